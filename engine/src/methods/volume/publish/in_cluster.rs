//! `volume_publish` on a node of a cluster.

use std::rc::Rc;

use uuid::Uuid;

use super::{PublishParams, PublishReply};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::cluster;

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
