//! Goal: streams of live data begin, resume and end as they should. Method: streams over loopback.

use std::time::{Duration, Instant};

use super::rig::Rig;
use crate::live::MAX_STREAMS;
use crate::testing::run;
use crate::web::Limits;

#[test]
fn live_data_comes_each_tick_and_resumes() {
    run(async {
        let rig = Rig::with_accounts().await;
        assert_eq!(rig.get("/api/live", "").await.status, 401);
        let cookie = rig.login("ann").await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(rig.fake.samples.get(), 0, "nothing is computed for no page");
        rig.fake.events.set(7);
        rig.fake.changed.replace(vec!["old"]);
        let mut one = rig.stream(&cookie, "").await;
        let mut two = rig.stream(&cookie, "Last-Event-ID: 4\r\n").await;
        assert!(
            one.until("event: metrics\ndata: {\"padding\":\"\",\"sample\":2}")
                .await
        );
        assert!(one.text.contains("text/event-stream") && one.text.contains("retry: 2000"));
        assert!(
            one.text
                .contains("event: snapshot\ndata: {\"phase\":\"running\",\"time_ms\":")
        );
        assert!(
            !one.text.contains("event: event") && !one.text.contains("old"),
            "{}",
            one.text
        );
        assert!(two.until("event: metrics").await);
        for id in [5, 6] {
            let event = format!("event: event\nid: {id}\ndata: {{\"id\":{id}}}\n\n");
            assert!(two.text.contains(&event), "{}", two.text);
        }
        assert!(!two.text.contains("id: 4"));
        // New events come once, to both; so do changes and phases.
        rig.fake.events.set(8);
        rig.fake.changed.replace(vec!["bdevs", "volumes"]);
        rig.fake.phase.set("draining");
        for stream in [&mut one, &mut two] {
            assert!(
                stream
                    .until("event: changed\ndata: {\"kinds\":[\"bdevs\",\"volumes\"]}")
                    .await
            );
            assert!(stream.until("\"phase\":\"draining\"").await);
            assert!(stream.until("\n:\n").await, "a heartbeat");
            assert_eq!(stream.text.matches("id: 7\n").count(), 1);
        }
        // The id of an earlier daemon: all events are new.
        let mut three = rig.stream(&cookie, "Last-Event-ID: 99\r\n").await;
        assert!(three.until("id: 7\n").await && three.text.contains("id: 0\n"));
        assert!(rig.fake.watched.get());
        drop((one, two, three));
        while rig.fake.watched.get() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let samples = rig.fake.samples.get();
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert_eq!(rig.fake.samples.get(), samples);
    });
}

#[test]
fn a_stream_ends_with_its_session_and_streams_are_bounded() {
    run(async {
        let rig = Rig::with_accounts().await;
        let (ann, bob) = (rig.login("ann").await, rig.login("bob").await);
        let mut open = Vec::new();
        for _ in 1..MAX_STREAMS {
            let mut stream = rig.stream(&ann, "").await;
            assert!(stream.until("snapshot").await);
            open.push(stream);
        }
        let mut of_bob = rig.stream(&bob, "").await;
        assert!(of_bob.until("metrics").await);
        let host = &rig.host;
        let over = format!(
            "GET /api/live HTTP/1.1\r\nHost: {host}\r\nCookie: {ann}\r\nConnection: close\r\n\r\n"
        );
        assert_eq!(rig.raw(&over).await.status, 503);
        rig.web.logins.remove("bob").await.unwrap();
        of_bob.ends().await;
        // A stream alone keeps no session open.
        assert!(open[0].until("metrics").await);
        rig.clock.advance(Duration::from_secs(31 * 60));
        for mut stream in open {
            stream.ends().await;
        }
        assert_eq!(rig.web.live.streams(), 0);
    });
}

/// Goal: a page that does not read delays no other page, and loses its connection. Method: large
/// samples, one stream that never reads.
#[test]
fn a_slow_reader_is_dropped() {
    run(async {
        let rig = Rig::with(Limits {
            // Slow enough that a test on a busy machine reads as fast as samples come.
            tick: Duration::from_millis(20),
            write: Duration::from_millis(50),
            ..Limits::default()
        })
        .await;
        rig.add_accounts().await;
        let cookie = rig.login("ann").await;
        let mut slow = rig.stream(&cookie, "").await;
        let mut good = rig.stream(&cookie, "").await;
        let begun = Instant::now();
        while rig.web.live.streams() < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // Only now: else the slow one may be gone before the good one is there.
        rig.fake.padding.set(100_000);
        while rig.web.live.streams() > 1 {
            // Not a certain sample: one read can bring several.
            good.text.clear();
            assert!(good.until("event: metrics").await, "the good one is served");
            assert!(begun.elapsed() < Duration::from_secs(20));
        }
        // The write limit closes the connection: bytes in the buffers come, then the end.
        tokio::time::sleep(Duration::from_millis(100)).await;
        slow.ends().await;
        assert!(good.until("sample").await);
    });
}
