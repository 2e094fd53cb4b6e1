//! Tests of reservations through the whole target: two hosts, their controllers, and the status and
//! notifications of each.

mod aborted;
mod persistence;

use std::sync::Arc;

use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::commands::admin::{GetFeatures, GetLogPage, SetFeatures, async_event_request};
use nacre_nvmf_wire::commands::io::{
    CopyRange0, DatasetManagement, DsmRange, ReadWrite, WriteZeroes,
};
use nacre_nvmf_wire::commands::reservation::{
    Acquire, AcquireAction, AcquireData, PersistChange, Register, RegisterAction, RegisterData,
    Release, ReleaseAction, Report, ReportHeader, ReservationType,
};
use nacre_nvmf_wire::features::fid;
use nacre_nvmf_wire::identify::controller::Oncs;
use nacre_nvmf_wire::identify::{IndependentNamespace, cns, nsid};
use nacre_nvmf_wire::log::{ReservationNotification, lid};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Fuse, Sgl, Sqe, StatusCode};
use zerocopy::{FromBytes, IntoBytes};

use super::host::INVALID;
use super::rig::*;
use super::scripted::rig_scripted;
use crate::subsystems::{NamespaceConfig, TargetConfig};
use crate::transport::ConnId;

const CONFLICT: StatusCode = StatusCode::RESERVATION_CONFLICT.with_dnr();
const OK: StatusCode = StatusCode::SUCCESS;
const EVENT: u32 = AsyncEvent::RESERVATION_LOG_AVAILABLE.dword0();
const KEY_A: u64 = 0xa11a;
const KEY_B: u64 = 0xb22b;

/// One host's connections.
#[derive(Clone, Copy)]
struct Host {
    admin: ConnId,
    io: ConnId,
    key: u64,
}

impl Rig {
    fn host(&mut self, id: u8, key: u64) -> Host {
        self.hostid = [id; 16];
        let name = format!("nqn.2025-01.io.nacre:host{id}");
        let (admin, cqe) = self.connect_as(&name, SUBNQN, 0, 0xffff, 32);
        assert!(cqe.status().is_success(), "{}", cqe.status());
        self.enable(admin);
        let (io, answer) = self.connect_as(&name, SUBNQN, 1, cqe.dword0() as u16, 16);
        assert!(answer.status().is_success(), "{}", answer.status());
        Host { admin, io, key }
    }

    fn register_as(
        &mut self,
        host: Host,
        action: RegisterAction,
        persist: PersistChange,
    ) -> StatusCode {
        let cid = self.cid();
        let register = Register {
            action,
            ignore_existing_key: false,
            persist,
        };
        let sgl = Sgl::Transport { length: 16 };
        let (crkey, nrkey) = match action {
            RegisterAction::Register => (0.into(), host.key.into()),
            _ => (host.key.into(), 0.into()),
        };
        let keys = RegisterData { crkey, nrkey };
        self.status(
            host.io,
            register.to_sqe(cid, 1).with_sgl(sgl),
            keys.as_bytes(),
        )
    }

    fn register(&mut self, host: Host) {
        let done = self.register_as(host, RegisterAction::Register, PersistChange::Keep);
        assert_eq!(done, OK);
    }

    fn acquire_sqe(&mut self, action: AcquireAction, kind: ReservationType) -> Sqe {
        let cid = self.cid();
        let acquire = Acquire {
            action,
            ignore_existing_key: false,
            kind,
        };
        acquire
            .to_sqe(cid, 1)
            .with_sgl(Sgl::Transport { length: 16 })
    }

    fn acquire_as(
        &mut self,
        host: Host,
        action: AcquireAction,
        kind: ReservationType,
        preempt: u64,
    ) -> StatusCode {
        let sqe = self.acquire_sqe(action, kind);
        self.status(host.io, sqe, keys(host.key, preempt).as_bytes())
    }

    fn acquire(&mut self, host: Host, kind: ReservationType) -> StatusCode {
        self.acquire_as(host, AcquireAction::Acquire, kind, 0)
    }

