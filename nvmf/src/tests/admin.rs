//! Tests of the admin queue through the target: Identify, features, log pages and registers.

use nacre_bdev::Status;
use nacre_nvmf_wire::commands::admin::{GetFeatures, Identify, Select, SetFeatures};
use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::fabrics::{self, PropertySize};
use nacre_nvmf_wire::features::{HostBehavior, fid};
use nacre_nvmf_wire::identify::controller::{Cmic, Ctratt, Oncs, Sgls, cntrltype, vwc};
use nacre_nvmf_wire::identify::namespace::{Nsfeat, dlfeat};
use nacre_nvmf_wire::identify::{
    ControllerList, IdentifyNamespace, IndependentNamespace, NamespaceList, NsIdDescriptor, cns,
    descriptors, read_ascii,
};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::registers::{Cap, Cc, Csts, Version, offset};
use nacre_nvmf_wire::{Nqn, Sgl, StatusCode};
use zerocopy::{FromBytes, IntoBytes};

use super::host::INVALID;
use super::rig::*;
use super::scripted::rig_scripted;
use crate::subsystems::{NamespaceConfig, NamespaceIds, SubsystemConfig, Teardown};
use crate::transport::ConnId;

const INVALID_NAMESPACE: StatusCode = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();

/// Goal: everything that Linux checks before it accepts an I/O controller (HOSTS.md 5b).
#[test]
fn identify_controller() {
    let mut rig = Rig::with_malloc();
    let (conn, cntlid) = rig.admin();
    let id = rig.identify_controller(conn);
    assert_eq!(id.cntlid.get(), cntlid, "\"Mismatching cntlid\"");
    assert_eq!(Nqn::from_field(&id.subnqn).unwrap(), nqn(SUBNQN));
    assert_eq!(id.ver.get(), Version::V2_0.0);
    assert_eq!(id.cntrltype, cntrltype::IO);
    assert!(id.kas.get() != 0, "keep-alive support is mandatory");
    assert!(id.maxcmd.get() != 0);
    assert!(id.ioccsz.get() >= 4 && id.iorcsz.get() >= 1);
    assert_eq!((id.icdoff.get(), id.in_capsule_bytes()), (0, 4096));
    assert_eq!((id.sqes, id.cqes), (0x66, 0x44));
    assert!(id.aerl >= 3);
    assert!(id.mnan.get() != 0 && id.mnan.get() <= id.nn.get());
    let cmic = Cmic::from_bits(id.cmic).unwrap();
    assert_eq!(cmic, Cmic::MULTIPLE_CONTROLLERS | Cmic::MULTIPLE_PORTS);
    let ctratt = Ctratt::from_bits(id.ctratt.get()).unwrap();
    assert!(ctratt.contains(Ctratt::HOST_ID_128 | Ctratt::TRAFFIC_BASED_KEEP_ALIVE));
    let sgls = Sgls::from_bits(id.sgls.get()).unwrap();
    assert!(sgls.contains(Sgls::SUPPORTED | Sgls::OFFSET));
    let oncs = Oncs::from_bits(id.oncs.get()).unwrap();
    assert!(oncs.contains(Oncs::RESERVATIONS));
    assert!(!oncs.intersects(Oncs::TIMESTAMP | Oncs::WRITE_UNCORRECTABLE));
    assert!(oncs.contains(Oncs::COPY | Oncs::VERIFY | Oncs::COMPARE | Oncs::WRITE_ZEROES));
    assert_eq!(id.vwc, vwc::PRESENT | vwc::FLUSH_BROADCAST_YES);
    assert_eq!(id.oaes.get(), 1 << 8, "namespace events and nothing else");
    assert_eq!((id.anacap, id.nanagrpid.get()), (0, 0));
    assert_eq!(
        [id.crdt1.get(), id.crdt2.get(), id.crdt3.get()],
        [1, 10, 50]
    );
    assert_eq!(read_ascii(&id.mn), "Nacre NVMe-oF controller");
    assert_eq!(id.oacs.get(), 0);
    // Entries of zero bytes, or of the wrong length, do not match the request.
    let short = Identify::new(cns::CONTROLLER).to_sqe(500, 0);
    assert_eq!(
        rig.fetch(conn, short, 4095).unwrap_err(),
        StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr()
    );
}

