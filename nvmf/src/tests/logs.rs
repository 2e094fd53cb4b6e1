//! Tests of log pages through the target.

use super::host::INVALID;
use super::rig::*;
use super::scripted::rig_scripted;
use crate::subsystems::{SubsystemConfig, TargetConfig};
use crate::transport::{Address, TransportType};
use nacre_bdev::Status;
use nacre_nvmf_wire::commands::admin::{
    Abort, GetFeatures, GetLogPage, Select, async_event_request,
};
use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::features::{AsyncEvents, fid};
use nacre_nvmf_wire::identify::controller::{Cmic, Lpa};
use nacre_nvmf_wire::identify::{IdentifyController, read_ascii};
use nacre_nvmf_wire::log::ana::{self, AnaState};
use nacre_nvmf_wire::log::{
    CommandEffects, Effects, ErrorInformation, FirmwareSlots, SmartHealth, SupportedLogPages,
    TelemetryHeader, lid,
};
use nacre_nvmf_wire::opcode::{admin, io as opcode};
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};
use zerocopy::FromBytes;

/// Goal: what page 00h lists can be read, everything else is refused; offsets have bounds.
#[test]
fn supported_pages_are_the_ones_that_can_be_read() {
    let mut rig = Rig::with_malloc();
    let (nvm, _) = rig.admin();
    let discovery = rig.discovery(HOSTNQN);
    for conn in [nvm, discovery] {
        let page = rig.log(conn, lid::SUPPORTED_LOG_PAGES, 1024);
        let supported = SupportedLogPages::read_from_bytes(&page).unwrap();
        for id in 0..=255 {
            let answer = rig.log_page(conn, GetLogPage::new(id, 64, 0));
            if supported.is_supported(id) {
                answer.unwrap();
                let beyond = rig.log_page(conn, GetLogPage::new(id, 64, 1 << 40));
                assert_eq!(beyond.unwrap_err(), INVALID, "page {id:#x}");
            } else {
                assert_eq!(answer.unwrap_err(), StatusCode::INVALID_LOG_PAGE.with_dnr());
            }
        }
    }
    let page = rig.log(nvm, lid::SUPPORTED_LOG_PAGES, 1024);
    let supported = SupportedLogPages::read_from_bytes(&page).unwrap();
    assert!(supported.is_supported(lid::SMART_HEALTH) && !supported.is_supported(lid::DISCOVERY));
    // The very end can be read: it is empty.
    let end = rig
        .log_page(nvm, GetLogPage::new(lid::SMART_HEALTH, 64, 512))
        .unwrap();
    assert_eq!(end, [0; 64]);
    let across = rig
        .log_page(nvm, GetLogPage::new(lid::FIRMWARE_SLOT, 1024, 0))
        .unwrap();
    assert!(across[512..].iter().all(|byte| *byte == 0));
    let index = GetLogPage {
        index_offset: true,
        ..GetLogPage::new(lid::SMART_HEALTH, 64, 0)
    };
    assert_eq!(rig.log_page(nvm, index).unwrap_err(), INVALID);
    let of_one = GetLogPage::new(lid::SMART_HEALTH, 512, 0).to_sqe(900, 1);
    assert_eq!(
        rig.fetch(nvm, of_one, 512).unwrap_err(),
        INVALID,
        "no SMART log per namespace"
    );
    // More than MDTS.
    let long = GetLogPage::new(lid::SMART_HEALTH, MAX_TRANSFER + 4, 0);
    assert_eq!(rig.log_page(nvm, long).unwrap_err(), INVALID);
}

