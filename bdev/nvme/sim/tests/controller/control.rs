//! Tests of the simulator's registers and admin commands, and of its detection of driver mistakes.

use std::time::Duration;

use super::host::{
    ENTRIES, ManualDriver, NSID, OK, PAGE, Pair, config, plain, prps, reset, transfer,
};
use nacre_bdev_nvme::{Function, GONE};
use nacre_bdev_nvme_sim::{Action, CacheSurvival, Config, NamespaceConfig, Pace, Rule, Target};
use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::commands::admin::{Abort, GetFeatures, GetLogPage, SetFeatures, queues};
use nacre_nvmf_wire::features::{AsyncEvents, fid};
use nacre_nvmf_wire::identify::controller::Oacs;
use nacre_nvmf_wire::identify::{IdentifyController, IdentifyNamespace, NamespaceList, cns};
use nacre_nvmf_wire::log::{CriticalWarning, FirmwareSlots, SmartHealth, lid};
use nacre_nvmf_wire::opcode::{admin, io};
use nacre_nvmf_wire::registers::{Cap, Cc, Csts, Version, offset};
use nacre_nvmf_wire::sqe::Psdt;
use nacre_nvmf_wire::zerocopy::{FromBytes, IntoBytes};
use nacre_nvmf_wire::{Sqe, StatusCode};

/// Goal: the registers have the right values, and each transition to ready and back takes its time.
#[test]
fn registers() {
    let mut hand = ManualDriver::new(Config {
        pace: Pace {
            ready_after: Duration::from_millis(30),
            disabled_after: Duration::from_millis(10),
            shutdown_after: Duration::from_millis(5),
            ..Pace::default()
        },
        doorbell_stride: 2,
        ..config()
    });
    let cap = Cap(hand.function.read64(offset::CAP));
    assert_eq!(
        (cap.queue_entries_max(), cap.ready_timeout_ms()),
        (1024, 5000)
    );
    assert_eq!((cap.doorbell_stride_bytes(), cap.cqr()), (16, 1));
    assert_eq!(hand.function.read32(offset::VS), Version::V2_0.0);
    hand.enable();
    assert!(!hand.csts().is_ready(), "it takes its time");
    hand.now = hand.now + Duration::from_millis(31);
    hand.turn();
    assert!(hand.csts().is_ready());
    assert_eq!(hand.identify(cns::CONTROLLER, 0).0, OK);
    hand.function
        .write32(offset::CC, Cc::enabled().with_shn(1).0);
    hand.turn();
    assert_eq!(hand.csts().shst(), Csts::SHST_OCCURRING);
    hand.now = hand.now + Duration::from_millis(6);
    hand.turn();
    assert_eq!(hand.csts().shst(), Csts::SHST_COMPLETE);
    hand.function.write32(offset::CC, 0);
    hand.turn();
    assert!(hand.csts().is_ready(), "it takes its time");
    hand.now = hand.now + Duration::from_millis(11);
    hand.turn();
    assert_eq!(hand.csts(), Csts(0));
    let stats = hand.drive.stats();
    assert_eq!((stats.enabled, stats.normal_shutdowns), (1, 1));
    hand.drive.check();
}

