//! Connect (Base 6.3) and Disconnect (Base 6.4).

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::fabrics::{
    AuthRequirements, Connect, ConnectAttributes, ConnectData, ConnectResponse, InvalidParameter,
};
use nacre_nvmf_wire::opcode::fabrics as fctype;
use nacre_nvmf_wire::{Cqe, Nqn, NqnError, Sqe, StatusCode};
use nacre_reactor::Nanos;
use zerocopy::FromBytes;

use crate::controller::Controller;
use crate::queues::command::Command;
use crate::queues::decode::{self, Plan, STRUCTURE_MOST};
use crate::queues::queue_auth::QueueAuth;
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::request::{Requests, Step};
use crate::queues::resources::Resources;
use crate::subsystems::association::{Association, NoQueue, Phase, QueueInfo, Teardown};
use crate::subsystems::authentication::{of_peer, origin};
use crate::subsystems::stats::QueueStats;
use crate::subsystems::subsystem::{Refusal, Subsystem};
use crate::subsystems::subsystem_config::SubsystemKind;
use crate::tls::{SecureChannel, TlsFailure};
use crate::transport::{CloseWhy, ListenerId, QueueParams};

/// Longest wait of a Connect for the end of an earlier controller of the same host.
const ADMIT_PATIENCE: Duration = Duration::from_secs(3);

/// Bytes of the data of a Connect command.
const CONNECT_DATA_BYTES: u32 = 1024;

/// The reason for refusing a Connect: the status for the host, and the log line.
enum ConnectRefused {
    Parameter(InvalidParameter, String),
    Status(StatusCode, String),
    /// Temporary, for example because an earlier controller of the host still exists.
    Busy(String),
}

/// The plan of the first command of a connection, which must be Connect.
pub(super) fn plan(qp: &QueuePair, sqe: &Sqe) -> Result<Plan, StatusCode> {
    // No command may follow Connect before its completion (Base 6.3).
    let alone = qp.requests.outstanding() == 1;
    if !alone || !sqe.is_fabrics() || sqe.fctype() != fctype::CONNECT {
        return Err(StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr());
    }
    let bytes = CONNECT_DATA_BYTES;
    decode::check_sgl(sqe, (bytes, STRUCTURE_MOST), true, &qp.limits)?;
    Ok(Plan::Admin { bytes })
}

/// Executes a Connect that has its data.
pub(super) fn run(command: &mut Command) {
    let now = command.now;
    let request = command.request();
    let (sqe, data) = (request.sqe, request.data.clone());
    let patient = now.since(request.started) < ADMIT_PATIENCE;
    let cid = sqe.cid();
    let (core, qp) = (&mut *command.core, &mut *command.queue);
    let accepted = match data.as_deref().map(ConnectData::read_from_prefix) {
        Some(Ok((data, _))) => core.connect(qp, &sqe, &data, now),
        _ => Err(ConnectRefused::Status(
            StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr(),
            "short data".into(),
        )),
    };
    let cqe = match accepted {
        Ok(cqe) => return connected(command, cqe),
        Err(ConnectRefused::Parameter(parameter, why)) => {
            core.log_refused(qp, &parameter, &why, now);
            let is_coming =
                parameter == InvalidParameter::SUBNQN && core.target.expects_subsystems();
            if is_coming {
                parameter.to_cqe_for_now(cid)
            } else {
                parameter.to_cqe(cid)
            }
        }
        // Wait instead of refusing: the earlier controller ends soon, and a refused host waits for
        // its whole reconnect delay.
        Err(ConnectRefused::Busy(_)) if patient => {
            qp.requests[command.index].step = Step::Deferred;
            qp.opening.waiting = Some(command.index);
            return;
        }
        Err(ConnectRefused::Busy(why)) => {
            core.log_refused(qp, &"for now", &why, now);
            Cqe::new(cid, StatusCode::CONNECT_CONTROLLER_BUSY)
        }
        Err(ConnectRefused::Status(status, why)) => {
            let reason = status.fabrics_name().unwrap_or("refused");
            core.log_refused(qp, &reason, &why, now);
            Cqe::new(cid, status)
        }
    };
    command.complete(cqe);
    command.core.close(command.queue, CloseWhy::Drained);
}

