//! Tests of attaching a drive and its failures, of its reported properties, of admin commands, and
//! of detaching.

use std::time::Duration;

use nacre_bdev::{Bdev, Op, Status, Support};
use nacre_bdev_nvme::{
    AdminData, AttachError, ControlError, DriveOptions, Event, FunctionError, State,
};
use nacre_bdev_nvme_sim::{
    Action, CacheSurvival, Config, NamespaceConfig, Pace, Rule, Target, telemetry,
};
use nacre_nvmf_wire::commands::admin::{Abort, GetFeatures, GetLogPage, Identify, SetFeatures};
use nacre_nvmf_wire::features::fid;
use nacre_nvmf_wire::identify::cns;
use nacre_nvmf_wire::identify::controller::Oncs;
use nacre_nvmf_wire::log::{CriticalWarning, lid};
use nacre_nvmf_wire::opcode::{admin, io};
use nacre_nvmf_wire::{Sqe, StatusCode};

use super::rig::Rig;

/// Goal: a drive attaches, reports its properties, and executes I/O. Detach leaves it shut down,
/// disabled and without bus mastering.
#[test]
fn attach_io_and_detach() {
    let mut rig = Rig::new(Config {
        mdts: 4,
        pace: Pace {
            ready_after: Duration::from_millis(40),
            disabled_after: Duration::from_millis(20),
            shutdown_after: Duration::from_millis(50),
            ..Pace::default()
        },
        ..Config::default()
    });
    let (controller, bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let info = controller.info();
    assert_eq!(
        (info.address.as_str(), info.drive.serial.as_str()),
        ("0000:5e:00.0", "SIM0001")
    );
    assert_eq!(
        (info.drive.model.as_str(), info.drive.firmware.as_str()),
        ("Nacre Simulated Drive", "1.0")
    );
    assert_eq!((info.version.as_str(), info.cntlid), ("2.0.0", 1));
    assert_eq!(info.mdts_bytes, Some(64 << 10));
    assert_eq!(info.io_queues, 16);
    assert!(info.sgl && info.volatile_cache && !info.shadow_doorbells);
    assert_eq!(bdev.name(), "nvme0n1");
    assert_eq!(bdev.product_name(), "NVMe disk");
    assert_eq!(bdev.nsid(), 1);
    let geometry = bdev.geometry();
    assert_eq!((geometry.block_size, geometry.blocks), (512, 8192));
    let limits = bdev.limits();
    assert_eq!((limits.max_blocks, limits.atomic_blocks), (128, 8));
    assert_eq!(limits.compare_and_write_blocks, 8);
    assert!(limits.volatile_cache && !limits.read_only);
    // Deallocated blocks may read as anything; write zeroes must give zeroes.
    assert!(!limits.unmap_zeroes && limits.zeroes_deallocate);
    assert!(bdev.native_fua());
    for op in Op::ALL {
        assert_eq!(bdev.supports(op), Support::Native, "{op:?}");
    }
    let events = rig.events.take();
    assert!(
        events
            .iter()
            .any(|event| matches!(event, Event::NamespaceAdded(added) if added.nsid() == 1)),
        "{events:?}"
    );
    let write = rig.write(3, 2, 7);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    assert_eq!(rig.values(&mut *queue, 2, 4), [0, 7, 7, 0]);
    rig.end(&controller, queue);
    assert_eq!(controller.status().state, State::Detached);
    let stats = rig.drive.stats();
    assert_eq!((stats.normal_shutdowns, stats.function_resets), (1, 0));
    assert!(!rig.drive.is_enabled() && !rig.drive.is_ready());
    assert!(!rig.drive.is_bus_master());
    assert_eq!(rig.drive.dirty_blocks(), 0, "the shutdown flushed");
    let refused = bdev.open(&rig.memory.pool);
    assert!(refused.is_err(), "a detached controller has no queues");
}

/// Goal: the counters of a queue pair are those of its I/O: every command and completion, the
/// writes of doorbells, and the polls. Method: 100 writes, 8 at a time, on a drive with and without
/// shadow doorbells.
#[test]
fn a_queue_pair_counts() {
    for shadow_doorbells in [false, true] {
        let mut rig = Rig::new(Config {
            shadow_doorbells,
            ..Config::default()
        });
        let (controller, _, mut queue) = rig.one(DriveOptions::new("nvme0"));
        let [before] = &controller.queue_pairs()[..] else {
            panic!("one core has one queue pair");
        };
        let mut written = 0;
        while written < 100 {
            let batch = (100 - written).min(8);
            for at in 0..batch {
                let io = rig.write(written + at, 1, 7);
                rig.submit(&mut *queue, io);
            }
            rig.run_until_idle(&mut *queue);
            written += batch;
        }
        let [after] = &controller.queue_pairs()[..] else {
            panic!("the queue pair stays");
        };
        assert_eq!(after.thread, std::thread::current().name().unwrap());
        assert_eq!(after.submitted - before.submitted, 100);
        assert_eq!(after.completions - before.completions, 100);
        let busy = after.busy_polls - before.busy_polls;
        assert!((1..=100).contains(&busy), "{after:?}");
        assert!(after.polls - before.polls >= busy, "{after:?}");
        let (registers, shadows) = (
            after.sq_register_writes - before.sq_register_writes,
            after.sq_shadow_writes - before.sq_shadow_writes,
        );
        // A batch needs one notification.
        if shadow_doorbells {
            assert!(
                (13..=100).contains(&shadows) && registers <= shadows,
                "{after:?}"
            );
        } else {
            assert!((13..=100).contains(&registers), "{after:?}");
            assert_eq!((shadows, after.cq_shadow_writes), (0, 0));
        }
        rig.end(&controller, queue);
    }
}

/// Goal: each failure of an attach has its own error, and leaves no resources behind.
#[test]
fn failures_to_attach() {
    type Spoil = fn(&mut Config);
    type Expected = fn(&AttachError) -> bool;
    let cases: [(Spoil, Expected); 4] = [
        (
            |config| config.nvm_command_set = false,
            |error| matches!(error, AttachError::CommandSet { .. }),
        ),
        (
            |config| config.pages = (2, 4),
            |error| matches!(error, AttachError::PageSize { minimum: 16384, .. }),
        ),
        (
            |config| config.queue_entries = 2,
            |error| matches!(error, AttachError::QueueSize { entries: 2, .. }),
        ),
        (
            |config| (config.doorbell_stride, config.io_queues) = (15, 0),
            |error| {
                matches!(
                    error,
                    AttachError::Registers { .. } | AttachError::NoQueues { .. }
                )
            },
        ),
    ];
    for (spoil, expected) in cases {
        let mut config = Config::default();
        spoil(&mut config);
        let mut rig = Rig::new(config);
        let error = rig
            .try_attach(DriveOptions::new("a"))
            .err()
            .expect("refused");
        assert!(expected(&error), "{error}");
        assert!(rig.drive.is_given_back(), "{error}");
        assert!(!rig.drive.is_ready());
        rig.drive.check();
    }
}

#[test]
fn a_drive_removed_while_attaching() {
    let mut rig = Rig::new(Config::default());
    rig.drive.inject(Rule::next(Target::Admin, Action::Pulled));
    let error = rig
        .try_attach(DriveOptions::new("a"))
        .err()
        .expect("refused");
    assert!(
        matches!(
            error,
            AttachError::Gone { .. } | AttachError::Control(ControlError::Gone)
        ),
        "{error}"
    );
}

#[test]
fn a_controller_that_never_becomes_ready() {
    let mut rig = Rig::new(Config::default());
    rig.drive.never_ready(true);
    let began = rig.core.now();
    let error = rig
        .try_attach(DriveOptions::new("a"))
        .err()
        .expect("refused");
    let AttachError::NotReady {
        ready: 1, limit, ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!(limit, Duration::from_secs(5), "CAP.TO");
    assert!(rig.core.now() - limit >= began);
    assert!(rig.drive.is_given_back());
}

#[test]
fn fatal_status_while_enabling() {
    let mut rig = Rig::new(Config {
        pace: Pace {
            ready_after: Duration::from_secs(1),
            ..Pace::default()
        },
        ..Config::default()
    });
    let drive = rig.drive.clone();
    let core = rig.core.core().clone();
    let task = rig.core.spawn_local(async move {
        while !drive.is_enabled() {
            core.after(Duration::from_millis(1)).await;
        }
        drive.make_fatal();
    });
    let error = rig
        .try_attach(DriveOptions::new("a"))
        .err()
        .expect("refused");
    assert!(matches!(error, AttachError::Fatal { .. }), "{error}");
    drop(task);
}

#[test]
fn bus_mastering_is_refused() {
    let mut rig = Rig::new(Config::default());
    rig.drive.fail_bus_master(true);
    let error = rig
        .try_attach(DriveOptions::new("a"))
        .err()
        .expect("refused");
    assert!(
        matches!(error, AttachError::Function(FunctionError { .. })),
        "{error}"
    );
}

/// An admin command of the bring-up fails or is never completed.
#[test]
fn admin_commands_of_the_bring_up_fail() {
    let internal = StatusCode::INTERNAL_ERROR.with_dnr();
    for opcode in [admin::IDENTIFY, admin::SET_FEATURES] {
        let mut rig = Rig::new(Config::default());
        rig.drive.inject(Rule::always(
            Target::AdminOp(opcode),
            Action::Status(internal),
        ));
        let error = rig
            .try_attach(DriveOptions::new("a"))
            .err()
            .expect("refused");
        let AttachError::Control(ControlError::Status {
            opcode: found,
            status,
        }) = error
        else {
            panic!("{error}")
        };
        assert_eq!((found, status), (opcode, internal));
        assert!(rig.drive.is_given_back() && !rig.drive.is_ready());
    }
    let mut rig = Rig::new(Config::default());
    let never = Action::Never {
        done: false,
        deaf: true,
    };
    rig.drive.inject(Rule::always(Target::Admin, never));
    let options = DriveOptions {
        admin_timeout: Duration::from_secs(3),
        ..DriveOptions::new("a")
    };
    let error = rig.try_attach(options).err().expect("refused");
    assert!(
        matches!(
            error,
            AttachError::Control(ControlError::Timeout {
                opcode: admin::IDENTIFY,
                limit,
            }) if limit == Duration::from_secs(3)
        ),
        "{error}"
    );
}

/// Goal: memory that cannot be registered with the drive is an error with the reason, not a crash.
#[test]
fn memory_registration_fails() {
    let mut rig = Rig::new(Config::default());
    rig.drive.iommu().limit_regions(1);
    let error = rig
        .try_attach(DriveOptions::new("a"))
        .err()
        .expect("refused");
    assert!(matches!(error, AttachError::Memory(_)), "{error}");
    assert!(rig.drive.is_given_back());
    // The same when a queue is opened; the cause contains the numbers and the remedy.
    rig.drive.iommu().limit_regions(u64::MAX);
    let controller = rig.attach();
    let bdev = controller.namespaces().remove(0);
    let regions = rig.drive.iommu().regions() as u64;
    rig.drive.iommu().limit_regions(regions);
    let error = bdev.clone().open(&rig.memory.pool).err().expect("refused");
    let text = error.to_string();
    let cause = format!("the simulated IOMMU takes {regions} regions");
    assert!(text.contains(&cause), "{text}");
    // Only the queue was refused; its number can be used again.
    rig.drive.iommu().limit_regions(u64::MAX);
    let mut queue = rig.open(&bdev);
    let write = rig.write(0, 1, 1);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    // A reset that gets no memory returns the reason.
    rig.drive.iommu().limit_regions(1);
    let handle = controller.clone();
    let reset = rig.core.block_on(async move { handle.reset().await });
    let text = reset.unwrap_err().to_string();
    assert!(text.contains("the simulated IOMMU takes"), "{text}");
    rig.drive.iommu().limit_regions(u64::MAX);
    rig.end(&controller, queue);
}

/// Goal: an enabled controller is taken over; one that cannot be disabled gets a function reset.
#[test]
fn an_enabled_controller_is_taken_over() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, queue) = rig.one(DriveOptions::new("a"));
    drop(queue);
    // The previous owner is killed without notifying the controller.
    rig.drive.never_disabled(true);
    rig.drive.never_shut_down(true);
    rig.detach(&controller);
    assert!(
        rig.drive.stats().function_resets > 0,
        "no function reset, although the controller stays enabled and may write to memory"
    );
    assert!(!rig.drive.is_bus_master());
    rig.drive.heal();
    let (controller, _bdev, queue) = rig.one(DriveOptions::new("b"));
    rig.end(&controller, queue);
}

