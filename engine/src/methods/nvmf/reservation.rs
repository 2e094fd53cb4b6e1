//! `nvmf_ns_get_reservation`, `nvmf_ns_clear_reservation`, and the method in the record of a stored
//! reservation, which a start calls to restore it.

use std::rc::Rc;
use std::sync::Arc;

use nacre_nvmf::subsystems::reservation::ReservationState;
use nacre_nvmf::subsystems::{ClearError, Clearing};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::commands::reservation::ReservationType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use uuid::Uuid;

use super::nvm_subsystem;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::stored_reservation::{RESTORE, StoredReservation, find};
use crate::services::subsystems::find_namespace;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<GetReservations>()
        .add::<Restore>()
        .add::<Clear>();
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
pub struct RegistrantReply {
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

pub struct Clear;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClearParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// Namespace id, from 1.
    pub nsid: u32,
    /// Clear only the state of this generation, as `nvmf_ns_get_reservation` showed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<u32>,
    /// Also while a host that holds the reservation is connected.
    #[serde(default)]
    pub force: bool,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tgt_name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct ClearReply {
    /// Name of the former type.
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    /// The former registrants. Each connected one has the notification Reservation Preempted.
    registrants: Vec<RegistrantReply>,
}

impl Method<Engine> for Clear {
    const NAME: &'static str = "nvmf_ns_clear_reservation";
    const ABOUT: &'static str = "Removes the reservation of a namespace and every registration, as a host's Clear does: for hosts that do not come back.";
    const CLASS: Class = Class::Admin;
    /// Waits for its turn among hosts' commands.
    const ORDER: Order = Order::Free;
    type Params = ClearParams;
    type Reply = ClearReply;

    async fn apply(params: ClearParams, engine: Rc<Engine>) -> Result<ClearReply, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let entry = find_namespace(&subsystem, params.nsid)?;
        let reservation = Arc::clone(&entry.namespace.reservation);
        let state = reservation.state();
        let state = state.ok_or_else(|| not_cleared(ClearError::Elsewhere))?;
        let now = state.generation;
        if let Some(seen) = params.generation
            && seen != now
        {
            return Err(not_cleared(ClearError::Changed { seen, now }));
        }
        let mut hosts = subsystem.controllers().into_iter();
        let holder = hosts.find(|host| state.holds(&host.hostid));
        if let Some(holder) = holder
            && !params.force
        {
            let cause = format!(
                "host {} holds the reservation and is connected",
                holder.hostnqn
            );
            return Err(RpcError::errno(Errno::EBUSY, cause).remedy(
                "`nvme resv-release` on that host, or use `force` if no application on that host relies on the reservation",
            ));
        }
        let woken = Arc::new(Notify::new());
        let wake = Arc::clone(&woken);
        let wake = Arc::new(move || wake.notify_one());
        let of = (params.nsid, reservation);
        // The checks hold for this state only: a host may acquire the reservation meanwhile.
        let is_checked = !params.force || params.generation.is_some();
        let seen = is_checked.then_some(state);
        let mut clearing = Clearing::new(subsystem, of, seen, wake);
        // A task of its own: the state that is being stored counts, although the caller has gone.
        let cleared = tokio::task::spawn_local(async move {
            loop {
                if let Some(done) = clearing.poll() {
                    return done;
                }
                woken.notified().await;
            }
        });
        let former = match cleared.await {
            Ok(done) => done.map_err(not_cleared)?,
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        };
        Ok(ClearReply {
            r#type: former.held.map(|held| name_of(held.kind)),
            registrants: registrants(&former),
        })
    }
}

fn not_cleared(error: ClearError) -> RpcError {
    let cause = error.to_string();
    match error {
        ClearError::Elsewhere => RpcError::errno(Errno::EAGAIN, cause)
            .remedy("call the node that serves the volume: `nacre volume show` names it"),
        ClearError::Changed { .. } => RpcError::errno(Errno::EBUSY, cause)
            .field("generation")
            .remedy("look at the reservation again"),
        ClearError::Nothing => RpcError::errno(Errno::ENOENT, cause),
        ClearError::NotStored => {
            RpcError::errno(Errno::EIO, cause).remedy("the log of the daemon has the cause")
        }
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
