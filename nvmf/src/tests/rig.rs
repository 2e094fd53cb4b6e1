//! The harness of the tests: a target with one queue group, a transport whose both ends the test
//! holds, and a minimal host.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::layer::Layer;
use nacre_bdev::{Bdev, malloc};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf_wire::commands::io::{CopyCommand, CopyFormat};
use nacre_nvmf_wire::fabrics::{
    Connect, ConnectAttributes, ConnectData, PropertySet, PropertySize,
};
use nacre_nvmf_wire::registers::{Cc, offset};
use nacre_nvmf_wire::{Cqe, Nqn, Sgl, Sqe, StatusCode};
use nacre_reactor::{Helper, Idle, Nanos};
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use crate::queues::{GroupConfig, QueueGroup};
use crate::subsystems::{
    Authentication, Backing, NamespaceConfig, NamespaceIds, SubsystemConfig, Target, TargetConfig,
};
use crate::tls::SecureChannel;
use crate::transport::{
    Address, CloseWhy, Closed, ConnId, Event, Events, ListenError, ListenerId, ListenerOptions,
    Plug, Pools, QueueParams, ReqTag, Response, Transport, TransportCaps, TransportType,
};

pub(super) const SUBNQN: &str = "nqn.2025-01.io.nacre:test";
pub(super) const HOSTNQN: &str =
    "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6";
pub(super) const MAX_TRANSFER: u32 = 128 * 1024;
pub(super) const BLOCK: u32 = 512;
pub(super) const BLOCKS: u64 = 4096;

/// The host's end of the wire, as a test sees and uses it.
#[derive(Default)]
pub(super) struct Wire {
    /// To the target.
    events: VecDeque<Event>,
    /// From the target.
    pub responses: VecDeque<(ConnId, Response)>,
    pub fetches: VecDeque<(ConnId, ReqTag, Buf)>,
    pub closes: Vec<(ConnId, CloseWhy)>,
    pub established: Vec<(ConnId, QueueParams)>,
    pub in_place: Vec<(ConnId, bool)>,
    /// Bytes to be fetched at a time; `None`: any.
    pub window: Option<usize>,
    /// The TLS keys of connections; `None`: they are in clear.
    pub secure: Option<Arc<SecureChannel>>,
    /// An action of another thread when the core looks up the TLS keys of a connection, at this
    /// number of times from now.
    pub at_look: Option<(u32, Box<dyn FnOnce()>)>,
    /// An action of another thread after the core has checked its messages, and before it takes
    /// arrived commands.
    pub meanwhile: Option<Box<dyn FnOnce()>>,
}

struct FakeTransport {
    caps: TransportCaps,
    wire: Rc<RefCell<Wire>>,
}

impl Transport for FakeTransport {
    fn caps(&self) -> &TransportCaps {
        &self.caps
    }

    fn secure_channel(&self, _conn: ConnId) -> Option<Arc<SecureChannel>> {
        let mut wire = self.wire.borrow_mut();
        match wire.at_look.take() {
            Some((1, action)) => action(),
            Some((looks, action)) => wire.at_look = Some((looks - 1, action)),
            None => {}
        }
        wire.secure.clone()
    }

    fn poll(&mut self, _now: Nanos, _pools: &Pools, events: &mut Events) -> usize {
        let mut wire = self.wire.borrow_mut();
        if let Some(meanwhile) = wire.meanwhile.take() {
            meanwhile();
        }
        let mut taken = 0;
        while events.has_room() {
            let Some(event) = wire.events.pop_front() else {
                break;
            };
            events.push(event);
            taken += 1;
        }
        taken
    }

    fn fetch(&mut self, conn: ConnId, tag: ReqTag, _sqe: &Sqe, into: Buf) {
        self.wire.borrow_mut().fetches.push_back((conn, tag, into));
    }

    fn respond(&mut self, conn: ConnId, response: Response) {
        self.wire.borrow_mut().responses.push_back((conn, response));
    }

