//! `nvmf_ns_get_reservation`, and the method in the record of a stored reservation, which a start
//! calls to restore it.

use std::rc::Rc;

use nacre_nvmf::subsystems::reservation::ReservationState;
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::commands::reservation::ReservationType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::nvm_subsystem;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::stored_reservation::{RESTORE, StoredReservation, find};
use crate::services::subsystems::find_namespace;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetReservations>().add::<Restore>();
}

struct Restore;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RestoreReservationsParams {
    /// NQN of the subsystem.
    nqn: String,
    /// Namespace id, from 1.
    nsid: u32,
    reservation: StoredReservation,
}

impl Method<Engine> for Restore {
    const NAME: &'static str = RESTORE;
    const ABOUT: &'static str = "Confirms that a namespace has the reservation that was kept for it; the daemon's own call, \
         at its start. It changes nothing: reservations are made by hosts.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Read;
    type Params = RestoreReservationsParams;
    type Reply = bool;

    async fn apply(
        params: RestoreReservationsParams,
        engine: Rc<Engine>,
    ) -> Result<bool, RpcError> {
        let nqn = Nqn::new(&params.nqn)
            .map_err(|error| RpcError::invalid_params(error.to_string()).field("nqn"))?;
        let kept = params.reservation;
        let reservation = find(&engine, &nqn, params.nsid, kept.bdev_uuid)?;
        let state = reservation.state();
        let now = state.map(|state| StoredReservation::of(&state, kept.bdev_uuid));
        if now.as_ref() != Some(&kept) {
            return Err(RpcError::errno(
                Errno::EEXIST,
                "hosts have made another reservation since",
            ));
        }
        Ok(true)
    }
}

struct GetReservations;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetReservationsParams {
    /// NQN of the subsystem.
    nqn: String,
    /// Namespace id, from 1.
    nsid: u32,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    tgt_name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ReservationsReply {
    /// False on a node of a cluster that does not serve the volume, or whose lease is in doubt:
    /// another node may have changed the reservation. Its fields are left out then.
    known: bool,
    /// Type as in `nvme resv-acquire --rtype`; 0: no reservation.
    #[serde(skip_serializing_if = "Option::is_none")]
    rtype: Option<u8>,
    /// Name of the type.
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    /// Generation: counts changes of registrations.
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<u32>,
    /// Persists through power loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    ptpl: Option<bool>,
    /// Hosts can make it persistent.
    ptpl_capable: bool,
    /// Commands refused because of the reservation since the namespace was added.
    conflicts: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    registrants: Option<Vec<RegistrantReply>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RegistrantReply {
    /// Host identifier.
    #[schemars(with = "String")]
    hostid: Uuid,
    /// Registration key, 16 hexadecimal digits.
    rkey: String,
    holder: bool,
}

impl Method<Engine> for GetReservations {
    const NAME: &'static str = "nvmf_ns_get_reservation";
    const ABOUT: &'static str =
        "Shows the registrants of a namespace and the holder of its reservation.";
    const CLASS: Class = Class::Read;
    type Params = GetReservationsParams;
    type Reply = ReservationsReply;

    async fn apply(
        params: GetReservationsParams,
        engine: Rc<Engine>,
    ) -> Result<ReservationsReply, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let entry = find_namespace(&subsystem, params.nsid)?;
        let reservation = &entry.namespace.reservation;
        let state = reservation.state();
        let state = state.as_ref();
        let held = state.and_then(|state| state.held);
        Ok(ReservationsReply {
            known: state.is_some(),
            rtype: state.map(|_| held.map_or(0, |held| held.kind as u8)),
            r#type: held.map(|held| name_of(held.kind)),
            generation: state.map(|state| state.generation),
            ptpl: state.map(|state| state.ptpl),
            ptpl_capable: reservation.can_persist(),
            conflicts: reservation.conflicts(),
            registrants: state.map(registrants),
        })
    }
}

fn registrants(state: &ReservationState) -> Vec<RegistrantReply> {
    let registrants = state.registrants.iter().map(|r| RegistrantReply {
        hostid: Uuid::from_bytes(r.host),
        rkey: format!("{:016x}", r.key),
        holder: state.holds(&r.host),
    });
    registrants.collect()
}

fn name_of(kind: ReservationType) -> &'static str {
    match kind {
        ReservationType::WriteExclusive => "write exclusive",
        ReservationType::ExclusiveAccess => "exclusive access",
        ReservationType::WriteExclusiveRegistrantsOnly => "write exclusive, registrants only",
        ReservationType::ExclusiveAccessRegistrantsOnly => "exclusive access, registrants only",
        ReservationType::WriteExclusiveAllRegistrants => "write exclusive, all registrants",
        ReservationType::ExclusiveAccessAllRegistrants => "exclusive access, all registrants",
    }
}
