//! Follows all keys of a prefix: a list, then the changes from that revision on. Each prefix has a
//! task of its own: a loop over several watches would cancel one that is opening.

use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_etcd::{Client, KeyValue, Update, Watch};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tracing::debug;

const PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Leases,
    Nodes,
    Volumes,
    Publications,
    Operations,
}

#[derive(Debug)]
pub(crate) enum Change {
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
}

/// Runs until the receiver is dropped.
pub(crate) async fn follow(
    client: Arc<Client>,
    kind: Kind,
    prefix: String,
    news: mpsc::Sender<(Kind, Change)>,
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
        if news
            .send((kind, Change::All { keys, revision }))
            .await
            .is_err()
        {
            return;
        }
        loop {
            let change = match watch.next().await {
                Update::Put(kv) => Change::Put(kv),
                Update::Deleted { key, revision } => Change::Deleted { key, revision },
                // Changes are lost: list again.
                Update::Compacted { .. } => break,
            };
            if news.send((kind, change)).await.is_err() {
                return;
            }
        }
    }
}
