//! Random I/O commands while namespaces, devices and connections change: each is completed exactly
//! once, and no resource is leaked.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::Buf;
use nacre_nvmf_wire::commands::admin::Abort;
use nacre_nvmf_wire::commands::io::{DatasetManagement, ReadWrite};
use nacre_nvmf_wire::commands::reservation::{
    Acquire, AcquireAction, PersistChange, Register, RegisterAction, ReservationType,
};
use nacre_nvmf_wire::fabrics::{PropertySet, PropertySize};
use nacre_nvmf_wire::log::ana::AnaState;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::registers::offset;
use nacre_nvmf_wire::{Fuse, Sgl, Sqe, StatusCode, fabrics};
use proptest::prelude::*;

use super::rig::*;
use super::scripted::{ScriptedBdev, add_scripted};
use crate::subsystems::TargetConfig;
use crate::transport::{ConnId, Event};

/// Commands of one queue at a time: its entries less one, and less the commands whose completion is
/// not visible yet.
const MOST: usize = 14;

/// A connection and the core that it is on.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Queue {
    core: usize,
    conn: ConnId,
}

/// A host: its admin queue, and an I/O queue on each core.
#[derive(Clone, Copy)]
struct Host {
    id: u8,
    admin: Queue,
    cntlid: u16,
    io: [Queue; 2],
}

struct Fixture {
    rig: Rig,
    /// The core whose wire is at hand.
    core: usize,
    hosts: [Host; 2],
    devices: Vec<Arc<ScriptedBdev>>,
    /// Commands without an answer, by core and connection.
    waiting: BTreeSet<(usize, u32, u16)>,
    hoarded: Vec<Buf>,
}

/// A queue on each core, of which the first one is at hand.
fn io_queues(rig: &mut Rig, cntlid: u16) -> [Queue; 2] {
    [0, 1].map(|core| {
        let conn = rig.io_queue(cntlid, 1 + core as u16);
        rig.switch();
        Queue { core, conn }
    })
}

impl Fixture {
    fn new(window: Option<usize>) -> Self {
        let mut rig = Rig::on_cores(TargetConfig::default(), 2);
        for _ in 0..2 {
            rig.wire.borrow_mut().window = window;
            rig.switch();
        }
        let devices = vec![add_scripted(&rig, 1), add_scripted(&rig, 2)];
        let hosts = [1, 2].map(|id| {
            rig.hostid = [id; 16];
            let (conn, cntlid) = rig.admin();
            let admin = Queue { core: 0, conn };
            let io = io_queues(&mut rig, cntlid);
            Host {
                id,
                admin,
                cntlid,
                io,
            }
        });
        Self {
            rig,
            core: 0,
            hosts,
            devices,
            waiting: BTreeSet::new(),
            hoarded: Vec::new(),
        }
    }

    /// Whose wire is at hand from here on.
    fn go_to(&mut self, core: usize) {
        if core != self.core {
            self.rig.switch();
            self.core = core;
        }
    }

    fn on_both(&mut self, mut does: impl FnMut(&mut Self)) {
        for core in [0, 1] {
            self.go_to(core);
            does(self);
        }
    }

    /// Notes a command, unless its queue has enough.
    fn note(&mut self, queue: Queue, cid: u16) -> bool {
        let (core, index) = (queue.core, queue.conn.index);
        let of_it = |(c, i, _): &&(usize, u32, u16)| (*c, *i) == (core, index);
        self.waiting.iter().filter(of_it).count() < MOST && self.waiting.insert((core, index, cid))
    }

    fn send(&mut self, queue: Queue, sqe: Sqe) {
        self.go_to(queue.core);
        if self.note(queue, sqe.cid()) {
            self.rig.send(queue.conn, sqe, None);
        }
    }

    fn forget(&mut self, queue: Queue) {
        let it = (queue.core, queue.conn.index);
        self.waiting
            .retain(|(core, index, _)| (*core, *index) != it);
    }

    fn turn(&mut self) {
        self.rig.turn();
        self.take_answers();
    }

