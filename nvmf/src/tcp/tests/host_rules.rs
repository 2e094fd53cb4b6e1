//! Tests of the host's machine with PDUs written by hand: its refusals, and its guesses of the next
//! PDU.

use hex_literal::hex;
use nacre_hugepages::Pool;
use nacre_nvmf_wire::cqe::Cqe;
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::Sqe;
use nacre_nvmf_wire::status::StatusCode;
use nacre_nvmf_wire::tcp::{
    CapsuleResp, DataAlignment, DataPdu, Digests, FatalErrorStatus, IcResp, PduFlags, PduType, R2t,
    Side, TermPdu, TermReq,
};
use nacre_reactor::Nanos;
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::pair::{filled, gather, pattern, pool};
use crate::tcp::{HostConfig, HostConn, HostPoll, RecvSlices, RxBuffers, Slices};
use crate::transport::{Closed, HostCommand, HostEvent};

const NOW: Nanos = Nanos(0);
const END: PduFlags = PduFlags::LAST_PDU.union(PduFlags::SUCCESS);

/// A host's end and the controller's bytes.
struct Raw {
    conn: HostConn,
    memory: Pool,
    buffers: RxBuffers,
    out: Vec<u8>,
    done: Vec<(Cqe, Option<Vec<u8>>, u32)>,
    closed: Option<Closed>,
}

impl Raw {
    fn new(digests: Digests) -> Self {
        let mut raw = Self {
            conn: HostConn::new(
                HostConfig {
                    digests,
                    entries: 16,
                    ..HostConfig::default()
                },
                NOW,
            ),
            memory: pool(64, 2),
            buffers: RxBuffers::new(2, 64 << 10),
            out: Vec::new(),
            done: Vec::new(),
            closed: None,
        };
        raw.turn();
        assert_eq!(
            raw.out[..16],
            [
                &hex!("0000 8000 80000000 0000 00")[..],
                &[digests.bits()],
                &hex!("0f000000")
            ]
            .concat()
        );
        raw.out.clear();
        raw
    }

    fn connected(digests: Digests) -> Self {
        let mut raw = Self::new(digests);
        raw.feed(IcResp::new(DataAlignment::DWORD, digests, 4096).as_bytes());
        assert_eq!(raw.closed, None);
        raw
    }

    fn feed(&mut self, bytes: &[u8]) {
        self.feed_in(bytes, usize::MAX);
    }

    fn feed_in(&mut self, mut bytes: &[u8], chunk: usize) {
        while !bytes.is_empty() && self.conn.wants_read() {
            let mut slices = RecvSlices::new();
            assert!(self.conn.recv_slices(&mut self.buffers, &mut slices));
            let mut n = 0;
            for slice in &mut slices {
                let take = slice.len().min(bytes.len()).min(chunk - n);
                slice[..take].copy_from_slice(&bytes[..take]);
                bytes = &bytes[take..];
                n += take;
            }
            drop(slices);
            self.conn.received(n);
            self.turn();
        }
    }

    fn turn(&mut self) {
        self.take_events();
        self.conn.end_receive(&mut self.buffers, false, NOW);
        let mut slices = Slices::new();
        self.conn.send_slices(&mut slices);
        let bytes = gather(&slices, usize::MAX);
        drop(slices);
        self.conn.sent(bytes.len());
        self.out.extend(bytes);
        self.take_events();
    }

    fn take_events(&mut self) {
        while let HostPoll::Event(event) = self.conn.poll(NOW) {
            match event {
                HostEvent::Ready => {}
                HostEvent::Completion {
                    cqe,
                    read,
                    transferred,
                } => {
                    self.done
                        .push((cqe, read.map(|buf| buf.to_vec()), transferred));
                }
                HostEvent::Closed(why) => self.closed = Some(why),
            }
        }
    }

    fn read(&mut self, cid: u16, len: usize) {
        let read = self.memory.acquire(len);
        self.conn.submit(HostCommand {
            sqe: Sqe::for_namespace(io::READ, cid, 1),
            write: None,
            read,
        });
        self.turn();
    }

    fn write(&mut self, cid: u16, len: usize) {
        let write = Some(filled(&self.memory, 5, len));
        self.conn.submit(HostCommand {
            sqe: Sqe::for_namespace(io::WRITE, cid, 1),
            write,
            read: None,
        });
        self.turn();
    }