/// Checks the parameters of a Connect, and creates the queue.
impl Resources {
    /// Logs a refusal: the first one, and then at most one per minute, because refused hosts retry
    /// often.
    fn log_refused(
        &mut self,
        qp: &QueuePair,
        reason: &dyn std::fmt::Display,
        why: &str,
        now: Nanos,
    ) {
        let peer = &qp.ends.peer;
        let host = of_peer(peer);
        if let Some(left_out) = self.refusals.admit((host, why.to_owned()), now) {
            let times = left_out + 1;
            tracing::warn!(%peer, %reason, times, "connect refused: {why}");
        }
    }

    fn connect(
        &mut self,
        qp: &mut QueuePair,
        sqe: &Sqe,
        data: &ConnectData,
        now: Nanos,
    ) -> Result<Cqe, ConnectRefused> {
        let connect = Connect::parse(sqe).map_err(|error| {
            ConnectRefused::Status(
                StatusCode::CONNECT_INCOMPATIBLE_FORMAT.with_dnr(),
                error.to_string(),
            )
        })?;
        let name = |parameter| {
            move |error: NqnError| ConnectRefused::Parameter(parameter, error.to_string())
        };
        let hostnqn = host_name(data).map_err(name(InvalidParameter::HOSTNQN))?;
        let subnqn = data
            .subsystem_nqn()
            .map_err(name(InvalidParameter::SUBNQN))?;
        let subsystem = self.target.subsystem(&subnqn).map_err(|error| {
            ConnectRefused::Parameter(InvalidParameter::SUBNQN, error.to_string())
        })?;
        let entries = connect.queue_entries();
        let kind = self.ports.kind_of(qp);
        let limits = self.target.listener_limits(kind, qp.ends.listener);
        let max = if connect.is_admin() {
            limits.max_admin_entries
        } else {
            limits.max_io_entries
        };
        if entries < 2 || entries > u32::from(max) {
            return Err(ConnectRefused::Parameter(
                InvalidParameter::SQSIZE,
                format!("{entries} entries; 2 to {max} are possible"),
            ));
        }
        let secure = self.check_channel(qp, &subsystem, &hostnqn);
        secure.inspect_err(|refused| self.report_tls(qp, &subsystem, &hostnqn, refused, now))?;
        // Taken first: a refusal for lack of a place must leave nothing behind.
        let discovery = subsystem.kind == SubsystemKind::Discovery;
        let place = self.target.places.take(discovery).map_err(|full| {
            ConnectRefused::Status(StatusCode::CONNECT_CONTROLLER_BUSY, full.to_string())
        })?;
        // Read this once, because an administrator may change the keys meanwhile.
        let channel = self.ports.secure_channel_of(qp);
        let is_generated = |channel: &SecureChannel| channel.identity.is_generated;
        // The host has authenticated itself when it made the PSK of this connection.
        let has_proof = channel.as_deref().is_some_and(is_generated);
        let must_authenticate = subsystem.host_keys(&hostnqn).is_some() && !has_proof;
        let places = &self.target.places;
        let unproven = must_authenticate.then(|| places.take_unproven(origin(&qp.ends.peer)));
        let unproven = unproven.transpose().map_err(|full| {
            ConnectRefused::Status(StatusCode::CONNECT_CONTROLLER_BUSY, full.to_string())
        })?;
        let association = if connect.is_admin() {
            self.connect_admin(qp, &subsystem, data, &hostnqn)?
        } else {
            let association =
                self.connect_io(&connect, &subsystem, qp.ends.listener, data, &hostnqn)?;
            // Either all queues of an association use TLS, or none.
            if association.has_clear_queue() == channel.is_some() {
                return Err(ConnectRefused::Status(
                    StatusCode::AUTHENTICATION_REQUIRED.with_dnr(),
                    format!("the admin queue of {hostnqn} and this queue are not both on TLS"),
                ));
            }
            if !association.takes_channel(channel.as_deref()) {
                return Err(ConnectRefused::Status(
                    StatusCode::AUTHENTICATION_REQUIRED.with_dnr(),
                    format!(
                        "the admin queue of {hostnqn} generated a PSK (secure channel concatenation), and this queue does not use TLS with it"
                    ),
                ));
            }
            association
        };
        let cqe = self.adopt(
            qp,
            &connect,
            (subsystem, association),
            must_authenticate,
            now,
        )?;
        (qp.admission.place, qp.admission.unproven) = (Some(place), unproven);
        Ok(cqe)
    }

