//! A minimal NVMe host that writes submission queue entries itself, to test the simulator without
//! the driver.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev_nvme::{DmaMemory, Function};
use nacre_bdev_nvme_sim::{Config, Drive, SimFunction};
use nacre_nvmf_wire::commands::admin::{Identify, SetFeatures, queues};
use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::features::{NumberOfQueues, fid};
use nacre_nvmf_wire::registers::{Aqa, Cap, Cc, Csts, offset};
use nacre_nvmf_wire::sqe::Psdt;
use nacre_nvmf_wire::zerocopy::{FromBytes, IntoBytes};
use nacre_nvmf_wire::{Cqe, Sqe, StatusCode};
use nacre_reactor::Nanos;

pub(crate) const ENTRIES: u16 = 8;
/// Bytes of the page (and of each of the pages) that commands may use.
pub(crate) const PAGE: usize = 4096;

/// One queue pair.
pub(crate) struct Pair {
    pub id: u16,
    pub sq: DmaMemory,
    pub cq: DmaMemory,
    pub tail: u16,
    pub head: u16,
    pub phase: bool,
}

pub(crate) struct ManualDriver {
    pub drive: Drive,
    pub function: Arc<dyn Function>,
    pub now: Nanos,
    pub admin: Pair,
    /// 32 pages.
    pub data: DmaMemory,
    next: u16,
}

impl ManualDriver {
    /// Plugged in, not enabled.
    pub(crate) fn new(config: Config) -> Self {
        let drive = Drive::new(config);
        let plugged: Arc<SimFunction> = drive.plug();
        let function: Arc<dyn Function> = plugged;
        let admin = pair(&function, 0);
        let data = DmaMemory::allocate(&function, 32 * PAGE).unwrap();
        Self {
            drive,
            function,
            now: Nanos(1),
            admin,
            data,
            next: 0,
        }
    }

    /// As `new`, and enabled.
    pub(crate) fn enabled(config: Config) -> Self {
        let mut hand = Self::new(config);
        hand.enable();
        assert!(hand.csts().is_ready());
        hand
    }

    pub(crate) fn csts(&self) -> Csts {
        Csts(self.function.read32(offset::CSTS))
    }

    pub(crate) fn turn(&mut self) {
        self.now = self.now + Duration::from_micros(1);
        self.drive.tick(self.now);
    }

    pub(crate) fn enable(&mut self) {
        self.function.set_bus_master(true).unwrap();
        let last = u32::from(ENTRIES) - 1;
        let aqa = Aqa(0).with_asqs(last).with_acqs(last);
        self.function.write32(offset::AQA, aqa.0);
        self.function.write64(offset::ASQ, self.admin.sq.address(0));
        self.function.write64(offset::ACQ, self.admin.cq.address(0));
        self.function.write32(offset::CC, Cc::enabled().0);
        self.turn();
    }

    pub(crate) fn disable(&mut self) {
        self.function.write32(offset::CC, 0);
        self.turn();
        reset(&mut self.admin);
    }

    /// An I/O queue pair, of the number that it has.
    pub(crate) fn create_pair(&mut self, id: u16, vector: Option<u16>) -> Pair {
        let made = pair(&self.function, id);
        let entries = u32::from(ENTRIES);
        let sqe = queues::create_cq(0, id, entries, made.cq.address(0), vector);
        assert_eq!(self.admin(sqe).status(), StatusCode::SUCCESS);
        let sqe = queues::create_sq(0, id, entries, made.sq.address(0), id);
        assert_eq!(self.admin(sqe).status(), StatusCode::SUCCESS);
        made
    }

    pub(crate) fn ask_for_queues(&mut self, count: u32) -> NumberOfQueues {
        let requested = NumberOfQueues {
            submission: count,
            completion: count,
        };
        let set = SetFeatures::new(fid::NUMBER_OF_QUEUES, requested.dword());
        let cqe = self.admin(set.to_sqe(0, 0));
        assert_eq!(cqe.status(), StatusCode::SUCCESS);
        NumberOfQueues::from_dword(cqe.dword0()).unwrap()
    }

    /// With one I/O queue pair.
    pub(crate) fn with_pair(config: Config) -> (Self, Pair) {
        let mut hand = Self::enabled(config);
        hand.ask_for_queues(4);
        let pair = hand.create_pair(1, Some(1));
        (hand, pair)
    }

    pub(crate) fn identify(&mut self, cns: u8, nsid: u32) -> (StatusCode, Vec<u8>) {
        let sqe = self.to_page(Identify::new(cns).to_sqe(0, nsid));
        let status = self.admin(sqe).status();
        (status, self.bytes(0, PAGE))
    }

