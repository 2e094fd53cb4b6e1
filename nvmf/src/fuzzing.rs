//! The body of the fuzz target `admin`: a controller executes admin commands and events, decoded
//! from the input. It is here, not in the target, so that an ordinary test replays its corpus.
//!
//! ```text
//!   byte 0            bit 0   a discovery controller      bit 2   CC.EN is set from the start
//!                     bit 1   ANA reporting               bit 3   keyed SGLs, as over RDMA
//!   then operations until the end: a tag, taken modulo 6, and its bytes (missing ones are 0)
//!   0 sqe[64]         any command
//!   1 op nsid cdw[20] a frequent command: an index in `LIKELY`, its NSID, CDW10 to CDW14;
//!                     the last byte is also the CID
//!   2 cc[4]           Property Set of CC
//!   3 n               adds namespace n (bit 7: removes it)
//!   4 events          raises asynchronous events
//!   5 n               n seconds pass
//! ```
//!
//! Data that a command transfers to the controller is a copy of the bytes behind the command, which
//! are the next operations, too.
//!
//! The checks:
//!
//! - Nothing panics. The buffer of a command has exactly the length that the controller announced,
//!   so a controller that writes more panics.
//! - Each completion has the CID of its command.
//! - An Asynchronous Event Request completes exactly once: at an event, by an Abort, or by a reset.
//! - At the end, nothing refers to the association or the subsystem.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, null};
use nacre_hugepages::Pool;
use nacre_nvmf_wire::fabrics::{DISCOVERY_NQN, PropertySet, PropertySize};
use nacre_nvmf_wire::opcode::{DataTransfer, admin as opcode};
use nacre_nvmf_wire::registers::{Cc, offset};
use nacre_nvmf_wire::{Cqe, Nqn, Sqe};
use nacre_reactor::Nanos;
use zerocopy::{FromBytes, IntoBytes};

use crate::controller::{Controller, Outcome};
use crate::subsystems::association::{Association, Phase};
use crate::subsystems::config::TargetConfig;
use crate::subsystems::namespace::{Backing, NamespaceIds};
use crate::subsystems::nvmf_target::Target;
use crate::subsystems::subsystem::{NamespaceConfig, Subsystem};
use crate::subsystems::subsystem_config::SubsystemConfig;
use crate::transport::{Address, ListenerId, TransportCaps, TransportType};

const SUBNQN: &str = "nqn.2025-01.io.nacre:fuzz";
const HOSTNQN: &str = "nqn.2025-01.io.nacre:host";
const MAX_TRANSFER: u32 = 128 << 10;
/// Entries of the admin queue: the most outstanding commands.
const ENTRIES: usize = 64;

/// Opcodes of operation 1.
const LIKELY: [u8; 9] = [
    opcode::IDENTIFY,
    opcode::GET_LOG_PAGE,
    opcode::GET_FEATURES,
    opcode::SET_FEATURES,
    opcode::ASYNC_EVENT_REQUEST,
    opcode::ABORT,
    opcode::KEEP_ALIVE,
    nacre_nvmf_wire::opcode::FABRICS,
    opcode::NAMESPACE_MANAGEMENT,
];

/// Executes the operations of `input`. Panics if a check fails.
pub fn admin(input: &[u8]) {
    let [choice, ops @ ..] = input else { return };
    let mut fixture = Fixture::new(*choice);
    let mut rest = ops;
    while let [tag, tail @ ..] = rest {
        rest = fixture.step(*tag, tail);
    }
    fixture.finish();
}

struct Fixture {
    target: Arc<Target>,
    subsystem: Arc<Subsystem>,
    association: Arc<Association>,
    controller: Controller,
    now: Nanos,
    /// Identifiers of outstanding Asynchronous Event Requests.
    held: BTreeSet<u16>,
}

