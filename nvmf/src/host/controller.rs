//! The admin queue of a controller as its host drives it.
//!
//! ```text
//!   Dialling ─▶ Connecting ─▶ Enabling ─▶ Identifying ─▶ Live
//!      ▲            any failure, lost connection, timeout │
//!      └───────────── Waiting (back-off) ◀────────────────┘ ─▶ Failed (refused for good, or too long)
//! ```
//!
//! One command of its own at a time leads from step to step; keep-alives, event requests and the
//! user's admin commands run beside it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use nacre_hugepages::{Buf, Pool};
use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::commands::admin::{self as commands, GetLogPage, Identify, SetFeatures};
use nacre_nvmf_wire::fabrics::{
    Connect, ConnectAttributes, ConnectData, ConnectResponse, InvalidParameter, PropertyGet,
    PropertySet, PropertySize,
};
use nacre_nvmf_wire::features::{AsyncEvents, NumberOfQueues, fid};
use nacre_nvmf_wire::identify::controller::cntrltype;
use nacre_nvmf_wire::identify::{IdentifyController, NamespaceList, NvmController, cns};
use nacre_nvmf_wire::log::discovery::{DiscoveryEntry, DiscoveryHeader, DiscoveryRecord};
use nacre_nvmf_wire::log::lid;
use nacre_nvmf_wire::registers::{Cap, Cc, Csts, offset};
use nacre_nvmf_wire::{Cqe, Sgl, Sqe, StatusCode};
use nacre_reactor::{Idle, Nanos};
use zerocopy::{FromBytes, IntoBytes};

use super::namespace::NamespaceInfo;
use super::options::{Dial, HostError, HostOptions};
use super::queue::{CommandQueue, Finished};

/// Entries of the admin queue, as Linux hosts ask for.
const ADMIN_ENTRIES: u16 = 32;
/// Event requests left with the controller.
const EVENT_REQUESTS: usize = 1;
/// Admin commands of the user waiting for room in the queue.
const MAX_WAITING: usize = 256;
/// Identify data, and the largest piece of a log page read at once.
const PAGE: usize = 4096;

/// Where a controller is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControllerState {
    Connecting,
    Live,
    /// Lost; the next attempt is at `until`.
    Waiting {
        attempt: u32,
        until: Nanos,
        error: HostError,
    },
    Failed(HostError),
    /// Disconnected on request.
    Closed,
}

/// The answer to an admin command of the user.
#[derive(Debug)]
pub struct AdminResult {
    pub cqe: Cqe,
    pub data: Option<Buf>,
}

/// What I/O queues, on whatever core, need to know of their controller.
#[derive(Debug, Default)]
pub struct Link {
    /// 0 while there is no association; grows with every new one.
    generation: AtomicU64,
    /// An I/O queue found the association stuck.
    reset: AtomicBool,
    state: Mutex<LinkState>,
}

#[derive(Debug, Clone, Default)]
pub struct LinkState {
    pub cntlid: u16,
    /// I/O queues granted.
    pub io_queues: u16,
    /// Entries of an I/O queue.
    pub queue_entries: u16,
    pub in_capsule_bytes: u32,
    pub max_transfer_bytes: u32,
    pub max_dsm_ranges: u32,
    pub write_zeroes_bytes: u64,
    pub oncs: u16,
    pub volatile_cache: bool,
    pub namespaces: BTreeMap<u32, NamespaceInfo>,
    /// Set when the controller will not come back.
    pub failed: bool,
}

impl Link {
    /// `None` while there is no association.
    pub fn generation(&self) -> Option<u64> {
        match self.generation.load(Ordering::Acquire) {
            g if g & 1 == 1 => Some(g),
            _ => None,
        }
    }

    pub fn state(&self) -> LinkState {
        self.state.lock().expect("poisoned").clone()
    }