    fn release(
        &mut self,
        host: Host,
        action: ReleaseAction,
        kind: Option<ReservationType>,
    ) -> StatusCode {
        let cid = self.cid();
        let release = Release {
            action,
            ignore_existing_key: false,
            kind,
        };
        let sgl = Sgl::Transport { length: 8 };
        let sqe = release.to_sqe(cid, 1).with_sgl(sgl);
        self.status(host.io, sqe, &host.key.to_le_bytes())
    }

    fn report(&mut self, host: Host, bytes: u32) -> Result<Vec<u8>, StatusCode> {
        let cid = self.cid();
        let report = Report {
            bytes: bytes.into(),
            extended: true,
        };
        self.fetch(host.io, report.to_sqe(cid, 1), bytes)
    }

    fn write(&mut self, host: Host) -> StatusCode {
        let cid = self.cid();
        let sqe = rw(opcode::WRITE, cid);
        self.status(host.io, sqe, &[5; BLOCK as usize])
    }

    fn notice(&mut self, host: Host, retain: bool) -> ReservationNotification {
        let mut page = GetLogPage::new(lid::RESERVATION_NOTIFICATION, 64, 0);
        page.retain_event = retain;
        let page = self.log_page(host.admin, page).unwrap();
        ReservationNotification::read_from_bytes(&page).unwrap()
    }

    fn wait_for_event(&mut self, host: Host) -> u16 {
        let cid = self.cid();
        self.send(host.admin, async_event_request(cid), None);
        self.turn();
        cid
    }
}

fn keys(current: u64, preempt: u64) -> AcquireData {
    AcquireData {
        crkey: current.into(),
        prkey: preempt.into(),
    }
}

fn rw(op: u8, cid: u16) -> Sqe {
    ReadWrite::new(3, 1)
        .to_sqe(op, cid, 1)
        .with_sgl(Sgl::Transport { length: BLOCK })
}

fn two_hosts() -> (Rig, Host, Host) {
    let mut rig = Rig::with_malloc();
    let (a, b) = (rig.host(0xa, KEY_A), rig.host(0xb, KEY_B));
    (rig, a, b)
}

const KINDS: [ReservationType; 6] = [
    ReservationType::WriteExclusive,
    ReservationType::ExclusiveAccess,
    ReservationType::WriteExclusiveRegistrantsOnly,
    ReservationType::ExclusiveAccessRegistrantsOnly,
    ReservationType::WriteExclusiveAllRegistrants,
    ReservationType::ExclusiveAccessAllRegistrants,
];

/// Each I/O command with its data, and whether it counts as a write.
fn every_command(rig: &mut Rig) -> Vec<(&'static str, Sqe, Vec<u8>, bool)> {
    let block = vec![0; BLOCK as usize];
    let range = DsmRange {
        cattr: 0.into(),
        nlb: 1.into(),
        slba: 40.into(),
    };
    let dsm = |deallocate, cid| {
        let command = DatasetManagement {
            ranges: 1,
            deallocate,
            ..DatasetManagement::default()
        };
        let sgl = Sgl::Transport { length: 16 };
        command.to_sqe(cid, 1).with_sgl(sgl)
    };
    let source = CopyRange0::new(60, 1);
    let copy = copy_of(50, 1);
    let copy_sgl = Sgl::Transport { length: 32 };
    let zeroes = WriteZeroes {
        slba: 30,
        blocks: 1,
        ..WriteZeroes::default()
    };
    let verify = ReadWrite::new(3, 1).to_sqe(opcode::VERIFY, rig.cid(), 1);
    vec![
        ("Read", rw(opcode::READ, rig.cid()), vec![], false),
        ("Verify", verify, vec![], false),
        ("Write", rw(opcode::WRITE, rig.cid()), block.clone(), true),
        ("Compare", rw(opcode::COMPARE, rig.cid()), block, false),
        ("Write Zeroes", zeroes.to_sqe(rig.cid(), 1), vec![], true),
        (
            "Deallocate",
            dsm(true, rig.cid()),
            range.as_bytes().to_vec(),
            true,
        ),
        (
            "Hints",
            dsm(false, rig.cid()),
            range.as_bytes().to_vec(),
            true,
        ),
        (
            "Copy",
            copy.to_sqe(rig.cid(), 1).with_sgl(copy_sgl),
            source.as_bytes().to_vec(),
            true,
        ),
        (
            "Flush",
            Sqe::for_namespace(opcode::FLUSH, rig.cid(), 1),
            vec![],
            true,
        ),
        (
            "Flush of all",
            Sqe::for_namespace(opcode::FLUSH, rig.cid(), nsid::BROADCAST),
            vec![],
            true,
        ),
    ]
}

