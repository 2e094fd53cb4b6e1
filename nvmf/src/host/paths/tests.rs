//! Tests of [`super::Paths`] in virtual time: each reports attempts of two transports that succeed
//! or fail, and checks the decisions.

use super::*;

const RDMA: TransportType = TransportType::Rdma;
const TCP: TransportType = TransportType::Tcp;
const SECOND: Duration = Duration::from_secs(1);

fn options(fallback: Option<TransportType>) -> PathOptions {
    PathOptions::new(RDMA, fallback)
}

fn at(seconds: u64) -> Nanos {
    Nanos::ZERO + SECOND * seconds as u32
}

/// The share of attempts, then the fallback at once, with the reason.
#[test]
fn falls_back_when_its_attempts_are_used_up() {
    let mut paths = Paths::new(options(Some(TCP)));
    assert_eq!(paths.current(), RDMA);
    for attempt in 1..3 {
        assert_eq!(paths.failed("no route", false, at(attempt)), Some(SECOND));
        assert_eq!(paths.current(), RDMA);
    }
    assert_eq!(
        paths.failed("no listener", false, at(3)),
        Some(Duration::ZERO)
    );
    assert_eq!(paths.current(), TCP);
    assert!(!paths.all_failed());
    let counts = paths.counts();
    assert_eq!((counts.failed_attempts, counts.fallbacks), (3, 1));
    assert_eq!(counts.fallback_cause.as_deref(), Some("no listener"));
}

/// No other transport is ever tried, and the delay stays constant.
#[test]
fn without_a_fallback_there_is_none() {
    let mut paths = Paths::new(options(None));
    for attempt in 1..100 {
        assert_eq!(paths.failed("no", false, at(attempt)), Some(SECOND));
        assert_eq!(paths.current(), RDMA);
        assert_eq!(paths.all_failed(), attempt >= 3);
    }
    assert_eq!(paths.counts().failed_attempts, 99);
    assert_eq!((paths.counts().fallbacks, paths.probe_at()), (0, None));
    assert_eq!(paths.failed("not this host", true, at(100)), None);
    assert_eq!(Paths::new(options(Some(RDMA))).options().fallback, None);
}

/// 0 attempts: without end, although there is a fallback; a permanent refusal ends that.
#[test]
fn no_attempt_is_the_last_one_without_a_limit() {
    let mut paths = Paths::new(PathOptions {
        connection_retries: 0,
        ..options(Some(TCP))
    });
    for attempt in 1..100 {
        assert_eq!(paths.failed("no", false, at(attempt)), Some(SECOND));
        assert!(!paths.all_failed());
    }
    assert_eq!(paths.current(), RDMA);
    assert_eq!(paths.failed("never", true, at(100)), Some(Duration::ZERO));
    assert_eq!(paths.current(), TCP);
}

/// Both fail: they take turns, ever more slowly; this counts as one fallback.
#[test]
fn neither_works() {
    let mut paths = Paths::new(options(Some(TCP)));
    let (mut now, mut longest, mut by) = (0, Duration::ZERO, Vec::new());
    for _ in 0..60 {
        by.push(paths.current());
        let delay = paths.failed("no", false, at(now)).unwrap();
        longest = longest.max(delay);
        now += delay.as_secs() + 1;
    }
    assert_eq!(by[..9], [RDMA, RDMA, RDMA, TCP, TCP, TCP, RDMA, RDMA, RDMA]);
    assert_eq!(longest, ROUND_DELAY_MAX);
    assert!(paths.all_failed());
    assert_eq!(paths.counts().fallbacks, 1);
    assert_eq!(paths.causes(), "RDMA: no; TCP: no");
}

/// A permanently refused transport is not retried, only the other one; if both refuse, the machine
/// ends.
#[test]
fn refused_for_good() {
    let mut paths = Paths::new(options(Some(TCP)));
    assert_eq!(
        paths.failed("no such subsystem", true, at(1)),
        Some(Duration::ZERO)
    );
    assert_eq!(paths.current(), TCP);
    assert_eq!(paths.failed("no such subsystem", true, at(1)), None);
    // An earlier refusal does not count once a host was let in.
    let mut paths = Paths::new(options(Some(TCP)));
    paths.failed("no such subsystem", true, at(1));
    paths.connected(at(2));
    assert!(paths.failed("host removed", true, at(100)).is_some());
    assert_eq!(paths.current(), RDMA);
}

fn fallen() -> Paths {
    let mut paths = Paths::new(options(Some(TCP)));
    for _ in 0..3 {
        paths.failed("no", false, at(0));
    }
    paths.connected(at(0));
    paths
}