    #[track_caller]
    fn assert_refused(&self, status: FatalErrorStatus, fei: u32, field: &str) {
        let why = self.closed.clone().expect("the connection goes on");
        assert!(
            matches!(&why, Closed::Protocol(text) if text.contains(field)),
            "{why:?} does not name {field}"
        );
        let (request, _) = TermReq::ref_from_prefix(&self.out).expect("no termination request");
        assert_eq!(request.ch.pdu_type, PduType::H2cTermReq as u8);
        assert_eq!((request.status(), request.fei.get()), (Ok(status), fei));
    }
}

fn c2h(cid: u16, offset: u32, data: &[u8], flags: PduFlags) -> Vec<u8> {
    let header = DataPdu::c2h(
        cid,
        offset,
        data.len() as u32,
        flags,
        Digests::NONE,
        DataAlignment::DWORD,
    );
    [header.as_bytes(), data].concat()
}

fn response(cqe: Cqe) -> Vec<u8> {
    CapsuleResp::new(cqe, Digests::NONE).as_bytes().to_vec()
}

fn r2t(cid: u16, offset: u32, length: u32) -> Vec<u8> {
    R2t::new(cid, 77, offset, length, Digests::NONE)
        .as_bytes()
        .to_vec()
}

/// A controller that completes a write before it received the requested data: the command is not
/// over before its buffer is released, which its owner may refill at once.
#[test]
fn answers_before_the_data_has_left() {
    for in_capsule in [true, false] {
        let mut raw = Raw::connected(Digests::NONE);
        let length = if in_capsule { 8192 } else { 20_000 };
        raw.conn.submit(HostCommand {
            sqe: Sqe::for_namespace(io::WRITE, 2, 1),
            write: Some(filled(&raw.memory, 5, length)),
            read: None,
        });
        let mut early = response(Cqe::new(2, StatusCode::WRITE_FAULT));
        if !in_capsule {
            raw.turn();
            early = [r2t(2, 0, length as u32), early].concat();
        }
        let mut slices = RecvSlices::new();
        assert!(raw.conn.recv_slices(&mut raw.buffers, &mut slices));
        slices[0][..early.len()].copy_from_slice(&early);
        drop(slices);
        raw.conn.received(early.len());
        assert!(matches!(raw.conn.poll(NOW), HostPoll::Waiting));
        assert!(!raw.conn.wants_read() && raw.conn.has_news());
        raw.conn.end_receive(&mut raw.buffers, true, NOW);
        assert!(raw.memory.stats().iter().any(|c| c.free < c.count));
        raw.turn();
        assert_eq!(raw.done.len(), 1, "once it has left");
        assert!(raw.memory.stats().iter().all(|c| c.free == c.count));
    }
}

/// A write fails if the controller did not request all of its data, even if it reports success; a
/// reported failure keeps its status.
#[test]
fn writes_without_data() {
    for (asked, status, expected) in [
        (0, StatusCode::SUCCESS, StatusCode::DATA_TRANSFER_ERROR),
        (8192, StatusCode::SUCCESS, StatusCode::DATA_TRANSFER_ERROR),
        (20_000, StatusCode::SUCCESS, StatusCode::SUCCESS),
        (0, StatusCode::WRITE_FAULT, StatusCode::WRITE_FAULT),
    ] {
        let mut raw = Raw::connected(Digests::NONE);
        raw.write(2, 20_000);
        if asked > 0 {
            raw.feed(&r2t(2, 0, asked));
        }
        raw.feed(&response(Cqe::new(2, status)));
        assert_eq!(raw.done.len(), 1);
        assert_eq!(raw.done[0].0.status(), expected, "{asked} bytes");
        assert_eq!(raw.closed, None);
    }
}

#[test]
fn handshake() {
    use FatalErrorStatus::*;
    let good = |digests| {
        IcResp::new(DataAlignment::DWORD, digests, 4096)
            .as_bytes()
            .to_vec()
    };
    let change = |at: usize, value: u8| {
        let mut bytes = good(Digests::NONE);
        bytes[at] = value;
        bytes
    };
    for (bytes, status, fei, field) in [
        (good(Digests::BOTH), UnsupportedParameter, 11, "DGST"),
        (change(8, 9), UnsupportedParameter, 8, "PFV"),
        (change(10, 32), InvalidHeaderField, 10, "CPDA"),
        (change(13, 0x0f), InvalidHeaderField, 12, "MAXH2CDATA"),
        (change(12, 2), InvalidHeaderField, 12, "MAXH2CDATA"),
        (response(Cqe::success(1)), SequenceError, 0, "PDU-Type"),
    ] {
        let mut raw = Raw::new(Digests::NONE);
        raw.feed(&bytes);
        raw.assert_refused(status, fei, field);
    }
    // Digests that were asked for and are denied are not silently done without.
    let mut raw = Raw::new(Digests::BOTH);
    raw.feed(&good(Digests {
        header: true,
        data: false,
    }));
    raw.assert_refused(UnsupportedParameter, 11, "DGST");
}

