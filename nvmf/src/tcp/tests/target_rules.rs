//! Tests of the controller's machine with PDUs written by hand: the fatal error status and
//! information of each refusal, and errors that fail only the command.

use std::rc::Rc;

use hex_literal::hex;
use nacre_nvmf_wire::cqe::Cqe;
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::status::StatusCode;
use nacre_nvmf_wire::tcp::{
    CapsuleCmd, DataAlignment, DataPdu, Digests, FatalErrorStatus, IcReq, PduType, Side, TermPdu,
    TermReq,
};
use nacre_reactor::Nanos;
use zerocopy::{FromBytes, IntoBytes};

use super::pair::{App, gather, io_queue, pattern, pools};
use crate::tcp::controller::{TargetConn, TargetPoll, TcpTargetConfig};
use crate::tcp::{RecvSlices, RxBuffers, Slices};
use crate::transport::{Closed, Pools, QueueParams, ReqTag};

/// A controller's end and the host's bytes.
pub(super) struct Raw {
    pub conn: TargetConn,
    pub app: App,
    pub pools: Pools,
    pub buffers: RxBuffers,
    pub out: Vec<u8>,
}

pub(super) const NOW: Nanos = Nanos(0);

impl Raw {
    pub(super) fn new(config: TcpTargetConfig) -> Self {
        Self {
            conn: TargetConn::new(Rc::new(config), NOW),
            app: App::new(),
            pools: pools(16, 4),
            buffers: RxBuffers::new(2, 16 << 10),
            out: Vec::new(),
        }
    }

    /// After ICReq and Connect, on an I/O queue of four entries.
    pub(super) fn connected(digests: Digests) -> Self {
        let mut raw = Self::new(TcpTargetConfig {
            max_h2c_data_bytes: 4096,
            ..TcpTargetConfig::default()
        });
        raw.feed(IcReq::new(DataAlignment::DWORD, digests, 1).as_bytes());
        assert_eq!(raw.out.len(), 128, "no ICResp");
        assert_eq!(raw.out[11], digests.bits());
        raw.out.clear();
        raw.conn.established(QueueParams {
            entries: 4,
            ..io_queue(false)
        });
        raw
    }

    pub(super) fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.conn.wants_read() {
            let mut slices = RecvSlices::new();
            assert!(self.conn.recv_slices(&mut self.buffers, &mut slices));
            let mut n = 0;
            for slice in &mut slices {
                let take = slice.len().min(bytes.len());
                slice[..take].copy_from_slice(&bytes[..take]);
                bytes = &bytes[take..];
                n += take;
            }
            drop(slices);
            self.conn.received(n, NOW);
            self.turn();
        }
    }

    pub(super) fn turn(&mut self) {
        while let TargetPoll::Event(event) = self.conn.poll(&self.pools, NOW) {
            self.app.handle(event, &mut self.conn, &self.pools);
        }
        self.conn.end_receive(&mut self.buffers, false, NOW);
        let mut slices = Slices::new();
        self.conn.send_slices(&mut slices);
        let bytes = gather(&slices, usize::MAX);
        drop(slices);
        self.conn.sent(bytes.len(), NOW);
        self.out.extend(bytes);
        while let TargetPoll::Event(event) = self.conn.poll(&self.pools, NOW) {
            self.app.handle(event, &mut self.conn, &self.pools);
        }
    }

    /// The connection ended with C2HTermReq, which says this.
    #[track_caller]
    fn assert_refused(&self, status: FatalErrorStatus, fei: u32, field: &str, offending: &[u8]) {
        let why = self.app.closed.clone().expect("the connection goes on");
        assert!(
            matches!(&why, Closed::Protocol(text) if text.contains(field)),
            "{why:?} does not name {field}"
        );
        let (request, rest) = TermReq::ref_from_prefix(&self.out).expect("no termination request");
        assert_eq!(request.ch.pdu_type, PduType::C2hTermReq as u8);
        assert_eq!((request.status(), request.fei.get()), (Ok(status), fei));
        assert_eq!(request.ch.plen.get() as usize, self.out.len());
        assert!(
            !rest.is_empty() && offending.starts_with(rest),
            "the quoted header differs"
        );
        assert!(!self.conn.is_finished(), "the host gets time to read it");
    }

    fn last_cqe(&self) -> Cqe {
        let at = self.out.len() - Cqe::SIZE;
        Cqe::read_from_bytes(&self.out[at..]).unwrap()
    }
}

