//! Tests of the simulator's data pointers and I/O commands, and of each injected fault.

use std::time::Duration;

use super::host::{ManualDriver, NSID, OK, PAGE, Pair, config, plain, prps, transfer};
use nacre_bdev_nvme::GONE;
use nacre_bdev_nvme_sim::{Action, Config, Format, Limits, NamespaceConfig, Rule, Target};
use nacre_nvmf_wire::commands::io::{
    CopyCommand, CopyFormat, CopyRange0, DatasetManagement, DsmRange, Protection, ReadWrite,
    WriteZeroes,
};
use nacre_nvmf_wire::identify::controller::Sgls;
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::registers::{Csts, offset};
use nacre_nvmf_wire::sqe::Psdt;
use nacre_nvmf_wire::zerocopy::IntoBytes;
use nacre_nvmf_wire::{Fuse, Sgl, SglDescriptor, Sqe, StatusCode};

/// Goal: data is transferred both ways, with two PRPs, a PRP list, an SGL of one block and SGL
/// segments. A wrong pointer fails the command and is recorded.
#[test]
fn data_pointers() {
    let (mut hand, mut pair) = ManualDriver::with_pair(config());
    let pattern: Vec<u8> = (0..6 * PAGE).map(|at| (at / 7) as u8).collect();
    hand.data.write(0, &pattern);
    // Two pages, starting in the middle of the first.
    let mut write = transfer(&hand, io::WRITE, 10, 8);
    prps(&mut write, hand.data.address(512), hand.data.address(PAGE));
    assert_eq!(hand.run(&mut pair, write).status(), OK);
    let stored = |hand: &ManualDriver, lba, blocks| hand.drive.stored(NSID, lba, blocks).unwrap();
    assert_eq!(stored(&hand, 10, 8), pattern[512..512 + PAGE]);
    // A list that starts at the end of one page and continues in another.
    let (list, more) = (31 * PAGE - 16, 29 * PAGE);
    let pages = [1, 2, 3, 4].map(|page| hand.data.address(page * PAGE));
    hand.data.write(list, &pages[0].to_le_bytes());
    hand.data
        .write(list + 8, &hand.data.address(more).to_le_bytes());
    for (at, page) in (0..).zip(&pages[1..]) {
        hand.data.write(more + at * 8, &page.to_le_bytes());
    }
    let mut write = transfer(&hand, io::WRITE, 100, 40);
    prps(&mut write, hand.data.address(0), hand.data.address(list));
    assert_eq!(hand.run(&mut pair, write).status(), OK);
    assert_eq!(stored(&hand, 100, 40), pattern[..5 * PAGE]);
    // An SGL of one block, then of two segments.
    let block = |hand: &ManualDriver, at: usize, length| {
        let address = hand.data.address(at);
        SglDescriptor::from(Sgl::DataBlock { address, length }).0
    };
    let mut read = transfer(&hand, io::READ, 100, 8);
    read.set_psdt(Psdt::Sgl);
    read.dptr = block(&hand, 20 * PAGE + 12, PAGE as u32);
    assert_eq!(hand.run(&mut pair, read).status(), OK);
    assert_eq!(hand.bytes(20 * PAGE + 12, PAGE), pattern[..PAGE]);
    let segment = |hand: &ManualDriver, at: usize, count: u32, last: bool| {
        let mut bytes = block(hand, at, count * 16);
        bytes[15] = if last { 0x30 } else { 0x20 };
        bytes
    };
    let (first, second) = (28 * PAGE, 28 * PAGE + 256);
    hand.data.write(first, &block(&hand, 21 * PAGE, 1024));
    hand.data
        .write(first + 16, &segment(&hand, second, 2, true));
    hand.data.write(second, &block(&hand, 23 * PAGE, 2048));
    hand.data.write(second + 16, &block(&hand, 22 * PAGE, 1024));
    read.dptr = segment(&hand, first, 2, false);
    assert_eq!(hand.run(&mut pair, read).status(), OK);
    assert_eq!(hand.bytes(21 * PAGE, 1024), pattern[..1024]);
    assert_eq!(hand.bytes(23 * PAGE, 2048), pattern[1024..3072]);
    assert_eq!(hand.bytes(22 * PAGE, 1024), pattern[3072..4096]);
    hand.drive.check();
    let stats = hand.drive.stats();
    assert_eq!((stats.sgls, stats.scattered), (2, 3));

    type Spoil = fn(&ManualDriver, &mut Sqe);
    let spoilt: [(Spoil, StatusCode); 7] = [
        (
            |hand, sqe| prps(sqe, hand.data.address(2), 0),
            StatusCode::PRP_OFFSET_INVALID,
        ),
        (
            |hand, sqe| prps(sqe, hand.data.address(8), hand.data.address(PAGE + 8)),
            StatusCode::PRP_OFFSET_INVALID,
        ),
        (
            |hand, sqe| prps(sqe, hand.data.address(0), hand.data.address(PAGE)),
            StatusCode::INVALID_FIELD,
        ),
        (
            |_, sqe| prps(sqe, 0x1000, 0),
            StatusCode::DATA_TRANSFER_ERROR,
        ),
        (
            |hand, sqe| {
                sqe.set_psdt(Psdt::Sgl);
                let (address, length) = (hand.data.address(0), 512);
                sqe.set_sgl(Sgl::DataBlock { address, length });
            },
            StatusCode::DATA_SGL_LENGTH_INVALID,
        ),
        (
            |hand, sqe| {
                sqe.set_psdt(Psdt::Sgl);
                let (address, length) = (hand.data.address(0), 8192);
                sqe.set_sgl(Sgl::DataBlock { address, length });
            },
            StatusCode::DATA_SGL_LENGTH_INVALID,
        ),
        (
            |_, sqe| {
                sqe.set_psdt(Psdt::Sgl);
                sqe.set_sgl(Sgl::Transport { length: 4096 });
            },
            StatusCode::SGL_DESCRIPTOR_TYPE_INVALID,
        ),
    ];
    for (number, (spoil, status)) in spoilt.into_iter().enumerate() {
        let mut sqe = transfer(&hand, io::READ, 0, 8);
        spoil(&hand, &mut sqe);
        let cqe = hand.run(&mut pair, sqe);
        assert_eq!(cqe.status(), status.with_dnr(), "{number}");
        assert_eq!(hand.drive.clear_violations(), 1);
    }
    assert_eq!(hand.drive.iommu().outside(), 1);
}