    fn take_answers(&mut self) {
        self.on_both(|fixture| {
            let core = fixture.core;
            let responses: Vec<_> = fixture.rig.wire.borrow_mut().responses.drain(..).collect();
            for (conn, response) in responses {
                let cid = response.cqe.cid();
                let known = fixture.waiting.remove(&(core, conn.index, cid));
                assert!(known, "{conn:?} {:?}", response.cqe);
            }
            let closes: Vec<_> = fixture.rig.wire.borrow_mut().closes.drain(..).collect();
            for (conn, _) in closes {
                fixture.forget(Queue { core, conn });
            }
        });
    }

    fn step(&mut self, (op, a, b, c): (u8, u8, u8, u8)) {
        let cid = self.rig.cid();
        let (host, queue) = (usize::from(a & 1), usize::from(a >> 1 & 1));
        let io = self.hosts[host].io[queue];
        self.go_to(io.core);
        let nsid = 1 + u32::from(b & 1);
        let lba = u64::from(b >> 1 & 7);
        let rw = |op| {
            let blocks = 1 + u32::from(c & 7);
            ReadWrite::new(lba, blocks)
                .to_sqe(op, cid, nsid)
                .with_sgl(Sgl::Transport {
                    length: blocks * BLOCK,
                })
        };
        match op {
            0 => self.send(io, rw(opcode::READ)),
            1 => self.send(io, rw(opcode::WRITE)),
            2 => {
                if let Some(data) = self.rig.pools.io.acquire(4096)
                    && self.note(io, cid)
                {
                    let (offset, length) = (0, 4096);
                    let sqe = ReadWrite::new(lba, 8).to_sqe(opcode::WRITE, cid, nsid);
                    let sqe = sqe.with_sgl(Sgl::InCapsule { offset, length });
                    self.rig.send(io.conn, sqe, Some(data));
                }
            }
            3 | 4 => {
                let mut first = ReadWrite::new(0, 1).to_sqe(opcode::COMPARE, cid, nsid);
                first.set_fuse(Fuse::First);
                let mut second = ReadWrite::new(0, 1).to_sqe(opcode::WRITE, cid, nsid);
                second.set_fuse(Fuse::Second);
                second.cid = self.rig.cid().into();
                let sgl = Sgl::Transport { length: BLOCK };
                let (first, second) = (first.with_sgl(sgl), second.with_sgl(sgl));
                for (which, sqe) in [(1, first), (2, second)] {
                    if c & which != 0 && c & 8 == 0 {
                        self.send(io, sqe);
                    } else if c & which != 0 && self.note(io, sqe.cid()) {
                        let conn = io.conn;
                        self.rig.event(Event::CapsuleDamaged { conn, sqe });
                    }
                }
            }
            5 => {
                let command = DatasetManagement {
                    ranges: 1 + u16::from(c % 32),
                    deallocate: true,
                    ..Default::default()
                };
                let length = command.data_bytes() as u32;
                let sqe = command.to_sqe(cid, nsid);
                self.send(io, sqe.with_sgl(Sgl::Transport { length }));
            }
            6 => {
                let command = copy_of(2000, 1 + u16::from(c % 12));
                let length = command.data_bytes() as u32;
                let sqe = command.to_sqe(cid, nsid);
                self.send(io, sqe.with_sgl(Sgl::Transport { length }));
            }
            7 => {
                let nsid = if c & 1 == 0 { nsid } else { u32::MAX };
                self.send(io, Sqe::for_namespace(opcode::FLUSH, cid, nsid));
            }
            8 => {
                let it = (io.core, io.conn.index);
                let of_it = |(core, index, cid): &(usize, u32, u16)| {
                    ((*core, *index) == it).then_some(*cid)
                };
                let all: Vec<u16> = self.waiting.iter().filter_map(of_it).collect();
                if let Some(&victim) = all.get(usize::from(c) % all.len().max(1)) {
                    let sqid = 1 + queue as u16;
                    let abort = Abort { sqid, cid: victim };
                    self.send(self.hosts[host].admin, abort.to_sqe(cid));
                }
            }
            9 | 10 => self.deliver(a, b, c),
            11 => self.devices[usize::from(a & 1) % self.devices.len()].script(|state| {
                state.held = b & 1 != 0;
                state.full = b & 6 == 6;
                state.aborts = b & 8 != 0;
            }),
            12 => self.change_namespaces(nsid, c),
            13 => {
                let class = [4096, MAX_TRANSFER as usize][usize::from(a & 1)];
                match b & 1 {
                    0 => self.hoarded.truncate(usize::from(c % 4)),
                    _ => {
                        let pool = self.rig.pools.io.clone();
                        let all = std::iter::from_fn(|| pool.acquire(class));
                        self.hoarded.extend(all.take(usize::from(c % 8)));
                    }
                }
            }
            14 => self.turn(),
            15 => {
                self.rig.pass(Duration::from_millis(100));
                self.take_answers();
            }
            16 if c & 2 == 0 => self.leave(host, queue, c),
            16 => self.begin_again(host, c),
            17 => {
                let (action, kind) = match c % 4 {
                    0 => (None, ReservationType::WriteExclusive),
                    1 => (
                        Some(AcquireAction::Acquire),
                        ReservationType::ExclusiveAccess,
                    ),
                    2 => (
                        Some(AcquireAction::Preempt),
                        ReservationType::WriteExclusiveRegistrantsOnly,
                    ),
                    _ => (
                        Some(AcquireAction::PreemptAndAbort),
                        ReservationType::ExclusiveAccessAllRegistrants,
                    ),
                };
                let register = Register {
                    action: RegisterAction::Replace,
                    ignore_existing_key: true,
                    persist: PersistChange::Keep,
                };
                let sqe = match action {
                    None => register.to_sqe(cid, nsid),
                    Some(action) => Acquire {
                        action,
                        ignore_existing_key: false,
                        kind,
                    }
                    .to_sqe(cid, nsid),
                };
                self.send(io, sqe.with_sgl(Sgl::Transport { length: 16 }));
            }
            _ => {
                let subsystem = self.rig.target.subsystem(&nqn(SUBNQN)).unwrap();
                let listener = self.rig.listener;
                let state = match c & 1 {
                    0 => AnaState::Optimized,
                    _ => AnaState::Inaccessible,
                };
                // Refused where the subsystem reports none.
                let _ = subsystem.set_ana_state(listener, None, state);
            }
        }
    }