/// Goal: Identify reports the configuration.
#[test]
fn identify() {
    let mut other = NamespaceConfig::new(5, 4096, 100);
    other.noiob = 32;
    let mut hand = ManualDriver::enabled(Config {
        mdts: 3,
        shadow_doorbells: true,
        namespaces: vec![NamespaceConfig::new(1, 512, 8192), other],
        ..config()
    });
    let (status, page) = hand.identify(cns::CONTROLLER, 0);
    assert_eq!(status, OK);
    let page = IdentifyController::read_from_bytes(&page).unwrap();
    assert_eq!(
        (page.mdts, page.oacs.get()),
        (3, Oacs::DOORBELL_BUFFER.bits())
    );
    assert_eq!(&page.sn[..8], b"SIM0001 ");
    let list = hand.identify(cns::ACTIVE_NAMESPACES, 0).1;
    let list = NamespaceList::read_from_bytes(&list).unwrap();
    assert_eq!(list.iter().collect::<Vec<_>>(), [1, 5]);
    let page = hand.identify(cns::NAMESPACE, 5).1;
    let page = IdentifyNamespace::read_from_bytes(&page).unwrap();
    assert_eq!((page.block_bytes(), page.nsze.get()), (Some(4096), 100));
    assert_eq!(page.noiob.get(), 32);
    for cns in [
        cns::NAMESPACE_DESCRIPTORS,
        cns::IO_NAMESPACE,
        cns::INDEPENDENT_NAMESPACE,
    ] {
        assert_eq!(hand.identify(cns, 5).0, OK);
    }
    assert_eq!(hand.identify(cns::IO_CONTROLLER, 0).0, OK);
    assert_eq!(hand.identify(cns::IO_COMMAND_SETS, 0).0, OK);
    let (status, page) = hand.identify(cns::NAMESPACE, 2);
    assert_eq!((status, page), (OK, vec![0; PAGE]), "inactive");
    let none = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
    assert_eq!(hand.identify(cns::NAMESPACE, 0).0, none);
    assert_eq!(
        hand.identify(0x55, 0).0,
        StatusCode::INVALID_FIELD.with_dnr()
    );
    hand.drive.check();
}

/// Goal: queues can be created and deleted only in the right order; each refusal has the specified
/// status.
#[test]
fn queues_have_an_order() {
    let mut hand = ManualDriver::enabled(Config {
        queue_entries: 16,
        vectors: 3,
        ..config()
    });
    let granted = hand.ask_for_queues(99);
    assert_eq!((granted.submission, granted.completion), (16, 16));
    let (memory, entries) = (hand.data.address(0), u32::from(ENTRIES));
    for (sqe, status) in [
        (
            queues::create_sq(0, 1, entries, memory, 1),
            StatusCode::COMPLETION_QUEUE_INVALID,
        ),
        (
            queues::create_cq(0, 0, entries, memory, None),
            StatusCode::INVALID_QUEUE_IDENTIFIER,
        ),
        (
            queues::create_cq(0, 17, entries, memory, None),
            StatusCode::INVALID_QUEUE_IDENTIFIER,
        ),
        (
            queues::create_cq(0, 1, 17, memory, None),
            StatusCode::INVALID_QUEUE_SIZE,
        ),
        (
            queues::create_cq(0, 1, 1, memory, None),
            StatusCode::INVALID_QUEUE_SIZE,
        ),
        (
            queues::create_cq(0, 1, entries, memory + 64, None),
            StatusCode::PRP_OFFSET_INVALID,
        ),
        (
            queues::create_cq(0, 1, entries, memory, Some(3)),
            StatusCode::INVALID_INTERRUPT_VECTOR,
        ),
        (
            queues::delete_sq(0, 1),
            StatusCode::INVALID_QUEUE_IDENTIFIER,
        ),
        (
            queues::delete_cq(0, 0),
            StatusCode::INVALID_QUEUE_IDENTIFIER,
        ),
    ] {
        assert_eq!(hand.admin(sqe).status(), status.with_dnr(), "{sqe:?}");
        assert_eq!(hand.drive.clear_violations(), 1);
    }
    hand.create_pair(1, Some(2));
    assert_eq!(hand.drive.io_queues(), 1);
    let status = hand.admin(queues::delete_cq(0, 1)).status();
    assert_eq!(status, StatusCode::INVALID_QUEUE_DELETION.with_dnr());
    assert_eq!(hand.drive.clear_violations(), 1);
    assert_eq!(hand.admin(queues::delete_sq(0, 1)).status(), OK);
    assert_eq!(hand.admin(queues::delete_cq(0, 1)).status(), OK);
    assert_eq!(hand.drive.io_queues(), 0);
    hand.drive.check();
}

