//! Tests of the commands that show the state of a running daemon.

use nacre_tests::daemon::Place;
use serde_json::Value;

/// Goal: `nacre info rdma` prints text and JSON, under both names, also on machines without RDMA.
/// Without a daemon it fails with its own exit code.
#[test]
fn info_rdma_works_without_rdma() {
    let place = Place::new();
    assert_eq!(place.client(&["info", "rdma"]).status.code(), Some(3));
    let daemon = place.start();
    for words in [["info", "rdma"], ["INFO", "RDMA"]] {
        let shown = place.client(&words);
        assert!(shown.status.success(), "{shown:?}");
        let text = String::from_utf8(shown.stdout).unwrap();
        let line = text.lines().find(|l| l.starts_with("rdma_connections"));
        assert_eq!(
            line.map(|l| l.split_whitespace().last()),
            Some(Some("0")),
            "{text}"
        );
    }
    let shown = place.client(&["info", "rdma", "--json"]);
    let stats: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(
        (&stats["rdma_send_ops"], &stats["latency"]["read"]["count"]),
        (&0.into(), &0.into())
    );
    daemon.stop();
}