/// Goal: the number of granted queues and the drive's limits bound the driver.
#[test]
fn fewer_queues_than_requested() {
    let mut rig = Rig::new(Config {
        queue_entries: 8,
        ..Config::default()
    });
    rig.drive.grant_queues(1);
    let (controller, bdev, queue) = rig.one(DriveOptions::new("nvme0"));
    let info = controller.info();
    assert_eq!((info.io_queues, info.io_queue_depth), (1, 7));
    assert_eq!(bdev.limits().queue_depth, 7);
    // Opening on another core fails: no queue is left.
    let other = bdev.clone();
    let memory = rig.drive.iommu().clone();
    let refused = std::thread::spawn(move || {
        let memory = super::rig::Memory::new(
            &[nacre_hugepages::ClassSpec {
                size: 4096,
                count: 4,
            }],
            4,
            &memory,
        );
        other
            .open(&memory.pool)
            .err()
            .map(|error| error.to_string())
    })
    .join()
    .unwrap()
    .expect("there is no second queue pair");
    assert!(
        refused.contains('1') && refused.contains("nvme0"),
        "{refused}"
    );
    drop(bdev);
    rig.end(&controller, queue);
}

/// Goal: if the drive refuses to create a queue, the waiting I/O fails, or the queue is created
/// later; no I/O hangs.
#[test]
fn queue_creation_fails() {
    for opcode in [admin::CREATE_IO_CQ, admin::CREATE_IO_SQ] {
        let mut rig = Rig::new(Config::default());
        let controller = rig.attach();
        let status = StatusCode::INVALID_QUEUE_IDENTIFIER.with_dnr();
        rig.drive.inject(Rule::always(
            Target::AdminOp(opcode),
            Action::Status(status),
        ));
        let bdev = controller.namespaces().remove(0);
        let mut queue = rig.open(&bdev);
        let read = rig.read(0, 1);
        let status = rig.status(&mut *queue, read);
        assert!(!status.is_ok());
        rig.drive.heal();
        drop(bdev);
        rig.end(&controller, queue);
    }
}