pub(super) fn write_sqe(cid: u16, sgl: Sgl) -> Sqe {
    Sqe::for_namespace(io::WRITE, cid, 1).with_sgl(sgl)
}

pub(super) fn capsule(sqe: Sqe, data: &[u8]) -> Vec<u8> {
    let header = CapsuleCmd::new(sqe, data.len() as u32, Digests::NONE, DataAlignment::DWORD);
    [header.as_bytes(), data].concat()
}

pub(super) fn h2c(cid: u16, ttag: u16, offset: u32, len: u32, last: bool) -> Vec<u8> {
    let header = DataPdu::h2c(
        cid,
        ttag,
        offset,
        len,
        last,
        Digests::NONE,
        DataAlignment::DWORD,
    );
    [header.as_bytes(), &pattern(1, len as usize)].concat()
}

/// What may come first, and how it has to look.
#[test]
fn handshake() {
    use FatalErrorStatus::*;
    let good = IcReq::new(DataAlignment::DWORD, Digests::BOTH, 4)
        .as_bytes()
        .to_vec();
    let change = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    let second = [&good[..], &good[..]].concat();
    for (bytes, status, fei, field) in [
        (
            capsule(Sqe::new(io::FLUSH, 1), &[]),
            SequenceError,
            0,
            "PDU-Type",
        ),
        (change(8, 1), UnsupportedParameter, 8, "PFV"),
        (change(10, 32), InvalidHeaderField, 10, "HPDA"),
        (change(11, 4), UnsupportedParameter, 11, "DGST"),
        (change(0, 0x0b), InvalidHeaderField, 0, "PDU-Type"),
        (
            change(0, PduType::IcResp as u8),
            InvalidHeaderField,
            0,
            "PDU-Type",
        ),
        (change(1, 1), InvalidHeaderField, 1, "FLAGS"),
        (change(2, 127), InvalidHeaderField, 2, "HLEN"),
        (change(4, 129), InvalidHeaderField, 4, "PLEN"),
    ] {
        let mut raw = Raw::new(TcpTargetConfig::default());
        raw.feed(&bytes);
        raw.assert_refused(status, fei, field, &bytes);
    }
    let mut raw = Raw::new(TcpTargetConfig::default());
    raw.feed(&second);
    raw.out.drain(..128);
    raw.assert_refused(SequenceError, 0, "PDU-Type", &good);
}

/// The answer agrees to the digests that are asked for and allowed, announces MAXH2CDATA, and wants
/// payload at any dword (all that Linux hosts accept).
#[test]
fn handshake_answer() {
    let only_data = Digests {
        header: false,
        data: true,
    };
    let config = TcpTargetConfig {
        allow_digests: only_data,
        max_h2c_data_bytes: 0x12340,
        ..TcpTargetConfig::default()
    };
    let mut raw = Raw::new(config);
    raw.feed(IcReq::new(DataAlignment::DWORD, Digests::BOTH, 1).as_bytes());
    assert_eq!(
        raw.out[..16],
        hex!("0100 8000 80000000 0000 00 02 40230100")
    );
    assert_eq!(raw.out[16..], [0; 112]);
    assert_eq!(raw.conn.digests(), only_data);
}