    /// Checks the TLS channel of a queue. A host that has a PSK must use TLS, and the names of its
    /// Connect must be those of the handshake. Only then has the host proved that it has the PSK.
    /// The host must still have that PSK.
    fn check_channel(
        &self,
        qp: &QueuePair,
        subsystem: &Subsystem,
        hostnqn: &Nqn,
    ) -> Result<(), ConnectRefused> {
        let Some(channel) = self.ports.secure_channel_of(qp) else {
            return match subsystem.host_psk(hostnqn) {
                None if subsystem.host_must_concat(hostnqn)
                    && subsystem.host_keys(hostnqn).is_none() =>
                {
                    Err(ConnectRefused::Status(
                        StatusCode::AUTHENTICATION_REQUIRED.with_dnr(),
                        format!(
                            "host {hostnqn} must make a key for TLS by authentication (concat), and has no dhchap_key any more"
                        ),
                    ))
                }
                None => Ok(()),
                Some(_) => Err(ConnectRefused::Status(
                    StatusCode::AUTHENTICATION_REQUIRED.with_dnr(),
                    format!(
                        "host {hostnqn} has a psk, so it must use TLS: its connection is in clear"
                    ),
                )),
            };
        };
        let identity = &channel.identity;
        // The discovery subsystem may have two names.
        let named = self.target.subsystem(&identity.subsystem);
        let is_same = named.is_ok_and(|named| std::ptr::eq(&*named, subsystem));
        if identity.host == *hostnqn && is_same {
            if identity.is_generated {
                return check_generated(subsystem, hostnqn);
            }
            let psks = self.target.host_psks(subsystem, hostnqn);
            if psks.iter().any(|psk| Arc::ptr_eq(psk, &channel.psk)) {
                let authentication = &self.target.authentication;
                authentication.note_access(subsystem.nqn(), hostnqn, &qp.ends.peer);
                return Ok(());
            }
            // Not for good: the next handshake uses the key of then.
            return Err(ConnectRefused::Status(
                StatusCode::AUTHENTICATION_REQUIRED,
                format!(
                    "the psk of host {hostnqn} was replaced or removed since its TLS handshake"
                ),
            ));
        }
        Err(ConnectRefused::Status(
            StatusCode::CONNECT_INVALID_HOST.with_dnr(),
            format!(
                "{hostnqn} connects to {}, and its TLS identity is of {} and {}",
                subsystem.nqn(),
                identity.host,
                identity.subsystem
            ),
        ))
    }

    /// Reports a connection that [`Resources::check_channel`] refused, as an event. Repetitions are
    /// left out as in the log.
    fn report_tls(
        &mut self,
        qp: &QueuePair,
        subsystem: &Subsystem,
        hostnqn: &Nqn,
        refused: &ConnectRefused,
        now: Nanos,
    ) {
        let ConnectRefused::Status(_, why) = refused else {
            return;
        };
        let peer = &qp.ends.peer;
        let fact = format!("TLS of {hostnqn} at {}: {why}", subsystem.nqn());
        if let Some(left_out) = self.refusals.admit((of_peer(peer), fact), now) {
            self.target.authentication.report_tls(TlsFailure {
                peer: peer.to_string(),
                address: of_peer(peer),
                names: Some((hostnqn.clone(), subsystem.nqn().clone())),
                reason: why.clone(),
                times: left_out + 1,
            });
        }
    }