/// Goal: only admin commands that read pass through, whatever their parameters.
#[test]
fn only_reading_admin_commands_pass_through() {
    let mut rig = Rig::new(Config::default());
    let controller = rig.attach();
    let mut ask = |sqe: Sqe, data| {
        let controller = controller.clone();
        rig.core
            .block_on(async move { controller.admin(sqe, data).await })
    };
    let page = AdminData::Read(4096);
    let identify = Identify::new(cns::CONTROLLER).to_sqe(0, 0);
    let reply = ask(identify, page).expect("Identify only reads");
    assert_eq!(&reply.data[4..11], b"SIM0001");
    let log = GetLogPage::new(lid::SMART_HEALTH, 512, 0).to_sqe(0, u32::MAX);
    let reply = ask(log, AdminData::Read(512)).expect("logs only read");
    assert_eq!(reply.data.len(), 512);
    let feature = GetFeatures::new(fid::VOLATILE_WRITE_CACHE).to_sqe(0, 0);
    let reply = ask(feature, AdminData::None).expect("Get Features only reads");
    assert_eq!(reply.dword0, 1);
    let unknown = Identify::new(0x77).to_sqe(0, 0);
    let error = ask(unknown, page).unwrap_err();
    assert!(matches!(error, ControlError::Status { .. }), "{error}");
    let set = SetFeatures::new(fid::VOLATILE_WRITE_CACHE, 0).to_sqe(0, 0);
    let abort = Abort { sqid: 1, cid: 0 }.to_sqe(0);
    let mut refused = vec![set, abort];
    let allowed = [admin::IDENTIFY, admin::GET_LOG_PAGE, admin::GET_FEATURES];
    let others = (0..=255u8).filter(|opcode| !allowed.contains(opcode));
    refused.extend(others.map(|opcode| Sqe::new(opcode, 0)));
    for sqe in refused {
        let error = ask(sqe, AdminData::None).unwrap_err();
        assert_eq!(
            error,
            ControlError::NotAllowed { opcode: sqe.opcode },
            "{}",
            admin::name(sqe.opcode).unwrap_or("unknown")
        );
    }
    let error = ask(identify, AdminData::Read(64 << 20)).unwrap_err();
    assert!(matches!(error, ControlError::DataLength { .. }), "{error}");
    rig.detach(&controller);
    let again = controller.clone();
    let error = rig
        .core
        .block_on(async move { again.admin(identify, page).await });
    assert_eq!(error, Err(ControlError::Detached));
    rig.drive.check();
}

