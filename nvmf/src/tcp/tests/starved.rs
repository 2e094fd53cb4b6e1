//! Tests of connections that wait for a receive buffer or a command buffer: the memory that they
//! hold, and that none waits forever.

use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::tcp::{DataAlignment, Digests, IcReq};
use zerocopy::IntoBytes;

use super::pair::{io_queue, pattern};
use super::target_rules::{NOW, Raw, capsule, h2c, write_sqe};
use crate::tcp::controller::{TargetEvent, TargetPoll, TcpTargetConfig};
use crate::tcp::{RecvSlices, RxBuffers};
use crate::transport::{QueueParams, ReqTag};

impl Raw {
    /// So many bytes arrive, for which there is room, and nothing is made of them yet.
    fn put(&mut self, bytes: &[u8]) {
        let mut slices = RecvSlices::new();
        assert!(self.conn.recv_slices(&mut self.buffers, &mut slices));
        slices[0][..bytes.len()].copy_from_slice(bytes);
        drop(slices);
        self.conn.received(bytes.len(), NOW);
    }

    /// What arrived is handled, and nothing is sent.
    fn handle(&mut self) {
        while let TargetPoll::Event(event) = self.conn.poll(&self.pools, NOW) {
            self.app.handle(event, &mut self.conn, &self.pools);
        }
    }
}

/// Goal: a host that does not read the responses to its admin commands holds only few of the
/// buffers that all admin queues share. Method: commands whose responses are not sent.
#[test]
fn few_admin_answers_are_kept_for_a_host() {
    let mut raw = Raw::connected(Digests::NONE);
    raw.conn.established(QueueParams {
        qid: 0,
        entries: 128,
        ..io_queue(false)
    });
    let length = 512;
    for cid in 0..64 {
        let read = Sqe::for_namespace(io::READ, cid, 1).with_sgl(Sgl::Transport { length });
        raw.put(&capsule(read, &[]));
    }
    raw.handle();
    assert_eq!(raw.app.log.len(), 16);
    assert!(!raw.conn.wants_read());
    // It goes on as they are sent.
    for _ in 0..4 {
        raw.turn();
    }
    assert_eq!(raw.app.log.len(), 64);
    assert!(raw.conn.wants_read());
}

/// Goal: connections whose commands wait for buffers may take all receive buffers. A new connection
/// and an admin queue are served nevertheless, and leave nothing behind.
#[test]
fn waiting_queues_do_not_silence_admin_queues() {
    let waits = |buffers: RxBuffers| {
        let mut raw = Raw::connected(Digests::NONE);
        raw.buffers = buffers;
        let hoard: Vec<_> = std::iter::from_fn(|| raw.pools.io.acquire(512)).collect();
        let (offset, length) = (0, 512);
        let write = write_sqe(1, Sgl::InCapsule { offset, length });
        raw.put(&capsule(write, &pattern(1, 512)));
        raw.handle();
        assert!(!raw.conn.wants_read(), "it waits for a buffer");
        raw.conn.end_receive(&mut raw.buffers, false, NOW);
        let buffers = std::mem::replace(&mut raw.buffers, RxBuffers::new(2, 16 << 10));
        (raw, hoard, buffers)
    };
    for bytes in [1 << 10, 4 << 10, 16 << 10] {
        let (_first, _hoard, buffers) = waits(RxBuffers::new(2, bytes));
        let (_second, _hoard, buffers) = waits(buffers);

        let mut raw = Raw::new(TcpTargetConfig::default());
        raw.buffers = buffers;
        raw.feed(IcReq::new(DataAlignment::DWORD, Digests::NONE, 1).as_bytes());
        assert_eq!(raw.out.len(), 128, "no ICResp");
        raw.conn.established(QueueParams {
            qid: 0,
            ..io_queue(false)
        });
        let (offset, length) = (0, 8192);
        let write = write_sqe(1, Sgl::InCapsule { offset, length });
        raw.feed(&capsule(write, &pattern(1, 8192)));
        assert!(raw.app.written[&1] == pattern(1, 8192));

        raw.conn.established(io_queue(false));
        let mut slices = RecvSlices::new();
        assert!(
            !raw.conn.recv_slices(&mut raw.buffers, &mut slices),
            "it is one of those that wait now"
        );
    }
}

/// Goal: the data of many outstanding R2Ts goes through one buffer while each command ends before
/// the next data comes, so that the cache holds it. Method: each payload is dropped as it is handed
/// up; one that stays keeps its bytes.
#[test]
fn data_goes_to_the_buffer_returned_last() {
    let mut raw = Raw::connected(Digests::NONE);
    let free = |raw: &Raw| raw.pools.io.stats().iter().map(|c| c.free).sum::<usize>();
    let all = free(&raw);
    for index in 0..4 {
        let into = raw.pools.io.acquire(4096).expect("a buffer");
        raw.conn.fetch(ReqTag { cid: index, index }, into, NOW);
    }
    let receive = |raw: &mut Raw, index| {
        raw.put(&h2c(index, index, 0, 4096, true));
        let TargetPoll::Event(TargetEvent::Fetched { tag, data }) = raw.conn.poll(&raw.pools, NOW)
        else {
            panic!("the data of {index} is here");
        };
        assert_eq!(tag.index, index);
        assert!(*data == pattern(1, 4096)[..]);
        data
    };
    let first = receive(&mut raw, 0).as_ptr();
    let kept = receive(&mut raw, 2);
    assert_eq!(kept.as_ptr(), first);
    let other = receive(&mut raw, 1);
    assert_ne!(other.as_ptr(), first);
    let last = other.as_ptr();
    drop(other);
    assert_eq!(receive(&mut raw, 3).as_ptr(), last);
    assert!(*kept == pattern(1, 4096)[..]);
    drop(kept);
    assert_eq!(free(&raw), all);
}