impl Fixture {
    fn new(choice: u8) -> Self {
        let name = |text| Nqn::new(text).expect("a name");
        let target = Target::new(TargetConfig::default(), 1);
        let mut config = SubsystemConfig::new(name(SUBNQN));
        config.allow_any_host = true;
        config.ana_reporting = choice & 2 != 0;
        target.create_subsystem(config).expect("the first one");
        let subnqn = if choice & 1 != 0 {
            DISCOVERY_NQN
        } else {
            SUBNQN
        };
        let subsystem = target.subsystem(&name(subnqn)).expect("it exists");
        let listener = ListenerId(1);
        let entry = crate::subsystems::subsystem::SubsystemListener {
            id: listener,
            transport: TransportType::Loopback,
            address: Address::Loopback("fuzz".to_string()),
            ana: Default::default(),
            withheld: None,
            options: Default::default(),
        };
        subsystem.add_listener(entry).expect("the first one");
        let association = subsystem
            .admit(
                0xffff,
                &name(HOSTNQN),
                [7; 16],
                listener,
                TransportType::Loopback,
            )
            .expect("any host");
        let caps = TransportCaps {
            kind: TransportType::Loopback,
            in_capsule_bytes: 4096,
            admin_in_capsule_bytes: 8192,
            max_transfer_bytes: MAX_TRANSFER,
            max_sgl_descriptors: 1,
            keyed_sgl: choice & 8 != 0,
        };
        let (local, now) = (Address::Loopback("fuzz".to_string()), Nanos(1));
        let of = (Arc::clone(&subsystem), Arc::clone(&association));
        let controller = Controller::new(&target, of, &caps, local, 15_000, now);
        let mut fixture = Self {
            target,
            subsystem,
            association,
            controller,
            now,
            held: BTreeSet::new(),
        };
        if choice & 4 != 0 {
            fixture.write_cc(Cc::enabled());
        }
        fixture
    }