    fn established(&mut self, conn: ConnId, params: QueueParams) {
        self.wire.borrow_mut().established.push((conn, params));
    }

    fn fetch_window(&self) -> usize {
        self.wire.borrow().window.unwrap_or(usize::MAX)
    }

    fn set_in_place(&mut self, conn: ConnId, in_place: bool) {
        self.wire.borrow_mut().in_place.push((conn, in_place));
    }

    fn close(&mut self, conn: ConnId, why: CloseWhy) {
        let mut wire = self.wire.borrow_mut();
        wire.closes.push((conn, why));
        wire.fetches.retain(|(c, ..)| *c != conn);
        wire.events.push_back(Event::Closed {
            conn,
            why: Closed::Local,
        });
    }

    fn flush(&mut self, _now: Nanos) {}

    fn arm(&mut self, _now: Nanos) -> Idle {
        Idle::Quiet
    }

    fn wake_fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn connections(&self) -> usize {
        0
    }
}

/// A plug whose one core is the test's thread. The opener makes the wire.
struct FakePlug;

thread_local! {
    static WIRE: RefCell<Option<Rc<RefCell<Wire>>>> = const { RefCell::new(None) };
}

impl Plug for FakePlug {
    fn kind(&self) -> TransportType {
        TransportType::Loopback
    }

    fn listen(
        &self,
        _id: ListenerId,
        address: &Address,
        _options: &ListenerOptions,
    ) -> Result<Address, ListenError> {
        Ok(address.clone())
    }

    fn unlisten(&self, _id: ListenerId) {}

    fn open(
        &self,
        _core: usize,
        _wake: Arc<dyn Fn() + Send + Sync>,
    ) -> std::io::Result<Box<dyn Transport>> {
        let wire = Rc::new(RefCell::new(Wire::default()));
        WIRE.set(Some(Rc::clone(&wire)));
        let caps = TransportCaps {
            kind: TransportType::Loopback,
            in_capsule_bytes: 4096,
            admin_in_capsule_bytes: 8192,
            max_transfer_bytes: MAX_TRANSFER,
            max_sgl_descriptors: 1,
            keyed_sgl: false,
        };
        Ok(Box::new(FakeTransport { caps, wire }))
    }
}

pub(super) struct Rig {
    pub target: Arc<Target>,
    pub group: QueueGroup,
    pub wire: Rc<RefCell<Wire>>,
    pub pools: Pools,
    pub now: Nanos,
    /// Where connections come from here on.
    pub listener: ListenerId,
    /// Host identifier of the host that connects from here on.
    pub hostid: [u8; 16],
    /// Of admin queues that are connected from here on.
    pub kato_ms: u32,
    /// The other core, if there is one.
    other: Option<(QueueGroup, Rc<RefCell<Wire>>)>,
    next_conn: u32,
    /// The connection whose place the next one gets.
    reused: Option<ConnId>,
    next_cid: u16,
}

/// Buffers of the rig's I/O pool: few, so that tests can use them up.
pub(super) const IO_BUFFERS: usize = 4;

impl Rig {
    /// A target with one subsystem, that any host may use, on one listener.
    pub(super) fn new(config: TargetConfig) -> Self {
        Self::on_cores(config, 1)
    }