/// Goal: long logs arrive complete, also concurrently. A command transfers up to 128 KiB, or MDTS
/// if less. Longer requests are refused with both numbers. A command that hangs occupies its data
/// area only until the reset.
#[test]
fn long_logs_passed_through() {
    let mut rig = Rig::new(Config::default());
    let controller = rig.attach_with(DriveOptions {
        admin_timeout: Duration::from_millis(200),
        ..DriveOptions::new("nvme0")
    });
    let expected = telemetry();
    let log = |offset: usize, bytes: usize| {
        GetLogPage::new(lid::TELEMETRY_HOST, bytes as u32, offset as u64).to_sqe(0, u32::MAX)
    };
    let ask = |rig: &mut Rig, offset: usize, bytes: usize| {
        let controller = controller.clone();
        rig.core.block_on(async move {
            controller
                .admin(log(offset, bytes), AdminData::Read(bytes))
                .await
        })
    };
    for bytes in [4, 4096, 4100, 8192, 8196, 12 << 10, 64 << 10, 128 << 10] {
        for offset in [0, 512, 5000, 100 << 10] {
            let reply = ask(&mut rig, offset, bytes).expect("Get Log Page passes through");
            assert!(
                reply.data == expected[offset..offset + bytes],
                "{bytes} bytes at {offset}"
            );
        }
    }
    let error = ask(&mut rig, 0, (128 << 10) + 4).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Get Log Page asks for 131076 bytes of data; at most 131072 are possible"
    );
    // More concurrent commands than there are slots.
    let (handle, many) = (controller.clone(), 40);
    let replies = rig.core.block_on(async move {
        let all = (0..many).map(|at| {
            let (handle, bytes) = (handle.clone(), if at % 3 == 0 { 512 } else { 32 << 10 });
            async move {
                let read = AdminData::Read(bytes);
                (at, handle.admin(log(at * 4096, bytes), read).await)
            }
        });
        futures_util::future::join_all(all).await
    });
    for (at, reply) in replies {
        let data = reply.expect("the command waits for a slot").data;
        assert!(data == expected[at * 4096..at * 4096 + data.len()], "{at}");
    }
    rig.drive.check();
    // A command that never completes keeps the data area, because the drive may still write to it.
    let never = Action::Never {
        done: false,
        deaf: true,
    };
    rig.drive
        .inject(Rule::next(Target::AdminOp(admin::GET_LOG_PAGE), never));
    let error = ask(&mut rig, 0, 8192).unwrap_err();
    assert!(matches!(error, ControlError::Timeout { .. }), "{error}");
    let error = ask(&mut rig, 0, 8192).unwrap_err();
    assert_eq!(error, ControlError::Busy);
    assert!(ask(&mut rig, 0, 4096).is_ok());
    let handle = controller.clone();
    rig.core
        .block_on(async move { handle.reset().await })
        .unwrap();
    assert!(ask(&mut rig, 0, 8192).is_ok());
    rig.detach(&controller);
    rig.drive.check();

    // A drive with a smaller transfer limit (MDTS).
    let mut rig = Rig::new(Config {
        mdts: 1,
        ..Config::default()
    });
    let controller = rig.attach();
    for (bytes, is_possible) in [(8192, true), (8196, false)] {
        let handle = controller.clone();
        let reply = rig
            .core
            .block_on(async move { handle.admin(log(0, bytes), AdminData::Read(bytes)).await });
        assert_eq!(reply.is_ok(), is_possible, "{bytes}: {reply:?}");
    }
    rig.detach(&controller);
    rig.drive.check();
}

