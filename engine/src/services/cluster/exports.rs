//! The devices of this node that are replicas of volumes, as namespaces of the node's own
//! subsystem. Only the nodes of the cluster may connect to it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_cluster_core::{ExportId, Holder, NodeId};
use nacre_cluster_node::export::{Is, Want};
use nacre_cluster_node::{Export, ExportState, Node, NodeState, OwnExports, StoreView, node_nqn};
use nacre_nvmf_wire::Nqn;
use serde_json::json;
use tokio::time::timeout;
use tracing::{debug, info, warn};

use super::Running;
use super::hosts::Hosts;
use super::last_errors::LastErrors;
use super::lvols::{LvolProgress, Lvols};
use super::nsids::{MAX_EXPORTS, NsidError, Nsids};
use crate::rpc::RpcError;
use crate::services::Engine;
use crate::services::subsystems::{ADD_NAMESPACE, CREATE_SUBSYSTEM};

/// Longest wait for the disk that notes an NSID: volumes are taken after it.
const NOTED: Duration = Duration::from_secs(1);

pub(super) struct Exports {
    nqn: String,
    is_made: Cell<bool>,
    /// All exports that etcd listed have a namespace, or failed to get one.
    is_complete: Cell<bool>,
    /// The NQNs of the hosts that were allowed.
    hosts: RefCell<BTreeSet<String>>,
    not_made: LastErrors<()>,
    not_admitted: LastErrors<String>,
    not_exported: LastErrors<ExportId>,
    nsids: RefCell<Nsids>,
    not_noted: LastErrors<()>,
    /// The last state that was sent to etcd, or is to be sent, of each export; `None`: the export
    /// has ended.
    sent: RefCell<BTreeMap<ExportId, Option<ExportState>>>,
    /// Exports whose state is being sent. Two at once could arrive in the other order.
    sending: RefCell<BTreeSet<ExportId>>,
    /// Exports that etcd is asked to end.
    ending: RefCell<BTreeSet<ExportId>>,
    /// The exports whose keys were seen, with the etcd that had them, until their namespaces are
    /// gone.
    seen: RefCell<BTreeMap<ExportId, Seen>>,
    /// Exports whose keys are missing, while etcd is asked for them.
    asking: RefCell<BTreeSet<ExportId>>,
    pub(super) lvols: Lvols,
}

/// The etcd that had the key of an export.
struct Seen {
    view: StoreView,
    device: String,
}

impl Exports {
    pub(super) fn new(me: NodeId, nsids: Nsids) -> Self {
        Self {
            nqn: node_nqn(me),
            is_made: Cell::default(),
            is_complete: Cell::default(),
            hosts: RefCell::default(),
            not_made: LastErrors::default(),
            not_admitted: LastErrors::default(),
            not_exported: LastErrors::default(),
            nsids: RefCell::new(nsids),
            not_noted: LastErrors::default(),
            sent: RefCell::default(),
            sending: RefCell::default(),
            ending: RefCell::default(),
            seen: RefCell::default(),
            asking: RefCell::default(),
            lvols: Lvols::default(),
        }
    }

    /// The NQN of the node's subsystem, once it exists.
    pub(super) fn nqn(&self) -> Option<String> {
        self.is_made.get().then(|| self.nqn.clone())
    }