/// Every way in which a capsule can be wrong.
#[test]
fn capsules() {
    use FatalErrorStatus::*;
    let in_capsule = |length| write_sqe(1, Sgl::InCapsule { offset: 0, length });
    let good = capsule(in_capsule(512), &pattern(1, 512));
    let change = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    let plen = |plen: u32| {
        let mut bytes = good.clone();
        bytes[4..8].copy_from_slice(&plen.to_le_bytes());
        bytes
    };
    for (bytes, status, fei, field) in [
        (
            change(0, PduType::C2hData as u8),
            InvalidHeaderField,
            0,
            "PDU-Type",
        ),
        (change(1, 0x08), InvalidHeaderField, 1, "FLAGS"),
        (change(1, 0x01), InvalidHeaderField, 1, "FLAGS"),
        (change(1, 0x02), InvalidHeaderField, 1, "FLAGS"),
        (change(2, 24), InvalidHeaderField, 2, "HLEN"),
        (change(3, 71), InvalidHeaderField, 3, "PDO"),
        (change(3, 74), InvalidHeaderField, 3, "PDO"),
        (plen(71), InvalidHeaderField, 4, "PLEN"),
        (plen(0xff00_0248), InvalidHeaderField, 4, "PLEN"),
        (
            capsule(in_capsule(8192), &pattern(1, 8192)),
            InvalidHeaderField,
            4,
            "PLEN",
        ),
    ] {
        let mut raw = Raw::connected(Digests::NONE);
        raw.feed(&bytes);
        assert!(raw.app.log.is_empty());
        raw.assert_refused(status, fei, field, &bytes);
    }
    // One more than the queue has entries.
    let mut raw = Raw::connected(Digests::NONE);
    raw.app.answer = false;
    for cid in 0..5 {
        raw.feed(&capsule(Sqe::new(io::FLUSH, cid), &[]));
    }
    assert_eq!(raw.app.log.len(), 4);
    raw.assert_refused(
        SequenceError,
        0,
        "SQ",
        &capsule(Sqe::new(io::FLUSH, 4), &[]),
    );
}

/// What an in-capsule SGL may mean. A range outside the capsule is the command's fault, not the
/// connection's, and its data is skipped.
#[test]
fn in_capsule_ranges() {
    let data = pattern(9, 1024);
    for (sgl, expected) in [
        (
            Sgl::InCapsule {
                offset: 0,
                length: 1024,
            },
            Some(&data[..]),
        ),
        (
            Sgl::InCapsule {
                offset: 512,
                length: 512,
            },
            Some(&data[512..]),
        ),
        (
            Sgl::InCapsule {
                offset: 100,
                length: 8,
            },
            Some(&data[100..108]),
        ),
        (
            Sgl::InCapsule {
                offset: 513,
                length: 512,
            },
            None,
        ),
        (
            Sgl::InCapsule {
                offset: u64::MAX,
                length: 512,
            },
            None,
        ),
        (
            Sgl::InCapsule {
                offset: 0,
                length: 1025,
            },
            None,
        ),
        (
            Sgl::InCapsule {
                offset: 0,
                length: 0,
            },
            None,
        ),
        (
            Sgl::DataBlock {
                address: 0x1000,
                length: 1024,
            },
            None,
        ),
    ] {
        let mut raw = Raw::connected(Digests::NONE);
        raw.feed(&capsule(write_sqe(1, sgl), &data));
        raw.feed(&capsule(
            write_sqe(
                2,
                Sgl::InCapsule {
                    offset: 0,
                    length: 1024,
                },
            ),
            &data,
        ));
        assert_eq!(raw.app.closed, None);
        assert_eq!(
            raw.app.written.get(&1).map(|data| &data[..]),
            expected,
            "{sgl:?}"
        );
        assert_eq!(
            raw.app.written[&2], data,
            "the stream is out of step after {sgl:?}"
        );
    }
}

