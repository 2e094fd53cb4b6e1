//! Tests of in-capsule data that the layer above gets in the receive buffer, without a copy.

use std::collections::VecDeque;

use nacre_hugepages::Buf;
use nacre_nvmf_wire::Fuse;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::tcp::{CapsuleCmd, DataAlignment, Digests};
use zerocopy::IntoBytes;

use super::pair::{io_queue, pattern, scatter};
use super::target_rules::{NOW, Raw, capsule, write_sqe};
use crate::tcp::controller::{TargetEvent, TargetPoll};
use crate::tcp::{RecvSlices, RxBuffers};

impl Raw {
    /// Puts bytes in, without looking at them.
    fn receive(&mut self, bytes: &[u8]) {
        let mut slices = RecvSlices::new();
        assert!(self.conn.recv_slices(&mut self.buffers, &mut slices));
        let mut pipe: VecDeque<u8> = bytes.iter().copied().collect();
        let n = scatter(&mut pipe, &mut slices, usize::MAX);
        drop(slices);
        assert_eq!(n, bytes.len());
        self.conn.received(n, NOW);
    }

    /// The data of the capsule that comes next.
    #[track_caller]
    fn capsule(&mut self) -> Buf {
        match self.conn.poll(&self.pools, NOW) {
            TargetPoll::Event(TargetEvent::Capsule { data, .. }) => data.expect("data"),
            other => panic!("{other:?}"),
        }
    }
}

fn capsule_with(sqe: Sqe, data: &[u8], digests: Digests) -> Vec<u8> {
    let header = CapsuleCmd::new(sqe, data.len() as u32, digests, DataAlignment::DWORD);
    let digest = |wanted: bool, of: &[u8]| {
        if wanted {
            crc_fast::crc32_iscsi(of).to_le_bytes().to_vec()
        } else {
            Vec::new()
        }
    };
    [
        header.as_bytes(),
        &digest(digests.header, header.as_bytes()),
        data,
        &digest(digests.data, data),
    ]
    .concat()
}

/// Data in place is a part of the receive buffer, stays unchanged while it has a user, and takes no
/// buffer of the pools. Data that is cut, or may be kept for long, takes a buffer.
#[test]
fn data_in_place() {
    for digests in [Digests::NONE, Digests::BOTH] {
        let mut raw = Raw::connected(digests);
        raw.conn.established(io_queue(false));
        raw.conn.set_in_place(true);
        let sgl = Sgl::InCapsule {
            offset: 0,
            length: 1024,
        };
        let whole = |cid, fuse| {
            let mut sqe = write_sqe(cid, sgl);
            sqe.set_fuse(fuse);
            capsule_with(sqe, &pattern(cid.into(), 1024), digests)
        };
        let mut last = whole(3, Fuse::Normal);
        let rest = last.split_off(600);
        let first = [whole(1, Fuse::Normal), whole(2, Fuse::First), last].concat();
        let taken = |raw: &Raw| {
            let stats = raw.pools.io.stats();
            stats
                .iter()
                .map(|class| class.count - class.free)
                .sum::<usize>()
        };
        raw.receive(&first);
        let one = raw.capsule();
        assert_eq!(taken(&raw), 0, "in place");
        let two = raw.capsule();
        assert_eq!(taken(&raw), 1, "half of a pair may wait for long");
        assert!(matches!(
            raw.conn.poll(&raw.pools, NOW),
            TargetPoll::Starved
        ));
        assert_eq!(taken(&raw), 2, "what is cut is received into a buffer");
        raw.conn.end_receive(&mut raw.buffers, false, NOW);
        raw.receive(&rest);
        let three = raw.capsule();
        raw.conn.end_receive(&mut raw.buffers, false, NOW);
        // A part of the next in the buffer's place, with the first still kept.
        let next = whole(4, Fuse::Normal);
        raw.receive(&next[..500]);
        assert!(matches!(
            raw.conn.poll(&raw.pools, NOW),
            TargetPoll::Starved
        ));
        raw.conn.end_receive(&mut raw.buffers, false, NOW);
        raw.receive(&next[500..]);
        let four = raw.capsule();
        for (data, cid) in [(&one, 1), (&two, 2), (&three, 3), (&four, 4)] {
            assert_eq!(**data, pattern(cid, 1024)[..], "capsule {cid}");
        }
        let part = [one.slice(10, 20), one.slice(1000, 24)];
        drop((one, two, three, four));
        assert_eq!(taken(&raw), 0);

        // Parts of it keep it as well.
        raw.conn.end_receive(&mut raw.buffers, false, NOW);
        let damaged = {
            let mut bytes = whole(1, Fuse::Normal);
            let at = bytes.len() - 5;
            bytes[at] ^= 1;
            bytes
        };
        if digests.data {
            raw.receive(&damaged);
            let TargetPoll::Event(TargetEvent::CapsuleDamaged { sqe }) =
                raw.conn.poll(&raw.pools, NOW)
            else {
                panic!("the damage was not seen");
            };
            assert_eq!(sqe.cid(), 1);
        } else {
            raw.receive(&whole(2, Fuse::Normal));
            drop(raw.capsule());
        }
        assert_eq!(*part[0], pattern(1, 1024)[10..30]);
        assert_eq!(*part[1], pattern(1, 1024)[1000..]);
    }
}

/// Parts that are kept for long occupy some receive buffers, not all: then data is copied, and in
/// place again when they are released.
#[test]
fn kept_parts_leave_buffers() {
    let mut raw = Raw::connected(Digests::NONE);
    raw.conn.established(io_queue(false));
    raw.conn.set_in_place(true);
    raw.buffers = RxBuffers::new(16, 16 << 10);
    let sgl = Sgl::InCapsule {
        offset: 0,
        length: 1024,
    };
    let next = |raw: &mut Raw, cid: u16| {
        raw.receive(&capsule(write_sqe(cid, sgl), &pattern(cid.into(), 1024)));
        let data = raw.capsule();
        assert_eq!(*data, pattern(cid.into(), 1024)[..]);
        raw.conn.end_receive(&mut raw.buffers, false, NOW);
        let copied = raw.pools.io.owns(&data);
        (data, copied)
    };
    let kept: Vec<(Buf, bool)> = (0..14).map(|cid| next(&mut raw, cid)).collect();
    let in_place = kept.iter().filter(|(_, copied)| !copied).count();
    assert_eq!(in_place, 16 / 4 + 1);
    assert!(kept[..in_place].iter().all(|(_, copied)| !copied));
    drop(kept);
    next(&mut raw, 20);
    let (_, copied) = next(&mut raw, 21);
    assert!(!copied, "there is room again");
}

/// Exactly the range of the SGL comes in place.
#[test]
fn ranges_in_place() {
    let data = pattern(9, 1024);
    for (offset, length) in [(0, 1024), (512, 512), (100, 8)] {
        let mut raw = Raw::connected(Digests::NONE);
        raw.conn.set_in_place(true);
        raw.receive(&capsule(
            write_sqe(1, Sgl::InCapsule { offset, length }),
            &data,
        ));
        let (from, len) = (offset as usize, length as usize);
        assert_eq!(*raw.capsule(), data[from..from + len]);
    }
}