    fn connect_admin(
        &mut self,
        qp: &QueuePair,
        subsystem: &Arc<Subsystem>,
        data: &ConnectData,
        hostnqn: &Nqn,
    ) -> Result<Arc<Association>, ConnectRefused> {
        let asked = data.cntlid.get();
        subsystem.config.check_cntlid(asked).map_err(|why| {
            ConnectRefused::Parameter(
                InvalidParameter::CNTLID,
                format!("{}: {why}", subsystem.nqn()),
            )
        })?;
        let kind = self.ports.kind_of(qp);
        subsystem
            .admit(asked, hostnqn, data.hostid, qp.ends.listener, kind)
            .map_err(|refusal| match refusal {
                Refusal::HostNotAllowed => ConnectRefused::Status(
                    StatusCode::CONNECT_INVALID_HOST.with_dnr(),
                    format!("host {hostnqn} is not allowed to use {}", subsystem.nqn()),
                ),
                Refusal::Busy => ConnectRefused::Busy(format!(
                    "an earlier controller of {hostnqn}, or the one that it asks for, is still being torn down"
                )),
                // Without DNR: the controller is free again after the other host's association.
                Refusal::ControllerTaken => ConnectRefused::Status(
                    StatusCode::CONNECT_CONTROLLER_BUSY,
                    format!("controller {asked} of {} has a host", subsystem.nqn()),
                ),
                Refusal::NoFreeController => ConnectRefused::Status(
                    StatusCode::CONNECT_CONTROLLER_BUSY,
                    format!("all controller ids of {} are in use", subsystem.nqn()),
                ),
                Refusal::Withheld(why) => {
                    self.target.count_withheld();
                    ConnectRefused::Parameter(
                        InvalidParameter::SUBNQN,
                        why.refusal(subsystem.nqn(), hostnqn, kind),
                    )
                }
                Refusal::NotOnThisListener => ConnectRefused::Parameter(
                    InvalidParameter::SUBNQN,
                    format!("{} does not listen here", subsystem.nqn()),
                ),
            })
    }

    fn connect_io(
        &mut self,
        connect: &Connect,
        subsystem: &Arc<Subsystem>,
        listener: ListenerId,
        data: &ConnectData,
        hostnqn: &Nqn,
    ) -> Result<Arc<Association>, ConnectRefused> {
        let cntlid = data.cntlid.get();
        let association = subsystem.controller(cntlid).ok_or_else(|| {
            ConnectRefused::Parameter(
                InvalidParameter::CNTLID,
                format!("{} has no controller {cntlid}", subsystem.nqn()),
            )
        })?;
        // An I/O queue must connect through the listener of its admin queue (Base 2.2, 3.1), whose
        // in-capsule size, queue size and ANA states the controller has announced.
        if association.listener != listener {
            return Err(ConnectRefused::Parameter(
                InvalidParameter::CNTLID,
                format!(
                    "controller {cntlid} was connected through another listener, over {}; \
                     its I/O queues have to come through that one too",
                    association.transport
                ),
            ));
        }
        // A HOSTID of zero is ignored on an I/O queue (Base 6.3).
        let other_id = data.hostid != [0; 16] && association.hostid != data.hostid;
        if association.hostnqn != *hostnqn || other_id {
            let parameter = if association.hostnqn != *hostnqn {
                InvalidParameter::HOSTNQN
            } else {
                InvalidParameter::HOSTID
            };
            return Err(ConnectRefused::Parameter(
                parameter,
                format!("controller {cntlid} belongs to {}", association.hostnqn),
            ));
        }
        // The limits that the controller has announced: those of the admin queue's transport.
        let limits = self.target.queue_limits(association.transport);
        let max = limits.max_io_queues.min(association.io_queues());
        let discovery = subsystem.kind == SubsystemKind::Discovery;
        if connect.qid > max || discovery {
            return Err(ConnectRefused::Parameter(
                InvalidParameter::QID,
                format!(
                    "queue {} of a controller with {} I/O queues",
                    connect.qid,
                    if discovery { 0 } else { max }
                ),
            ));
        }
        match association.phase() {
            Phase::Ready => Ok(association),
            Phase::Connected => Err(ConnectRefused::Status(
                StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr(),
                format!("controller {cntlid} is not enabled"),
            )),
            Phase::Closing => Err(ConnectRefused::Status(
                StatusCode::CONNECT_CONTROLLER_BUSY,
                format!("controller {cntlid} is being torn down"),
            )),
        }
    }