/// Goal: a namespace is described as its device is, now.
#[test]
fn identify_namespace_follows_the_device() {
    let (mut rig, scripted) = rig_scripted();
    let (conn, _) = rig.admin();
    let id = rig.identify_namespace(conn, 1);
    assert_eq!(
        (id.nsze.get(), id.ncap.get(), id.nuse.get()),
        (4096, 4096, 4096)
    );
    assert_eq!(id.block_bytes(), Some(512));
    assert_eq!((id.nmic, id.nlbaf, id.nsattr, id.dlfeat), (1, 0, 0, 0));
    assert_eq!(
        id.nguid,
        *rig.target.subsystem(&nqn(SUBNQN)).unwrap().namespaces()[0]
            .namespace
            .ids
            .uuid
            .as_bytes()
    );
    let plain: IndependentNamespace = rig.identify(conn, cns::INDEPENDENT_NAMESPACE, 1).unwrap();
    assert_eq!(
        (plain.nsfeat, plain.nstat),
        (1 << 5, 1),
        "no volatile cache; ready"
    );

    scripted.script(|state| {
        state.geometry.block_size = 4096;
        state.geometry.physical_block_size = 16_384;
        state.geometry.blocks = 1 << 33;
        state.limits.volatile_cache = true;
        state.limits.unmap_zeroes = true;
        state.limits.read_only = true;
        state.limits.atomic_blocks = 4;
        state.limits.compare_and_write_blocks = 16;
        state.limits.optimal_boundary_blocks = 64;
        state.limits.unmap_granularity_blocks = 8;
        state.limits.unmap_alignment_blocks = 2;
    });
    let plain = rig.identify_namespace(conn, 1);
    let sizes = |id: &IdentifyNamespace| [id.nsze.get(), id.ncap.get(), id.nuse.get()];
    assert_eq!(sizes(&plain), [1 << 33; 3], "all blocks have their space");
    let id = rig.identify_namespace(conn, 1);
    assert_eq!(id.nsze.get(), 1 << 33);
    assert_eq!(id.block_bytes(), Some(4096));
    assert_eq!(
        id.dlfeat,
        dlfeat::READ_ZEROES | dlfeat::WRITE_ZEROES_DEALLOCATES
    );
    assert_eq!(id.nsattr, 1);
    let nsfeat = Nsfeat::from_bits(id.nsfeat).unwrap();
    assert_eq!(nsfeat, Nsfeat::ATOMICITY | Nsfeat::OPTIMAL_PERFORMANCE);
    assert_eq!(
        (id.nawun.get(), id.nawupf.get(), id.nacwu.get()),
        (3, 3, 15)
    );
    assert_eq!((id.npwg.get(), id.npwa.get(), id.nows.get()), (3, 3, 63));
    assert_eq!((id.npdg.get(), id.npda.get(), id.noiob.get()), (7, 1, 64));
    let cached: IndependentNamespace = rig.identify(conn, cns::INDEPENDENT_NAMESPACE, 1).unwrap();
    assert_eq!((cached.nsfeat, cached.nsattr), (0, 1));
    let mut thin = |blocks, optimal| {
        scripted.script(|state| state.limits.optimal_write_blocks = optimal);
        scripted.script(|state| state.allocated = Some(blocks));
        rig.identify_namespace(conn, 1)
    };
    let id = thin(0, 16);
    assert_eq!(sizes(&id), [1 << 33, 1 << 33, 0]);
    assert_eq!(
        Nsfeat::from_bits(id.nsfeat).unwrap(),
        nsfeat | Nsfeat::THIN_PROVISIONING
    );
    assert_eq!((id.nows.get(), id.noiob.get()), (15, 64));
    let id = thin(77, 6);
    assert_eq!(
        (id.nuse.get(), id.nows.get()),
        (77, 63),
        "no multiple of NPWG"
    );
    assert_eq!(thin(u64::MAX, 0).nuse.get(), 1 << 33);
    scripted.script(|state| state.limits.optimal_boundary_blocks = 1 << 16);
    let id = rig.identify_namespace(conn, 1);
    assert_eq!(
        id.noiob.get(),
        0,
        "a boundary that does not fit is not told"
    );
}