    /// Lets one of the fetches that are under way end.
    fn deliver(&mut self, a: u8, b: u8, c: u8) {
        let fetch = {
            let mut wire = self.rig.wire.borrow_mut();
            let count = wire.fetches.len();
            match count {
                0 => return,
                _ => wire.fetches.remove(usize::from(a) % count),
            }
        };
        let (conn, tag, mut data) = fetch.expect("a pending fetch");
        data.bytes_mut().unwrap().fill(b & 1);
        self.rig.event(match c % 8 {
            0 => Event::FetchDamaged { conn, tag },
            1 => Event::FetchRefused {
                conn,
                tag,
                status: StatusCode::DATA_SGL_LENGTH_INVALID,
            },
            _ => Event::Fetched { conn, tag, data },
        });
    }

    fn change_namespaces(&mut self, nsid: u32, c: u8) {
        let subsystem = self.rig.target.subsystem(&nqn(SUBNQN)).unwrap();
        let there = subsystem.remove_namespace(nsid).is_ok();
        if !there || c & 1 == 0 {
            self.devices.push(add_scripted(&self.rig, nsid));
        }
    }

    /// An I/O queue ends, by itself or as its host says, and comes again.
    fn leave(&mut self, host: usize, queue: usize, c: u8) {
        let io = self.hosts[host].io[queue];
        self.go_to(io.core);
        let cid = self.rig.cid();
        if c & 1 == 1 && self.note(io, cid) {
            self.rig.send(io.conn, fabrics::disconnect(cid), None);
            self.turn();
        } else {
            self.rig.hang_up(io.conn);
        }
        self.gone(&[io]);
        self.go_to(io.core);
        self.rig.hostid = [self.hosts[host].id; 16];
        let (qid, cntlid) = (1 + queue as u16, self.hosts[host].cntlid);
        let (conn, cqe) = self.rig.connect_as(HOSTNQN, SUBNQN, qid, cntlid, 16);
        assert!(cqe.status().is_success(), "{}", cqe.status());
        self.hosts[host].io[queue] = Queue { conn, ..io };
    }