/// Goal: a drive without SGLs refuses them; a drive with dword-granular SGLs refuses odd lengths.
#[test]
fn sgl_support() {
    for (sgls, offset, status) in [
        (Sgls::empty(), 0, StatusCode::INVALID_FIELD),
        (
            Sgls::SUPPORTED_DWORD,
            2,
            StatusCode::SGL_DATA_BLOCK_GRANULARITY_INVALID,
        ),
    ] {
        let (mut hand, mut pair) = ManualDriver::with_pair(Config { sgls, ..config() });
        let mut sqe = transfer(&hand, io::READ, 0, 1);
        sqe.set_psdt(Psdt::Sgl);
        let (address, length) = (hand.data.address(offset), 512);
        sqe.set_sgl(Sgl::DataBlock { address, length });
        assert_eq!(hand.run(&mut pair, sqe).status(), status.with_dnr());
        assert_eq!(hand.drive.clear_violations(), 1);
    }
}

/// Goal: every I/O command has its effect.
#[test]
fn commands() {
    let (mut hand, mut pair) = ManualDriver::with_pair(Config {
        limits: Limits {
            dmrl: 2,
            ..Limits::default()
        },
        ..config()
    });
    let stored = |hand: &ManualDriver, lba| hand.drive.stored(NSID, lba, 1).unwrap()[0];
    hand.data.write(0, &[7; PAGE]);
    let write = transfer(&hand, io::WRITE, 0, 8);
    assert_eq!(hand.run(&mut pair, write).status(), OK);
    assert_eq!(hand.drive.dirty_blocks(), 8);
    assert_eq!(hand.run(&mut pair, plain(io::FLUSH)).status(), OK);
    assert_eq!(hand.drive.dirty_blocks(), 0);
    let mut fua = transfer(&hand, io::WRITE, 2, 8);
    fua.cdw12.set(fua.cdw12.get() | 1 << 30);
    assert_eq!(hand.run(&mut pair, fua).status(), OK);
    assert_eq!(hand.drive.dirty_blocks(), 0);

    let compare = transfer(&hand, io::COMPARE, 0, 8);
    assert_eq!(hand.run(&mut pair, compare).status(), OK);
    let compare = transfer(&hand, io::COMPARE, 5, 8);
    let cqe = hand.run(&mut pair, compare);
    assert_eq!(cqe.status(), StatusCode::COMPARE_FAILURE);

    let mut zeroes = WriteZeroes {
        slba: 1,
        blocks: 1,
        deallocate: true,
        ..WriteZeroes::default()
    }
    .to_sqe(0, NSID);
    zeroes.set_psdt(Psdt::Prp);
    assert_eq!(hand.run(&mut pair, zeroes).status(), OK);
    assert_eq!([0, 1, 2].map(|lba| stored(&hand, lba)), [7, 0, 7]);

    let ranges = [DsmRange::new(3, 2), DsmRange::new(7, 1)];
    let deallocate = |hand: &ManualDriver, count| {
        let command = DatasetManagement {
            ranges: count,
            deallocate: true,
            ..DatasetManagement::default()
        };
        hand.to_page(command.to_sqe(0, NSID))
    };
    hand.data.write(0, ranges.as_bytes());
    let dsm = deallocate(&hand, 2);
    assert_eq!(hand.run(&mut pair, dsm).status(), OK);
    let around = [2, 3, 4, 5, 6, 7, 8].map(|lba| stored(&hand, lba));
    assert_eq!(around, [7, 0, 0, 7, 7, 0, 7]);
    let dsm = deallocate(&hand, 3);
    let invalid = StatusCode::INVALID_FIELD.with_dnr();
    assert_eq!(hand.run(&mut pair, dsm).status(), invalid);
    assert_eq!(hand.drive.clear_violations(), 1, "DMRL");

    let copy = CopyCommand {
        sdlba: 50,
        ranges: 2,
        format: CopyFormat::Format0,
        fua: false,
        lr: false,
        read_protection: 0,
        protection: Protection::default(),
        directive: Default::default(),
    };
    let sources = [CopyRange0::new(2, 2), CopyRange0::new(5, 1)];
    hand.data.write(0, sources.as_bytes());
    let sqe = hand.to_page(copy.to_sqe(0, NSID));
    assert_eq!(hand.run(&mut pair, sqe).status(), OK);
    assert_eq!([50, 51, 52, 53].map(|lba| stored(&hand, lba)), [7, 0, 7, 0]);

    let mut verify = ReadWrite::new(0, 64).to_sqe(io::VERIFY, 0, NSID);
    verify.set_psdt(Psdt::Prp);
    assert_eq!(hand.run(&mut pair, verify).status(), OK);
    hand.drive.spoil_block(NSID, 63);
    let unreadable = StatusCode::UNRECOVERED_READ_ERROR.with_dnr();
    assert_eq!(hand.run(&mut pair, verify).status(), unreadable);
    let beyond = transfer(&hand, io::READ, 8191, 2);
    let out = StatusCode::LBA_OUT_OF_RANGE.with_dnr();
    assert_eq!(hand.run(&mut pair, beyond).status(), out);
    hand.drive.check();
}