/// Goal: which identifiers name a namespace, for every structure that takes one.
#[test]
fn namespace_identifiers() {
    let mut rig = Rig::with_malloc();
    rig.add_namespace(ram());
    let (conn, _) = rig.admin();
    let last = rig.identify_controller(conn).nn.get();
    for cns in [
        cns::NAMESPACE,
        cns::ALLOCATED_NAMESPACE,
        cns::INDEPENDENT_NAMESPACE,
        cns::IO_NAMESPACE,
    ] {
        // Without namespace management no structure has the common attributes of all namespaces.
        for bad in [0, last + 1, u32::MAX - 1, u32::MAX] {
            let answer = rig.identify_bytes(conn, Identify::new(cns), bad);
            assert_eq!(
                answer.unwrap_err(),
                INVALID_NAMESPACE,
                "CNS {cns:#x} NSID {bad:#x}"
            );
        }
        let inactive = rig.identify_bytes(conn, Identify::new(cns), last).unwrap();
        assert!(inactive.iter().all(|byte| *byte == 0));
    }
    for cns in [cns::NAMESPACE_DESCRIPTORS, cns::ATTACHED_CONTROLLERS] {
        for bad in [0, 3, last + 1, u32::MAX] {
            let answer = rig.identify_bytes(conn, Identify::new(cns), bad);
            assert_eq!(
                answer.unwrap_err(),
                INVALID_NAMESPACE,
                "CNS {cns:#x} NSID {bad:#x}"
            );
        }
    }
    for cns in [
        cns::ACTIVE_NAMESPACES,
        cns::IO_ACTIVE_NAMESPACES,
        cns::ALLOCATED_NAMESPACES,
    ] {
        for (after, expected) in [(0, &[1, 2][..]), (1, &[2]), (2, &[]), (u32::MAX - 2, &[])] {
            let list: NamespaceList = rig.identify(conn, cns, after).unwrap();
            assert_eq!(list.iter().collect::<Vec<_>>(), expected);
        }
        for bad in [u32::MAX - 1, u32::MAX] {
            let answer = rig.identify_bytes(conn, Identify::new(cns), bad);
            assert_eq!(answer.unwrap_err(), INVALID_NAMESPACE);
        }
    }
}

#[test]
fn namespace_descriptors() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let list = rig
        .identify_bytes(conn, Identify::new(cns::NAMESPACE_DESCRIPTORS), 1)
        .unwrap();
    let names: Vec<_> = descriptors::iter(&list).map(Result::unwrap).collect();
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let ids = subsystem.namespaces()[0].namespace.ids;
    assert_eq!(
        names,
        [
            NsIdDescriptor::Nguid(ids.nguid),
            NsIdDescriptor::Uuid(ids.uuid),
            NsIdDescriptor::Csi(0),
        ]
    );
}

#[test]
fn controller_lists() {
    let mut rig = Rig::with_malloc();
    let (conn, first) = rig.admin();
    let (_, second) = rig.admin();
    for (cns, nsid) in [(cns::ATTACHED_CONTROLLERS, 1), (cns::CONTROLLERS, 0)] {
        for (from, expected) in [
            (0, &[first, second][..]),
            (second, &[second]),
            (second + 1, &[]),
        ] {
            let what = Identify {
                cntid: from,
                ..Identify::new(cns)
            };
            let bytes = rig.identify_bytes(conn, what, nsid).unwrap();
            let list = ControllerList::read_from_bytes(&bytes).unwrap();
            assert_eq!(list.iter().collect::<Vec<_>>(), expected);
        }
    }
}

#[test]
fn command_sets_and_unknown_structures() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let sets = rig
        .identify_bytes(conn, Identify::new(cns::IO_COMMAND_SETS), 0)
        .unwrap();
    assert_eq!(sets[..16], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    for cns in [
        cns::IO_NAMESPACE,
        cns::IO_CONTROLLER,
        cns::IO_ACTIVE_NAMESPACES,
    ] {
        let zoned = Identify {
            csi: 2,
            ..Identify::new(cns)
        };
        let answer = rig.identify_bytes(conn, zoned, 1);
        assert_eq!(
            answer.unwrap_err(),
            StatusCode::INVALID_IO_COMMAND_SET.with_dnr()
        );
    }
    for cns in [cns::NVM_SET_LIST, cns::UUID_LIST, 0x09, 0x14, 0xff] {
        let answer = rig.identify_bytes(conn, Identify::new(cns), 1);
        assert_eq!(answer.unwrap_err(), INVALID, "CNS {cns:#x}");
    }
}

