//! Checks every 10 s that etcd answers, and that this daemon still owns its prefix.
//!
//! A volume may need no change of its record for months. The check finds a problem before the loss
//! of a replica makes a change urgent.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::client::Client;
use crate::keys::Prefix;
use crate::owner;

const EVERY: Duration = Duration::from_secs(10);

/// The result of the last check.
#[derive(Debug, Clone, PartialEq)]
pub enum Health {
    /// etcd answered after this time, and this daemon owns the prefix.
    Answers(Duration),
    /// etcd does not answer, or refuses the read.
    Silent { why: String },
    /// Another daemon owns the prefix, or the owner key was deleted. No other check follows.
    Taken { owner: String },
}

/// Checks, and sends each result to `answers`, until the receiver is dropped or this daemon does
/// not own the prefix. `claimed` is the revision at which this daemon wrote the owner key.
pub(crate) async fn ask(
    client: Arc<Client>,
    prefix: Prefix,
    claimed: i64,
    answers: watch::Sender<Health>,
) {
    loop {
        tokio::select! {
            () = answers.closed() => return,
            () = sleep(EVERY) => {}
        }
        let began = Instant::now();
        let health = match client.get(&prefix.owner()).await {
            Err(error) => Health::Silent {
                why: error.to_string(),
            },
            Ok(Some(kv)) if kv.mod_revision == claimed => Health::Answers(began.elapsed()),
            // A linearizable read may be stale after a pause of a member, but not from the future.
            Ok(Some(kv)) if kv.mod_revision < claimed => continue,
            Ok(found) => Health::Taken {
                owner: match found.as_ref().map(owner::decode) {
                    Some(Ok(owner)) => owner.node.to_string(),
                    Some(Err(error)) => error.to_string(),
                    None => "its key was deleted".to_owned(),
                },
            },
        };
        let is_over = matches!(health, Health::Taken { .. });
        answers.send_replace(health);
        if is_over {
            return;
        }
    }
}