    /// Executes one operation. Returns the rest of the input.
    fn step<'a>(&mut self, tag: u8, rest: &'a [u8]) -> &'a [u8] {
        match tag % 6 {
            0 => {
                let (bytes, rest) = take::<64>(rest);
                let sqe = Sqe::read_from_bytes(&bytes).expect("64 bytes");
                self.command(sqe, rest);
                rest
            }
            1 => {
                let (bytes, rest) = take::<22>(rest);
                let op = LIKELY[usize::from(bytes[0]) % LIKELY.len()];
                let mut sqe = Sqe::for_namespace(op, u16::from(bytes[21]), u32::from(bytes[1]));
                sqe.as_mut_bytes()[40..60].copy_from_slice(&bytes[2..22]);
                self.command(sqe, rest);
                rest
            }
            2 => {
                let (bytes, rest) = take::<4>(rest);
                self.write_cc(Cc(u32::from_le_bytes(bytes)));
                rest
            }
            3 => {
                let ([which], rest) = take::<1>(rest);
                self.change_namespace(u32::from(which & 0x7f), which & 0x80 != 0);
                rest
            }
            4 => {
                let ([events], rest) = take::<1>(rest);
                self.association.notify(u32::from(events));
                self.take_events();
                rest
            }
            _ => {
                let ([seconds], rest) = take::<1>(rest);
                self.now = self.now + Duration::from_secs(u64::from(seconds));
                // The driver of the controller would now close it; here it has to continue.
                self.controller.expired(self.now);
                rest
            }
        }
    }

    fn write_cc(&mut self, cc: Cc) {
        let set = PropertySet {
            size: PropertySize::Four,
            offset: offset::CC,
            value: u64::from(cc.0),
        };
        self.command(set.to_sqe(0xfffe), &[]);
    }

    /// Executes a command in the order of a queue pair: gets the length of its data, fetches the
    /// data (from `more`), and executes it.
    fn command(&mut self, sqe: Sqe, more: &[u8]) {
        if self.held.contains(&sqe.cid()) || self.held.len() == ENTRIES {
            return;
        }
        let bytes = match self.controller.data_bytes(&sqe) {
            Ok(bytes) if bytes <= MAX_TRANSFER => bytes as usize,
            Ok(_) => return,
            Err(status) => return assert!(!status.is_success()),
        };
        let mut data = vec![0; bytes];
        if sqe.data_transfer() == DataTransfer::HostToController {
            for (to, from) in data.iter_mut().zip(more) {
                *to = *from;
            }
        }
        match self.controller.execute(&sqe, &mut data, self.now) {
            Outcome::Done(cqe) => assert_eq!(cqe.cid(), sqe.cid()),
            Outcome::Deferred => assert!(self.held.insert(sqe.cid()), "held twice"),
            // No I/O queue has such a command.
            Outcome::Abort { .. } => self.controller.abort_finished(),
            // The group sees to it.
            Outcome::Persist { namespaces, .. } => assert!(namespaces.len() <= 128),
            Outcome::ListAllocated { bdev, query } => {
                let range = query.range;
                assert!(!range.is_empty() && range.end <= bdev.geometry().blocks);
            }
        }
        assert!(self.association.phase() != Phase::Closing);
        self.take_events();
    }

    fn take_events(&mut self) {
        while let Some(cqe) = self.controller.next_event() {
            self.ended(&cqe);
        }
    }

    fn ended(&mut self, cqe: &Cqe) {
        let was_held = self.held.remove(&cqe.cid());
        assert!(was_held, "an answer to a command that waits for none");
    }

    fn change_namespace(&mut self, nsid: u32, goes: bool) {
        let name = Nqn::new(SUBNQN).expect("a name");
        let subsystem = self.target.subsystem(&name).expect("it exists");
        if goes {
            let _ = subsystem.remove_namespace(nsid);
        } else {
            let config = null::Config {
                name: format!("null{nsid}"),
                block_size: 512 << (nsid % 4),
                num_blocks: 1 << (nsid % 40),
                physical_block_size: None,
                uuid: Some(uuid::Uuid::from_u128(u128::from(nsid) + 1)),
                reads: null::Reads::Zeroes,
            };
            let bdev: Arc<dyn Bdev> = null::create(config).expect("a size that can be");
            let opened = Arc::clone(&bdev);
            let open = move |pool: &Pool| Arc::clone(&opened).open(pool);
            let config = NamespaceConfig {
                nsid: Some(nsid),
                bdev_name: bdev.name().to_string(),
                ids: NamespaceIds::from_uuid(bdev.uuid()),
                backing: Backing::new(bdev, Arc::new(open)),
                ana_group: None,
                auto_visible: true,
                reservations: Default::default(),
            };
            // An identifier that is taken or out of range is refused, which is fine.
            let _ = subsystem.add_namespace(config);
        }
        self.take_events();
    }

    /// Resets the controller (CC.EN to 0), which completes all outstanding commands. Then drops it,
    /// and checks that nothing refers to its association and subsystem.
    fn finish(mut self) {
        self.write_cc(Cc::enabled());
        self.write_cc(Cc(0));
        assert!(self.held.is_empty(), "never answered: {:?}", self.held);
        let subsystem = Arc::clone(&self.subsystem);
        subsystem.forget(&self.association);
        let left = (
            Arc::downgrade(&subsystem),
            Arc::downgrade(&self.association),
        );
        drop((self, subsystem));
        assert!(left.1.upgrade().is_none(), "the association is still held");
        assert!(left.0.upgrade().is_none(), "the subsystem is still held");
    }
}

/// The first `N` bytes, padded with zeroes, and the rest.
fn take<const N: usize>(bytes: &[u8]) -> ([u8; N], &[u8]) {
    let mut taken = [0; N];
    let count = bytes.len().min(N);
    taken[..count].copy_from_slice(&bytes[..count]);
    (taken, &bytes[count..])
}