/// Goal: log pages pass unchanged.
#[test]
fn log_pages() {
    let mut rig = Rig::new(Config::default());
    let (controller, bdev, mut queue) = rig.one(DriveOptions::new("a"));
    rig.drive.set_health(|smart| {
        smart.percentage_used = 12;
        smart.critical_warning = CriticalWarning::READ_ONLY.bits();
    });
    let handle = controller.clone();
    let health = rig
        .core
        .block_on(async move { handle.health().await })
        .unwrap();
    assert_eq!((health.percentage_used, health.temperature_c), (12, 37));
    assert_eq!(health.warnings, ["read_only"]);
    let handle = controller.clone();
    let slots = rig
        .core
        .block_on(async move { handle.firmware_slots().await })
        .unwrap();
    assert_eq!(
        (slots.active_slot, slots.slots),
        (1, vec![(1, "1.0".to_owned())])
    );
    rig.drive.spoil_block(1, 5);
    let read = rig.read(5, 1);
    assert_eq!(rig.status(&mut *queue, read), Status::ReadError);
    let (whole, spoilt) = (rig.io(Op::Verify, 0, 5), rig.io(Op::Verify, 1, 5));
    assert_eq!(rig.status(&mut *queue, whole), Status::Ok);
    assert_eq!(rig.status(&mut *queue, spoilt), Status::ReadError);
    let handle = controller.clone();
    let log = rig
        .core
        .block_on(async move { handle.error_log(8).await })
        .unwrap();
    let newest = &log[0];
    assert_eq!(
        (newest.sct, newest.sc, newest.opcode),
        (2, 0x81, io::VERIFY)
    );
    drop(bdev);
    rig.end(&controller, queue);
}