/// Goal: every command of every host is let through or refused as the type says, and the refusals
/// are counted.
#[test]
fn every_command_meets_every_type() {
    for kind in KINDS {
        let (mut rig, a, b) = two_hosts();
        let c = rig.host(0xc, 1);
        rig.register(a);
        rig.register(b);
        assert_eq!(rig.acquire(a, kind), OK);
        let number = kind as u8;
        let mut refused = 0;
        for (who, host) in [("holder", a), ("registrant", b), ("other", c)] {
            let inside = who == "holder" || (who == "registrant" && number >= 3);
            for (name, sqe, data, writes) in every_command(&mut rig) {
                let may = inside || (!writes && number % 2 == 1);
                let expected = if may { OK } else { CONFLICT };
                // Twice: a queue's remembered rights count, too.
                for _ in 0..2 {
                    let status = rig.status(host.io, sqe, &data);
                    assert_eq!(status, expected, "{kind:?}: {name} of the {who}");
                    refused += u64::from(!may);
                }
            }
        }
        let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
        let namespace = Arc::clone(&subsystem.namespaces()[0].namespace);
        assert_eq!(namespace.reservation.conflicts(), refused, "{kind:?}");
        assert_eq!(rig.release(a, ReleaseAction::Release, Some(kind)), OK);
        for host in [a, b, c] {
            assert_eq!(rig.write(host), OK, "nothing is reserved any more");
        }
    }
}

/// A fused pair writes: both halves fail, and the one that is to blame says why.
#[test]
fn fused_pairs() {
    for (kind, compare, write) in [
        (
            ReservationType::WriteExclusive,
            StatusCode::ABORTED_FAILED_FUSED,
            CONFLICT,
        ),
        (
            ReservationType::ExclusiveAccess,
            CONFLICT,
            StatusCode::ABORTED_FAILED_FUSED,
        ),
    ] {
        let (mut rig, a, b) = two_hosts();
        rig.register(a);
        assert_eq!(rig.acquire(a, kind), OK);
        for (host, expected) in [(b, [compare, write]), (a, [OK, OK])] {
            let (first, second) = (rig.cid(), rig.cid());
            let mut first = rw(opcode::COMPARE, first);
            first.set_fuse(Fuse::First);
            let mut second = rw(opcode::WRITE, second);
            second.set_fuse(Fuse::Second);
            rig.send(host.io, first, None);
            rig.send(host.io, second, None);
            rig.turn();
            rig.deliver(&[0; BLOCK as usize]);
            rig.turn();
            rig.turn();
            let answers = rig.answers();
            let statuses: Vec<_> = answers.iter().map(|cqe| cqe.status()).collect();
            assert_eq!(statuses, expected, "{kind:?}");
        }
    }
}

