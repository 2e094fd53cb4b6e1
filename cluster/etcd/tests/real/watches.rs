//! Watches of a real etcd.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_cluster_etcd::{Client, Copies, Txn, Update, Watch};
use tokio::time::timeout;

use crate::{client, runtime};
use nacre_cluster_etcd_members::{DEADLINE, Members, program};

/// Writes a value of its own. It compares, so several copies of it write once.
async fn put(client: &Client, key: &str, value: &str) -> i64 {
    let last = client.get(key).await.expect("an answer");
    let last = last.map_or(0, |kv| kv.mod_revision);
    let txn = Txn::default()
        .if_modified(key, last)
        .put(key, value.into())
        .read_on_failure(key);
    let answer = client
        .transact(txn, Copies::Several)
        .await
        .expect("an answer");
    if answer.is_made {
        return answer.revision;
    }
    let found = answer.found[0].clone().expect("a key");
    assert!(answer.is_copied && found.value == value.as_bytes());
    found.mod_revision
}

async fn update(watch: &mut Watch) -> Update {
    let update = timeout(3 * DEADLINE, watch.next()).await;
    update.expect("an update in time")
}

fn shown(update: &Update) -> (String, i64) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match update {
        Update::Put(kv) => (text(&kv.value), kv.mod_revision),
        Update::Deleted { key, revision } => (format!("-{}", text(key)), *revision),
        Update::Compacted { revision } => ("compacted".to_owned(), *revision),
        Update::OtherStore { revision } => ("other store".to_owned(), *revision),
    }
}

/// The member that a watch uses is killed, another one is stopped: all changes arrive, in order.
#[test]
fn a_watch_survives_its_member() {
    let Some(program) = program("a_watch_survives_its_member") else {
        return;
    };
    let mut members = Members::start(program, 3, &[]);
    runtime().block_on(async {
        let client = client(&members.endpoints());
        let first = put(&client, "/w/a", "0").await;
        let mut watch = Watch::new(Arc::clone(&client), "/w/", first);
        let mut seen = vec![shown(&update(&mut watch).await)];
        let mut made = vec![("0".to_owned(), first)];
        for index in 0..3 {
            match index {
                0 | 1 => members.kill(index),
                _ => members.stop(index),
            }
            for number in 0..10 {
                let value = format!("{index}.{number}");
                let revision = put(&client, "/w/a", &value).await;
                made.push((value, revision));
            }
            while seen.last() != made.last() {
                let new = shown(&update(&mut watch).await);
                if !seen.contains(&new) {
                    seen.push(new);
                }
            }
            match index {
                0 | 1 => members.run(index),
                _ => members.go_on(index),
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        assert_eq!(seen, made);
        let gone = client.transact(Txn::default().delete("/w/a"), Copies::One);
        let revision = gone.await.expect("made").revision;
        let last = shown(&update(&mut watch).await);
        assert_eq!(last, ("-/w/a".to_owned(), revision));
    });
}

/// The messages that a member has received on streams of watches, of its metrics.
fn received(endpoint: &str) -> u64 {
    let address = endpoint.strip_prefix("http://").expect("a URL");
    let mut stream = TcpStream::connect(address).expect("connected");
    let request = format!("GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let name = "grpc_server_msg_received_total{grpc_method=\"Watch\"";
    let line = text.lines().find(|line| line.starts_with(name));
    let value = line.and_then(|line| line.rsplit(' ').next());
    value.and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// Goal: watches at rest do not ask every second each, but one for all; all hear the changes
/// afterwards, and none leaves its member.
#[test]
fn watches_at_rest_share_their_questions() {
    const WATCHES: u64 = 20;
    let Some(program) = program("watches_at_rest_share_their_questions") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    runtime().block_on(async {
        let client = client(&members.endpoints());
        let first = put(&client, "/w/a", "0").await;
        let watches = (0..WATCHES).map(|_| {
            let client = Arc::clone(&client);
            tokio::spawn(async move {
                let mut watch = Watch::new(client, "/w/", first);
                let update = shown(&update(&mut watch).await);
                assert_eq!(update, ("0".to_owned(), first));
                let last = watch.next().await;
                shown(&last).0
            })
        });
        let watches: Vec<_> = watches.collect();
        let endpoint = &members.endpoints().urls[0];
        let end = Instant::now() + DEADLINE;
        while received(endpoint) < WATCHES {
            assert!(Instant::now() < end, "not all watches are open");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let before = received(endpoint);
        tokio::time::sleep(Duration::from_secs(6)).await;
        let asked = received(endpoint) - before;
        // Each would ask six times. A slow member is asked by each after two seconds.
        let most = 3 * WATCHES;
        assert!((3..=most).contains(&asked), "{asked} questions in 6 s");
        put(&client, "/w/a", "1").await;
        for watch in watches {
            let last = timeout(DEADLINE, watch).await.expect("in time");
            assert_eq!(last.expect("no panic"), "1");
        }
    });
}

/// A watch that is behind a compaction says so, and goes on from a new list.
#[test]
fn a_compaction_under_a_watch() {
    let Some(program) = program("a_compaction_under_a_watch") else {
        return;
    };
    let mut members = Members::start(program, 1, &[]);
    runtime().block_on(async {
        let client = client(&members.endpoints());
        let first = put(&client, "/w/a", "0").await;
        let mut watch = Watch::new(Arc::clone(&client), "/w/", first);
        assert_eq!(shown(&update(&mut watch).await), ("0".to_owned(), first));
        // The member restarts, and compacts changes that the watch has not seen.
        members.kill(0);
        members.run(0);
        let mut last = first;
        for number in 1..=20 {
            last = put(&client, "/w/a", &number.to_string()).await;
        }
        client.compact(last).await.expect("compacted");
        client.compact(last).await.expect("once more is no error");
        let lost = update(&mut watch).await;
        assert_eq!(lost, Update::Compacted { revision: last });
        let page = client.list("/w/").await.expect("a list");
        assert_eq!(page.keys[0].value, b"20");
        let mut watch = Watch::new(Arc::clone(&client), "/w/", page.revision + 1);
        let revision = put(&client, "/w/b", "21").await;
        assert_eq!(
            shown(&update(&mut watch).await),
            ("21".to_owned(), revision)
        );
    });
}

/// Goal: a store that was replaced by an empty one is recognised, although its revisions are
/// younger, and a member that only lags behind is not taken for another store.
#[test]
fn another_store_under_a_watch() {
    let Some(program) = program("another_store_under_a_watch") else {
        return;
    };
    let mut members = Members::start(program, 1, &[]);
    runtime().block_on(async {
        let client = client(&members.endpoints());
        for number in 0..20 {
            put(&client, "/w/a", &number.to_string()).await;
        }
        let page = client.list("/w/").await.expect("a list");
        let mut watch = Watch::new(Arc::clone(&client), "/w/", page.revision + 1);
        // The stream is there.
        let revision = put(&client, "/w/a", "x").await;
        assert_eq!(shown(&update(&mut watch).await), ("x".to_owned(), revision));
        // The same store.
        members.kill(0);
        members.run(0);
        let revision = put(&client, "/w/a", "y").await;
        assert_eq!(shown(&update(&mut watch).await), ("y".to_owned(), revision));
        members.lose_all();
        let other = update(&mut watch).await;
        let Update::OtherStore { revision } = other else {
            panic!("{other:?}");
        };
        assert!(revision < page.revision, "{revision}");
        // The watch goes on with the new store.
        let revision = put(&client, "/w/a", "z").await;
        assert_eq!(shown(&update(&mut watch).await), ("z".to_owned(), revision));
    });
}