/// Goal: a fused pair is executed as a whole or not at all.
#[test]
fn fused() {
    let (mut hand, mut pair) = ManualDriver::with_pair(config());
    let both = |hand: &mut ManualDriver, pair: &mut Pair, lba| {
        let mut compare = transfer(hand, io::COMPARE, lba, 1);
        compare.set_fuse(Fuse::First);
        let mut write = transfer(hand, io::WRITE, lba, 1);
        write.set_fuse(Fuse::Second);
        prps(&mut write, hand.data.address(PAGE), 0);
        hand.submit(pair, compare);
        hand.submit(pair, write);
        hand.ring(pair);
        hand.turn();
        [(); 2].map(|()| hand.reap(pair).expect("an answer").status())
    };
    hand.data.write(PAGE, &[9; 512]);
    assert_eq!(both(&mut hand, &mut pair, 4), [OK, OK]);
    let failed = [
        StatusCode::COMPARE_FAILURE,
        StatusCode::ABORTED_FAILED_FUSED,
    ];
    assert_eq!(both(&mut hand, &mut pair, 4), failed);
    assert_eq!(hand.drive.stored(NSID, 4, 1).unwrap(), [9; 512]);
    hand.drive.check();
    let mut alone = transfer(&hand, io::WRITE, 0, 1);
    alone.set_fuse(Fuse::Second);
    let cqe = hand.run(&mut pair, alone);
    assert_eq!(cqe.status(), StatusCode::ABORTED_MISSING_FUSED);
    assert_eq!(hand.drive.clear_violations(), 1);
}

