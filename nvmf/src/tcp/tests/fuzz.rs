//! Streams that make no sense cost their connection and nothing else.

use std::collections::VecDeque;
use std::rc::Rc;

use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::Nanos;
use proptest::prelude::*;

use super::pair::{App, Pair, Rng, gather, io_queue, pools, scatter};
use crate::tcp::target::{TargetConfig, TargetConn, TargetPoll};
use crate::tcp::{HostConfig, HostConn, HostPoll, RecvSlices, RxBuffers, Slices};

/// Everything a host sends in a session with reads, writes with and without R2T.
fn session(digests: Digests) -> (Vec<u8>, Vec<u8>) {
    let mut pair = Pair::new(
        TargetConfig::default(),
        HostConfig {
            digests,
            ..HostConfig::default()
        },
    );
    pair.run();
    pair.target.established(io_queue(true));
    pair.read(1, 1, 4096);
    pair.write(2, 2, 4096);
    pair.write(3, 3, 40_000);
    pair.read(4, 4, 9000);
    pair.run();
    assert_eq!(pair.outcomes.len(), 4);
    (pair.sent_to_target, pair.sent_to_host)
}

/// Feeds a controller; it must come to rest with every buffer back once it is dropped.
fn feed_target(bytes: &[u8], seed: u64) {
    let pools = pools(16, 2);
    let now = Nanos(0);
    let mut conn = TargetConn::new(Rc::new(TargetConfig::default()), now);
    let mut buffers = RxBuffers::new(2, 16 << 10);
    let mut app = App::new();
    let mut pipe: VecDeque<u8> = bytes.iter().copied().collect();
    let mut rng = Rng(seed | 1);
    let mut established = false;
    for _ in 0..bytes.len() * 2 + 64 {
        if conn.wants_read() && !pipe.is_empty() {
            let mut slices = RecvSlices::new();
            let ready = conn.recv_slices(&mut buffers, &mut slices);
            let n = scatter(&mut pipe, &mut slices, 1 + rng.below(9000));
            drop(slices);
            if ready {
                conn.received(n, now);
            }
        }
        while let TargetPoll::Event(event) = conn.poll(&pools, now) {
            app.handle(event, &mut conn, &pools);
        }
        conn.settle(&mut buffers, false, now);
        if !established && conn.pdus().0 > 0 {
            established = true;
            conn.established(io_queue(true));
        }
        let mut slices = Slices::new();
        conn.send_slices(&mut slices);
        let n = gather(&slices, usize::MAX).len();
        drop(slices);
        conn.sent(n);
        if pipe.is_empty() && !conn.has_news() {
            break;
        }
    }
    conn.peer_closed(None);
    while let TargetPoll::Event(event) = conn.poll(&pools, now) {
        app.handle(event, &mut conn, &pools);
    }
    conn.settle(&mut buffers, false, now);
    assert!(conn.is_finished());
    assert!(app.closed.is_some());
    for class in pools.io.stats().into_iter().chain(pools.admin.stats()) {
        assert_eq!(class.free, class.count, "a buffer is missing");
    }
}

fn feed_host(bytes: &[u8], seed: u64) {
    let mut pair = Pair::with_buffers(TargetConfig::default(), HostConfig::default(), 16, 2);
    let now = Nanos(0);
    let mut conn = HostConn::new(HostConfig::default(), now);
    let mut buffers = RxBuffers::new(2, 16 << 10);
    let mut pipe: VecDeque<u8> = bytes.iter().copied().collect();
    let mut rng = Rng(seed | 1);
    let mut closed = false;
    for _ in 0..bytes.len() * 2 + 64 {
        if conn.wants_read() && !pipe.is_empty() {
            let mut slices = RecvSlices::new();
            let ready = conn.recv_slices(&mut buffers, &mut slices);
            let n = scatter(&mut pipe, &mut slices, 1 + rng.below(9000));
            drop(slices);
            if ready {
                conn.received(n);
            }
        }
        while let HostPoll::Event(event) = conn.poll(now) {
            match event {
                crate::transport::HostEvent::Ready => {
                    pair.host = conn;
                    pair.read(1, 1, 4096);
                    pair.write(2, 2, 4096);
                    pair.write(3, 3, 40_000);
                    pair.read(4, 4, 9000);
                    conn = std::mem::replace(
                        &mut pair.host,
                        HostConn::new(HostConfig::default(), now),
                    );
                }
                crate::transport::HostEvent::Closed(_) => closed = true,
                crate::transport::HostEvent::Completion { .. } => {}
            }
        }
        conn.settle(&mut buffers, false, now);
        let mut slices = Slices::new();
        conn.send_slices(&mut slices);
        let n = gather(&slices, usize::MAX).len();
        drop(slices);
        conn.sent(n);
        if pipe.is_empty() && !conn.has_news() {
            break;
        }
    }
    conn.peer_closed(None);
    while let HostPoll::Event(event) = conn.poll(now) {
        closed |= matches!(event, crate::transport::HostEvent::Closed(_));
    }
    assert!(closed && conn.is_finished());
    drop(conn);
    pair.assert_no_leak();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Noise, and noise behind a good ICReq.
    #[test]
    fn noise(bytes in proptest::collection::vec(any::<u8>(), 0..2000), seed: u64, behind: bool) {
        let mut stream = if behind { session(Digests::NONE).0[..128].to_vec() } else { Vec::new() };
        stream.extend_from_slice(&bytes);
        feed_target(&stream, seed);
        let mut stream = if behind { session(Digests::NONE).1[..128].to_vec() } else { Vec::new() };
        stream.extend_from_slice(&bytes);
        feed_host(&stream, seed);
    }

    /// A good session with some bytes changed, cut off somewhere, or with a piece left out.
    #[test]
    fn mutated_sessions(
        seed: u64,
        header: bool,
        data: bool,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        near_start in proptest::collection::vec((0usize..600, any::<u8>()), 0..3),
        cut in any::<prop::sample::Index>(),
        hole in proptest::option::of((any::<prop::sample::Index>(), 1usize..100)),
    ) {
        let (mut up, mut down) = session(Digests { header, data });
        for stream in [&mut up, &mut down] {
            for (at, value) in &changes {
                let at = at.index(stream.len());
                stream[at] = *value;
            }
            for (at, value) in &near_start {
                stream[*at] = *value;
            }
            if let Some((at, len)) = &hole {
                let at = at.index(stream.len());
                let end = (at + len).min(stream.len());
                stream.drain(at..end);
            }
            let end = cut.index(stream.len() * 2).min(stream.len());
            stream.truncate(end);
        }
        feed_target(&up, seed);
        feed_host(&down, seed);
    }
}
