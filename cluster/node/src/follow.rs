//! Follows all keys with a prefix: lists them, then watches the changes after the list's revision.
//! Each prefix has a task of its own: a loop over several watches would cancel one that is opening.

use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_etcd::{Client, KeyValue, Update, Watch};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tracing::debug;

const PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// The list of all leases, and their ends.
    Leases,
    /// The renewals of one node's lease.
    Renewals,
    Nodes,
    Volumes,
    Publications,
    Operations,
    Exports,
    Snapshots,
}

#[derive(Debug)]
pub(crate) enum KeyChange {
    /// All keys, at one revision: every other key is absent.
    All {
        keys: Vec<KeyValue>,
        revision: i64,
    },
    Put(KeyValue),
    Deleted {
        key: Vec<u8>,
        revision: i64,
    },
    /// etcd lost its data, or had them restored: all earlier changes are void. No other one
    /// follows.
    OtherStore,
}

/// Runs until the receiver is dropped, or the store is another one.
pub(crate) async fn follow(
    client: Arc<Client>,
    kind: Kind,
    prefix: String,
    news: mpsc::Sender<(Kind, KeyChange)>,
) {
    loop {
        let page = match client.list(&prefix).await {
            Ok(page) => page,
            Err(error) => {
                debug!(prefix, %error, "not listed");
                sleep(PAUSE).await;
                continue;
            }
        };
        let revision = page.revision;
        let keys = page.keys;
        let mut watch = Watch::new(Arc::clone(&client), &prefix, revision + 1);
        if kind == Kind::Leases {
            // With a hundred nodes, the renewals would be 25,000 events per second.
            watch = watch.only_deletions();
        }
        if news
            .send((kind, KeyChange::All { keys, revision }))
            .await
            .is_err()
        {
            return;
        }
        loop {
            let change = match watch.next().await {
                Update::Put(kv) => KeyChange::Put(kv),
                Update::Deleted { key, revision } => KeyChange::Deleted { key, revision },
                // Changes are lost: list again.
                Update::Compacted { .. } => break,
                Update::OtherStore { .. } => {
                    let _ = news.send((kind, KeyChange::OtherStore)).await;
                    return;
                }
            };
            if news.send((kind, change)).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use nacre_cluster_etcd::{Copies, Txn};
    use nacre_cluster_etcd_members::{Members, program};

    use super::*;

    async fn change(client: &Client, txn: Txn) -> i64 {
        let answer = client.transact(txn, Copies::Several).await;
        answer.expect("an answer").revision
    }

    /// Goal: a node that lost changes to a compaction learns of deletions too. Method: the follower
    /// does not run while etcd restarts, changes keys and compacts its history.
    #[test]
    fn a_compaction_under_a_follower() {
        let Some(program) = program("a_compaction_under_a_follower") else {
            return;
        };
        let mut members = Members::start(program, 1, &[]);
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let client = Arc::new(Client::new(&members.endpoints()).expect("endpoints"));
            let value = |text: &str| text.as_bytes().to_vec();
            let both = Txn::default()
                .put("/f/a", value("1"))
                .put("/f/b", value("1"));
            change(&client, both).await;
            let (sender, mut receiver) = mpsc::channel(8);
            let follower = follow(Arc::clone(&client), Kind::Nodes, "/f/".to_owned(), sender);
            let mut follower: Pin<Box<dyn Future<Output = ()>>> = Box::pin(follower);
            let mut next = async || {
                tokio::select! {
                    () = &mut follower => unreachable!("the receiver lives"),
                    news = receiver.recv() => news.expect("the follower lives").1,
                }
            };
            let keys = |change: KeyChange| match change {
                KeyChange::All { keys, revision } => {
                    let keys = keys.into_iter().map(|kv| (kv.key, kv.value));
                    (keys.collect::<Vec<_>>(), revision)
                }
                other => panic!("no list: {other:?}"),
            };
            assert_eq!(keys(next().await).0.len(), 2);
            change(&client, Txn::default().put("/f/a", value("2"))).await;
            let KeyChange::Put(kv) = next().await else {
                panic!("not the change");
            };
            assert_eq!(kv.value, b"2");

            members.kill(0);
            members.run(0);
            change(&client, Txn::default().delete("/f/b")).await;
            let last = change(&client, Txn::default().put("/f/a", value("3"))).await;
            client.compact(last).await.expect("compacted");
            let only = vec![(value("/f/a"), value("3"))];
            assert_eq!(keys(next().await), (only, last));
            let revision = change(&client, Txn::default().delete("/f/a")).await;
            let KeyChange::Deleted { key, revision: at } = next().await else {
                panic!("not the deletion");
            };
            assert_eq!((key, at), (value("/f/a"), revision));
        });
    }
}
