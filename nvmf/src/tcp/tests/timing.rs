//! Tests of the time limits: of the handshake, Connect, an incomplete PDU, a silent host, and the
//! close.

use std::time::Duration;

use super::pair::{Pair, io_queue};
use crate::tcp::{HostConfig, TcpTargetConfig};
use crate::transport::{CloseWhy, Closed, ReqTag};

fn config() -> TcpTargetConfig {
    TcpTargetConfig {
        handshake_timeout: Duration::from_secs(1),
        connect_timeout: Duration::from_secs(5),
        stall_timeout: Duration::from_secs(3),
        idle_timeout: Some(Duration::from_secs(100)),
        linger: Duration::from_secs(2),
        ..TcpTargetConfig::default()
    }
}

/// Lets `time` pass without a byte; whether the controller's end is over then.
fn silent(pair: &mut Pair, time: Duration) -> Option<Closed> {
    pair.now = pair.now + time;
    pair.target.handle_timeout(pair.now);
    pair.step();
    pair.app.closed.clone()
}

const MS: Duration = Duration::from_millis(1);

#[test]
fn handshake() {
    let mut pair = Pair::new(config(), HostConfig::default());
    pair.host.close();
    assert_eq!(silent(&mut pair, Duration::from_secs(1) - MS), None);
    assert_eq!(silent(&mut pair, MS), Some(Closed::TimedOut));
    assert!(pair.target.is_finished());
}

#[test]
fn connect() {
    let mut pair = Pair::new(config(), HostConfig::default());
    pair.run();
    assert!(pair.ready);
    assert_eq!(silent(&mut pair, Duration::from_secs(5) - MS), None);
    assert_eq!(silent(&mut pair, MS), Some(Closed::TimedOut));
}

/// The clock of a PDU starts with its first byte and is not wound up by the ones that trickle in.
#[test]
fn rest_of_a_pdu() {
    let mut pair = Pair::connected(config(), HostConfig::default(), io_queue(false));
    pair.write(1, 1, 4096);
    pair.chunk = 1;
    for _ in 0..5 {
        assert_eq!(silent(&mut pair, Duration::from_millis(500)), None);
    }
    assert_eq!(
        silent(&mut pair, Duration::from_secs(2)),
        Some(Closed::TimedOut)
    );
    pair.host.close();
    pair.step();
    pair.assert_no_leak();
}

/// A host owes the requested data: it may take its time for each piece, but each piece has a limit.
#[test]
fn requested_data_has_a_time_limit_per_piece() {
    let config = TcpTargetConfig {
        max_h2c_data_bytes: 4096,
        ..config()
    };
    let mut pair = Pair::connected(config.clone(), HostConfig::default(), io_queue(false));
    pair.write(1, 1, 100_000);
    pair.run();
    pair.write(2, 2, 100_000);
    pair.chunk = 4200;
    for _ in 0..20 {
        assert_eq!(silent(&mut pair, Duration::from_secs(1)), None);
    }
    assert!(!pair.outcomes.contains_key(&2), "it went slowly");
    pair.chunk = usize::MAX;
    pair.run();
    assert!(pair.outcomes.contains_key(&2));
    assert_eq!(
        silent(&mut pair, Duration::from_secs(10)),
        None,
        "it owes nothing"
    );

    let mut pair = Pair::connected(config, HostConfig::default(), io_queue(false));
    pair.app.answer = false;
    pair.write(1, 1, 100_000);
    pair.run();
    pair.host.close();
    let tag = ReqTag { cid: 1, index: 0 };
    let into = pair.pools.io.acquire(100_000).expect("memory enough");
    pair.target.fetch(tag, into, pair.now);
    // The host takes nothing, so it has not been asked yet.
    let asked = pair.now;
    assert_eq!(pair.target.deadline(), Some(asked + Duration::from_secs(3)));
    for _ in 0..5 {
        pair.now = pair.now + Duration::from_secs(3);
        pair.target.handle_timeout(pair.now);
        assert_eq!(
            pair.target.deadline(),
            Some(pair.now + Duration::from_secs(3))
        );
    }
    // The R2T leaves here, and the wait begins.
    assert_eq!(silent(&mut pair, MS), None);
    assert_eq!(silent(&mut pair, Duration::from_secs(2)), None);
    assert_eq!(
        silent(&mut pair, Duration::from_secs(1)),
        Some(Closed::TimedOut)
    );
    assert!(pair.pools.io.stats().iter().all(|c| c.free == c.count));
}

/// Goal: a host that ignores an R2T cannot gain time with further commands. Method: it sends a
/// write each second, whose R2T leaves at once.
#[test]
fn further_commands_give_no_time() {
    let mut pair = Pair::connected(config(), HostConfig::default(), io_queue(false));
    pair.app.answer = false;
    for cid in 1..=3 {
        pair.write(cid, 1, 100_000);
        pair.run();
    }
    pair.host.close();
    let asked = |pair: &mut Pair, cid: u16| {
        let tag = ReqTag { cid, index: cid };
        let into = pair.pools.io.acquire(100_000).expect("memory enough");
        pair.target.fetch(tag, into, pair.now);
        pair.step();
    };
    asked(&mut pair, 1);
    assert_eq!(silent(&mut pair, Duration::from_secs(1)), None);
    asked(&mut pair, 2);
    assert_eq!(silent(&mut pair, Duration::from_secs(1)), None);
    asked(&mut pair, 3);
    assert_eq!(
        silent(&mut pair, Duration::from_secs(1)),
        Some(Closed::TimedOut)
    );
}

#[test]
fn silence() {
    let mut pair = Pair::connected(config(), HostConfig::default(), io_queue(false));
    pair.write(1, 1, 4096);
    pair.run();
    assert_eq!(silent(&mut pair, Duration::from_secs(99)), None);
    pair.write(2, 1, 4096);
    pair.run();
    assert_eq!(silent(&mut pair, Duration::from_secs(99)), None);
    assert_eq!(
        silent(&mut pair, Duration::from_secs(2)),
        Some(Closed::TimedOut)
    );
}

/// A host that does not take the last responses, or does not close, is given up after a while.
#[test]
fn linger() {
    let mut pair = Pair::connected(config(), HostConfig::default(), io_queue(false));
    pair.target.close(CloseWhy::Drained, pair.now);
    assert_eq!(silent(&mut pair, MS), Some(Closed::Local));
    assert!(!pair.target.is_finished());
    silent(&mut pair, Duration::from_secs(2));
    assert!(pair.target.is_finished());
}

/// The host's own deadlines: ICResp, and the rest of a PDU.
#[test]
fn host_side() {
    let mut pair = Pair::new(config(), HostConfig::default());
    let deadline = pair.host.deadline().unwrap();
    pair.host.handle_timeout(deadline - MS);
    assert_eq!(pair.host.deadline(), Some(deadline));
    pair.host.handle_timeout(deadline);
    pair.step();
    assert_eq!(pair.host_closed, Some(Closed::TimedOut));

    let mut pair = Pair::connected(config(), HostConfig::default(), io_queue(false));
    assert_eq!(pair.host.deadline(), None);
    pair.read(1, 1, 4096);
    pair.chunk = 100;
    for _ in 0..8 {
        pair.step();
    }
    let deadline = pair.host.deadline().expect("a PDU is in progress");
    pair.host.handle_timeout(deadline);
    pair.to_host.clear();
    pair.step();
    assert_eq!(pair.host_closed, Some(Closed::TimedOut));
}
