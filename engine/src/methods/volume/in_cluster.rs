//! `volume_create` and `volume_publish` on a node of a cluster.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev_replica::model::Settings;
use uuid::Uuid;

use super::blocks;
use super::create::{CreateParams, bytes_of};
use super::list::{VolumeReply, describe};
use super::publish::{PublishParams, PublishReply};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::cluster::{self, NewReplica};
use crate::services::engine::Engine;

/// Block size by which sizes in blocks are converted before the devices are known.
const BLOCK: u32 = 512;
/// Time for a new record to return from etcd.
const SEEN: Duration = Duration::from_secs(5);

pub(super) async fn create(
    engine: &Rc<Engine>,
    params: CreateParams,
) -> Result<VolumeReply, RpcError> {
    if !params.replicas.is_empty() {
        let cause = "in a cluster, replicas are named as NODE:DEVICE";
        return Err(RpcError::errno(Errno::EINVAL, cause)
            .field("replicas")
            .remedy("make the lvols on their nodes with lvol_create, and name them in devices"));
    }
    let replicas = params.devices.iter().enumerate().map(|(at, text)| {
        NewReplica::parse(text).map_err(|error| error.field(format!("devices[{at}]")))
    });
    let replicas = replicas.collect::<Result<Vec<_>, _>>()?;
    let blocks = blocks(params.num_blocks, params.size_mb, BLOCK)?;
    let bytes = bytes_of(blocks, BLOCK)?;
    let mut settings = Settings::default();
    params.settings.merge(&mut settings);
    let id = params.uuid.unwrap_or_else(Uuid::new_v4);
    cluster::create(
        engine,
        params.name,
        id,
        bytes,
        replicas,
        settings,
        params.force,
    )
    .await?;
    let end = tokio::time::Instant::now() + SEEN;
    loop {
        match engine.volumes.find(&id.to_string()) {
            Ok(listed) => return describe(engine, &listed),
            Err(error) if tokio::time::Instant::now() >= end => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

pub(super) async fn publish(
    engine: &Rc<Engine>,
    id: Uuid,
    params: &PublishParams,
) -> Result<PublishReply, RpcError> {
    for (field, is_set) in [
        ("nqn", params.nqn.is_some()),
        ("listeners", !params.listeners.is_empty()),
        ("ana", params.ana.is_some()),
        ("ana_reporting", !params.ana_reporting),
        ("adopt", params.adopt),
    ] {
        if is_set {
            let cause = "the cluster sets it: all nodes show the volume alike, on all listeners";
            return Err(RpcError::errno(Errno::EINVAL, cause)
                .field(field)
                .remedy("leave it out"));
        }
    }
    let (hosts, any_host) = (params.hosts.clone(), params.allow_any_host);
    let publication = cluster::publish(engine, id, hosts, any_host, &params.nodes).await?;
    let listen_addresses = cluster::addresses(engine, &publication);
    Ok(PublishReply {
        nqn: publication.nqn,
        nsid: 1,
        uuid: id.to_string(),
        listen_addresses,
    })
}