/// The announced capabilities, and the contents of a report.
#[test]
fn announced_and_reported() {
    let (mut rig, a, b) = two_hosts();
    let oncs = Oncs::from_bits_retain(rig.identify_controller(a.admin).oncs.get());
    assert!(oncs.contains(Oncs::RESERVATIONS));
    assert_eq!(
        rig.identify_namespace(a.admin, 1).rescap,
        0xfe,
        "not persistent"
    );
    let id: IndependentNamespace = rig
        .identify(a.admin, cns::INDEPENDENT_NAMESPACE, 1)
        .unwrap();
    assert_eq!(id.rescap, 0xfe);
    assert_eq!(
        rig.register_as(a, RegisterAction::Register, PersistChange::Set),
        INVALID,
        "as announced"
    );

    rig.register(a);
    rig.register(b);
    assert_eq!(rig.acquire(b, ReservationType::ExclusiveAccess), OK);
    let page = rig.report(a, 256).unwrap();
    let (header, _) = ReportHeader::read_from_prefix(&page).unwrap();
    assert_eq!((header.generation.get(), header.rtype), (2, 2));
    assert_eq!((header.regctl.get(), header.ptpls), (2, 0));
    assert_eq!((page[66], page[130]), (0, 1));
    assert_eq!(page[80..96], [0xa; 16]);
    assert!(
        page[192..].iter().all(|b| *b == 0),
        "nothing of what the buffer held"
    );
    assert_eq!(
        rig.report(a, 100).unwrap(),
        page[..100],
        "what there is room for"
    );
    assert_eq!(rig.report(a, MAX_TRANSFER + 4), Err(INVALID));
    let cid = rig.cid();
    let short = Report {
        bytes: 64,
        extended: false,
    };
    let status = StatusCode::HOST_ID_INCONSISTENT_FORMAT.with_dnr();
    assert_eq!(rig.fetch(a.io, short.to_sqe(cid, 1), 64), Err(status));

    assert_eq!(
        rig.register_as(b, RegisterAction::Unregister, PersistChange::Keep),
        OK
    );
    let page = rig.report(a, 128).unwrap();
    assert_eq!((page[0], page[4], page[5]), (3, 0, 1));
}

/// Commands that cannot be understood, and a host without an identifier.
#[test]
fn refusals() {
    let (mut rig, a, _) = two_hosts();
    let sgl = Sgl::Transport { length: 16 };
    for (op, cdw10) in [
        (opcode::RESERVATION_REGISTER, 3),
        (opcode::RESERVATION_REGISTER, 1 << 30),
        (opcode::RESERVATION_ACQUIRE, 7 << 8),
        (opcode::RESERVATION_RELEASE, 2),
    ] {
        let cid = rig.cid();
        let mut sqe = Sqe::for_namespace(op, cid, 1).with_sgl(sgl);
        sqe.cdw10 = cdw10.into();
        assert_eq!(
            rig.status(a.io, sqe, &[0; 16]),
            INVALID,
            "{op:#x} {cdw10:#x}"
        );
    }
    let register = Register {
        action: RegisterAction::Register,
        ignore_existing_key: false,
        persist: PersistChange::Keep,
    };
    for (nsid, length, expected) in [
        (1, 15, StatusCode::DATA_SGL_LENGTH_INVALID),
        (2, 16, StatusCode::INVALID_NAMESPACE_OR_FORMAT),
        (nsid::BROADCAST, 16, StatusCode::INVALID_NAMESPACE_OR_FORMAT),
    ] {
        let cid = rig.cid();
        let sqe = register
            .to_sqe(cid, nsid)
            .with_sgl(Sgl::Transport { length });
        assert_eq!(rig.status(a.io, sqe, &[0; 16]), expected.with_dnr());
    }
    let nobody = rig.host(0, 7);
    let status = rig.register_as(nobody, RegisterAction::Register, PersistChange::Keep);
    assert_eq!(status, StatusCode::HOST_ID_NOT_INITIALIZED.with_dnr());
}