/// Goal: every feature reads as it was set, a reset brings its default back, and a feature that
/// cannot be set fails with the reason.
#[test]
fn features_read_back() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let settable: [(u8, u32, u32); 10] = [
        (fid::ARBITRATION, 0x0102_0304, 0x0102_0304),
        (fid::POWER_MANAGEMENT, 0x40, 0x40),
        (fid::TEMPERATURE_THRESHOLD, 300, 300),
        (fid::ERROR_RECOVERY, 7, 7),
        (fid::NUMBER_OF_QUEUES, 0x0007_0003, 0x0003_0003),
        (fid::WRITE_ATOMICITY, 1, 1),
        (fid::ASYNC_EVENT_CONFIGURATION, 0x03, 0x03),
        (fid::IO_COMMAND_SET_PROFILE, 0, 0),
        (fid::VOLATILE_WRITE_CACHE, 1, 1),
        (fid::KEEP_ALIVE_TIMER, 12_345, 13_000),
    ];
    let mut defaults = Vec::new();
    for (fid, value, reads) in settable {
        let select = |select| GetFeatures {
            select,
            ..GetFeatures::new(fid)
        };
        let default = rig.feature(conn, select(Select::Default)).unwrap();
        assert_eq!(rig.feature(conn, select(Select::Saved)), Ok(default));
        rig.set_feature(conn, fid, value).unwrap();
        let now = rig.feature(conn, GetFeatures::new(fid)).unwrap();
        assert_eq!(now, reads, "feature {fid:#x}");
        assert_eq!(rig.feature(conn, select(Select::Default)), Ok(default));
        let changeable = u32::from(fid != fid::VOLATILE_WRITE_CACHE) << 2;
        let capabilities = rig.feature(conn, select(Select::SupportedCapabilities));
        assert_eq!(capabilities, Ok(changeable), "feature {fid:#x}");
        defaults.push((fid, default));
        // It cannot be saved, and it is not one namespace's.
        let saved = SetFeatures {
            save: true,
            ..SetFeatures::new(fid, value)
        };
        for (sqe, refused) in [
            (saved.to_sqe(700, 0), StatusCode::FEATURE_NOT_SAVEABLE),
            (
                SetFeatures::new(fid, value).to_sqe(701, 1),
                StatusCode::FEATURE_NOT_NAMESPACE_SPECIFIC,
            ),
        ] {
            assert_eq!(rig.status(conn, sqe, &[]), refused.with_dnr());
        }
    }
    rig.write_cc(conn, Cc(0)).unwrap();
    rig.enable(conn);
    for (fid, default) in defaults {
        // The timer that Connect has started survives.
        let expected = if fid == fid::KEEP_ALIVE_TIMER {
            13_000
        } else {
            default
        };
        assert_eq!(
            rig.feature(conn, GetFeatures::new(fid)),
            Ok(expected),
            "feature {fid:#x}"
        );
    }
}

const NOT_CHANGEABLE: StatusCode = StatusCode::FEATURE_NOT_CHANGEABLE.with_dnr();