    /// As `new`, on one core or two, which take turns; [`Rig::switch`] goes to the other.
    pub(super) fn on_cores(config: TargetConfig, cores: usize) -> Self {
        let authentication = Authentication::with_helper(Arc::new(Helper::at_once()));
        let target = Target::with_authentication(config, cores, authentication);
        target.add_plug(Arc::new(FakePlug)).unwrap();
        let pools = Pools {
            io: Pool::heap(&[
                ClassSpec {
                    size: 4096,
                    count: IO_BUFFERS,
                },
                ClassSpec {
                    size: MAX_TRANSFER as usize,
                    count: IO_BUFFERS,
                },
            ]),
            admin: Pool::heap(&[ClassSpec {
                size: 8192,
                count: 4,
            }]),
        };
        let mut groups = (0..cores).map(|core| {
            let mut group = QueueGroup::new(
                Arc::clone(&target),
                core,
                pools.clone(),
                Arc::new(|| {}),
                GroupConfig::default(),
            )
            .unwrap();
            group.turn(Nanos(1));
            let wire = WIRE.take().expect("the group opened the plug");
            (group, wire)
        });
        let (group, wire) = groups.next().expect("a core");
        let other = groups.next();
        drop(groups);
        let mut config = SubsystemConfig::new(nqn(SUBNQN));
        config.allow_any_host = true;
        target.create_subsystem(config).unwrap();
        let address = Address::Loopback("test".into());
        target
            .add_listener(&nqn(SUBNQN), TransportType::Loopback, &address)
            .unwrap();
        Self {
            target,
            group,
            wire,
            pools,
            now: Nanos(1),
            listener: ListenerId(1),
            hostid: [1; 16],
            kato_ms: 15_000,
            other,
            next_conn: 0,
            reused: None,
            next_cid: 0,
        }
    }

    /// A rig whose subsystem has namespace 1 on `bdev`.
    pub(super) fn with_bdev(bdev: Arc<dyn Bdev>) -> Self {
        let rig = Self::new(TargetConfig::default());
        rig.add_namespace(bdev);
        rig
    }

    pub(super) fn with_malloc() -> Self {
        Self::with_bdev(ram())
    }

    pub(super) fn add_namespace(&self, bdev: Arc<dyn Bdev>) -> u32 {
        self.add_namespace_to(SUBNQN, bdev)
    }

    pub(super) fn add_namespace_to(&self, subnqn: &str, bdev: Arc<dyn Bdev>) -> u32 {
        let config = NamespaceConfig {
            nsid: None,
            bdev_name: bdev.name().to_string(),
            ids: NamespaceIds::from_uuid(bdev.uuid()),
            backing: backing(bdev),
            ana_group: None,
            auto_visible: true,
            reservations: Default::default(),
        };
        self.target.add_namespace(&nqn(subnqn), config).unwrap()
    }

    pub(super) fn turn(&mut self) {
        self.now = self.now + Duration::from_micros(10);
        self.group.turn(self.now);
        if let Some((group, _)) = &mut self.other {
            group.turn(self.now);
        }
    }

    /// Commands and completions from here on are on the other core.
    pub(super) fn switch(&mut self) {
        let (group, wire) = self.other.as_mut().expect("two cores");
        std::mem::swap(group, &mut self.group);
        std::mem::swap(wire, &mut self.wire);
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.turn();
        self.turn();
    }

    /// A connection that has sent nothing yet.
    pub(super) fn open(&mut self) -> ConnId {
        let conn = match self.reused.take() {
            Some(before) => ConnId {
                generation: before.generation + 1,
                ..before
            },
            None => ConnId {
                index: self.next_conn,
                generation: 7,
            },
        };
        self.next_conn = self.next_conn.max(conn.index + 1);
        let event = Event::Opened {
            conn,
            listener: self.listener,
            local: Address::Loopback("test".into()),
            peer: Address::Loopback(format!("host{}", conn.index)),
        };
        self.wire.borrow_mut().events.push_back(event);
        conn
    }

    /// The next connection gets the place of one that has ended.
    pub(super) fn reuse(&mut self, conn: ConnId) {
        self.reused = Some(conn);
    }

    pub(super) fn send(&mut self, conn: ConnId, sqe: Sqe, data: Option<Buf>) {
        self.wire
            .borrow_mut()
            .events
            .push_back(Event::Capsule { conn, sqe, data });
    }

    pub(super) fn event(&mut self, event: Event) {
        self.wire.borrow_mut().events.push_back(event);
    }