/// Goal: operations that a drive lacks are not offered, and each limit comes from the field in
/// which the drive reports it.
#[test]
fn limits_come_from_the_drive() {
    let mut namespace = NamespaceConfig::new(1, 4096, 1000);
    namespace.noiob = 32;
    namespace.nawupf = Some(4);
    namespace.write_protected = true;
    namespace.deallocated_zeroes = false;
    let mut rig = Rig::new(Config {
        oncs: Oncs::COMPARE,
        fused_compare_and_write: false,
        volatile_cache: false,
        mdts: 1,
        namespaces: vec![namespace],
        ..Config::default()
    });
    let controller = rig.attach();
    let bdev = controller.namespaces().remove(0);
    let limits = bdev.limits();
    assert_eq!(limits.max_blocks, 2);
    assert_eq!(limits.optimal_boundary_blocks, 32);
    assert_eq!(
        (limits.atomic_blocks, limits.compare_and_write_blocks),
        (4, 4)
    );
    assert!(limits.read_only && !limits.volatile_cache);
    assert!(!limits.unmap_zeroes && !limits.zeroes_deallocate);
    assert_eq!(bdev.supports(Op::Compare), Support::Native);
    for op in [Op::Unmap, Op::WriteZeroes, Op::Copy, Op::CompareAndWrite] {
        assert_eq!(bdev.supports(op), Support::No, "{op:?}");
    }
    rig.detach(&controller);
    rig.drive.pull(CacheSurvival::All);
    rig.drive.check();
}