/// Probes come after 60 s, 120 s, … up to the bound, and only by the fallback.
#[test]
fn probes_back_off() {
    let mut paths = fallen();
    let mut now = at(0);
    for expected in [60, 120, 240, 480, 600, 600, 600] {
        let due = paths.probe_at().unwrap();
        assert_eq!(due.since(now), SECOND * expected);
        assert!(!paths.take_probe(Nanos(due.0 - 1)));
        assert!(paths.take_probe(due));
        assert!(!paths.take_probe(due), "one at a time");
        now = due + SECOND;
        paths.probe_failed("still no", now);
    }
    assert_eq!(paths.counts().failed_probes, 7);
    assert_eq!(paths.current(), TCP);
    // None on the preferred one, and none while there is no connection.
    paths.failed("lost", false, now + SECOND * 20);
    assert_eq!(paths.probe_at(), None);

    let mut never = Paths::new(PathOptions {
        reprobe: Duration::ZERO,
        ..options(Some(TCP))
    });
    for _ in 0..3 {
        never.failed("no", false, at(0));
    }
    never.connected(at(0));
    assert_eq!((never.current(), never.probe_at()), (TCP, None));
}

/// The whole cycle: fallback, probe, return. The back-off starts again once the return has settled.
#[test]
fn returns() {
    let mut paths = fallen();
    assert!(paths.take_probe(at(60)));
    paths.probe_failed("no", at(61));
    assert!(paths.take_probe(at(181)));
    paths.returning();
    assert_eq!(paths.current(), RDMA);
    paths.connected(at(182));
    assert_eq!((paths.counts().returns, paths.probe_at()), (1, None));

    // It lasted: its loss is no failed attempt, and the next one is at once.
    let before = paths.counts().failed_attempts;
    assert_eq!(paths.failed("lost", false, at(300)), Some(Duration::ZERO));
    assert_eq!(paths.counts().failed_attempts, before);
    for _ in 0..3 {
        paths.failed("gone", false, at(301));
    }
    assert_eq!(paths.current(), TCP);
    paths.connected(at(302));
    assert_eq!(paths.probe_at().unwrap(), at(362));
    assert_eq!(paths.counts().fallbacks, 2);
}

/// A probe that came through and whose connection then fails: the fallback again at once, which is
/// no other fallback, and a longer wait.
#[test]
fn a_return_that_fails() {
    let mut paths = fallen();
    assert!(paths.take_probe(at(60)));
    paths.returning();
    assert_eq!(paths.failed("lost", false, at(61)), Some(Duration::ZERO));
    assert_eq!(paths.current(), TCP);
    paths.connected(at(61));
    assert_eq!(paths.probe_at().unwrap(), at(61 + 120));
    let counts = paths.counts();
    assert_eq!(
        (counts.fallbacks, counts.returns, counts.failed_probes),
        (1, 0, 1)
    );
}

/// Connections that come to be and break soon: as many as attempts may fail, then the fallback; and
/// a network that goes on like this is gone back to ever more rarely.
#[test]
fn a_network_that_carries_only_handshakes() {
    let mut paths = Paths::new(options(Some(TCP)));
    let mut now = at(0);
    let mut waits = Vec::new();
    for _ in 0..6 {
        while paths.current() == RDMA {
            paths.connected(now);
            now = now + SECOND * 2;
            let delay = paths.failed("IBV_WC_RETRY_EXC_ERR", false, now).unwrap();
            now = now + delay;
        }
        paths.connected(now);
        let due = paths.probe_at().unwrap();
        waits.push(due.since(now).as_secs());
        now = due;
        assert!(paths.take_probe(now));
        paths.returning();
    }
    assert_eq!(waits, [120, 240, 480, 600, 600, 600]);
    assert_eq!(paths.counts().fallbacks, 6);
}

/// Where RDMA is known not to work, TCP is first, and the reason is reported.
#[test]
fn unusable_at_first() {
    let mut paths = Paths::new(PathOptions {
        unusable: Some("no_rdma_dev".into()),
        ..options(Some(TCP))
    });
    assert_eq!(paths.current(), TCP);
    assert_eq!(
        paths.counts().fallback_cause.as_deref(),
        Some("no_rdma_dev")
    );
    paths.connected(at(0));
    assert!(paths.take_probe(at(60)));
    paths.returning();
    paths.connected(at(61));
    assert_eq!((paths.counts().fallbacks, paths.counts().returns), (1, 1));

    let alone = Paths::new(PathOptions {
        unusable: Some("no_rdma_dev".into()),
        ..options(None)
    });
    assert_eq!(alone.current(), RDMA, "there is nothing else to take");
}
