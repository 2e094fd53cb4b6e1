//! The reservation of hosts on a volume of the cluster. It is in the store, and moves with the
//! volume.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_cluster_core::{Holder, Incarnation, VolumeId};
use nacre_nvmf::subsystems::reservation::{Reservation, StateLease};
use nacre_nvmf_wire::Nqn;
use serde::Deserialize;
use serde_json::json;
use uuid::Uuid;

use super::Running;
use super::lease::OfIncarnation;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::stored_reservation::{self, StoredReservation};

/// Version of the stored JSON value.
const FORMAT: u64 = 1;
/// NSID of the namespace in a volume's subsystem.
const NSID: u32 = 1;

/// Stores the reservation in etcd, before the host's command completes. Refused if this node does
/// not hold the volume any more.
pub(in crate::services) async fn store(
    engine: &Engine,
    volume: Uuid,
    kept: Option<StoredReservation>,
) -> Result<(), RpcError> {
    let running = engine.cluster.joined()?;
    let holder = Holder {
        node: running.me,
        incarnation: Incarnation(running.link.incarnation.load(Ordering::Acquire) as u64),
    };
    let value = kept.map(|kept| {
        let mut value = json!(kept);
        value["v"] = FORMAT.into();
        value
    });
    let operator = &running.operator;
    let stored = operator.set_reservation(VolumeId(volume), holder, value.as_ref());
    stored.await.or_refuse()
}

/// The reservation of the namespace with which this node shows the volume.
pub(super) fn shown(
    engine: &Engine,
    running: &Running,
    id: VolumeId,
) -> Result<Arc<Reservation>, RpcError> {
    let nqn = running
        .shown
        .borrow()
        .get(&id)
        .map(|shown| shown.nqn.clone());
    let nqn = nqn.and_then(|nqn| Nqn::new(&nqn).ok());
    let nqn = nqn.ok_or_else(|| {
        let cause = format!("volume {} is not shown to hosts", id.0);
        RpcError::errno(Errno::EAGAIN, cause)
    })?;
    stored_reservation::find(engine, &nqn, NSID, id.0)
}

/// Gives the namespace the stored reservation, before hosts can access it. The target answers
/// reservation commands while `lease` is good, under which this node opened the volume. Returns
/// false while the target executes a reservation command: call again.
pub(super) async fn load(
    engine: &Engine,
    running: &Running,
    id: VolumeId,
    lease: &Arc<OfIncarnation>,
) -> Result<bool, RpcError> {
    let stored = running.operator.reservation(id).await.or_refuse()?;
    let state = match stored {
        None => Default::default(),
        Some(value) => {
            let damaged = |why: String| {
                RpcError::errno(
                    Errno::EIO,
                    format!("the reservation of volume {} is damaged: {why}", id.0),
                )
                .remedy("volume_unpublish ends it: hosts have to register again")
            };
            let kept = StoredReservation::deserialize(&value);
            let kept = kept.map_err(|error| damaged(error.to_string()))?;
            kept.belongs_to(id.0).map_err(damaged)?;
            kept.state().map_err(damaged)?
        }
    };
    let lease: Arc<dyn StateLease> = Arc::clone(lease) as _;
    Ok(shown(engine, running, id)?.take_over(state, Some(lease)))
}