/// Goal: completions wait for space in their queue, and have the right phase in every round.
#[test]
fn completion_queues_fill() {
    let (mut hand, mut pair) = ManualDriver::with_pair(config());
    let mut seen = 0;
    for _ in 0..10 {
        for _ in 0..6 {
            hand.submit(&mut pair, plain(io::FLUSH));
        }
        hand.ring(&pair);
        hand.turn();
        for _ in 0..3 {
            hand.submit(&mut pair, plain(io::FLUSH));
        }
        if hand.reap(&mut pair).is_some() {
            seen += 1;
        }
        // Three more commands, with space for two completions.
        hand.ring(&pair);
        hand.turn();
        while hand.reap(&mut pair).is_some() {
            seen += 1;
            hand.turn();
        }
    }
    assert_eq!(seen, 90);
    assert!(hand.drive.stats().full_completion_queues >= 10);
    hand.drive.check();
}

/// Goal: every fault has the effect that its name describes.
#[test]
fn faults() {
    let begin = |action| {
        let (mut hand, mut pair) = ManualDriver::with_pair(config());
        hand.function.interrupts(2).unwrap();
        hand.drive
            .inject(Rule::next(Target::IoOp(io::WRITE), action));
        hand.data.write(0, &[5; 512]);
        let write = transfer(&hand, io::WRITE, 1, 1);
        let cid = hand.submit(&mut pair, write);
        hand.ring(&pair);
        hand.turn();
        let done = hand
            .drive
            .stored(NSID, 1, 1)
            .is_some_and(|stored| stored[0] == 5);
        (hand, pair, cid, done)
    };
    let failed = StatusCode::INTERNAL_ERROR;
    for (action, status, should) in [
        (Action::Status(failed), failed, false),
        (
            Action::DoneButStatus(failed.with_dnr()),
            failed.with_dnr(),
            true,
        ),
        (Action::LoseInterrupt, OK, true),
    ] {
        let (hand, pair, _, done) = begin(action);
        let cqe = hand.peek(&pair).expect("an answer");
        assert_eq!((cqe.status(), done), (status, should), "{action:?}");
        let fired = hand.function.acknowledge(1);
        assert_eq!(fired, action != Action::LoseInterrupt);
        assert!(!hand.function.acknowledge(1));
    }
    let (hand, pair, cid, _) = begin(Action::WrongCid(3));
    assert_eq!(hand.peek(&pair).unwrap().cid(), cid + 3);
    let (hand, pair, ..) = begin(Action::WrongSqid(3));
    assert_eq!(hand.peek(&pair).unwrap().sqid.get(), 4);
    let (hand, pair, ..) = begin(Action::WrongHead(5));
    assert_eq!(hand.peek(&pair).unwrap().sqhd(), 6);
    let (hand, pair, _, done) = begin(Action::WrongPhase);
    assert!(done && hand.peek(&pair).is_none());
    let (hand, mut pair, cid, _) = begin(Action::Duplicate);
    for _ in 0..2 {
        assert_eq!(hand.reap(&mut pair).unwrap().cid(), cid);
    }
    let (mut hand, pair, _, done) = begin(Action::Late(Duration::from_secs(1)));
    assert!(done && hand.peek(&pair).is_none());
    hand.now = hand.now + Duration::from_secs(1);
    hand.turn();
    assert!(hand.peek(&pair).is_some());
    let (mut hand, pair, _, done) = begin(Action::Hold);
    assert!(!done && hand.drive.stuck() == 1);
    hand.drive.release();
    hand.turn();
    assert!(hand.peek(&pair).is_some());
    let (hand, ..) = begin(Action::Fatal);
    assert!(hand.csts().is_fatal());
    let (hand, ..) = begin(Action::ResetItself);
    assert_eq!(hand.csts(), Csts(0));
    let (hand, ..) = begin(Action::Pulled);
    assert_eq!(hand.function.read32(offset::CSTS), GONE);
    assert!(!hand.function.is_present());
}

