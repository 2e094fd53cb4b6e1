//! Goal: only an admin stores a file. Method: requests as bytes over loopback.

use std::time::Duration;

use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::rig::{Rig, exchange};
use crate::acts::Act;
use crate::testing::run;
use crate::web::Limits;

/// Goal: an admin's file arrives whole, and replaces the last one; every other request leaves it as
/// it was. Method: roles, headers, lengths, a client that goes away, and a second upload meanwhile.
#[test]
fn an_admin_uploads_a_file() {
    run(async {
        let rig = Rig::with(Limits {
            body: Duration::from_secs(2),
            ..Limits::default()
        })
        .await;
        rig.add_accounts().await;
        let (ann, bob) = (rig.login("ann").await, rig.login("bob").await);
        let host = rig.host.clone();
        let headers = |cookie: &str| {
            format!(
                "Content-Type: application/octet-stream\r\nX-Nacre: 1\r\nOrigin: http://{host}\r\nCookie: {cookie}\r\n"
            )
        };
        let file = rig.uploads.path().join("upload/bundle.tar");
        let whole = "bundle ".repeat(40_000);
        let sent = rig.post_with("/api/upload", &headers(&ann), &whole).await;
        assert_eq!(sent.status, 200, "{}", sent.body);
        assert_eq!(sent.json()["file"], file.to_str().unwrap());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), whole);

        let json_type = headers(&ann).replace("octet-stream", "json");
        let elsewhere = headers(&ann).replace("Origin: http://", "Origin: http://x.");
        let large = "x".repeat((1 << 20) + 1);
        for (headers, body, status) in [
            (headers(&bob), "x", 403),
            (headers("nacre=00"), "x", 401),
            (json_type, "x", 403),
            (elsewhere, "x", 403),
            (headers(&ann), &*large, 422),
        ] {
            let refused = rig.post_with("/api/upload", &headers, body).await;
            assert_eq!(refused.status, status, "{headers} {}", refused.body);
        }
        // The body is shorter than it says: the client waits, then it goes away.
        let ours = headers(&ann);
        let slow = format!(
            "POST /api/upload HTTP/1.1\r\nHost: {host}\r\n{ours}Content-Length: 9\r\n\r\nshort"
        );
        let mut waiting = rig.connect().await;
        waiting.write_all(slow.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        let second = rig.post_with("/api/upload", &ours, "x").await;
        assert_eq!(second.status, 409, "{}", second.body);
        let first = exchange(waiting, "").await;
        assert_eq!(first.status, 400, "{}", first.body);
        let mut gone = rig.connect().await;
        gone.write_all(slow.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(gone);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(std::fs::read_to_string(&file).unwrap(), whole);
        assert_eq!(
            std::fs::read_dir(file.parent().unwrap()).unwrap().count(),
            1
        );

        let again = rig.post_with("/api/upload", &ours, "new").await;
        assert_eq!(again.status, 200, "{}", again.body);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "new");
        let noted = || -> Vec<bool> {
            let acts = rig.fake.acts.borrow();
            let uploads = acts.iter().filter(|act| act.name == Act::UPLOAD);
            uploads.map(|act| act.outcome.is_ok()).collect()
        };
        assert_eq!(noted(), [true, false, false, false, false, false, true]);

        // A session that ends meanwhile ends its upload.
        let mut ending = rig.connect().await;
        ending.write_all(slow.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        let out = rig.post("/api/logout", &ann, &json!({})).await;
        assert_eq!(out.status, 200, "{}", out.body);
        let ended = exchange(ending, "rest").await;
        assert_eq!(ended.status, 403, "{}", ended.body);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "new");
    });
}