/// Data and completions without a matching command, or in an invalid form.
#[test]
fn misbehaving_controllers() {
    use FatalErrorStatus::*;
    let data = pattern(1, 4096);
    for (bytes, status, fei, field) in [
        (c2h(9, 0, &data, END), InvalidHeaderField, 8, "CCCID"),
        (c2h(1, 4, &data[4..], END), DataOutOfRange, 0, "DATAO"),
        (
            c2h(1, 0, &pattern(1, 4100), END),
            DataOutOfRange,
            0,
            "DATAL",
        ),
        (c2h(2, 0, &data, END), DataOutOfRange, 0, "CCCID"),
        (
            c2h(1, 0, &data, PduFlags::SUCCESS),
            InvalidHeaderField,
            1,
            "FLAGS",
        ),
        (
            [
                c2h(1, 0, &data[..512], PduFlags::LAST_PDU),
                c2h(1, 512, &data[..512], END),
            ]
            .concat(),
            DataOutOfRange,
            0,
            "CCCID",
        ),
        (response(Cqe::success(9)), InvalidHeaderField, 8, "CCCID"),
        (
            response(Cqe::success(0xffff)),
            InvalidHeaderField,
            8,
            "CCCID",
        ),
        (
            [response(Cqe::success(1)), response(Cqe::success(1))].concat(),
            InvalidHeaderField,
            8,
            "CCCID",
        ),
        (r2t(1, 0, 512), DataOutOfRange, 0, "CCCID"),
        (r2t(9, 0, 512), InvalidHeaderField, 8, "CCCID"),
        (r2t(2, 512, 512), DataOutOfRange, 0, "R2TO"),
        (r2t(2, 0, 20_001), DataOutOfRange, 0, "R2TL"),
        (
            r2t(2, 0, 20_000)
                .into_iter()
                .chain(r2t(2, 0, 512))
                .collect(),
            InvalidHeaderField,
            8,
            "CCCID",
        ),
    ] {
        let mut raw = Raw::connected(Digests::NONE);
        raw.read(1, 4096);
        raw.write(2, 20_000);
        raw.out.clear();
        raw.feed(&bytes);
        if field == "CCCID" && raw.out.len() > 20_000 {
            // The second R2T, after one that was answered in full.
            let at = raw.out.len() - 48;
            raw.out.drain(..at);
            assert!(matches!(&raw.closed, Some(Closed::Protocol(_))));
            continue;
        }
        raw.assert_refused(status, fei, field);
    }
}

/// Several R2Ts, cut by MAXH2CDATA, each with its own LAST.
#[test]
fn r2ts() {
    let mut raw = Raw::connected(Digests::NONE);
    raw.write(2, 20_000);
    raw.out.clear();
    raw.feed(&[r2t(2, 0, 6000), r2t(2, 6000, 14_000)].concat());
    let mut at = 0;
    let mut got = Vec::new();
    let mut bytes = Vec::new();
    while at < raw.out.len() {
        let (pdu, rest) = DataPdu::ref_from_prefix(&raw.out[at..]).unwrap();
        let len = pdu.datal.get() as usize;
        assert_eq!((pdu.cccid.get(), pdu.ttag.get()), (2, 77));
        assert_eq!(pdu.datao.get() as usize, bytes.len());
        got.push((len, pdu.is_last()));
        bytes.extend_from_slice(&rest[..len]);
        at += 24 + len;
    }
    assert_eq!(
        got,
        [
            (4096, false),
            (1904, true),
            (4096, false),
            (4096, false),
            (4096, false),
            (1712, true)
        ]
    );
    assert_eq!(bytes, pattern(5, 20_000));
    raw.feed(&response(Cqe::success(2)));
    assert!(raw.done[0].0.status().is_success());
}

/// Damaged data fails the read with Transient Transport Error, however the controller ended it.
#[test]
fn damaged_data() {
    let digests = Digests {
        header: false,
        data: true,
    };
    let data = pattern(1, 4096);
    let good = crc_fast::crc32_iscsi(&data).to_le_bytes();
    for (digest, flags, expected) in [
        (good, END, StatusCode::SUCCESS),
        ([1; 4], END, StatusCode::TRANSIENT_TRANSPORT_ERROR),
        (
            [1; 4],
            PduFlags::LAST_PDU,
            StatusCode::TRANSIENT_TRANSPORT_ERROR,
        ),
    ] {
        let mut raw = Raw::connected(digests);
        raw.read(1, 4096);
        let header = DataPdu::c2h(1, 0, 4096, flags, digests, DataAlignment::DWORD);
        raw.feed(&[header.as_bytes(), &data, &digest].concat());
        if !flags.contains(PduFlags::SUCCESS) {
            raw.feed(CapsuleResp::new(Cqe::success(1), digests).as_bytes());
        }
        assert_eq!(raw.done[0].0.status(), expected);
        assert_eq!(raw.closed, None);
    }
}