/// Each host is notified of its losses, once per page that it reads, and of no masked notice.
#[test]
fn hosts_are_notified_of_their_losses() {
    let (mut rig, a, b) = two_hosts();
    assert_eq!(rig.notice(a, false), ReservationNotification::zeroed());
    rig.register(a);
    rig.register(b);
    let kind = ReservationType::WriteExclusiveRegistrantsOnly;
    assert_eq!(rig.acquire(a, kind), OK);
    let cid = rig.wait_for_event(b);
    assert!(rig.answers().is_empty(), "nothing happened to B");
    // Two things happen before B looks.
    assert_eq!(rig.release(a, ReleaseAction::Release, Some(kind)), OK);
    rig.turn();
    let event = rig.answers();
    assert_eq!(
        (event.len(), event[0].cid(), event[0].dword0()),
        (1, cid, EVENT)
    );
    let cid = rig.wait_for_event(b);
    assert_eq!(rig.acquire_as(a, AcquireAction::Preempt, kind, KEY_B), OK);
    rig.turn();
    assert!(rig.answers().is_empty(), "one event until the log is read");
    let page = rig.notice(b, true);
    assert_eq!((page.log_page_count.get(), page.nsid.get()), (1, 1));
    assert_eq!(page.log_page_type, ReservationNotification::RELEASED);
    assert_eq!(page.available, 1);
    rig.turn();
    assert!(rig.answers().is_empty(), "retained");
    // Read for good, it makes way for the event of the next one, which comes right behind it.
    let read = rig.cid();
    let sqe = GetLogPage::new(lid::RESERVATION_NOTIFICATION, 64, 0);
    let sgl = Sgl::Transport { length: 64 };
    rig.send(
        b.admin,
        sqe.to_sqe(read, nsid::BROADCAST).with_sgl(sgl),
        None,
    );
    rig.turn();
    rig.turn();
    let both: Vec<_> = rig
        .answers()
        .iter()
        .map(|cqe| (cqe.cid(), cqe.dword0()))
        .collect();
    assert_eq!(both, [(read, 0), (cid, EVENT)], "there is more to read");
    let page = rig.notice(b, false);
    assert_eq!(
        page.log_page_type,
        ReservationNotification::REGISTRATION_PREEMPTED
    );
    assert_eq!((page.log_page_count.get(), page.available), (2, 0));
    assert_eq!(
        rig.notice(a, false),
        ReservationNotification::zeroed(),
        "A did it"
    );

    // Masks are each host's own.
    rig.register(b);
    let mask = fid::RESERVATION_NOTIFICATION_MASK;
    let set = |cid, dword, nsid| SetFeatures::new(mask, dword).to_sqe(cid, nsid);
    let get = |rig: &mut Rig, host: Host| {
        let cid = rig.cid();
        rig.call(host.admin, GetFeatures::new(mask).to_sqe(cid, 1), &[])
            .cqe
            .dword0()
    };
    let cid = rig.cid();
    assert_eq!(rig.status(b.admin, set(cid, 1 << 3, 1), &[]), OK);
    assert_eq!((get(&mut rig, b), get(&mut rig, a)), (8, 0));
    for (dword, nsid) in [(1, 1), (1 << 4, 1)] {
        let cid = rig.cid();
        assert_eq!(rig.status(b.admin, set(cid, dword, nsid), &[]), INVALID);
    }
    let cid = rig.cid();
    let missing = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
    assert_eq!(rig.status(b.admin, set(cid, 0, 7), &[]), missing);
    assert_eq!(rig.release(a, ReleaseAction::Clear, None), OK);
    assert_eq!(
        rig.notice(b, false),
        ReservationNotification::zeroed(),
        "masked"
    );
    rig.register(a);
    rig.register(b);
    assert_eq!(rig.release(b, ReleaseAction::Clear, None), OK);
    assert_eq!(
        rig.notice(a, false).log_page_type,
        ReservationNotification::PREEMPTED
    );
    let cid = rig.cid();
    assert_eq!(rig.status(b.admin, set(cid, 0, nsid::BROADCAST), &[]), OK);
    assert_eq!(get(&mut rig, b), 0);
}