    pub fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        self.state
            .lock()
            .expect("poisoned")
            .namespaces
            .get(&nsid)
            .cloned()
    }

    pub fn has_failed(&self) -> bool {
        self.state.lock().expect("poisoned").failed
    }

    /// Makes the controller drop its association and connect again.
    pub fn request_reset(&self) {
        self.reset.store(true, Ordering::Release);
    }

    /// Odd: up; even: down.
    fn set_up(&self, up: bool) {
        let now = self.generation.load(Ordering::Acquire);
        if (now & 1 == 1) != up {
            self.generation.store(now + 1, Ordering::Release);
        }
    }
}

/// What the controller's own command in flight is for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    /// Waiting for the transport.
    Dialling,
    Connect,
    ReadCap,
    Enable,
    WaitReady,
    IdentifyController,
    IdentifyNvm,
    NumberOfQueues,
    ConfigureEvents,
    ListNamespaces,
    IdentifyNamespace(u32),
    DescribeNamespace(u32),
    ReadChangedList,
    /// Nothing of its own to do.
    Idle,
    ShutDown,
}

impl Step {
    fn name(&self) -> &'static str {
        match self {
            Step::Dialling => "connecting the transport",
            Step::Connect => "connect",
            Step::ReadCap => "reading CAP",
            Step::Enable => "enabling the controller",
            Step::WaitReady => "waiting for CSTS.RDY",
            Step::IdentifyController => "identify controller",
            Step::IdentifyNvm => "identify controller (NVM command set)",
            Step::NumberOfQueues => "set number of queues",
            Step::ConfigureEvents => "configure events",
            Step::ListNamespaces => "list namespaces",
            Step::IdentifyNamespace(_) => "identify namespace",
            Step::DescribeNamespace(_) => "namespace descriptors",
            Step::ReadChangedList => "read changed namespace list",
            Step::Idle => "idle",
            Step::ShutDown => "shut down",
        }
    }
}

/// Tokens of commands that are not the user's.
const OWN: u64 = u64::MAX;
const KEEP_ALIVE: u64 = u64::MAX - 1;
const EVENT: u64 = u64::MAX - 2;

struct UserCommand {
    ticket: u64,
    sqe: Sqe,
    write: Option<Buf>,
    read: Option<Buf>,
}

pub struct Controller {
    options: HostOptions,
    dial: Box<dyn Dial>,
    pool: Pool,
    link: Arc<Link>,
    state: ControllerState,
    queue: Option<CommandQueue>,
    step: Step,
    step_sent: bool,
    step_since: Nanos,
    started: Nanos,
    /// When the connection was lost for the first time since it was live.
    lost_since: Option<Nanos>,
    attempts: u32,
    cap: Cap,
    identify: Option<Box<IdentifyController>>,
    found: BTreeMap<u32, NamespaceInfo>,
    to_identify: VecDeque<u32>,
    events_out: usize,
    /// Events that arrived and that the user has not taken.
    news: VecDeque<AsyncEvent>,
    rescan: bool,
    last_sent: Nanos,
    keep_alive_out: bool,
    user: VecDeque<UserCommand>,
    next_ticket: u64,
    results: BTreeMap<u64, Result<AdminResult, HostError>>,
}

impl Controller {
    /// Starts to connect; `pool` is the memory of the core that polls it.
    pub fn new(options: HostOptions, dial: Box<dyn Dial>, pool: Pool, now: Nanos) -> Controller {
        Controller {
            options,
            dial,
            pool,
            link: Arc::default(),
            state: ControllerState::Connecting,
            queue: None,
            step: Step::Dialling,
            step_sent: false,
            step_since: now,
            started: now,
            lost_since: None,
            attempts: 0,
            cap: Cap(0),
            identify: None,
            found: BTreeMap::new(),
            to_identify: VecDeque::new(),
            events_out: 0,
            news: VecDeque::new(),
            rescan: false,
            last_sent: now,
            keep_alive_out: false,
            user: VecDeque::new(),
            next_ticket: 1,
            results: BTreeMap::new(),
        }
    }