    pub(super) fn hang_up(&mut self, conn: ConnId) {
        self.wire.borrow_mut().events.push_back(Event::Closed {
            conn,
            why: Closed::Peer,
        });
        self.turn();
    }

    pub(super) fn cid(&mut self) -> u16 {
        self.next_cid += 1;
        self.next_cid
    }

    /// Answers the target's fetches with `data`.
    pub(super) fn deliver(&mut self, data: &[u8]) -> usize {
        let fetches: Vec<_> = self.wire.borrow_mut().fetches.drain(..).collect();
        for (conn, tag, mut buf) in fetches.into_iter().rev() {
            buf.bytes_mut().unwrap().copy_from_slice(data);
            let event = Event::Fetched {
                conn,
                tag,
                data: buf,
            };
            self.wire.borrow_mut().events.push_front(event);
        }
        self.wire.borrow().events.len()
    }

    pub(super) fn fetched(&mut self, conn: ConnId, tag: ReqTag, data: Buf) {
        self.wire
            .borrow_mut()
            .events
            .push_back(Event::Fetched { conn, tag, data });
    }

    /// Returns the only completion; panics if there is not exactly one.
    pub(super) fn answer(&mut self) -> Response {
        let mut wire = self.wire.borrow_mut();
        let (_, response) = wire.responses.pop_front().expect("no answer");
        assert!(wire.responses.is_empty(), "more than one answer");
        response
    }

    pub(super) fn answers(&mut self) -> Vec<Cqe> {
        self.wire
            .borrow_mut()
            .responses
            .drain(..)
            .map(|(_, r)| r.cqe)
            .collect()
    }

    /// The same, without what queues say of themselves.
    pub(super) fn statuses(&mut self) -> Vec<(u16, StatusCode)> {
        let answers = self.answers();
        answers.iter().map(|c| (c.cid(), c.status())).collect()
    }

    /// Sends a command, gives the target the data it asks for, and takes the answer.
    pub(super) fn call(&mut self, conn: ConnId, sqe: Sqe, data: &[u8]) -> Response {
        self.send(conn, sqe, None);
        for _ in 0..8 {
            self.turn();
            if !self.wire.borrow().responses.is_empty() {
                break;
            }
            self.deliver(data);
        }
        let response = self.answer();
        assert_eq!(response.cqe.cid(), sqe.cid());
        response
    }

    pub(super) fn status(&mut self, conn: ConnId, sqe: Sqe, data: &[u8]) -> StatusCode {
        self.call(conn, sqe, data).cqe.status()
    }

    /// Connects a queue as `host` to `subnqn`.
    pub(super) fn connect_as(
        &mut self,
        host: &str,
        subnqn: &str,
        qid: u16,
        cntlid: u16,
        entries: u16,
    ) -> (ConnId, Cqe) {
        let data = ConnectData::new(self.hostid, cntlid, &nqn(subnqn), &nqn(host));
        self.connect_with(qid, entries, &data)
    }

    /// As a host that has an identifier and no name.
    pub(super) fn connect_nameless(
        &mut self,
        hostid: [u8; 16],
        qid: u16,
        cntlid: u16,
    ) -> (ConnId, Cqe) {
        let mut data = ConnectData::new(hostid, cntlid, &nqn(SUBNQN), &nqn(HOSTNQN));
        data.hostnqn = [0; 256];
        self.connect_with(qid, 32, &data)
    }

    /// A Connect that asks for its data.
    fn connect_command(&mut self, qid: u16, entries: u16) -> Sqe {
        let cid = self.cid();
        let connect = Connect {
            qid,
            sqsize: entries - 1,
            attributes: ConnectAttributes::empty(),
            priority_class: 0,
            kato_ms: if qid == 0 { self.kato_ms } else { 0 },
        };
        connect.to_sqe(cid, Sgl::Transport { length: 1024 })
    }