#[test]
fn features_refused() {
    let mut rig = Rig::with_malloc();
    let (conn, cntlid) = rig.admin();
    for (fid, value, refused) in [
        (fid::NUMBER_OF_QUEUES, 0x0000_ffff, INVALID),
        (fid::NUMBER_OF_QUEUES, 0xffff_0000, INVALID),
        (fid::POWER_MANAGEMENT, 1, INVALID),
        (fid::ERROR_RECOVERY, 1 << 16, INVALID),
        (fid::TEMPERATURE_THRESHOLD, 2 << 20, INVALID),
        (fid::TEMPERATURE_THRESHOLD, 1 << 16, INVALID),
        (fid::ASYNC_EVENT_CONFIGURATION, 1 << 31, INVALID),
        (fid::ASYNC_EVENT_CONFIGURATION, 1 << 11, INVALID),
        (fid::ASYNC_EVENT_CONFIGURATION, 1 << 16, INVALID),
        (
            fid::IO_COMMAND_SET_PROFILE,
            1,
            StatusCode::IO_COMMAND_SET_COMBINATION_REJECTED.with_dnr(),
        ),
        (fid::VOLATILE_WRITE_CACHE, 0, NOT_CHANGEABLE),
        (
            fid::HOST_IDENTIFIER,
            1,
            StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr(),
        ),
        (fid::INTERRUPT_COALESCING, 0, NOT_CHANGEABLE),
        (fid::INTERRUPT_COALESCING, 0x0a05, NOT_CHANGEABLE),
        (fid::INTERRUPT_VECTOR_CONFIGURATION, 1 << 16, NOT_CHANGEABLE),
        (fid::LBA_RANGE_TYPE, 0, INVALID),
        (fid::TIMESTAMP, 0, INVALID),
        (0x00, 0, INVALID),
        (0xc0, 0, INVALID),
    ] {
        let answer = rig.set_feature(conn, fid, value);
        assert_eq!(answer, Err(refused), "feature {fid:#x} value {value:#x}");
    }
    for fid in [
        fid::INTERRUPT_COALESCING,
        fid::INTERRUPT_VECTOR_CONFIGURATION,
    ] {
        for select in [Select::Current, Select::Default, Select::Saved] {
            let get = GetFeatures {
                select,
                ..GetFeatures::new(fid)
            };
            assert_eq!(rig.feature(conn, get), Ok(0), "feature {fid:#x}");
        }
    }
    for fid in [fid::LBA_RANGE_TYPE, 0x00, 0xff] {
        assert_eq!(rig.feature(conn, GetFeatures::new(fid)), Err(INVALID));
    }
    let mut reserved_select = GetFeatures::new(fid::ARBITRATION).to_sqe(600, 0);
    reserved_select.cdw10 = (u32::from(fid::ARBITRATION) | 4 << 8).into();
    assert_eq!(rig.status(conn, reserved_select, &[]), INVALID);
    // The number of queues is settled before the first of them connects.
    rig.io_queue(cntlid, 1);
    let late = rig.set_feature(conn, fid::NUMBER_OF_QUEUES, 3 << 16 | 3);
    assert_eq!(late, Err(StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr()));
}

#[test]
fn host_identifier() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let get = |cdw11| GetFeatures {
        cdw11,
        ..GetFeatures::new(fid::HOST_IDENTIFIER)
    };
    let data = rig.fetch(conn, get(1).to_sqe(800, 0), 16).unwrap();
    assert_eq!(data, [1; 16]);
    let short = rig.fetch(conn, get(0).to_sqe(801, 0), 8);
    assert_eq!(
        short,
        Err(INVALID),
        "64 bits are not enough for a fabrics host"
    );
}

fn host_behavior(rig: &mut Rig, conn: ConnId, behavior: &HostBehavior) -> StatusCode {
    let cid = rig.cid();
    let sqe = SetFeatures::new(fid::HOST_BEHAVIOR_SUPPORT, 0)
        .to_sqe(cid, 0)
        .with_sgl(Sgl::Transport { length: 512 });
    rig.status(conn, sqe, behavior.as_bytes())
}