/// Every way in which H2CData can be wrong: the tag, the command, the place, the length, the end.
#[test]
fn h2c_data() {
    use FatalErrorStatus::*;
    let changed = |at: usize, value: u8| {
        let mut bytes = h2c(7, 0, 0, 4096, false);
        bytes[at] = value;
        bytes
    };
    // The app's first index is 0; 10000 bytes are asked for, 4096 at most per PDU.
    for (before, bytes, status, fei, field) in [
        (
            None,
            h2c(7, 1, 0, 4096, false),
            InvalidHeaderField,
            10,
            "TTAG",
        ),
        (
            None,
            h2c(7, 0xffff, 0, 4096, false),
            InvalidHeaderField,
            10,
            "TTAG",
        ),
        (
            None,
            h2c(8, 0, 0, 4096, false),
            InvalidHeaderField,
            8,
            "CCCID",
        ),
        (
            None,
            h2c(7, 0, 4096, 4096, false),
            DataOutOfRange,
            0,
            "DATAO",
        ),
        (
            None,
            h2c(7, 0, u32::MAX, 4096, false),
            DataOutOfRange,
            0,
            "DATAO",
        ),
        (
            Some(h2c(7, 0, 0, 4096, false)),
            h2c(7, 0, 0, 4096, false),
            DataOutOfRange,
            0,
            "DATAO",
        ),
        (None, h2c(7, 0, 0, 4100, false), LimitExceeded, 0, "PLEN"),
        (
            None,
            h2c(7, 0, 0, 4096, true),
            InvalidHeaderField,
            1,
            "LAST_PDU",
        ),
        (None, changed(16, 4), InvalidHeaderField, 16, "DATAL"),
        (None, changed(3, 28), InvalidHeaderField, 16, "DATAL"),
    ] {
        let mut raw = Raw::connected(Digests::NONE);
        raw.feed(&capsule(
            write_sqe(7, Sgl::Transport { length: 10_000 }),
            &[],
        ));
        assert_eq!(
            raw.out[..24],
            hex!("0900 1800 18000000 0700 0000 00000000 10270000 00000000")
        );
        raw.out.clear();
        if let Some(before) = before {
            raw.feed(&before);
        }
        raw.feed(&bytes);
        raw.assert_refused(status, fei, field, &bytes);
        assert!(raw.app.written.is_empty());
    }
    let first = [h2c(7, 0, 0, 4096, false), h2c(7, 0, 4096, 4096, false)].concat();
    for (last, status, fei, field) in [
        (
            h2c(7, 0, 8192, 1808, false),
            InvalidHeaderField,
            1,
            "LAST_PDU",
        ),
        (h2c(7, 0, 8192, 1812, true), DataOutOfRange, 0, "DATAL"),
    ] {
        let mut raw = Raw::connected(Digests::NONE);
        raw.feed(&capsule(
            write_sqe(7, Sgl::Transport { length: 10_000 }),
            &[],
        ));
        raw.out.clear();
        raw.feed(&first);
        raw.feed(&last);
        raw.assert_refused(status, fei, field, &last);
    }
    // And the good one; after it the tag is unused.
    let mut raw = Raw::connected(Digests::NONE);
    raw.feed(&capsule(
        write_sqe(7, Sgl::Transport { length: 10_000 }),
        &[],
    ));
    raw.feed(&first);
    raw.feed(&h2c(7, 0, 8192, 1808, true));
    assert_eq!(raw.app.written[&7].len(), 10_000);
    raw.out.clear();
    raw.feed(&h2c(7, 0, 0, 4096, false));
    raw.assert_refused(InvalidHeaderField, 10, "TTAG", &h2c(7, 0, 0, 4096, false));
}

/// A damaged header ends the connection, and the request carries the digest that came.
#[test]
fn header_digest() {
    let digests = Digests {
        header: true,
        data: false,
    };
    let header = CapsuleCmd::new(Sqe::new(io::FLUSH, 1), 0, digests, DataAlignment::DWORD);
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(crc_fast::crc32_iscsi(header.as_bytes()).to_le_bytes());
    let mut raw = Raw::connected(digests);
    raw.feed(&bytes);
    assert_eq!(raw.app.log, ["capsule 1"]);
    for at in [10, 40, 71, 72, 75] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        let mut raw = Raw::connected(digests);
        raw.feed(&damaged);
        let received = u32::from_le_bytes(damaged[72..].try_into().unwrap());
        raw.assert_refused(
            FatalErrorStatus::HeaderDigestError,
            received,
            "HDGST",
            &damaged,
        );
    }
}

/// Damaged data costs the command (Transient Transport Error), not the connection.
#[test]
fn data_digest() {
    let digests = Digests {
        header: false,
        data: true,
    };
    let data = pattern(3, 2048);
    let good = crc_fast::crc32_iscsi(&data).to_le_bytes();
    let sqe = |cid| {
        write_sqe(
            cid,
            Sgl::InCapsule {
                offset: 0,
                length: 2048,
            },
        )
    };
    let capsule = |cid, digest: [u8; 4]| {
        let header = CapsuleCmd::new(sqe(cid), 2048, digests, DataAlignment::DWORD);
        [header.as_bytes(), &data, &digest].concat()
    };
    let mut raw = Raw::connected(digests);
    raw.feed(&capsule(1, [1, 2, 3, 4]));
    assert_eq!(raw.app.log, ["damaged capsule 1"]);
    assert_eq!(
        raw.last_cqe().status(),
        StatusCode::TRANSIENT_TRANSPORT_ERROR
    );
    raw.feed(&capsule(2, good));
    assert_eq!(raw.app.written[&2], data);

    // Of two H2CData PDUs the first is damaged: the second is still taken, then the command fails.
    raw.feed(
        CapsuleCmd::new(
            write_sqe(3, Sgl::Transport { length: 4096 }),
            0,
            digests,
            DataAlignment::DWORD,
        )
        .as_bytes(),
    );
    for (offset, digest) in [(0, [0; 4]), (2048, good)] {
        let header = DataPdu::h2c(
            3,
            0,
            offset,
            2048,
            offset > 0,
            digests,
            DataAlignment::DWORD,
        );
        raw.feed(&[header.as_bytes(), &data, &digest].concat());
    }
    assert_eq!(raw.app.log.last().unwrap(), "damaged fetch 3");
    assert!(!raw.app.written.contains_key(&3));
    raw.feed(&capsule(4, good));
    assert_eq!(raw.app.written[&4], data);
    assert_eq!(raw.app.closed, None);
}