    /// Adds the connection to the association as a queue.
    fn adopt(
        &mut self,
        qp: &mut QueuePair,
        connect: &Connect,
        (subsystem, association): (Arc<Subsystem>, Arc<Association>),
        must_authenticate: bool,
        now: Nanos,
    ) -> Result<Cqe, ConnectRefused> {
        let stats = Arc::new(QueueStats::default());
        let group = self.handle.clone();
        let transport = self.ports.kind_of(qp);
        let caps = self.ports.caps_of(qp.port, qp.conn).clone();
        let info = QueueInfo {
            qid: connect.qid,
            entries: connect.queue_entries() as u16,
            group,
            id: qp.id,
            transport,
            listener: qp.ends.listener,
            local: qp.ends.local.clone(),
            peer: qp.ends.peer.clone(),
            stats: Arc::clone(&stats),
            auth: Arc::clone(&qp.admission.auth_state),
            secure: self.ports.secure_channel_of(qp),
            ending: false,
        };
        if let Err(refusal) = association.add_queue(info) {
            let (qid, cntlid) = (connect.qid, association.cntlid);
            return Err(match refusal {
                NoQueue::InUse => ConnectRefused::Status(
                    StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr(),
                    format!("queue {qid} of controller {cntlid} exists"),
                ),
                NoQueue::Ending => ConnectRefused::Busy(format!(
                    "commands of the queue {qid} of controller {cntlid} that was before are still in a device"
                )),
                NoQueue::Closing => {
                    if connect.is_admin() {
                        // The association ended meanwhile, without a queue that would remove it.
                        subsystem.forget(&association);
                    }
                    ConnectRefused::Status(
                        StatusCode::CONNECT_CONTROLLER_BUSY,
                        format!("controller {cntlid} is being torn down"),
                    )
                }
            });
        }
        // A key that changed since the first check did not see this queue.
        let host = &association.hostnqn;
        let secure = self.check_channel(qp, &subsystem, host);
        // Without authentication this queue makes no key for TLS.
        let stays_in_clear = !must_authenticate
            && self.ports.secure_channel_of(qp).is_none()
            && subsystem.host_must_concat(host);
        if secure.is_err() || stays_in_clear {
            association.tear_down(Teardown::MustEncrypt);
        }
        if connect.is_admin() {
            association.set_keep_alive(connect.kato_ms);
            let controller = Controller::new(
                &self.target,
                (Arc::clone(&subsystem), Arc::clone(&association)),
                &caps,
                qp.ends.local.clone(),
                connect.kato_ms,
                now,
            );
            qp.controller = Some(Box::new(controller));
            let (host, cntlid) = (&association.hostnqn, association.cntlid);
            tracing::info!(subsystem = %association.subnqn, %host, cntlid, peer = %qp.ends.peer, "controller connected");
        }
        association.touch();
        if must_authenticate {
            let state = Arc::clone(&qp.admission.auth_state);
            state.set_pending(true);
            qp.admission.auth = Some(Box::new(QueueAuth::new(state)));
        } else if connect.is_admin() {
            association.set_authenticated();
        }
        qp.opening.since = now;
        qp.qid = connect.qid;
        qp.flow.entries = connect.queue_entries() as u16;
        qp.flow.is_off = connect
            .attributes
            .contains(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL);
        qp.stats = stats;
        let response = ConnectResponse {
            cntlid: association.cntlid,
            // Without ASCR, which Linux hosts refuse unless secure concatenation is configured.
            auth: if must_authenticate {
                AuthRequirements::AUTHENTICATION
            } else {
                AuthRequirements::empty()
            },
        };
        qp.subsystem = Some(subsystem);
        qp.association = Some(association);
        qp.refresh_view();
        Ok(response.to_cqe(0))
    }
}

