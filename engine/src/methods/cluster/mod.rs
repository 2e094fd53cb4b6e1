//! `cluster_*`, a Nacre extension: the cluster that this daemon is a node of.
//!
//! All calls work on any node. A change is durable when the call returns. Each call has a time
//! limit of its own, because etcd may not answer.

pub mod backups;
pub mod events;
pub mod evict;
pub mod init;
pub mod join;
pub mod nodes;
pub mod pools;
pub mod rebuilds;
pub mod removals;
pub mod status;
#[cfg(test)]
pub(in crate::methods) mod tests;
pub mod unconfirmed;
pub mod upgrade;
pub mod volumes;
mod without_daemon;

use std::time::Duration;

use nacre_cluster_core::NodeId;
use nacre_cluster_node::{Error, NodeStatus, Operator, Status};
use tokio::runtime::Builder;
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use crate::refusal::OrRefuse;
use crate::rpc::error::Errno;
use crate::rpc::{Registry, RpcError};
use crate::services::Engine;

/// Time limit of a call, without the time for which the caller wants to wait.
pub const LIMIT: Duration = Duration::from_secs(5);
/// Longest time for which a caller may want to wait.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
/// Interval at which the progress of an operation is read.
const LOOK: Duration = Duration::from_millis(500);
/// Most names in an error.
const NAMED: usize = 16;

pub fn register(registry: &mut Registry<Engine>) {
    status::register(registry);
    nodes::register(registry);
    evict::register(registry);
    pools::register(registry);
    upgrade::register(registry);
    volumes::register(registry);
    unconfirmed::register(registry);
    events::register(registry);
}

fn silent() -> RpcError {
    let cause = format!("etcd has not answered within {} s", LIMIT.as_secs());
    RpcError::errno(Errno::ETIMEDOUT, cause).remedy(
        "check that etcd has a majority of its members and is reachable. A change may have been \
         made all the same: cluster_get_status shows it",
    )
}

/// Waits for etcd, at most `limit`.
async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, RpcError> {
    match timeout(limit, work).await {
        Ok(answer) => answer.or_refuse(),
        Err(_) => Err(silent()),
    }
}

/// Reads from etcd on another thread, because decoding the records of many volumes takes time.
async fn read<T, W>(work: impl FnOnce() -> W + Send + 'static) -> Result<T, RpcError>
where
    T: Send + 'static,
    W: Future<Output = Result<T, Error>>,
{
    let run = || {
        let runtime = Builder::new_current_thread().enable_time().build()?;
        std::io::Result::Ok(runtime.block_on(async { within(LIMIT, work()).await }))
    };
    let ended = tokio::task::spawn_blocking(run).await;
    let ended = ended.map_err(|error| RpcError::internal(error.to_string()))?;
    ended.map_err(|error| RpcError::io("a thread for etcd", &error))?
}

async fn read_status(operator: &Operator) -> Result<Status, RpcError> {
    let operator = operator.clone();
    read(move || async move { operator.status().await }).await
}

/// Polls the progress of an operation by `look` until it has ended, or for `wait`. `look` returns
/// the reply, and true at the end.
async fn follow<T>(
    wait: Duration,
    mut look: impl AsyncFnMut() -> Result<(T, bool), RpcError>,
) -> Result<T, RpcError> {
    let end = Instant::now() + wait;
    loop {
        let (reply, has_ended) = look().await?;
        if has_ended || Instant::now() + LOOK > end {
            return Ok(reply);
        }
        sleep(LOOK).await;
    }
}

fn refuse_long_wait(wait_s: u64) -> Result<Duration, RpcError> {
    let wait = Duration::from_secs(wait_s);
    if wait > LONGEST_WAIT {
        let most = LONGEST_WAIT.as_secs();
        let cause = format!("{wait_s} s is more than {most} s");
        return Err(RpcError::invalid_params(cause).field("wait_s"));
    }
    Ok(wait)
}

fn name_of(node: &NodeStatus) -> Option<&str> {
    let key = node.key.as_ref()?;
    Some(key.description.name.as_str())
}

/// The node with this id or name. An id is not looked up in etcd.
async fn node(operator: &Operator, text: &str) -> Result<NodeId, RpcError> {
    if let Ok(id) = text.parse::<Uuid>() {
        return Ok(NodeId(id));
    }
    let names = within(LIMIT, operator.node_names()).await?;
    let known: Vec<(Uuid, &str)> = names
        .iter()
        .map(|(id, name)| (id.0, name.as_str()))
        .collect();
    let found = named("node", text, &known);
    found.map(NodeId).map_err(|error| error.field("node"))
}

/// The node or volume with this name in `known`. The error lists the candidates.
fn named(noun: &str, name: &str, known: &[(Uuid, &str)]) -> Result<Uuid, RpcError> {
    let found: Vec<_> = known.iter().filter(|(_, of)| *of == name).collect();
    match found.as_slice() {
        [(id, _)] => Ok(*id),
        [] => {
            let cause = format!("the cluster has no {noun} \"{name}\"");
            let error = RpcError::errno(Errno::ENODEV, cause);
            Err(if known.is_empty() {
                error.remedy(format!("cluster_get_{noun}s lists the {noun}s"))
            } else {
                error.remedy(format!("its {noun}s are {}", list(known.iter())))
            })
        }
        several => {
            let cause = format!("{} {noun}s have the name \"{name}\"", several.len());
            let ids = list(several.iter().copied());
            let error = RpcError::errno(Errno::EINVAL, cause);
            Err(error.remedy(format!("give the id of one of them: {ids}")))
        }
    }
}

fn list<'a>(known: impl ExactSizeIterator<Item = &'a (Uuid, &'a str)>) -> String {
    let more = known.len().saturating_sub(NAMED);
    let mut texts: Vec<String> = known
        .take(NAMED)
        .map(|(id, name)| format!("\"{name}\" ({id})"))
        .collect();
    if more > 0 {
        texts.push(format!("and {more} more"));
    }
    texts.join(", ")
}