/// Goal: features keep their set values until a reset.
#[test]
fn features() {
    let mut hand = ManualDriver::enabled(config());
    let cache = SetFeatures::new(fid::VOLATILE_WRITE_CACHE, 0).to_sqe(0, 0);
    assert_eq!(hand.admin(cache).status(), OK);
    let get = |fid| GetFeatures::new(fid).to_sqe(0, 0);
    let cqe = hand.admin(get(fid::VOLATILE_WRITE_CACHE));
    assert_eq!((cqe.status(), cqe.dword0()), (OK, 0));
    let events = AsyncEvents::NAMESPACE_ATTRIBUTE.bits();
    let set = SetFeatures::new(fid::ASYNC_EVENT_CONFIGURATION, events);
    assert_eq!(hand.admin(set.to_sqe(0, 0)).status(), OK);
    let cqe = hand.admin(get(fid::ASYNC_EVENT_CONFIGURATION));
    assert_eq!(cqe.dword0(), events);
    let vector = SetFeatures::new(fid::INTERRUPT_VECTOR_CONFIGURATION, 3 | 1 << 16);
    assert_eq!(hand.admin(vector.to_sqe(0, 0)).status(), OK);
    let invalid = StatusCode::INVALID_FIELD.with_dnr();
    let vector = SetFeatures::new(fid::INTERRUPT_VECTOR_CONFIGURATION, 99);
    assert_eq!(hand.admin(vector.to_sqe(0, 0)).status(), invalid);
    assert_eq!(hand.admin(get(0xc7)).status(), invalid);
    hand.disable();
    hand.enable();
    let cqe = hand.admin(get(fid::VOLATILE_WRITE_CACHE));
    assert_eq!(cqe.dword0(), 1);
    hand.drive.check();
}