/// Goal: a device that is busy for a moment causes a status that the host understands.
#[test]
fn retry_delays_only_for_hosts_that_honour_them() {
    let (mut rig, scripted) = rig_scripted();
    let (conn, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    scripted.script(|state| state.status = Status::Retry);
    let read = |cid| {
        ReadWrite::new(0, 1)
            .to_sqe(opcode::READ, cid, 1)
            .with_sgl(Sgl::Transport { length: 512 })
    };
    assert_eq!(
        rig.status(io, read(1), &[]),
        StatusCode::NAMESPACE_NOT_READY
    );

    let mut behavior = HostBehavior::zeroed();
    behavior.acre = 1;
    assert!(host_behavior(&mut rig, conn, &behavior).is_success());
    let get = GetFeatures::new(fid::HOST_BEHAVIOR_SUPPORT).to_sqe(802, 0);
    assert_eq!(rig.fetch(conn, get, 512).unwrap(), behavior.as_bytes());
    assert_eq!(
        rig.status(io, read(2), &[]),
        StatusCode::COMMAND_INTERRUPTED.with_crd(1)
    );

    let spoils: [fn(&mut HostBehavior); 3] = [|b| b.acre = 2, |b| b.etdas = 1, |b| b.lbafee = 1];
    for spoil in spoils {
        let mut bad = HostBehavior::zeroed();
        spoil(&mut bad);
        assert_eq!(host_behavior(&mut rig, conn, &bad), INVALID);
    }
    assert_eq!(
        rig.status(io, read(3), &[]).crd(),
        1,
        "a refused value changes nothing"
    );
    behavior.acre = 0;
    assert!(host_behavior(&mut rig, conn, &behavior).is_success());
    assert_eq!(
        rig.status(io, read(4), &[]),
        StatusCode::NAMESPACE_NOT_READY
    );
}

/// Goal: a discovery controller has what belongs to it, and nothing of an I/O controller.
#[test]
fn discovery_controllers_are_small() {
    let mut rig = Rig::with_malloc();
    let conn = rig.discovery(HOSTNQN);
    let id = rig.identify_controller(conn);
    assert_eq!((id.cntrltype, id.dctype), (cntrltype::DISCOVERY, 1));
    assert_eq!(
        (id.nn.get(), id.oncs.get(), id.vwc, id.crdt1.get()),
        (0, 0, 0, 0)
    );
    assert_eq!(id.oaes.get(), 1 << 31);
    assert!(id.maxcmd.get() != 0 && id.kas.get() != 0);
    assert!(Nqn::from_field(&id.subnqn).unwrap().is_discovery());
    for cns in [cns::NAMESPACE, cns::ACTIVE_NAMESPACES, cns::IO_CONTROLLER] {
        let answer = rig.identify_bytes(conn, Identify::new(cns), 1);
        assert_eq!(answer.unwrap_err(), INVALID);
    }
    assert_eq!(
        rig.set_feature(conn, fid::NUMBER_OF_QUEUES, 0),
        Err(INVALID)
    );
    assert_eq!(
        rig.set_feature(conn, fid::ASYNC_EVENT_CONFIGURATION, 1 << 8),
        Err(INVALID)
    );
    assert_eq!(
        rig.set_feature(conn, fid::ASYNC_EVENT_CONFIGURATION, 1 << 31),
        Ok(0)
    );
    let cap = Cap(rig
        .property(conn, offset::CAP, PropertySize::Eight)
        .unwrap());
    assert_eq!(cap.css(), Cap::CSS_NVM);
    let unsupported = Cc::enabled().with_css(Cc::CSS_ALL_IO_COMMAND_SETS);
    rig.write_cc(conn, Cc(0)).unwrap();
    assert_eq!(rig.write_cc(conn, unsupported), Err(INVALID));
}

#[test]
fn registers() {
    let mut rig = Rig::with_malloc();
    let (conn, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
    assert!(cqe.status().is_success());
    let cap = Cap(rig
        .property(conn, offset::CAP, PropertySize::Eight)
        .unwrap());
    assert_eq!(cap.queue_entries_max(), 128);
    assert_eq!(
        (cap.cqr(), cap.mpsmin(), cap.crwms(), cap.nssrs()),
        (1, 0, 1, 0)
    );
    assert!(cap.css() & Cap::CSS_NVM != 0 && cap.css() & Cap::CSS_IO_COMMAND_SETS != 0);
    let crto = rig
        .property(conn, offset::CRTO, PropertySize::Four)
        .unwrap();
    assert_eq!(crto, cap.to());
    assert_eq!(rig.csts(conn), Csts(0));
    for (register, size) in [
        (offset::CAP, PropertySize::Four),
        (offset::CSTS, PropertySize::Eight),
        (offset::AQA, PropertySize::Four),
        (0x1000, PropertySize::Four),
    ] {
        assert_eq!(
            rig.property(conn, register, size),
            Err(INVALID),
            "{register:#x}"
        );
    }
    let write = |register, value| fabrics::PropertySet {
        size: PropertySize::Four,
        offset: register,
        value,
    };
    for register in [offset::CAP, offset::VS, offset::CSTS, offset::NSSR, 0x1000] {
        let sqe = write(register, 0x4e56_4d65).to_sqe(300);
        assert_eq!(rig.status(conn, sqe, &[]), INVALID, "{register:#x}");
    }

    // A page size that is not there: refused, and fatal until a good one comes.
    assert_eq!(rig.write_cc(conn, Cc::enabled().with_mps(1)), Err(INVALID));
    assert!(rig.csts(conn).is_fatal() && !rig.csts(conn).is_ready());
    rig.write_cc(conn, Cc::enabled().with_css(Cc::CSS_ALL_IO_COMMAND_SETS))
        .unwrap();
    assert_eq!(rig.csts(conn), Csts(0).with_rdy(1));
    let cc = rig.property(conn, offset::CC, PropertySize::Four).unwrap();
    assert_eq!(cc, 0x0046_0061);

    // Shutdown, then reset, then up again.
    rig.write_cc(conn, Cc::enabled().with_shn(1)).unwrap();
    assert_eq!(rig.csts(conn).shst(), Csts::SHST_COMPLETE);
    rig.write_cc(conn, Cc(0)).unwrap();
    assert_eq!(rig.csts(conn), Csts(0));
    rig.enable(conn);
    assert_eq!(rig.csts(conn), Csts(0).with_rdy(1));

    let disconnect = rig.status(conn, fabrics::disconnect(301), &[]);
    assert_eq!(disconnect, StatusCode::INVALID_QUEUE_TYPE.with_dnr());
}

/// Goal: CSTS.RDY waits for I/O in the devices; a host that does not wait is refused.
#[test]
fn disabling_waits_for_the_devices() {
    let (mut rig, scripted) = rig_scripted();
    let (conn, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    scripted.script(|state| state.held = true);
    let read = ReadWrite::new(0, 1)
        .to_sqe(opcode::READ, 5, 1)
        .with_sgl(Sgl::Transport { length: 512 });
    rig.send(io, read, None);
    rig.turn();
    rig.write_cc(conn, Cc(0)).unwrap();
    rig.turn();
    assert!(rig.csts(conn).is_ready(), "its read is still in the device");
    assert_eq!(
        rig.write_cc(conn, Cc::enabled()),
        Err(StatusCode::COMMAND_SEQUENCE_ERROR)
    );
    scripted.script(|state| state.held = false);
    rig.turn();
    rig.turn();
    assert!(!rig.csts(conn).is_ready());
    rig.enable(conn);
    rig.io_queue(cntlid, 1);
}

/// ANAGRPMAX bounds the groups that namespaces can be in.
#[test]
fn ana_groups_have_a_range() {
    let rig = Rig::with_malloc();
    let max = SubsystemConfig::DEFAULT_MAX_NAMESPACES;
    for (group, fits) in [(0, false), (1, true), (max, true), (max + 1, false)] {
        let bdev = ram();
        let config = NamespaceConfig {
            nsid: None,
            bdev_name: bdev.name().to_string(),
            ids: NamespaceIds::from_uuid(bdev.uuid()),
            backing: backing(bdev),
            ana_group: Some(group),
            auto_visible: true,
            reservations: Default::default(),
        };
        let added = rig.target.add_namespace(&nqn(SUBNQN), config);
        assert_eq!(added.is_ok(), fits, "group {group}");
    }
}

/// Goal: a command during the teardown of its controller, before its core knows of that, is not
/// answered with an error: hosts take an error for the state of a namespace, and remove it. The
/// host sends it again on the next connection.
#[test]
fn nothing_is_refused_for_the_sake_of_a_teardown() {
    let (mut rig, _) = rig_scripted();
    let commands = [
        Identify::new(cns::CONTROLLER).to_sqe(900, 0),
        Identify::new(cns::NAMESPACE_DESCRIPTORS).to_sqe(900, 1),
        GetFeatures::new(fid::ARBITRATION).to_sqe(900, 0),
        nacre_nvmf_wire::commands::admin::keep_alive(900),
        nacre_nvmf_wire::commands::admin::async_event_request(900),
    ];
    for sqe in commands {
        let (conn, cntlid) = rig.admin();
        let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
        let association = subsystem.controller(cntlid).unwrap();
        let leaves = move || association.tear_down(Teardown::TargetStopping);
        rig.wire.borrow_mut().meanwhile = Some(Box::new(leaves));
        rig.send(conn, sqe.with_sgl(Sgl::Transport { length: 4096 }), None);
        (0..3).for_each(|_| rig.turn());
        assert_eq!(rig.statuses(), [], "{sqe:?}");
        assert!(rig.wire.borrow().closes.iter().any(|(c, _)| *c == conn));
        rig.assert_clean();
    }
}