    /// A controller is reset, or its host leaves as a whole, and comes again.
    fn begin_again(&mut self, host: usize, c: u8) {
        let Host { id, admin, io, .. } = self.hosts[host];
        self.go_to(admin.core);
        self.rig.hostid = [id; 16];
        let cid = self.rig.cid();
        if c & 1 == 1 && self.note(admin, cid) {
            let disable = PropertySet {
                size: PropertySize::Four,
                offset: offset::CC,
                value: 0,
            };
            self.rig.send(admin.conn, disable.to_sqe(cid), None);
            self.turn();
            self.gone(&io);
            self.go_to(admin.core);
            assert!(!self.rig.csts(admin.conn).is_ready());
            self.rig.enable(admin.conn);
        } else {
            self.rig.hang_up(admin.conn);
            self.gone(&[io[0], io[1], admin]);
            self.go_to(admin.core);
            let (conn, cntlid) = self.rig.admin();
            self.hosts[host].admin.conn = conn;
            self.hosts[host].cntlid = cntlid;
        }
        self.hosts[host].io = io_queues(&mut self.rig, self.hosts[host].cntlid);
    }

    /// These queues end, and nothing else is in flight: the data and the completions of other
    /// commands do not mix with those of the next Connect.
    fn gone(&mut self, ended: &[Queue]) {
        ended.iter().for_each(|queue| self.forget(*queue));
        for _ in 0..4 {
            self.release_all();
            self.rig.pass(Duration::from_millis(100));
            // Their last answers are of no interest.
            for queue in ended {
                self.go_to(queue.core);
                let mut wire = self.rig.wire.borrow_mut();
                wire.fetches.retain(|(conn, ..)| *conn != queue.conn);
                wire.responses.retain(|(conn, _)| *conn != queue.conn);
            }
            self.take_answers();
        }
        self.finish_all();
    }

    /// Releases devices and buffers, so that nothing is blocked.
    fn release_all(&mut self) {
        self.hoarded.clear();
        for device in &self.devices {
            device.script(|state| (state.held, state.full) = (false, false));
        }
    }

    /// Whatever can end ends.
    fn finish_all(&mut self) {
        self.release_all();
        for _ in 0..60 {
            self.turn();
            self.on_both(|fixture| {
                while !fixture.rig.wire.borrow().fetches.is_empty() {
                    fixture.deliver(0, 0, 7);
                }
            });
        }
    }

    fn finish(mut self) {
        // Commands that wait for a second half end with the next command.
        for io in self
            .hosts
            .iter()
            .flat_map(|host| host.io)
            .collect::<Vec<_>>()
        {
            let cid = self.rig.cid();
            self.go_to(io.core);
            self.waiting.insert((io.core, io.conn.index, cid));
            let flush = Sqe::for_namespace(opcode::FLUSH, cid, 1);
            self.rig.send(io.conn, flush, None);
        }
        self.finish_all();
        let waiting = &self.waiting;
        assert!(waiting.is_empty(), "never answered: {waiting:?}");
        self.on_both(|fixture| {
            let group = &fixture.rig.group;
            assert!(
                group.core.buffers.waiting.is_empty()
                    && group.core.buffers.waiting_admin.is_empty()
            );
            assert!(group.core.reserving.is_idle() && !group.core.buffers.is_fetching());
            assert_eq!(group.core.devices.all_waiting(), 0);
            for qp in group.queues.iter() {
                assert_eq!(
                    (qp.inflight, qp.fetches.bytes, qp.fetches.waiting.len()),
                    (0, 0, 0)
                );
                assert_eq!(qp.requests.outstanding(), 0);
            }
        });
        for host in [0, 1] {
            let Host { admin, io, .. } = self.hosts[host];
            for queue in [io[0], io[1], admin] {
                self.go_to(queue.core);
                self.rig.hang_up(queue.conn);
            }
        }
        self.on_both(|fixture| {
            fixture.rig.assert_clean();
            assert_eq!(fixture.rig.group.devices_open(), 0);
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Goal: whatever happens between two steps of a command, it is completed once, and the next
    /// one is unaffected. Method: two hosts with a queue on each of two cores send reads, writes,
    /// halves of pairs, commands of many ranges, aborts and reservations. Meanwhile data is late or
    /// damaged, buffers are short, devices full or slow, queues leave, and namespaces go and others
    /// get their ids. Then everything is released, and nothing may be left.
    #[test]
    fn answered_once(
        small in any::<bool>(),
        steps in proptest::collection::vec((0u8..19, any::<u8>(), any::<u8>(), any::<u8>()), 1..120),
    ) {
        let mut fixture = Fixture::new(small.then_some(4096));
        for step in steps {
            fixture.step(step);
        }
        fixture.finish();
    }
}