/// Goal: Preempt and Abort is answered when the last command of the preempted host has left the
/// device, and not before, on whichever cores they are. Method: a device that holds its I/O and
/// cannot abort it; the two hosts on one core, and on two.
#[test]
fn preempt_and_abort_waits() {
    for cores in [1, 2] {
        let (told_rig, scripted) = rig_scripted();
        let backing = told_rig
            .target
            .subsystem(&nqn(SUBNQN))
            .unwrap()
            .namespaces()[0]
            .clone();
        let mut rig = Rig::on_cores(TargetConfig::default(), cores);
        let config = NamespaceConfig {
            nsid: Some(1),
            bdev_name: "told".to_string(),
            ids: backing.namespace.ids,
            backing: backing.namespace.backing.clone(),
            ana_group: None,
            auto_visible: true,
            reservations: Default::default(),
        };
        rig.target.add_namespace(&nqn(SUBNQN), config).unwrap();
        let other_core = |rig: &mut Rig| {
            if cores == 2 {
                rig.switch();
            }
        };
        let a = rig.host(0xa, KEY_A);
        rig.register(a);
        other_core(&mut rig);
        let b = rig.host(0xb, KEY_B);
        rig.register(b);
        assert_eq!(
            rig.acquire(b, ReservationType::WriteExclusiveRegistrantsOnly),
            OK
        );
        scripted.script(|state| state.held = true);
        // One in the device, one whose data has not come.
        let (first, second) = (rig.cid(), rig.cid());
        rig.send(b.io, rw(opcode::WRITE, first), None);
        rig.turn();
        rig.deliver(&[1; BLOCK as usize]);
        rig.turn();
        rig.send(b.io, rw(opcode::WRITE, second), None);
        rig.turn();
        let (_, tag, data) = rig.wire.borrow_mut().fetches.pop_front().unwrap();
        assert!(rig.answers().is_empty());

        other_core(&mut rig);
        let kind = ReservationType::WriteExclusive;
        let preempt = rig.acquire_sqe(AcquireAction::PreemptAndAbort, kind);
        rig.send(a.io, preempt, None);
        rig.turn();
        rig.deliver(keys(KEY_A, KEY_B).as_bytes());
        for _ in 0..20 {
            rig.turn();
        }
        assert!(
            rig.answers().is_empty(),
            "{cores}: a write is still in the device"
        );
        // In the meantime the reservation is A's already.
        let page = rig.report(a, 128).unwrap();
        assert_eq!((page[4], page[5]), (1, 1));
        other_core(&mut rig);
        assert_eq!(rig.write(b), CONFLICT);
        rig.fetched(b.io, tag, data);
        rig.turn();
        let ended = rig.answers();
        assert_eq!((ended.len(), ended[0].cid()), (1, second));
        assert_eq!(ended[0].status(), StatusCode::ABORTED_PREEMPT_AND_ABORT);

        scripted.script(|state| state.held = false);
        for _ in 0..4 {
            rig.turn();
        }
        let mut answers = rig.answers();
        other_core(&mut rig);
        answers.extend(rig.answers());
        let of = |cid: u16| {
            answers
                .iter()
                .find(|cqe| cqe.cid() == cid)
                .unwrap()
                .status()
        };
        assert_eq!(answers.len(), 2);
        assert_eq!(of(first), StatusCode::ABORTED_PREEMPT_AND_ABORT);
        assert_eq!(of(preempt.cid()), OK);
    }
}

/// A preempted host that leaves with writes in the device is waited for all the same; a host that
/// leaves while its own Preempt and Abort waits is not missed.
#[test]
fn preempt_and_abort_when_hosts_leave() {
    for preemptor_leaves in [false, true] {
        let (mut rig, scripted) = rig_scripted();
        let (a, b) = (rig.host(0xa, KEY_A), rig.host(0xb, KEY_B));
        rig.register(a);
        rig.register(b);
        scripted.script(|state| state.held = true);
        let cid = rig.cid();
        rig.send(b.io, rw(opcode::WRITE, cid), None);
        rig.turn();
        rig.deliver(&[1; BLOCK as usize]);
        rig.turn();
        let kind = ReservationType::WriteExclusive;
        let preempt = rig.acquire_sqe(AcquireAction::PreemptAndAbort, kind);
        rig.hang_up(b.io);
        rig.send(a.io, preempt, None);
        rig.turn();
        rig.deliver(keys(KEY_A, KEY_B).as_bytes());
        for _ in 0..5 {
            rig.turn();
        }
        assert!(rig.answers().is_empty(), "the write is still in the device");
        if preemptor_leaves {
            rig.hang_up(a.io);
        }
        scripted.script(|state| state.held = false);
        for _ in 0..4 {
            rig.turn();
        }
        let answers = rig.statuses();
        let expected = if preemptor_leaves {
            vec![]
        } else {
            vec![(preempt.cid(), OK)]
        };
        assert_eq!(answers, expected);
        rig.hang_up(a.admin);
        rig.hang_up(b.admin);
        rig.assert_clean();
    }
}