/// Goal: each event completes a request, and further events of its type wait for a read of the log
/// page; the logs have the right contents.
#[test]
fn events_and_logs() {
    let mut hand = ManualDriver::enabled(config());
    let events = AsyncEvents::NAMESPACE_ATTRIBUTE | AsyncEvents::SMART_TEMPERATURE;
    let set = SetFeatures::new(fid::ASYNC_EVENT_CONFIGURATION, events.bits());
    assert_eq!(hand.admin(set.to_sqe(0, 0)).status(), OK);
    let mut admin = hand.lend_admin();
    let mut request = Sqe::new(admin::ASYNC_EVENT_REQUEST, 0);
    request.set_psdt(Psdt::Prp);
    for _ in 0..2 {
        hand.submit(&mut admin, request);
    }
    hand.ring(&admin);
    hand.turn();
    assert!(hand.reap(&mut admin).is_none());
    assert_eq!(hand.drive.async_requests(), 2);
    hand.drive.add_namespace(NamespaceConfig::new(9, 512, 64));
    hand.turn();
    let cqe = hand.reap(&mut admin).expect("an event");
    let event = AsyncEvent::from_dword0(cqe.dword0());
    assert_eq!(event, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
    hand.drive.resize_namespace(1, 4096);
    hand.turn();
    assert!(hand.reap(&mut admin).is_none(), "the log was not read");
    hand.admin = admin;
    let log = |hand: &mut ManualDriver, lid, bytes| {
        let sqe = hand.to_page(GetLogPage::new(lid, bytes, 0).to_sqe(0, 0));
        hand.admin(sqe)
    };
    hand.drive.set_health(|smart| {
        smart.composite_temperature.set(360);
        smart.critical_warning = CriticalWarning::TEMPERATURE.bits();
    });
    hand.turn();
    let event = hand.peek(&hand.admin).expect("an event of another type");
    let mut admin = hand.lend_admin();
    hand.reap(&mut admin);
    hand.admin = admin;
    let event = AsyncEvent::from_dword0(event.dword0());
    assert_eq!(event, AsyncEvent::TEMPERATURE_THRESHOLD);
    assert_eq!(log(&mut hand, lid::SMART_HEALTH, 512).status(), OK);
    let smart = SmartHealth::read_from_bytes(&hand.bytes(0, 512)).unwrap();
    assert_eq!(smart.composite_temperature.get(), 360);
    assert_eq!(
        log(&mut hand, lid::CHANGED_NAMESPACE_LIST, 4096).status(),
        OK
    );
    assert_eq!(hand.bytes(0, 12), [1, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(log(&mut hand, lid::FIRMWARE_SLOT, 512).status(), OK);
    let slots = FirmwareSlots::read_from_bytes(&hand.bytes(0, 512)).unwrap();
    assert_eq!((slots.afi, &slots.frs[0]), (1, b"1.0     "));
    for lid in [
        lid::SUPPORTED_LOG_PAGES,
        lid::ERROR_INFORMATION,
        lid::COMMANDS_SUPPORTED_AND_EFFECTS,
    ] {
        assert_eq!(log(&mut hand, lid, 1024).status(), OK);
    }
    let unknown = StatusCode::INVALID_LOG_PAGE.with_dnr();
    assert_eq!(log(&mut hand, 0xd0, 512).status(), unknown);
    hand.drive.check();
}

/// Goal: wrong doorbells and identifiers are detected.
#[test]
fn driver_errors_are_detected() {
    type Err = fn(&mut ManualDriver, &mut Pair);
    let errors: [(&str, Err); 8] = [
        ("tail out of range", |hand, pair| {
            hand.function.write32(hand.doorbell(pair.id, false), 8);
        }),
        ("tail as before", |hand, pair| hand.ring(pair)),
        ("no such queue", |hand, _| {
            hand.function.write32(hand.doorbell(3, false), 1);
        }),
        ("head beyond the tail", |hand, pair| {
            hand.function.write32(hand.doorbell(pair.id, true), 1);
        }),
        ("an identifier twice", |hand, pair| {
            let hold = Rule::next(Target::Io, Action::Hold).times(2);
            hand.drive.inject(hold);
            let mut flush = plain(io::FLUSH);
            flush.cid.set(77);
            for at in 0..2 {
                pair.sq.write(at * Sqe::SIZE, flush.as_bytes());
            }
            pair.tail = 2;
            hand.ring(pair);
            hand.turn();
        }),
        ("a full queue", |hand, pair| {
            // Fetched, but not reported as fetched in a completion.
            hand.drive.inject(Rule::always(Target::Io, Action::Hold));
            for _ in 0..5 {
                hand.submit(pair, plain(io::FLUSH));
            }
            hand.ring(pair);
            hand.turn();
            for _ in 0..3 {
                hand.submit(pair, plain(io::FLUSH));
            }
            hand.ring(pair);
            hand.turn();
        }),
        ("a reserved field", |hand, pair| {
            let mut sqe = plain(io::FLUSH);
            sqe.cdw13.set(1);
            hand.run(pair, sqe);
        }),
        ("more than MDTS", |hand, pair| {
            hand.drive.reconfigure(|config| config.mdts = 1);
            let mut sqe = transfer(hand, io::READ, 0, 17);
            prps(&mut sqe, hand.data.address(0), hand.data.address(31 * PAGE));
            let list = [1, 2].map(|page| hand.data.address(page * PAGE));
            hand.data.write(31 * PAGE, list.as_bytes());
            let cqe = hand.run(pair, sqe);
            assert_eq!(cqe.status(), StatusCode::INVALID_FIELD.with_dnr());
        }),
    ];
    for (name, err) in errors {
        let (mut hand, mut pair) = ManualDriver::with_pair(config());
        hand.drive.check();
        err(&mut hand, &mut pair);
        let found = hand.drive.violations();
        assert_eq!(found.len(), 1, "{name}: {found:?}");
    }
    let hand = ManualDriver::enabled(config());
    hand.function.write32(offset::ASQ, 0);
    hand.function
        .write32(offset::CC, Cc::enabled().with_mps(1).0);
    hand.function.write32(offset::CAP, 0);
    assert_eq!(hand.drive.clear_violations(), 3);
}

/// Goal: a write to a shadow doorbell alone does not wake a sleeping controller; its event index
/// says when to write the register.
#[test]
fn shadow_doorbells() {
    let (mut hand, mut pair) = ManualDriver::with_pair(Config {
        shadow_doorbells: true,
        ..config()
    });
    let (values, events) = (24 * PAGE, 25 * PAGE);
    let mut sqe = Sqe::new(admin::DOORBELL_BUFFER_CONFIG, 0);
    sqe.set_psdt(Psdt::Prp);
    prps(
        &mut sqe,
        hand.data.address(values),
        hand.data.address(events),
    );
    assert_eq!(hand.admin(sqe).status(), OK);
    let index = |is_head: bool| 4 * (2 + usize::from(is_head));
    hand.submit(&mut pair, plain(io::FLUSH));
    hand.data.store(values + index(false), 1);
    hand.turn();
    assert!(hand.peek(&pair).is_none(), "it sleeps");
    hand.ring(&pair);
    hand.turn();
    assert!(hand.peek(&pair).is_some());
    // The controller polls for a while, so the next entry needs no register write.
    hand.submit(&mut pair, plain(io::FLUSH));
    hand.data.store(values + index(false), 2);
    hand.turn();
    hand.turn();
    let cqes = hand.drive.stats().completions;
    for _ in 0..4 {
        hand.turn();
    }
    assert_eq!(hand.data.load(events + index(false)), 2);
    hand.submit(&mut pair, plain(io::FLUSH));
    hand.data.store(values + index(false), 3);
    hand.turn();
    assert_eq!(hand.drive.stats().completions, cqes, "it sleeps again");
    hand.drive.check();
}

/// Goal: an abort ends a hanging command, unless it is deaf; deleting the queue ends that one too.
#[test]
fn aborts() {
    for (deaf, deletion_completes) in [(false, true), (true, true), (true, false)] {
        let (mut hand, mut pair) = ManualDriver::with_pair(Config {
            deletion_completes,
            ..config()
        });
        let never = Action::Never { done: false, deaf };
        hand.drive.inject(Rule::next(Target::Queue(1), never));
        let cid = hand.submit(&mut pair, plain(io::FLUSH));
        hand.ring(&pair);
        hand.turn();
        let abort = Abort { sqid: 1, cid }.to_sqe(0);
        let cqe = hand.admin(abort);
        assert_eq!((cqe.status(), cqe.dword0()), (OK, deaf.into()));
        let ended = if deaf {
            assert_eq!(hand.admin(queues::delete_sq(0, 1)).status(), OK);
            StatusCode::ABORTED_SQ_DELETION
        } else {
            StatusCode::ABORT_REQUESTED
        };
        let found = hand.peek(&pair).map(|cqe| cqe.status());
        assert_eq!(found, (!deaf || deletion_completes).then_some(ended));
        hand.drive.check();
    }
}

/// Goal: a controller may fail to become ready, fail to shut down, or reset itself; a removed drive
/// returns with its flushed data, as another function.
#[test]
fn failed_enable_shutdown_reset_and_removal() {
    let mut hand = ManualDriver::new(config());
    hand.drive.never_ready(true);
    hand.enable();
    assert!(!hand.csts().is_ready());
    hand.drive.heal();
    hand.turn();
    assert!(hand.csts().is_ready());
    hand.drive.never_disabled(true);
    hand.disable();
    assert!(hand.csts().is_ready());
    hand.function.reset().unwrap();
    assert_eq!(hand.csts(), Csts(0));
    hand.drive.heal();
    reset(&mut hand.admin);
    hand.enable();
    hand.ask_for_queues(1);
    let mut pair = hand.create_pair(1, None);
    hand.data.write(0, &[3; 1024]);
    let write = transfer(&hand, io::WRITE, 0, 1);
    assert_eq!(hand.run(&mut pair, write).status(), OK);
    assert_eq!(hand.run(&mut pair, plain(io::FLUSH)).status(), OK);
    let write = transfer(&hand, io::WRITE, 1, 1);
    assert_eq!(hand.run(&mut pair, write).status(), OK);
    hand.drive.pull(CacheSurvival::Nothing);
    assert_eq!(hand.function.read32(offset::VS), GONE);
    assert!(hand.function.set_bus_master(true).is_err());
    let again = hand.drive.plug();
    assert_eq!(
        hand.function.read32(offset::VS),
        GONE,
        "the old one stays gone"
    );
    assert_eq!(again.read32(offset::VS), Version::V2_0.0);
    let stored = [0, 1].map(|lba| hand.drive.stored(NSID, lba, 1).unwrap()[0]);
    assert_eq!(stored, [3, 0]);
    drop(again);
    assert!(hand.drive.is_given_back());
    hand.drive.check();
}