/// Goal: commands take random times and complete out of order, in the same order for the same seed.
#[test]
fn out_of_order() {
    let order = |seed| {
        let (mut hand, mut pair) = ManualDriver::with_pair(Config { seed, ..config() });
        let latency = (Duration::from_micros(10), Duration::from_micros(90));
        hand.drive
            .reconfigure(|config| config.pace.latency = latency);
        let first: Vec<u16> = (0..7)
            .map(|_| hand.submit(&mut pair, plain(io::FLUSH)))
            .collect();
        hand.ring(&pair);
        hand.turn();
        assert!(hand.reap(&mut pair).is_none());
        hand.now = hand.now + Duration::from_micros(100);
        hand.turn();
        let ended: Vec<u16> = std::iter::from_fn(|| hand.reap(&mut pair))
            .map(|cqe| cqe.cid() - first[0])
            .collect();
        hand.drive.check();
        ended
    };
    let (one, two) = (order(1), order(2));
    assert_eq!((one.len(), two.len()), (7, 7));
    assert_ne!(one, two);
    assert_eq!(one, order(1));
}

/// Goal: a namespace with metadata refuses transfers without space for the metadata.
#[test]
fn metadata() {
    let mut namespace = NamespaceConfig::new(NSID, 512, 64);
    namespace.formats.push(Format {
        block_size: 512,
        metadata: 8,
    });
    namespace.format = 1;
    let begin = |protection| {
        let mut namespace = namespace.clone();
        namespace.protection = protection;
        ManualDriver::with_pair(Config {
            namespaces: vec![namespace],
            ..config()
        })
    };
    let (mut hand, mut pair) = begin(0);
    let read = transfer(&hand, io::READ, 0, 1);
    let invalid = StatusCode::INVALID_FIELD.with_dnr();
    assert_eq!(hand.run(&mut pair, read).status(), invalid);
    assert_eq!(hand.drive.clear_violations(), 1);
    let (mut hand, mut pair) = begin(1);
    let mut read = transfer(&hand, io::READ, 0, 1);
    read.cdw12.set(read.cdw12.get() | 1 << 29);
    assert_eq!(hand.run(&mut pair, read).status(), OK);
    hand.drive.check();
}

/// Goal: a controller on its own thread completes commands, whether that thread sleeps or not.
#[test]
fn a_controller_on_its_own_thread_completes_commands() {
    let (hand, mut pair) = ManualDriver::with_pair(Config {
        strict_doorbells: false,
        ..config()
    });
    let mut hand = hand;
    let _running = hand.drive.spawn();
    for round in 0..200u64 {
        hand.submit(&mut pair, plain(io::FLUSH));
        hand.ring(&pair);
        let began = std::time::Instant::now();
        while hand.reap(&mut pair).is_none() {
            assert!(began.elapsed() < Duration::from_secs(30));
            std::thread::yield_now();
        }
        if round % 50 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    hand.drive.check();
}