    pub(crate) fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.data.read(at, &mut bytes);
        bytes
    }

    /// Its data is the first page.
    pub(crate) fn to_page(&self, mut sqe: Sqe) -> Sqe {
        sqe.set_psdt(Psdt::Prp);
        prps(&mut sqe, self.data.address(0), 0);
        sqe
    }

    /// One admin command, to its end.
    pub(crate) fn admin(&mut self, mut sqe: Sqe) -> Cqe {
        sqe.set_psdt(Psdt::Prp);
        let mut admin = self.lend_admin();
        let cqe = self.run(&mut admin, sqe);
        self.admin = admin;
        cqe
    }

    /// Takes the admin queues out; the caller puts them back.
    pub(crate) fn lend_admin(&mut self) -> Pair {
        let stands_in = pair(&self.function, 0);
        std::mem::replace(&mut self.admin, stands_in)
    }

    /// One command, to its end, which comes with the first turn.
    pub(crate) fn run(&mut self, pair: &mut Pair, sqe: Sqe) -> Cqe {
        let cid = self.submit(pair, sqe);
        self.ring(pair);
        self.turn();
        let cqe = self.reap(pair).expect("an answer");
        assert_eq!(cqe.cid(), cid);
        cqe
    }

    /// Submits the command with a new command identifier.
    pub(crate) fn submit(&mut self, pair: &mut Pair, mut sqe: Sqe) -> u16 {
        self.next = self.next.wrapping_add(1);
        sqe.cid.set(self.next);
        pair.sq
            .write(usize::from(pair.tail) * Sqe::SIZE, sqe.as_bytes());
        pair.tail = (pair.tail + 1) % ENTRIES;
        self.next
    }

    pub(crate) fn ring(&self, pair: &Pair) {
        self.function
            .write32(self.doorbell(pair.id, false), pair.tail.into());
    }

    pub(crate) fn doorbell(&self, qid: u16, is_head: bool) -> u32 {
        let cap = Cap(self.function.read64(offset::CAP));
        let index = 2 * u32::from(qid) + u32::from(is_head);
        offset::DOORBELLS + index * cap.doorbell_stride_bytes()
    }

    /// The next completion, if there is one, taken.
    pub(crate) fn reap(&self, pair: &mut Pair) -> Option<Cqe> {
        let cqe = self.peek(pair)?;
        pair.head = (pair.head + 1) % ENTRIES;
        pair.phase ^= pair.head == 0;
        self.function
            .write32(self.doorbell(pair.id, true), pair.head.into());
        Some(cqe)
    }

    pub(crate) fn peek(&self, pair: &Pair) -> Option<Cqe> {
        let mut bytes = [0; Cqe::SIZE];
        pair.cq.read(usize::from(pair.head) * Cqe::SIZE, &mut bytes);
        let cqe = Cqe::read_from_bytes(&bytes).unwrap();
        (cqe.phase() == pair.phase).then_some(cqe)
    }
}

pub(crate) fn prps(sqe: &mut Sqe, first: u64, second: u64) {
    sqe.dptr[..8].copy_from_slice(&first.to_le_bytes());
    sqe.dptr[8..].copy_from_slice(&second.to_le_bytes());
}

fn pair(function: &Arc<dyn Function>, id: u16) -> Pair {
    Pair {
        id,
        sq: DmaMemory::allocate(function, PAGE).unwrap(),
        cq: DmaMemory::allocate(function, PAGE).unwrap(),
        tail: 0,
        head: 0,
        phase: true,
    }
}

/// As a queue that was just made.
pub(crate) fn reset(pair: &mut Pair) {
    pair.cq.zero(0, PAGE);
    (pair.tail, pair.head, pair.phase) = (0, 0, true);
}

pub(crate) const NSID: u32 = 1;
pub(crate) const OK: StatusCode = StatusCode::SUCCESS;

pub(crate) fn config() -> Config {
    Config::default()
}

/// Builds a read or write of `blocks` blocks of 512 bytes, with PRPs from the first data page on.
pub(crate) fn transfer(hand: &ManualDriver, opcode: u8, lba: u64, blocks: u32) -> Sqe {
    let mut sqe = ReadWrite::new(lba, blocks).to_sqe(opcode, 0, NSID);
    sqe.set_psdt(Psdt::Prp);
    let second = if blocks * 512 > PAGE as u32 {
        hand.data.address(PAGE)
    } else {
        0
    };
    prps(&mut sqe, hand.data.address(0), second);
    sqe
}

pub(crate) fn plain(opcode: u8) -> Sqe {
    let mut sqe = Sqe::for_namespace(opcode, 0, NSID);
    sqe.set_psdt(Psdt::Prp);
    sqe
}
