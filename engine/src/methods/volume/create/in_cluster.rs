//! `volume_create` on a node of a cluster.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev_replica::model::{MAX_REPLICAS, Settings};
use nacre_cluster_core::placement::MAX_SPREAD;
use uuid::Uuid;

use super::super::blocks;
use super::super::list::{VolumeReply, describe};
use super::{CreateParams, bytes_of};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::cluster::{self, NewReplica, PlacedReplicas};

/// Block size by which sizes in blocks are converted before the devices are known.
const BLOCK: u32 = 512;
/// Time limit for a new record to be read back from etcd.
const SEEN: Duration = Duration::from_secs(5);

/// Most bytes of a class, and of a label's name.
const MAX_TEXT: usize = 63;

/// True if the cluster is to choose the pools. Refuses parameters that contradict this, or require
/// it.
pub(super) fn is_placed(params: &CreateParams) -> Result<bool, RpcError> {
    let wrong = |field, cause: String| RpcError::errno(Errno::EINVAL, cause).field(field);
    let Some(count) = params.options.replica_count else {
        for (field, is_set) in [
            ("thin", params.options.thin),
            ("class", params.options.class.is_some()),
            ("spread", !params.options.spread.is_empty()),
            ("strict_spread", params.options.strict_spread),
            ("nodes", !params.options.nodes.is_empty()),
        ] {
            if is_set {
                let cause = "it is for replicas whose pools the cluster chooses".to_owned();
                return Err(wrong(field, cause).remedy("give replica_count"));
            }
        }
        return Ok(false);
    };
    if !(1..=MAX_REPLICAS).contains(&count) {
        let cause = format!("a volume has 1 to {MAX_REPLICAS} replicas, not {count}");
        return Err(wrong("replica_count", cause));
    }
    for (field, is_set) in [
        ("devices", !params.devices.is_empty()),
        ("replicas", !params.replicas.is_empty()),
        ("force", params.options.force),
    ] {
        if is_set {
            let cause = "with replica_count, the cluster makes all devices".to_owned();
            return Err(wrong(field, cause).remedy("leave one of them out"));
        }
    }
    if params.options.strict_spread && params.options.spread.is_empty() {
        let cause = "it needs labels".to_owned();
        return Err(wrong("strict_spread", cause).remedy("give spread"));
    }
    if params.options.spread.len() > MAX_SPREAD {
        return Err(wrong("spread", format!("at most {MAX_SPREAD} labels")));
    }
    let texts = params.options.spread.iter().map(|label| ("spread", label));
    let mut texts = texts.chain(params.options.class.iter().map(|class| ("class", class)));
    match texts.find(|(_, text)| !(1..=MAX_TEXT).contains(&text.len())) {
        Some((field, text)) => {
            let cause = format!("\"{text}\" is not 1 to {MAX_TEXT} bytes");
            Err(wrong(field, cause))
        }
        None => Ok(true),
    }
}

pub(super) async fn create(
    engine: &Rc<Engine>,
    params: CreateParams,
) -> Result<VolumeReply, RpcError> {
    if let Some(count) = params.options.replica_count {
        return create_placed(engine, params, count).await;
    }
    if !params.replicas.is_empty() {
        let cause = "in a cluster, replicas are named as NODE:DEVICE";
        return Err(RpcError::errno(Errno::EINVAL, cause)
            .field("replicas")
            .remedy("give replica_count: the cluster chooses the pools"));
    }
    let replicas = params.devices.iter().enumerate().map(|(at, text)| {
        NewReplica::parse(text).map_err(|error| error.field(format!("devices[{at}]")))
    });
    let replicas = replicas.collect::<Result<Vec<_>, _>>()?;
    let blocks = blocks(params.num_blocks, params.size_mb, params.size, BLOCK)?;
    let bytes = bytes_of(blocks, BLOCK)?;
    let mut settings = Settings::default();
    params.options.settings.merge(&mut settings);
    let id = params.options.uuid.unwrap_or_else(Uuid::new_v4);
    cluster::create(
        engine,
        params.name,
        id,
        bytes,
        replicas,
        settings,
        params.options.force,
    )
    .await?;
    seen(engine, id).await
}

async fn create_placed(
    engine: &Rc<Engine>,
    params: CreateParams,
    count: usize,
) -> Result<VolumeReply, RpcError> {
    let block = nacre_bdev_pool::BLOCK;
    let blocks = blocks(params.num_blocks, params.size_mb, params.size, block)?;
    let bytes = bytes_of(blocks, block)?.filter(|bytes| *bytes > 0);
    let (source, bytes) = match &params.options.snapshot {
        None => (None, bytes),
        Some(snapshot) => {
            let found = cluster::snapshot_source(engine, snapshot, bytes).await?;
            let (source, origin, bytes) = found;
            (Some((source, origin)), Some(bytes))
        }
    };
    let Some(bytes) = bytes else {
        let cause = "replicas on pools need a size";
        return Err(RpcError::errno(Errno::EINVAL, cause).field("size"));
    };
    let mut settings = Settings::default();
    params.options.settings.merge(&mut settings);
    let id = params.options.uuid.unwrap_or_else(Uuid::new_v4);
    let replicas = PlacedReplicas {
        count,
        thin: params.options.thin,
        class: params.options.class,
        spread: params.options.spread,
        strict: params.options.strict_spread,
        nodes: params.options.nodes,
        source,
    };
    cluster::create_placed(engine, params.name, id, bytes, replicas, settings).await?;
    seen(engine, id).await
}

/// Waits until the new record was read back from etcd.
async fn seen(engine: &Rc<Engine>, id: Uuid) -> Result<VolumeReply, RpcError> {
    let end = tokio::time::Instant::now() + SEEN;
    loop {
        match engine.volumes.find(&id.to_string()) {
            Ok(listed) => return describe(engine, &listed),
            Err(error) if tokio::time::Instant::now() >= end => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}