    /// Sends the Connect of a queue, and its data, and does not wait for the answer.
    pub(super) fn start_connect(&mut self, conn: ConnId, qid: u16, cntlid: u16) {
        let data = ConnectData::new(self.hostid, cntlid, &nqn(SUBNQN), &nqn(HOSTNQN));
        let sqe = self.connect_command(qid, 16);
        self.send(conn, sqe, None);
        self.turn();
        self.deliver(data.as_bytes());
        self.turn();
    }

    pub(super) fn connect_with(
        &mut self,
        qid: u16,
        entries: u16,
        data: &ConnectData,
    ) -> (ConnId, Cqe) {
        let conn = self.open();
        let sqe = self.connect_command(qid, entries);
        let response = self.call(conn, sqe, data.as_bytes());
        (conn, response.cqe)
    }

    /// An enabled controller: its admin connection and id.
    pub(super) fn admin(&mut self) -> (ConnId, u16) {
        let (conn, cqe) = self.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
        assert!(cqe.status().is_success(), "{}", cqe.status());
        self.enable(conn);
        (conn, cqe.dword0() as u16)
    }

    pub(super) fn enable(&mut self, conn: ConnId) {
        let value = u64::from(Cc::enabled().0);
        let set = PropertySet {
            size: PropertySize::Four,
            offset: offset::CC,
            value,
        };
        let cid = self.cid();
        let status = self.status(conn, set.to_sqe(cid), &[]);
        assert!(status.is_success(), "{status}");
    }

    /// An I/O queue of a fresh controller.
    pub(super) fn io(&mut self) -> ConnId {
        let (_, cntlid) = self.admin();
        self.io_queue(cntlid, 1)
    }

    pub(super) fn io_queue(&mut self, cntlid: u16, qid: u16) -> ConnId {
        let (conn, cqe) = self.connect_as(HOSTNQN, SUBNQN, qid, cntlid, 16);
        assert!(cqe.status().is_success(), "{}", cqe.status());
        conn
    }

    /// Nothing is left anywhere: no queue pair, no buffer.
    pub(super) fn assert_clean(&mut self) {
        self.pass(Duration::from_millis(200));
        assert_eq!(self.group.queue_pairs(), 0, "queue pairs left");
        assert_eq!(self.target.controller_count(), 0, "controllers left");
        self.wire.borrow_mut().responses.clear();
        for pool in [&self.pools.io, &self.pools.admin] {
            for class in pool.stats() {
                assert_eq!(
                    class.free, class.count,
                    "buffers of {} bytes left",
                    class.size
                );
            }
        }
    }
}

/// A Copy to `sdlba` of as many source ranges, which are its data.
pub(super) fn copy_of(sdlba: u64, ranges: u16) -> CopyCommand {
    CopyCommand {
        sdlba,
        ranges,
        format: CopyFormat::Format0,
        fua: false,
        lr: false,
        read_protection: 0,
        protection: Default::default(),
        directive: Default::default(),
    }
}

pub(super) fn nqn(text: &str) -> Nqn {
    Nqn::new(text).unwrap()
}

pub(super) fn ram() -> Arc<dyn Bdev> {
    static COUNT: Mutex<u32> = Mutex::new(0);
    let mut count = COUNT.lock();
    *count += 1;
    malloc::create(malloc::Config {
        name: format!("ram{count}"),
        block_size: BLOCK,
        num_blocks: BLOCKS,
        physical_block_size: None,
        uuid: None,
        optimal_io_boundary: None,
        numa_id: None,
    })
    .unwrap()
}

/// As a registry would open it: with the layer that completes the module's operations.
pub(super) fn backing(bdev: Arc<dyn Bdev>) -> Backing {
    let layer: Arc<dyn Bdev> = Layer::new(bdev);
    let opened = Arc::clone(&layer);
    Backing::new(
        layer,
        Arc::new(move |pool: &Pool| Arc::clone(&opened).open(pool)),
    )
}