    pub fn state(&self) -> &ControllerState {
        &self.state
    }

    pub fn is_live(&self) -> bool {
        self.state == ControllerState::Live
    }

    pub fn options(&self) -> &HostOptions {
        &self.options
    }

    /// Shared with the I/O queues.
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// Identify Controller, once it was read.
    pub fn identify(&self) -> Option<&IdentifyController> {
        self.identify.as_deref()
    }

    pub fn cap(&self) -> Cap {
        self.cap
    }

    pub fn is_discovery(&self) -> bool {
        self.identify
            .as_ref()
            .is_some_and(|i| i.cntrltype == cntrltype::DISCOVERY)
    }

    /// The next event that the controller reported.
    pub fn take_event(&mut self) -> Option<AsyncEvent> {
        self.news.pop_front()
    }

    /// Submits an admin command; the answer comes under the ticket. `None`: too many wait.
    pub fn submit(&mut self, sqe: Sqe, write: Option<Buf>, read: Option<Buf>) -> Option<u64> {
        if self.user.len() >= MAX_WAITING {
            return None;
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.user.push_back(UserCommand {
            ticket,
            sqe,
            write,
            read,
        });
        Some(ticket)
    }

    /// The answer to a command, when it is there.
    pub fn take_result(&mut self, ticket: u64) -> Option<Result<AdminResult, HostError>> {
        self.results.remove(&ticket)
    }

    /// Shuts the controller down and closes the connection.
    pub fn disconnect(&mut self, now: Nanos) {
        if self.is_live() {
            self.link.set_up(false);
            self.enter(Step::ShutDown, now);
        } else {
            self.finish(
                ControllerState::Closed,
                HostError::Lost(crate::transport::Closed::Local),
            );
        }
    }

    /// Does what there is to do. Answers how much that was.
    pub fn poll(&mut self, now: Nanos) -> usize {
        match &self.state {
            ControllerState::Failed(_) | ControllerState::Closed => return 0,
            ControllerState::Waiting { until, .. } if now < *until => return 0,
            ControllerState::Waiting { .. } => {
                self.state = ControllerState::Connecting;
                self.enter(Step::Dialling, now);
                self.started = now;
            }
            _ => {}
        }
        let mut did = 0;
        if let Err(error) = self.turn(now, &mut did) {
            self.lost(error, now);
        }
        did
    }

    fn turn(&mut self, now: Nanos, did: &mut usize) -> Result<(), HostError> {
        if self.queue.is_none() {
            let transport = self
                .dial
                .dial(0)
                .map_err(|e| HostError::Dial(e.to_string()))?;
            self.queue = Some(CommandQueue::new(transport, ADMIN_ENTRIES));
            self.started = now;
            *did += 1;
        }
        if self.link.reset.swap(false, Ordering::AcqRel) && self.is_live() {
            return Err(HostError::Reset);
        }
        let mut finished = Vec::new();
        let queue = self.queue.as_mut().expect("just made");
        *did += queue.poll(now, |f| finished.push(f));
        for one in finished {
            self.finished(one, now)?;
        }
        // A shutdown that was answered took the connection along.
        let Some(queue) = &self.queue else {
            return Ok(());
        };
        if let Some(why) = queue.closed().cloned() {
            if self.step == Step::ShutDown {
                self.finish(ControllerState::Closed, HostError::Lost(why));
                return Ok(());
            }
            return Err(HostError::Lost(why));
        }
        if self.step == Step::Dialling && queue.is_ready() {
            self.enter(Step::Connect, now);
        }
        if !self.is_live()
            && self.step != Step::ShutDown
            && now.since(self.started) > self.options.connect_timeout
        {
            let limit = self.options.connect_timeout;
            return Err(HostError::TimedOut {
                step: self.step.name(),
                limit,
            });
        }
        let waits = self.step_sent && self.step != Step::Idle;
        if waits && now.since(self.step_since) > self.options.admin_timeout {
            let limit = self.options.admin_timeout;
            return Err(HostError::TimedOut {
                step: self.step.name(),
                limit,
            });
        }
        self.send(now);
        Ok(())
    }

    /// Sends what there is to send, while the queue has room.
    fn send(&mut self, now: Nanos) {
        if !self.step_sent && !matches!(self.step, Step::Dialling | Step::Idle) {
            self.send_step(now);
        }
        if !self.is_live() {
            return;
        }
        if self.step == Step::Idle && self.rescan {
            self.rescan = false;
            self.enter(Step::ReadChangedList, now);
            self.send_step(now);
        }
        let Some(queue) = &mut self.queue else { return };
        while self.events_out < EVENT_REQUESTS && queue.has_room() {
            queue.submit(commands::async_event_request(0), None, None, EVENT, now);
            self.events_out += 1;
        }
        // Half the timeout, so that one lost keep-alive does not end the association.
        let period = self.options.keep_alive / 2;
        let due = !period.is_zero() && now.since(self.last_sent) >= period;
        if due && !self.keep_alive_out && queue.has_room() {
            queue.submit(commands::keep_alive(0), None, None, KEEP_ALIVE, now);
            self.keep_alive_out = true;
            self.last_sent = now;
        }
        while queue.has_room() {
            let Some(command) = self.user.pop_front() else {
                break;
            };
            queue.submit(
                command.sqe,
                command.write,
                command.read,
                command.ticket,
                now,
            );
        }
    }

    fn enter(&mut self, step: Step, now: Nanos) {
        self.step = step;
        self.step_sent = false;
        self.step_since = now;
    }

    /// Sends the step's command; tried again in the next turn when a buffer or room is short.
    fn send_step(&mut self, now: Nanos) {
        let Some(queue) = &mut self.queue else { return };
        if !queue.has_room() {
            return;
        }
        let get = |offset, size| PropertyGet { size, offset }.to_sqe(0);
        let set_cc = |cc: Cc| {
            PropertySet {
                size: PropertySize::Four,
                offset: offset::CC,
                value: u64::from(cc.0),
            }
            .to_sqe(0)
        };
        let page = || self.pool.acquire(PAGE);
        let (sqe, write, read) = match &self.step {
            Step::Connect => {
                let attributes = ConnectAttributes::empty();
                let connect = Connect {
                    qid: 0,
                    sqsize: ADMIN_ENTRIES - 1,
                    attributes,
                    priority_class: 0,
                    kato_ms: self.options.keep_alive.as_millis() as u32,
                };
                let Some(data) = connect_data(&self.pool, &self.options, 0xffff) else {
                    return;
                };
                let sqe = connect.to_sqe(
                    0,
                    Sgl::Transport {
                        length: data.len() as u32,
                    },
                );
                (sqe, Some(data), None)
            }
            Step::ReadCap => (get(offset::CAP, PropertySize::Eight), None, None),
            Step::Enable => (set_cc(Cc::enabled()), None, None),
            Step::WaitReady => (get(offset::CSTS, PropertySize::Four), None, None),
            Step::IdentifyController => {
                let Some(buf) = page() else { return };
                (Identify::new(cns::CONTROLLER).to_sqe(0, 0), None, Some(buf))
            }
            Step::IdentifyNvm => {
                let Some(buf) = page() else { return };
                (
                    Identify::new(cns::IO_CONTROLLER).to_sqe(0, 0),
                    None,
                    Some(buf),
                )
            }
            Step::NumberOfQueues => {
                let wanted = u32::from(self.options.io_queues.max(1));
                let value = NumberOfQueues {
                    submission: wanted,
                    completion: wanted,
                }
                .dword();
                (
                    SetFeatures::new(fid::NUMBER_OF_QUEUES, value).to_sqe(0, 0),
                    None,
                    None,
                )
            }
            Step::ConfigureEvents => {
                let offered = self.identify.as_ref().map_or(0, |i| i.oaes.get());
                let wanted = AsyncEvents::NAMESPACE_ATTRIBUTE
                    | AsyncEvents::ANA_CHANGE
                    | AsyncEvents::DISCOVERY_LOG;
                let value = wanted.bits() & offered;
                (
                    SetFeatures::new(fid::ASYNC_EVENT_CONFIGURATION, value).to_sqe(0, 0),
                    None,
                    None,
                )
            }
            Step::ListNamespaces => {
                let Some(buf) = page() else { return };
                let after = self.found.keys().next_back().copied().unwrap_or(0);
                (
                    Identify::new(cns::ACTIVE_NAMESPACES).to_sqe(0, after),
                    None,
                    Some(buf),
                )
            }
            Step::IdentifyNamespace(nsid) => {
                let Some(buf) = page() else { return };
                (
                    Identify::new(cns::NAMESPACE).to_sqe(0, *nsid),
                    None,
                    Some(buf),
                )
            }
            Step::DescribeNamespace(nsid) => {
                let Some(buf) = page() else { return };
                (
                    Identify::new(cns::NAMESPACE_DESCRIPTORS).to_sqe(0, *nsid),
                    None,
                    Some(buf),
                )
            }
            Step::ReadChangedList => {
                let Some(buf) = page() else { return };
                let log = GetLogPage::new(lid::CHANGED_NAMESPACE_LIST, PAGE as u32, 0);
                (log.to_sqe(0, u32::MAX), None, Some(buf))
            }
            Step::ShutDown => (set_cc(Cc::enabled().with_shn(1)), None, None),
            Step::Dialling | Step::Idle => return,
        };
        queue.submit(sqe, write, read, OWN, now);
        self.step_sent = true;
        self.last_sent = now;
    }

    fn finished(&mut self, one: Finished, now: Nanos) -> Result<(), HostError> {
        match one.token {
            OWN => self.step_done(one, now),
            KEEP_ALIVE => {
                self.keep_alive_out = false;
                match one.cqe.status() {
                    status if status.is_success() => Ok(()),
                    status => Err(HostError::Refused {
                        step: "keep alive",
                        status,
                    }),
                }
            }
            EVENT => {
                self.events_out -= 1;
                if one.cqe.status().is_success() {
                    let event = AsyncEvent::from_dword0(one.cqe.dword0());
                    if event.log_page == lid::CHANGED_NAMESPACE_LIST {
                        self.rescan = true;
                    }
                    if self.news.len() < MAX_WAITING {
                        self.news.push_back(event);
                    }
                }
                Ok(())
            }
            ticket => {
                let result = AdminResult {
                    cqe: one.cqe,
                    data: one.read,
                };
                self.results.insert(ticket, Ok(result));
                Ok(())
            }
        }
    }

    /// The step's command came back: what it says, and the next step.
    fn step_done(&mut self, one: Finished, now: Nanos) -> Result<(), HostError> {
        let (status, step) = (one.cqe.status(), self.step.clone());
        let data: &[u8] = one.read.as_deref().unwrap_or(&[]);
        if !status.is_success() {
            return self.step_refused(&step, &one.cqe, now);
        }
        let next = match step {
            Step::Connect => {
                let cntlid = ConnectResponse::from_cqe(&one.cqe).cntlid;
                self.link.state.lock().expect("poisoned").cntlid = cntlid;
                Step::ReadCap
            }
            Step::ReadCap => {
                self.cap = Cap(one.cqe.result());
                Step::Enable
            }
            Step::Enable => Step::WaitReady,
            Step::WaitReady => {
                let csts = Csts(one.cqe.result() as u32);
                if csts.is_fatal() {
                    return Err(HostError::Misbehaved {
                        what: "the controller failed (CSTS.CFS)".into(),
                    });
                }
                if csts.is_ready() {
                    Step::IdentifyController
                } else {
                    Step::WaitReady
                }
            }
            Step::IdentifyController => {
                self.take_identify(data)?;
                if self.is_discovery() {
                    Step::ConfigureEvents
                } else {
                    Step::IdentifyNvm
                }
            }
            Step::IdentifyNvm => {
                self.take_nvm(data);
                Step::NumberOfQueues
            }
            Step::NumberOfQueues => {
                let granted = NumberOfQueues::from_dword(one.cqe.dword0());
                let granted = granted.map_or(1, |n| n.submission.min(n.completion));
                let mut link = self.link.state.lock().expect("poisoned");
                link.io_queues = (granted.min(u32::from(self.options.io_queues))) as u16;
                drop(link);
                Step::ConfigureEvents
            }
            Step::ConfigureEvents if self.is_discovery() => return self.live(now),
            Step::ConfigureEvents => self.start_listing(),
            Step::ListNamespaces => {
                let list = NamespaceList::ref_from_prefix(data);
                let (list, _) = list.map_err(|_| HostError::Misbehaved {
                    what: "short namespace list".into(),
                })?;
                self.to_identify.extend(list.iter());
                self.next_namespace()
            }
            Step::IdentifyNamespace(nsid) => {
                let info = NamespaceInfo::parse(nsid, data)?;
                // A namespace that went between the list and the question has no blocks.
                if info.blocks == 0 {
                    self.next_namespace()
                } else {
                    self.found.insert(nsid, info);
                    Step::DescribeNamespace(nsid)
                }
            }
            Step::DescribeNamespace(nsid) => {
                if let Some(info) = self.found.get_mut(&nsid) {
                    info.add_descriptors(data)?;
                }
                self.next_namespace()
            }
            Step::ReadChangedList => self.start_listing(),
            Step::ShutDown => {
                self.finish(
                    ControllerState::Closed,
                    HostError::Lost(crate::transport::Closed::Local),
                );
                return Ok(());
            }
            Step::Dialling | Step::Idle => Step::Idle,
        };
        if next == Step::Idle {
            return self.live(now);
        }
        self.enter(next, now);
        Ok(())
    }

    fn step_refused(&mut self, step: &Step, cqe: &Cqe, now: Nanos) -> Result<(), HostError> {
        let status = cqe.status();
        match step {
            Step::Connect if status.code() == StatusCode::CONNECT_INVALID_PARAMETERS => {
                let parameter = InvalidParameter::from_dword0(cqe.dword0());
                Err(HostError::InvalidParameter { parameter })
            }
            // Optional: a controller without it has the defaults.
            Step::IdentifyNvm => {
                self.enter(Step::NumberOfQueues, now);
                Ok(())
            }
            Step::ConfigureEvents if self.is_discovery() => self.live(now),
            Step::ConfigureEvents | Step::ReadChangedList => {
                let next = self.start_listing();
                self.enter(next, now);
                Ok(())
            }
            // It went between the list and the question.
            Step::IdentifyNamespace(_) | Step::DescribeNamespace(_) => {
                match self.next_namespace() {
                    Step::Idle => self.live(now),
                    next => {
                        self.enter(next, now);
                        Ok(())
                    }
                }
            }
            step => Err(HostError::Refused {
                step: step.name(),
                status,
            }),
        }
    }

    fn start_listing(&mut self) -> Step {
        self.found.clear();
        self.to_identify.clear();
        Step::ListNamespaces
    }

    /// `Idle` when all are known.
    fn next_namespace(&mut self) -> Step {
        match self.to_identify.pop_front() {
            Some(nsid) => Step::IdentifyNamespace(nsid),
            // A full list may go on.
            None if !self.found.is_empty()
                && self.found.len().is_multiple_of(NamespaceList::MAX_ENTRIES) =>
            {
                Step::ListNamespaces
            }
            None => Step::Idle,
        }
    }

    fn take_identify(&mut self, data: &[u8]) -> Result<(), HostError> {
        let identify = IdentifyController::read_from_prefix(data);
        let (identify, _) = identify.map_err(|_| HostError::Misbehaved {
            what: "short Identify Controller data".into(),
        })?;
        let mut link = self.link.state.lock().expect("poisoned");
        if identify.cntlid.get() != link.cntlid {
            let what = format!(
                "Identify says controller {}, Connect said {}",
                identify.cntlid.get(),
                link.cntlid
            );
            return Err(HostError::Misbehaved { what });
        }
        let entries = self
            .cap
            .queue_entries_max()
            .min(u32::from(self.options.queue_entries));
        let maxcmd = match identify.maxcmd.get() {
            0 => u16::MAX,
            n => n,
        };
        link.queue_entries = (entries as u16).min(maxcmd.saturating_add(1)).max(2);
        link.in_capsule_bytes = u32::try_from(identify.in_capsule_bytes()).unwrap_or(u32::MAX);
        let page = self.cap.page_bytes_min();
        let max = identify.max_transfer_bytes(page).unwrap_or(1 << 20);
        link.max_transfer_bytes = u32::try_from(max).unwrap_or(u32::MAX);
        link.oncs = identify.oncs.get();
        link.volatile_cache = identify.vwc & 1 == 1;
        link.max_dsm_ranges = 256;
        link.write_zeroes_bytes = max;
        drop(link);
        self.identify = Some(Box::new(identify));
        Ok(())
    }

    fn take_nvm(&mut self, data: &[u8]) {
        let Ok((nvm, _)) = NvmController::ref_from_prefix(data) else {
            return;
        };
        let page = self.cap.page_bytes_min();
        let mut link = self.link.state.lock().expect("poisoned");
        if nvm.wzsl != 0 {
            link.write_zeroes_bytes = page.checked_shl(u32::from(nvm.wzsl)).unwrap_or(u64::MAX);
        }
        if nvm.dmrl != 0 {
            link.max_dsm_ranges = u32::from(nvm.dmrl);
        }
    }

    fn live(&mut self, now: Nanos) -> Result<(), HostError> {
        self.enter(Step::Idle, now);
        let mut link = self.link.state.lock().expect("poisoned");
        link.namespaces = std::mem::take(&mut self.found);
        drop(link);
        if self.state != ControllerState::Live {
            self.state = ControllerState::Live;
            self.link.set_up(true);
            self.attempts = 0;
            self.lost_since = None;
            tracing::info!(subsystem = %self.options.subnqn, "connected");
        }
        Ok(())
    }

    /// The connection is no good any more: forget it and wait, or give up.
    fn lost(&mut self, error: HostError, now: Nanos) {
        self.drop_connection(&error);
        let since = *self.lost_since.get_or_insert(now);
        let over = self
            .options
            .loss_timeout
            .is_some_and(|limit| now.since(since) >= limit);
        if over || error.is_final() {
            tracing::warn!(subsystem = %self.options.subnqn, %error, "giving up");
            return self.finish(ControllerState::Failed(error.clone()), error);
        }
        let delay = self.options.reconnect_delay * 2u32.saturating_pow(self.attempts.min(16));
        let delay = delay.min(self.options.reconnect_delay_max);
        self.attempts += 1;
        tracing::warn!(subsystem = %self.options.subnqn, %error, attempt = self.attempts, ?delay, "reconnecting");
        self.state = ControllerState::Waiting {
            attempt: self.attempts,
            until: now + delay,
            error,
        };
    }

    fn drop_connection(&mut self, error: &HostError) {
        self.link.set_up(false);
        if let Some(queue) = self.queue.take() {
            for ticket in queue.tokens().filter(|t| *t < EVENT) {
                self.results.insert(ticket, Err(error.clone()));
            }
        }
        self.events_out = 0;
        self.keep_alive_out = false;
        self.found.clear();
        self.to_identify.clear();
    }

    fn finish(&mut self, state: ControllerState, error: HostError) {
        self.drop_connection(&error);
        for command in self.user.drain(..) {
            self.results.insert(command.ticket, Err(error.clone()));
        }
        self.link.state.lock().expect("poisoned").failed = true;
        self.state = state;
    }

    /// See [`nacre_reactor::Poller::arm`].
    pub fn arm(&mut self, now: Nanos) -> Idle {
        match &self.state {
            ControllerState::Failed(_) | ControllerState::Closed => Idle::Quiet,
            ControllerState::Waiting { until, .. } => Idle::Until(*until),
            ControllerState::Connecting => match &mut self.queue {
                None => Idle::Busy,
                Some(queue) => queue
                    .transport()
                    .arm(now)
                    .and(Idle::Until(now + self.options.connect_timeout)),
            },
            ControllerState::Live => {
                let Some(queue) = &mut self.queue else {
                    return Idle::Busy;
                };
                let mut idle = queue.transport().arm(now);
                let period = self.options.keep_alive / 2;
                if !period.is_zero() {
                    idle = idle.and(Idle::Until(self.last_sent + period));
                }
                if self.user.is_empty() {
                    idle
                } else {
                    Idle::Busy
                }
            }
        }
    }

    /// The transport's descriptor, for whoever waits; changes with every connection.
    pub fn wake_fd(&mut self) -> Option<std::os::fd::RawFd> {
        self.queue.as_mut().and_then(|q| q.transport().wake_fd())
    }
}

/// The 1024 bytes of a Connect. `None`: no buffer.
pub(super) fn connect_data(pool: &Pool, options: &HostOptions, cntlid: u16) -> Option<Buf> {
    let data = ConnectData::new(options.hostid, cntlid, &options.subnqn, &options.hostnqn);
    let mut buf = pool.acquire(data.as_bytes().len())?;
    buf.bytes_mut()?.copy_from_slice(data.as_bytes());
    Some(buf)
}

/// Reads a discovery log through `read(offset, bytes)`, again when it changed meanwhile.
///
/// `read` runs one Get Log Page to its end; at most `attempts` whole readings are made.
pub fn fetch_discovery_log(
    mut read: impl FnMut(GetLogPage) -> Result<Vec<u8>, HostError>,
    attempts: u32,
) -> Result<(u64, Vec<DiscoveryRecord>), HostError> {
    let short = || HostError::Misbehaved {
        what: "short discovery log".into(),
    };
    for _ in 0..attempts.max(1) {
        let first = read(GetLogPage::new(lid::DISCOVERY, PAGE as u32, 0))?;
        let (header, _) = DiscoveryHeader::ref_from_prefix(&first).map_err(|_| short())?;
        let (genctr, numrec) = (header.genctr.get(), header.numrec.get());
        let entry = size_of::<DiscoveryEntry>();
        if numrec > 100_000 {
            let what = format!("a discovery log of {numrec} entries");
            return Err(HostError::Misbehaved { what });
        }
        let total = size_of::<DiscoveryHeader>() + numrec as usize * entry;
        let mut log = first;
        while log.len() < total {
            let bytes = (total - log.len()).min(PAGE);
            log.extend(read(GetLogPage::new(
                lid::DISCOVERY,
                bytes as u32,
                log.len() as u64,
            ))?);
        }
        let again = read(GetLogPage::new(lid::DISCOVERY, PAGE as u32, 0))?;
        let (after, _) = DiscoveryHeader::ref_from_prefix(&again).map_err(|_| short())?;
        if after.genctr.get() != genctr {
            continue;
        }
        let records = log[size_of::<DiscoveryHeader>()..total]
            .chunks_exact(entry)
            .map(|bytes| {
                let (entry, _) = DiscoveryEntry::ref_from_prefix(bytes).map_err(|_| short())?;
                entry.parse().map_err(|e| HostError::Misbehaved {
                    what: e.to_string(),
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        return Ok((genctr, records));
    }
    Err(HostError::Misbehaved {
        what: "the discovery log changed during every reading".into(),
    })
}