#[test]
fn controller_terminates() {
    let mut raw = Raw::connected(Digests::NONE);
    raw.read(1, 4096);
    raw.feed(
        TermPdu::new(
            Side::Controller,
            FatalErrorStatus::SequenceError,
            0,
            &[1; 72],
        )
        .bytes(),
    );
    let why = raw.closed.clone();
    assert!(
        matches!(&why, Some(Closed::Protocol(text)) if text.contains("C2HTermReq")),
        "{why:?}"
    );
    assert!(raw.done.is_empty());
    // The read will not complete: its buffer is there to be taken back.
    let command = raw.conn.reclaim().expect("one command in flight");
    assert_eq!(command.sqe.cid(), 1);
    assert_eq!(command.read.map(|buf| buf.len()), Some(4096));
    assert!(raw.conn.reclaim().is_none());
    assert_eq!(raw.memory.stats()[0].free, 64);
}

impl Raw {
    /// Lengths of the pieces of memory that the next receive would fill.
    fn vector(&mut self) -> Vec<usize> {
        let mut slices = RecvSlices::new();
        assert!(self.conn.recv_slices(&mut self.buffers, &mut slices));
        slices.iter().map(|slice| slice.len()).collect()
    }
}

/// Guesses outlive a receive that ends in the middle of a PDU: the next receive goes to the rest of
/// its payload and on to the buffers of the following reads. After a receive without data it is
/// short.
#[test]
fn guesses_continue_behind_a_payload() {
    let mut raw = Raw::connected(Digests::NONE);
    // That the controller ends reads by the SUCCESS flag has to be seen first.
    raw.read(0, 4096);
    raw.feed(&c2h(0, 0, &pattern(0, 4096), END));
    for cid in 1..=6 {
        raw.read(cid, 4096);
    }
    assert_eq!(raw.vector(), [24, 4096].repeat(6));
    raw.conn.found_nothing();
    assert_eq!(raw.vector(), [24, 4096].repeat(4));

    let stream: Vec<u8> = (1..=6)
        .flat_map(|cid| c2h(cid, 0, &pattern(cid.into(), 4096), END))
        .collect();
    raw.feed(&stream[..24 + 1000]);
    let rest = [&[3096][..], &[24, 4096].repeat(5)].concat();
    assert_eq!(raw.vector(), rest);
    raw.conn.found_nothing();
    assert_eq!(raw.vector(), rest[..9]);
    raw.feed(&stream[24 + 1000..]);
    let ends = raw.done.drain(1..).enumerate();
    for (at, (cqe, read, _)) in ends {
        assert_eq!(usize::from(cqe.cid()), at + 1);
        assert_eq!(read, Some(pattern(at as u32 + 1, 4096)));
    }

    // A connection that ends gives back guessed buffers as well.
    raw.read(5, 4096);
    raw.read(6, 4096);
    assert_eq!(raw.vector(), [24, 4096].repeat(2));
    raw.conn.close();
    let mut kept: Vec<u16> = std::iter::from_fn(|| raw.conn.reclaim())
        .map(|command| {
            assert_eq!(command.read.map(|buf| buf.len()), Some(4096));
            command.sqe.cid()
        })
        .collect();
    kept.sort();
    assert_eq!(kept, [5, 6]);
}

/// Guessing begins with the oldest read in flight, though it was submitted before guessing was on,
/// and again after a pause: guesses that skip it would be wrong from the start.
#[test]
fn guesses_begin_with_the_oldest_read() {
    let mut raw = Raw::connected(Digests::NONE);
    let answer = |cid: u16| c2h(cid, 0, &pattern(cid.into(), 4096), END);
    for cid in 0..=3 {
        raw.read(cid, 4096);
    }
    raw.feed(&answer(0));
    raw.read(0, 4096);
    assert_eq!(raw.vector(), [24, 4096].repeat(4));

    // The last of the four is answered first: a pause.
    raw.feed(&answer(0));
    assert_eq!(raw.vector(), [64 << 10]);
    let mut receives = 0;
    while raw.vector() == [64 << 10] {
        receives += 1;
        assert!(receives < 64, "guessing never begins again");
        let next = [1, 2, 3][receives % 3];
        // Two are always under way while one is answered and submitted again.
        raw.feed(&answer(next));
        raw.read(next, 4096);
    }
    assert_eq!(raw.vector(), [24, 4096].repeat(3));
    raw.done.clear();
    let next: Vec<u16> = (1..=3).map(|at| [1, 2, 3][(receives + at) % 3]).collect();
    let stream: Vec<u8> = next.iter().flat_map(|&cid| answer(cid)).collect();
    // All of it by one receive: none of the guesses is wrong.
    raw.feed(&stream);
    let ends: Vec<u16> = raw.done.iter().map(|(cqe, ..)| cqe.cid()).collect();
    assert_eq!((ends, raw.closed.clone()), (next, None));
    raw.read(1, 4096);
    assert_eq!(raw.vector(), [24, 4096]);
}