/// Goal: SMART counts what happened, of queues that are gone, too.
#[test]
fn smart_counts() {
    let (mut rig, scripted) = rig_scripted();
    let (conn, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    let rw = |op, cid, blocks: u32| {
        ReadWrite::new(0, blocks)
            .to_sqe(op, cid, 1)
            .with_sgl(Sgl::Transport {
                length: blocks * 512,
            })
    };
    for cid in 0..4 {
        assert!(rig.status(io, rw(opcode::READ, cid, 256), &[]).is_success());
    }
    let data = vec![7; 8 * 512];
    assert!(rig.status(io, rw(opcode::WRITE, 9, 8), &data).is_success());
    scripted.script(|state| state.status = Status::ReadError);
    let failed = rig.status(io, rw(opcode::READ, 10, 1), &[]);
    assert_eq!(failed, StatusCode::UNRECOVERED_READ_ERROR);
    scripted.script(|state| state.status = Status::Miscompare);
    let miscompared = rig.status(io, rw(opcode::COMPARE, 11, 1), &[0; 512]);
    assert_eq!(miscompared.code(), StatusCode::COMPARE_FAILURE);

    for round in 0..2 {
        let page = rig.log(conn, lid::SMART_HEALTH, 512);
        let smart = SmartHealth::read_from_bytes(&page).unwrap();
        let value = SmartHealth::counter_value;
        assert_eq!(value(&smart.host_read_commands), 5, "round {round}");
        assert_eq!(value(&smart.host_write_commands), 1);
        // 4 x 128 KiB is 1.024 units of 512,000 bytes, and units begin to count when begun.
        assert_eq!(value(&smart.data_units_read), 2);
        assert_eq!(value(&smart.data_units_written), 1);
        assert_eq!(value(&smart.media_errors), 1, "a miscompare is none");
        assert_eq!(value(&smart.error_log_entries), 2);
        assert_eq!(value(&smart.power_on_hours), round);
        assert_eq!((smart.available_spare, smart.critical_warning), (100, 0));
        // The second round: without the queue, and an hour later.
        rig.hang_up(io);
        rig.set_feature(conn, fid::KEEP_ALIVE_TIMER, 0).unwrap();
        rig.pass(std::time::Duration::from_secs(3600));
    }
}

/// Goal: the error log holds what failed, the newest first, and no more than it announces.
#[test]
fn error_log() {
    let mut rig = Rig::new(TargetConfig {
        error_log_entries: 4,
        ..TargetConfig::default()
    });
    rig.add_namespace(ram());
    let (conn, cntlid) = rig.admin();
    assert_eq!(rig.identify_controller(conn).elpe, 3);
    let io = rig.io_queue(cntlid, 1);
    for i in 0..6 {
        let read = ReadWrite::new(BLOCKS + i, 1)
            .to_sqe(opcode::READ, i as u16, 1)
            .with_sgl(Sgl::Transport { length: 512 });
        assert_eq!(
            rig.status(io, read, &[]).code(),
            StatusCode::LBA_OUT_OF_RANGE
        );
    }
    let unknown = rig.set_feature(conn, 0xfe, 0);
    assert_eq!(unknown, Err(INVALID));
    let page = rig.log(conn, lid::ERROR_INFORMATION, 4 * 64);
    let entries = <[ErrorInformation]>::ref_from_bytes(&page).unwrap();
    assert_eq!(
        entries
            .iter()
            .map(|e| e.error_count.get())
            .collect::<Vec<_>>(),
        [7, 6, 5, 4]
    );
    assert_eq!(entries[0].status(), INVALID);
    assert_eq!(
        (entries[0].sqid.get(), entries[0].opcode),
        (0, admin::SET_FEATURES)
    );
    let last = &entries[1];
    assert_eq!(last.status(), StatusCode::LBA_OUT_OF_RANGE.with_dnr());
    assert_eq!(
        (last.sqid.get(), last.cid.get(), last.nsid.get()),
        (1, 5, 1)
    );
    assert_eq!(last.opcode, opcode::READ);
    assert_eq!(last.trtype, 254);
    let beyond = rig.log_page(
        conn,
        GetLogPage::new(lid::ERROR_INFORMATION, 64, 4 * 64 + 4),
    );
    assert_eq!(beyond.unwrap_err(), INVALID);
    let second = rig.log_page(conn, GetLogPage::new(lid::ERROR_INFORMATION, 64, 64));
    assert_eq!(
        second.unwrap()[..8],
        7u64.to_le_bytes(),
        "the refusal above is the newest now"
    );
}

/// Goal: the effects log names exactly the commands that are carried out.
#[test]
fn command_effects_tell_the_truth() {
    let mut rig = Rig::with_malloc();
    let (conn, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    let page = rig.log(conn, lid::COMMANDS_SUPPORTED_AND_EFFECTS, 4096);
    let effects = CommandEffects::read_from_bytes(&page).unwrap();
    for op in 0..=255u8 {
        let known = |table: &[zerocopy::little_endian::U32; 256]| {
            Effects::from_bits(table[usize::from(op)].get())
                .unwrap()
                .contains(Effects::CSUPP)
        };
        if op == nacre_nvmf_wire::opcode::FABRICS {
            continue;
        }
        if op != admin::ASYNC_EVENT_REQUEST {
            let cid = rig.cid();
            let status = rig.status(conn, Sqe::new(op, cid), &[]);
            let refused = status.code() == StatusCode::INVALID_OPCODE;
            assert_eq!(refused, !known(&effects.admin), "admin {op:#x}: {status}");
        }
        let cid = rig.cid();
        let status = rig.status(io, Sqe::for_namespace(op, cid, 1), &[]);
        let refused = status.code() == StatusCode::INVALID_OPCODE;
        assert_eq!(refused, !known(&effects.io), "I/O {op:#x}: {status}");
    }
    let zoned = GetLogPage {
        csi: 2,
        ..GetLogPage::new(lid::COMMANDS_SUPPORTED_AND_EFFECTS, 4096, 0)
    };
    assert_eq!(rig.log_page(conn, zoned).unwrap_err(), INVALID);
}

#[test]
fn feature_effects_and_firmware() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let page = rig.log(conn, lid::FEATURE_IDENTIFIERS_EFFECTS, 1024);
    for fid in 0..=255u8 {
        let effects = page[usize::from(fid) * 4] & 1 != 0;
        let select = Select::SupportedCapabilities;
        let answer = rig.feature(
            conn,
            GetFeatures {
                select,
                ..GetFeatures::new(fid)
            },
        );
        assert_eq!(answer.is_ok(), effects, "feature {fid:#x}");
    }
    let page = rig.log(conn, lid::FIRMWARE_SLOT, 512);
    let slots = FirmwareSlots::read_from_bytes(&page).unwrap();
    let id: IdentifyController = rig.identify_controller(conn);
    assert_eq!((slots.afi, slots.frs[0]), (1, id.fr));
    assert_eq!(read_ascii(&id.fr), env!("CARGO_PKG_VERSION"));
}

/// Goal: with ANA reporting on, what Linux needs to use it is there, and the log fits.
#[test]
fn ana_log() {
    let mut rig = Rig::with_malloc();
    let name = "nqn.2025-01.io.nacre:ana";
    let mut config = SubsystemConfig::new(nqn(name));
    config.allow_any_host = true;
    config.ana_reporting = true;
    rig.target.create_subsystem(config).unwrap();
    let address = Address::Loopback("test".into());
    rig.target
        .add_listener(&nqn(name), TransportType::Loopback, &address)
        .unwrap();
    for _ in 0..2 {
        rig.add_namespace_to(name, ram());
    }
    let (conn, cqe) = rig.connect_as(HOSTNQN, name, 0, 0xffff, 32);
    assert!(cqe.status().is_success());
    rig.enable(conn);
    let id = rig.identify_controller(conn);
    assert!(
        Cmic::from_bits(id.cmic)
            .unwrap()
            .contains(Cmic::ANA_REPORTING)
    );
    assert_eq!(id.oaes.get(), 1 << 8 | 1 << 11);
    assert!(id.anagrpmax.get() >= 2 && id.nanagrpid.get() <= id.anagrpmax.get());
    assert_eq!(id.anatt, 10);
    let bytes = 16 + id.nanagrpid.get() * 32 + id.mnan.get() * 4;
    assert!(u64::from(bytes) <= id.max_transfer_bytes(4096).unwrap());
    assert_eq!(rig.identify_namespace(conn, 2).anagrpid.get(), 2);
    let page = rig.log(conn, lid::ASYMMETRIC_NAMESPACE_ACCESS, bytes);
    let groups: Vec<_> = ana::groups(&page).map(Result::unwrap).collect();
    assert_eq!(groups.len(), 2);
    for (group, nsids) in &groups {
        assert_eq!(group.state(), Some(AnaState::Optimized));
        assert_eq!(
            nsids.iter().map(|n| n.get()).collect::<Vec<_>>(),
            [group.anagrpid.get()]
        );
    }
    let only = GetLogPage {
        lsp: 1,
        ..GetLogPage::new(lid::ASYMMETRIC_NAMESPACE_ACCESS, bytes, 0)
    };
    let page = rig.log_page(conn, only).unwrap();
    assert!(ana::groups(&page).all(|group| group.unwrap().1.is_empty()));
}

/// Goal: a capture is the target's view of the association, and stays until the next one.
#[test]
fn telemetry() {
    let mut rig = Rig::with_malloc();
    let (conn, cntlid) = rig.admin();
    let lpa = Lpa::from_bits(rig.identify_controller(conn).lpa).unwrap();
    assert!(lpa.contains(Lpa::TELEMETRY));
    let io = rig.io_queue(cntlid, 1);
    let read = |cid, lba| {
        let bytes = Sgl::Transport { length: 512 };
        ReadWrite::new(lba, 1)
            .to_sqe(opcode::READ, cid, 1)
            .with_sgl(bytes)
    };
    assert!(rig.status(io, read(7, 0), &[]).is_success());
    let header = |page: &[u8]| TelemetryHeader::read_from_bytes(&page[..512]).unwrap();
    let page = |lsp, offset| GetLogPage {
        lsp,
        ..GetLogPage::new(lid::TELEMETRY_HOST, 512, offset)
    };
    let empty = header(&rig.log_page(conn, page(0, 0)).unwrap());
    assert_eq!((empty.lid, empty.captures, empty.host_scope), (7, 0, 1));
    assert_eq!(empty.last_blocks, [0; 3]);

    let first = header(
        &rig.log_page(conn, page(TelemetryHeader::LSP_CREATE, 0))
            .unwrap(),
    );
    let blocks = first.last_blocks[0].get();
    assert!(first.captures == 1 && blocks > 0, "{first:?}");
    assert!(first.last_blocks.iter().all(|last| last.get() == blocks));
    // This error happened after the capture.
    assert!(!rig.status(io, read(8, BLOCKS), &[]).is_success());
    let report = |rig: &mut Rig, blocks: u16| {
        let block = |rig: &mut Rig, at: u16| {
            let offset = 512 * u64::from(at);
            rig.log_page(conn, page(0, offset)).unwrap()
        };
        let whole: Vec<u8> = (1..=blocks).flat_map(|at| block(rig, at)).collect();
        let text = String::from_utf8(whole).unwrap();
        text.trim_end_matches('\0').to_owned()
    };
    let text = report(&mut rig, blocks);
    for line in [
        format!("subsystem: {SUBNQN}\n"),
        format!("host: {HOSTNQN}\n"),
        format!("controller: {cntlid}\n"),
        "reads 1 (512 bytes, 0 errors)".to_owned(),
        format!("{BLOCKS} blocks of 512 bytes, optimized\n"),
        "errors: 0\n".to_owned(),
    ] {
        assert!(text.contains(&line), "{line} is not in {text}");
    }

    let second = header(
        &rig.log_page(conn, page(TelemetryHeader::LSP_CREATE, 0))
            .unwrap(),
    );
    assert_eq!(second.captures, 2);
    let text = report(&mut rig, second.last_blocks[0].get());
    let error = "queue 1, command 8, opcode 0x02, LBA Out of Range";
    assert!(text.contains(error), "{text}");
    let beyond = page(0, 512 * (u64::from(second.last_blocks[0].get()) + 2));
    for refused in [page(0, 4), beyond] {
        assert_eq!(rig.log_page(conn, refused).unwrap_err(), INVALID);
    }

    let none = header(&rig.log(conn, lid::TELEMETRY_CONTROLLER, 512));
    assert_eq!((none.lid, none.controller_data_available), (8, 0));
    // The notice of such data.
    let notice = AsyncEvents::TELEMETRY_LOG.bits();
    rig.set_feature(conn, fid::ASYNC_EVENT_CONFIGURATION, notice)
        .unwrap();
    let discovery = rig.discovery(HOSTNQN);
    let refused = rig.set_feature(discovery, fid::ASYNC_EVENT_CONFIGURATION, notice);
    assert_eq!(refused, Err(INVALID));
}

/// Goal: event requests that end with their controller are no errors of the host.
#[test]
fn ended_event_requests_are_no_errors() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    rig.send(conn, async_event_request(900), None);
    rig.turn();
    rig.send(conn, Abort { sqid: 0, cid: 900 }.to_sqe(901), None);
    rig.turn();
    let mut ended = rig.statuses();
    ended.sort_by_key(|(cid, _)| *cid);
    let expected = [
        (900, StatusCode::ABORT_REQUESTED),
        (901, StatusCode::SUCCESS),
    ];
    assert_eq!(ended, expected);
    let page = rig.log(conn, lid::ERROR_INFORMATION, 64);
    let entries = <[ErrorInformation]>::ref_from_bytes(&page).unwrap();
    assert_eq!(entries[0].error_count.get(), 0);
}

/// A failed fabrics command is logged without a namespace: that field holds its type.
#[test]
fn fabrics_errors_name_no_namespace() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let beyond = rig.property(conn, 0x2000, nacre_nvmf_wire::fabrics::PropertySize::Four);
    assert_eq!(beyond.unwrap_err(), INVALID);
    let page = rig.log(conn, lid::ERROR_INFORMATION, 64);
    let entries = <[ErrorInformation]>::ref_from_bytes(&page).unwrap();
    assert_eq!(entries[0].opcode, nacre_nvmf_wire::opcode::FABRICS);
    assert_eq!(entries[0].nsid.get(), 0);
}