/// Checks whether a host may use a PSK that its authentication generated. It proved its key then,
/// and must still have one.
fn check_generated(subsystem: &Subsystem, hostnqn: &Nqn) -> Result<(), ConnectRefused> {
    let why = if subsystem.host_psk(hostnqn).is_some() {
        "it has a psk, and used a generated one for TLS"
    } else if subsystem.host_keys(hostnqn).is_none() {
        "its keys were removed since it generated the PSK of this connection"
    } else {
        return Ok(());
    };
    Err(ConnectRefused::Status(
        StatusCode::AUTHENTICATION_REQUIRED.with_dnr(),
        format!("host {hostnqn}: {why}"),
    ))
}

/// Completes an accepted Connect and opens the queue for commands.
fn connected(command: &mut Command, mut cqe: Cqe) {
    cqe.cid = command.sqe().cid;
    let qp = &mut *command.queue;
    let params = QueueParams {
        qid: qp.qid,
        entries: qp.flow.entries,
        flow_control_off: qp.flow.is_off,
    };
    // At this point only a queue that requires authentication has this state.
    qp.stage = match &qp.admission.auth {
        Some(_) => Stage::Authenticating,
        None => Stage::Live,
    };
    let port = command.core.ports.of(qp);
    port.established(qp.conn, params);
    let takes_zero_copy = port.takes_zero_copy(qp.conn);
    let fetch_window = port.fetch_window();
    command.complete(cqe);
    let qp = &mut *command.queue;
    qp.takes_zero_copy = takes_zero_copy;
    if !qp.is_admin() {
        qp.fetches.window = fetch_window;
        qp.fetches.waiting.reserve(usize::from(qp.flow.entries));
    }
    qp.opening.is_unanswered = false;
    debug_assert_eq!(qp.requests.outstanding(), 0, "the Connect was alone");
    qp.requests = Requests::new(qp.flow.entries);
    command.core.view_changed(qp);
}

/// Handles a fabrics command on an I/O queue, except authentication commands.
pub(super) fn fabrics_command(command: &mut Command) {
    match command.sqe().fctype() {
        fctype::DISCONNECT => disconnect(command),
        fctype::CONNECT => command.finish(StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr()),
        _ => command.finish(StatusCode::INVALID_OPCODE.with_dnr()),
    }
}

/// Disconnect (Base 6.4): deletes this I/O queue and aborts its outstanding commands. The response
/// is sent after the devices have completed them, so no command takes effect later.
fn disconnect(command: &mut Command) {
    if command.queue.inflight == 0 {
        command.finish(StatusCode::SUCCESS);
        return command.core.close(command.queue, CloseWhy::Drained);
    }
    let farewell = command.queue.success_of(command.index, command.now);
    command.queue.closing.response = farewell.map(Box::new);
    command.core.end(command.queue);
}

/// The host NQN. An empty one, as `spdk_nvme_perf` sends by default, is replaced by an NQN derived
/// from the HOSTID, so that such hosts stay distinct and can be allowed.
fn host_name(data: &ConnectData) -> Result<Nqn, NqnError> {
    match data.host_nqn() {
        Err(NqnError::Empty) if data.hostid != [0; 16] => {
            Ok(Nqn::from_uuid(uuid::Uuid::from_bytes(data.hostid)))
        }
        named => named,
    }
}