/// How a controller may answer one of several reads.
#[derive(Debug, Clone, Copy)]
enum Answer {
    Whole,
    InTwo,
    WithResponse,
    ErrorStatus,
    Padded,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Reads answered in any order and any way, in any pieces: each gets its own data, whether it
    /// was guessed or not, and every buffer comes back.
    #[test]
    fn guesses_right_and_wrong(
        rounds in proptest::collection::vec(
            (
                proptest::collection::vec(
                    (
                        prop_oneof![
                            6 => Just(Answer::Whole),
                            1 => Just(Answer::InTwo),
                            1 => Just(Answer::WithResponse),
                            1 => Just(Answer::ErrorStatus),
                            1 => Just(Answer::Padded),
                        ],
                        prop_oneof![3 => Just(4096usize), 1 => Just(512usize), 1 => 2000usize..8192],
                    ),
                    1..12,
                ),
                prop_oneof![3 => Just(0usize), 1 => 0usize..12],
                prop_oneof![2 => Just(usize::MAX), 1 => 1usize..9000, 1 => Just(4120usize)],
                any::<bool>(),
            ),
            1..6,
        ),
    ) {
        let mut raw = Raw::connected(Digests::NONE);
        for (round, (reads, turn_by, chunk, looked)) in rounds.into_iter().enumerate() {
            for (cid, (_, len)) in (0u16..).zip(&reads) {
                raw.read(cid, *len);
            }
            if looked {
                raw.vector();
                raw.conn.found_nothing();
            }
            let mut order: Vec<usize> = (0..reads.len()).collect();
            order.rotate_left(turn_by % reads.len());
            let mut stream = Vec::new();
            for &cid in &order {
                let (answer, len) = reads[cid];
                let (id, data) = (cid as u16, pattern((round * 100 + cid) as u32, len));
                match answer {
                    Answer::Whole => stream.extend(c2h(id, 0, &data, END)),
                    Answer::InTwo => {
                        stream.extend(c2h(id, 0, &data[..300], PduFlags::empty()));
                        stream.extend(c2h(id, 300, &data[300..], END));
                    }
                    Answer::WithResponse => {
                        stream.extend(c2h(id, 0, &data, PduFlags::LAST_PDU));
                        stream.extend(response(Cqe::success(id)));
                    }
                    Answer::ErrorStatus => stream.extend(response(Cqe::new(id, StatusCode::new(2, 0x81)))),
                    Answer::Padded => {
                        let mut pdu = c2h(id, 0, &data, END);
                        pdu[3] += 8;
                        let plen = (pdu.len() + 8) as u32;
                        pdu[4..8].copy_from_slice(&plen.to_le_bytes());
                        pdu.splice(24..24, [0; 8]);
                        stream.extend(pdu);
                    }
                }
            }
            raw.feed_in(&stream, chunk);
            prop_assert_eq!(raw.closed.clone(), None);
            let ends: Vec<_> = raw.done.drain(..).collect();
            prop_assert_eq!(ends.iter().map(|end| usize::from(end.0.cid())).collect::<Vec<_>>(), order);
            for (cqe, read, transferred) in ends {
                let (answer, len) = reads[usize::from(cqe.cid())];
                if matches!(answer, Answer::ErrorStatus) {
                    prop_assert_eq!(cqe.status(), StatusCode::new(2, 0x81));
                    prop_assert_eq!(transferred, 0);
                } else {
                    prop_assert_eq!(transferred as usize, len);
                    let expected = pattern((round * 100) as u32 + u32::from(cqe.cid()), len);
                    prop_assert!(read == Some(expected), "wrong data for command {}", cqe.cid());
                }
            }
        }
        raw.conn.close();
        prop_assert_eq!(raw.memory.stats()[0].free, 64);
    }
}