    /// True once all exports that etcd listed have a namespace, or failed to get one.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete.get()
    }

    /// Creates the subsystem if needed, and brings its hosts and namespaces to the wanted state.
    pub(super) async fn make(&self, engine: &Rc<Engine>, running: &Rc<Running>) {
        if let Err(error) = self.make_subsystem(engine).await {
            if self.not_made.is_new(&(), &error.to_string()) {
                warn!(%error, "the devices of this node's replicas are not exported; it is tried again");
            }
            return;
        }
        let is_listed = running.inbox.is_listed();
        self.admit(engine, running).await;
        let exports = running.inbox.exports();
        self.sent
            .borrow_mut()
            .retain(|id, _| exports.contains_key(id));
        self.lvols.retain(|id| exports.contains_key(&id));
        self.not_exported.retain(|id| exports.contains_key(id));
        let stored = exports.iter().map(|(id, export)| (*id, export.nsid));
        self.nsids.borrow_mut().update(&stored.collect());
        self.withdraw_vanished(engine, running, &exports);
        for (id, export) in exports {
            let state = match export.want {
                Want::There => Some(self.add(engine, running, id, &export).await),
                Want::Gone => self.remove(engine, running, id, &export).await,
            };
            Self::send(running, id, &export, state);
            if is_left(running, id, &export) {
                Self::end(running, id);
            }
        }
        if is_listed {
            self.is_complete.set(true);
        }
    }

    /// Removes the namespaces of exports whose keys are gone although no node asked to end them.
    /// Only the etcd in which a key was seen counts: another one, or one restored from a backup,
    /// proves nothing. The device keeps its data.
    fn withdraw_vanished(
        &self,
        engine: &Rc<Engine>,
        running: &Rc<Running>,
        exports: &BTreeMap<ExportId, Export>,
    ) {
        let own = OwnExports {
            operator: &running.operator,
            node: running.me,
        };
        let Some((view, present)) = own.seen() else {
            return;
        };
        let mut seen = self.seen.borrow_mut();
        seen.retain(|id, _| exports.contains_key(id) || self.namespace(engine, *id).is_some());
        for (id, export) in exports {
            if present.contains(&id.0) {
                let device = export.device.clone();
                seen.insert(*id, Seen { view, device });
            }
        }
        let state = running.node.borrow().as_ref().map(Node::state);
        let Some(NodeState::In { incarnation, .. }) = state else {
            return;
        };
        for (id, one) in &*seen {
            let is_gone = !exports.contains_key(id) && !present.contains(&id.0);
            if !is_gone || one.view != view || !self.asking.borrow_mut().insert(*id) {
                continue;
            }
            let (engine, running) = (Rc::clone(engine), Rc::clone(running));
            let (id, device) = (*id, one.device.clone());
            tokio::task::spawn_local(async move {
                let own = OwnExports {
                    operator: &running.operator,
                    node: running.me,
                };
                match own.is_gone(incarnation, id, view).await {
                    Ok(true) => {
                        running
                            .exports
                            .withdraw(&engine, &running, id, &device)
                            .await
                    }
                    Ok(false) => {}
                    Err(error) => debug!(%error, "it is not known whether an export is gone"),
                }
                running.exports.asking.borrow_mut().remove(&id);
            });
        }
    }

    async fn withdraw(&self, engine: &Rc<Engine>, running: &Running, id: ExportId, device: &str) {
        // The key may have come back meanwhile.
        let is_back = running.inbox.exports().contains_key(&id);
        let Some(nsid) = self.namespace(engine, id).filter(|_| !is_back) else {
            return;
        };
        let params = json!({ "nqn": self.nqn, "nsid": nsid });
        match engine
            .declared_call("nvmf_subsystem_remove_ns", &params)
            .await
        {
            Ok(_) => warn!(
                device,
                nsid,
                "the key of an export is gone from etcd: its namespace is withdrawn, and the device stays"
            ),
            Err(error) => debug!(device, %error, "a namespace without a key is not withdrawn yet"),
        }
    }

    /// Ends an export that no record names. Does not wait for etcd.
    fn end(running: &Rc<Running>, id: ExportId) {
        if !running.exports.ending.borrow_mut().insert(id) {
            return;
        }
        let running = Rc::clone(running);
        tokio::task::spawn_local(async move {
            let ended = running.operator.unexport_unused(running.me, id, false);
            match ended.await {
                Ok(true) => info!(device = %id.0, "no volume uses the device any more"),
                Ok(false) => {}
                Err(error) => debug!(%error, "an export without a volume is not ended yet"),
            }
            running.exports.ending.borrow_mut().remove(&id);
        });
    }

    async fn make_subsystem(&self, engine: &Rc<Engine>) -> Result<(), RpcError> {
        if self.is_made.get() {
            return Ok(());
        }
        let create = json!({ "nqn": self.nqn, "max_namespaces": MAX_EXPORTS });
        engine.declared_call(CREATE_SUBSYSTEM, &create).await?;
        self.is_made.set(true);
        engine.listeners.look_again(engine).await;
        Ok(())
    }

    /// Allows the nodes that have a description in etcd as hosts, and removes nodes that have none
    /// any more.
    async fn admit(&self, engine: &Rc<Engine>, running: &Running) {
        let nodes = running.inbox.nodes();
        let wanted: BTreeSet<String> = nodes
            .keys()
            .map(|node| super::peers::host_nqn(*node))
            .collect();
        let hosts = match Hosts::of(engine, &self.nqn) {
            Ok(hosts) => hosts,
            Err(error) => return debug!(%error, "no subsystem for the nodes"),
        };
        let known = self.hosts.borrow().clone();
        for host in known.union(&wanted) {
            let is_wanted = wanted.contains(host);
            let changed = if is_wanted {
                hosts.allow(host).await
            } else {
                hosts.remove(host).await
            };
            let mut known = self.hosts.borrow_mut();
            match changed {
                Ok(()) => {
                    self.not_admitted.clear(host);
                    if is_wanted {
                        known.insert(host.clone());
                    } else {
                        known.remove(host);
                    }
                }
                Err(error) if self.not_admitted.is_new(host, &error.to_string()) => {
                    warn!(host, %error, "a node is not admitted as it should be");
                }
                Err(_) => {}
            }
        }
    }

    /// The NSID of an export, if it has a namespace.
    fn namespace(&self, engine: &Engine, id: ExportId) -> Option<u32> {
        let nqn = Nqn::new(&self.nqn).ok()?;
        let subsystem = engine.plane().ok()?.target.subsystem(&nqn).ok()?;
        subsystem.namespace_with(id.0)
    }

    /// The NSID of an export. A new one is noted on disk before a namespace has it, unless the disk
    /// fails or is silent: that does not keep replicas away.
    async fn nsid(&self, id: ExportId) -> Result<u32, NsidError> {
        let (nsid, note) = self.nsids.borrow().choose(id)?;
        if let Some(note) = note {
            let written = timeout(NOTED, note.write()).await;
            let written = written.unwrap_or(Err(NsidError::Late(NOTED)));
            match written {
                Ok(()) => self.not_noted.clear(&()),
                Err(error) if self.not_noted.is_new(&(), &error.to_string()) => {
                    warn!(%error, "NSIDs of ended exports may be used again after a restart");
                }
                Err(_) => {}
            }
            self.nsids.borrow_mut().take(id, nsid);
        }
        Ok(nsid)
    }

    async fn add(
        &self,
        engine: &Rc<Engine>,
        running: &Rc<Running>,
        id: ExportId,
        export: &Export,
    ) -> ExportState {
        let nsid = match self.nsid(id).await {
            Ok(nsid) => nsid,
            Err(error) => return state(Is::Failed, 0, Some(error.to_string())),
        };
        let Ok(plane) = engine.plane() else {
            return state(Is::Making, nsid, None);
        };
        let device = &export.device;
        let mut why = None;
        if let Some(place) = &export.place {
            let progress = self.lvols.make(engine, running, id, export, place);
            let is_here = plane.bdevs.lookup(device).is_some();
            match progress {
                // It is in use while it grows.
                LvolProgress::Failed(said) if is_here => why = Some(said),
                LvolProgress::Failed(said) => return state(Is::Failed, nsid, Some(said)),
                LvolProgress::Working if !is_here => return state(Is::Making, nsid, None),
                LvolProgress::Working | LvolProgress::Done => {}
            }
        }
        if self.namespace(engine, id).is_none() {
            let namespace = json!({ "nsid": nsid, "bdev_name": device, "uuid": id.0 });
            let params = json!({ "nqn": self.nqn, "namespace": namespace });
            if let Err(error) = engine.declared_call(ADD_NAMESPACE, &params).await {
                return state(Is::Failed, nsid, Some(error.to_string()));
            }
            info!(device, volume = %export.volume().0, "a device is exported to the cluster");
        }
        match plane.bdevs.lookup(device) {
            Some(layer) => {
                let geometry = layer.geometry();
                let block_size = u64::from(geometry.block_size);
                ExportState {
                    bytes: geometry.blocks.saturating_mul(block_size),
                    block_size: geometry.block_size,
                    ..state(Is::There, nsid, why)
                }
            }
            None => {
                let why = format!("there is no device \"{device}\"");
                state(Is::Failed, nsid, Some(why))
            }
        }
    }

    /// Removes the namespace of an export, and the lvol that the cluster made. `None`: both are
    /// gone.
    async fn remove(
        &self,
        engine: &Rc<Engine>,
        running: &Rc<Running>,
        id: ExportId,
        export: &Export,
    ) -> Option<ExportState> {
        if let Some(nsid) = self.namespace(engine, id) {
            let params = json!({ "nqn": self.nqn, "nsid": nsid });
            let removed = engine.declared_call("nvmf_subsystem_remove_ns", &params);
            if let Err(error) = removed.await {
                return Some(state(Is::Failed, nsid, Some(error.to_string())));
            }
        }
        let place = export.place.as_ref()?;
        let state_of_node = running.node.borrow().as_ref().map(Node::state);
        if !matches!(state_of_node, Some(NodeState::In { .. })) {
            // The wish may be that of another time: a backup may be restored at this moment.
            return Some(state(Is::Making, export.nsid, None));
        }
        match self.lvols.delete(engine, running, id, place) {
            LvolProgress::Done => None,
            LvolProgress::Working => Some(state(Is::Making, export.nsid, None)),
            LvolProgress::Failed(why) => Some(state(Is::Failed, export.nsid, Some(why))),
        }
    }

    /// Writes the state of an export to etcd, unless etcd has it. Does not wait for etcd.
    fn send(running: &Rc<Running>, id: ExportId, export: &Export, state: Option<ExportState>) {
        let this = &running.exports;
        let is_in_etcd = state.as_ref().is_some_and(|state| {
            (export.is, &export.why) == (state.is, &state.why)
                && (state.bytes == 0
                    || (export.bytes, export.block_size) == (state.bytes, state.block_size))
                && export.nsid == state.nsid
        });
        if is_in_etcd || this.sent.borrow().get(&id) == Some(&state) {
            return;
        }
        let node = running.node.borrow().as_ref().map(Node::state);
        let Some(NodeState::In { incarnation, .. }) = node else {
            return;
        };
        match state.as_ref().and_then(|state| state.why.as_ref()) {
            Some(why) if this.not_exported.is_new(&id, why) => {
                let device = &export.device;
                warn!(
                    device,
                    why, "a replica's device is not exported; it is tried again"
                );
            }
            Some(_) => {}
            None => this.not_exported.clear(&id),
        }
        this.sent.borrow_mut().insert(id, state);
        if !this.sending.borrow_mut().insert(id) {
            return;
        }
        let running = Rc::clone(running);
        tokio::task::spawn_local(async move {
            let (this, operator, me) = (&running.exports, &running.operator, running.me);
            loop {
                let Some(state) = this.sent.borrow().get(&id).cloned() else {
                    break;
                };
                let sent = operator.set_export_state(me, incarnation, id, state.as_ref());
                if let Err(error) = sent.await {
                    debug!(%error, "the state of an export is not in etcd; it is sent again");
                    this.sent.borrow_mut().remove(&id);
                    break;
                }
                // A later state waits for this one.
                if this.sent.borrow().get(&id) == Some(&state) {
                    break;
                }
            }
            this.sending.borrow_mut().remove(&id);
        });
    }
}

/// True if no record names the export, and the incarnation that requested it has no lease any more.
fn is_left(running: &Running, id: ExportId, export: &Export) -> bool {
    let inbox = &running.inbox;
    let makes = |by: Holder| inbox.stands(by);
    export.want == Want::There
        && inbox.is_listed()
        && !inbox.is_named(export.volume(), &id.0.to_string())
        && !export.by().is_some_and(makes)
}

fn state(is: Is, nsid: u32, why: Option<String>) -> ExportState {
    ExportState {
        is,
        bytes: 0,
        block_size: 0,
        nsid,
        why,
    }
}