/// The host's own termination request is understood, and answered with nothing but the end.
#[test]
fn host_terminates() {
    let mut raw = Raw::connected(Digests::BOTH);
    raw.feed(TermPdu::new(Side::Host, FatalErrorStatus::LimitExceeded, 0, &[9; 24]).bytes());
    let why = raw.app.closed.clone();
    assert!(
        matches!(&why, Some(Closed::Protocol(text)) if text.contains("H2CTermReq")),
        "{why:?}"
    );
    assert!(raw.out.is_empty());
    assert!(raw.conn.takes_shutdown());
}

/// A controller stops reading from a host that sends commands and reads no responses: the waiting
/// responses have a bound. It continues when the host reads.
#[test]
fn host_that_does_not_read() {
    let mut raw = Raw::connected(Digests::NONE);
    let flush = capsule(Sqe::for_namespace(io::READ, 1, 1), &[]);
    let mut fed = 0;
    while raw.conn.wants_read() {
        let mut slices = RecvSlices::new();
        assert!(raw.conn.recv_slices(&mut raw.buffers, &mut slices));
        slices[0][..72].copy_from_slice(&flush);
        drop(slices);
        raw.conn.received(72, NOW);
        // Nothing is sent here.
        while let TargetPoll::Event(event) = raw.conn.poll(&raw.pools, NOW) {
            raw.app.handle(event, &mut raw.conn, &raw.pools);
        }
        raw.conn.end_receive(&mut raw.buffers, false, NOW);
        fed += 1;
        assert!(fed < 100, "no bound");
    }
    assert_eq!(raw.app.log.len(), 2 * 4 + 8);
    raw.turn();
    raw.turn();
    assert!(raw.conn.wants_read());
    assert_eq!(raw.app.log.len(), fed);
    assert_eq!(raw.out.len(), 24 * fed);
}

/// R2Ts smaller than the data come one after the other, each when the one before was answered.
#[test]
fn r2t_by_r2t() {
    let mut raw = Raw::new(TcpTargetConfig {
        r2t_bytes: 4096,
        ..TcpTargetConfig::default()
    });
    raw.feed(IcReq::new(DataAlignment::DWORD, Digests::NONE, 1).as_bytes());
    raw.conn.established(io_queue(false));
    raw.app.answer = false;
    raw.feed(&capsule(
        write_sqe(7, Sgl::Transport { length: 10_000 }),
        &[],
    ));
    raw.app.answer = true;
    raw.conn.fetch(
        ReqTag { cid: 7, index: 3 },
        raw.pools.io.acquire(10_000).unwrap(),
        NOW,
    );
    raw.out.clear();
    raw.turn();
    let mut asked = Vec::new();
    for (offset, length) in [(0u32, 4096u32), (4096, 4096), (8192, 1808)] {
        assert_eq!(raw.out.len(), 24, "exactly one R2T at a time");
        asked.push((
            u32::from_le_bytes(raw.out[12..16].try_into().unwrap()),
            u32::from_le_bytes(raw.out[16..20].try_into().unwrap()),
        ));
        raw.out.clear();
        raw.feed(&h2c(7, 3, offset, length, true));
    }
    assert_eq!(asked, [(0, 4096), (4096, 4096), (8192, 1808)]);
    assert_eq!(raw.app.written[&7].len(), 10_000);
}
