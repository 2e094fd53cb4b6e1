//! Tests of both machines against each other, with the stream received in pieces of random sizes.

use nacre_nvmf_wire::status::StatusCode;
use nacre_nvmf_wire::tcp::{DataAlignment, Digests};
use nacre_random::Random;
use proptest::prelude::*;

use super::pair::{Pair, io_queue, pattern};
use crate::tcp::{HostConfig, TcpTargetConfig};
use crate::transport::{CloseWhy, Closed};

fn target_config() -> TcpTargetConfig {
    TcpTargetConfig {
        max_h2c_data_bytes: 16 << 10,
        ..TcpTargetConfig::default()
    }
}

#[derive(Debug, Clone, Copy)]
struct Command {
    write: bool,
    len: usize,
}

#[derive(Debug, Clone)]
struct Setting {
    digests: Digests,
    host_alignment: u8,
    controller_alignment: u8,
    flow_control_off: bool,
    r2t_bytes: u32,
    max_h2c_data_bytes: u32,
    in_capsule_bytes: u32,
    chunk: usize,
    seed: u64,
    commands: Vec<Command>,
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => prop_oneof![Just(512usize), Just(4096), Just(8192)],
        4 => 1usize..20_000,
        2 => Just(128 << 10),
        1 => Just(1 << 20),
    ]
}

fn setting() -> impl Strategy<Value = Setting> {
    let commands = proptest::collection::vec(
        (any::<bool>(), length()).prop_map(|(write, len)| Command { write, len }),
        1..8,
    );
    (
        (any::<bool>(), any::<bool>(), any::<bool>()),
        (0u8..32, 0u8..32),
        prop_oneof![Just(u32::MAX), Just(4096u32), Just(10_000u32)],
        (1u32..10).prop_map(|n| n * 4096),
        prop_oneof![Just(4096u32), Just(8192u32), Just(0u32)],
        (
            prop_oneof![Just(usize::MAX), Just(0usize), 200usize..5000],
            1u64..u64::MAX,
        ),
        commands,
    )
        .prop_map(
            |(
                flags,
                aligns,
                r2t_bytes,
                max_h2c_data_bytes,
                in_capsule_bytes,
                (chunk, seed),
                commands,
            )| Setting {
                digests: Digests {
                    header: flags.0,
                    data: flags.1,
                },
                flow_control_off: flags.2,
                host_alignment: aligns.0,
                controller_alignment: aligns.1,
                r2t_bytes,
                max_h2c_data_bytes,
                in_capsule_bytes,
                chunk,
                seed,
                commands,
            },
        )
}

fn check(setting: &Setting) {
    let mut pair = Pair::new(
        TcpTargetConfig {
            r2t_bytes: setting.r2t_bytes,
            max_h2c_data_bytes: setting.max_h2c_data_bytes,
            in_capsule_bytes: setting.in_capsule_bytes,
            alignment: DataAlignment::from_field(setting.controller_alignment).unwrap(),
            ..TcpTargetConfig::default()
        },
        HostConfig {
            digests: setting.digests,
            alignment: DataAlignment::from_field(setting.host_alignment).unwrap(),
            ..HostConfig::default()
        },
    );
    pair.chunk = setting.chunk;
    pair.random = Random::new(setting.seed);
    pair.run();
    assert!(pair.ready);
    assert_eq!(pair.target.digests(), setting.digests);
    pair.target.established(io_queue(setting.flow_control_off));
    pair.host.set_in_capsule_bytes(setting.in_capsule_bytes);
    for (cid, command) in (0..).zip(&setting.commands) {
        let seed = u32::from(cid) + 7;
        if command.write {
            pair.write(cid, seed, command.len)
        } else {
            pair.read(cid, seed, command.len)
        }
    }
    pair.run();
    assert_eq!(pair.app.closed, None);
    assert_eq!(pair.host_closed, None);
    for (cid, command) in (0u16..).zip(&setting.commands) {
        let outcome = &pair.outcomes[&cid];
        let expected = pattern(u32::from(cid) + 7, command.len);
        assert_eq!(outcome.status, StatusCode::SUCCESS, "command {cid}");
        if command.write {
            assert!(
                pair.app.written[&cid] == expected,
                "data of write {cid} differs"
            );
        } else {
            assert!(
                outcome.read.as_ref() == Some(&expected),
                "data of read {cid} differs"
            );
            assert_eq!(outcome.transferred as usize, command.len);
        }
    }
    pair.assert_no_leak();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Any mix of commands, digests, alignments, limits and cuts of the stream: every command ends
    /// well with its own data, and no buffer is lost.
    #[test]
    fn any_setting_any_cut(setting in setting()) {
        check(&setting);
    }
}

/// Byte by byte, with everything turned on.
#[test]
fn one_byte_at_a_time() {
    check(&Setting {
        digests: Digests::BOTH,
        host_alignment: 31,
        controller_alignment: 15,
        flow_control_off: true,
        r2t_bytes: 5000,
        max_h2c_data_bytes: 4096,
        in_capsule_bytes: 4096,
        chunk: 1,
        seed: 1,
        commands: vec![
            Command {
                write: true,
                len: 4096,
            },
            Command {
                write: false,
                len: 4096,
            },
            Command {
                write: true,
                len: 12_345,
            },
            Command {
                write: false,
                len: 9,
            },
            Command {
                write: false,
                len: 700,
            },
        ],
    });
}

/// A full queue of small reads and writes, many times over: identifiers and tags are reused.
#[test]
fn full_queue_many_rounds() {
    let mut pair = Pair::connected(target_config(), HostConfig::default(), io_queue(true));
    for round in 0..20u32 {
        pair.outcomes.clear();
        pair.app.written.clear();
        for cid in 0..128u16 {
            let seed = round * 1000 + u32::from(cid);
            if cid % 2 == 0 {
                pair.read(cid, seed, 4096)
            } else {
                pair.write(cid, seed, 4096 + usize::from(cid % 4) * 512)
            }
        }
        pair.run();
        assert_eq!(pair.outcomes.len(), 128);
        for cid in 0..128u16 {
            let seed = round * 1000 + u32::from(cid);
            let outcome = &pair.outcomes[&cid];
            assert_eq!(outcome.status, StatusCode::SUCCESS);
            match &outcome.read {
                Some(read) if cid % 2 == 0 => assert!(*read == pattern(seed, 4096)),
                _ => assert!(
                    pair.app.written[&cid] == pattern(seed, 4096 + usize::from(cid % 4) * 512)
                ),
            }
        }
    }
    pair.assert_no_leak();
}

/// With flow control off a good read ends without a response capsule; with it on, and for a read
/// that failed, it does not.
#[test]
fn success_flag_saves_the_response() {
    for (off, expected) in [(true, 24 + 4096), (false, 24 + 4096 + 24)] {
        let mut pair = Pair::connected(target_config(), HostConfig::default(), io_queue(off));
        pair.read(3, 1, 4096);
        pair.sent_to_host.clear();
        pair.run();
        assert_eq!(pair.outcomes[&3].status, StatusCode::SUCCESS);
        assert_eq!(pair.sent_to_host.len(), expected);
    }
}

/// No buffer for in-capsule data: the connection waits, reads nothing more, and goes on where it
/// stopped when there is one.
#[test]
fn waits_for_a_buffer() {
    let mut pair = Pair::connected(target_config(), HostConfig::default(), io_queue(false));
    let mut hoard = Vec::new();
    while let Some(buf) = pair.pools.io.acquire(4096) {
        hoard.push(buf);
    }
    pair.write(1, 11, 4096);
    pair.write(2, 22, 4096);
    for _ in 0..50 {
        pair.step();
    }
    assert!(pair.app.log.is_empty());
    assert!(!pair.target.wants_read());
    assert!(pair.target.has_news());
    assert_eq!(
        pair.target.deadline(),
        None,
        "a host is not blamed for our lack of buffers"
    );
    hoard.clear();
    pair.run();
    assert!(pair.app.written[&1] == pattern(11, 4096));
    assert!(pair.app.written[&2] == pattern(22, 4096));
    assert!(pair.target.wants_read());
    pair.assert_no_leak();
}

/// Commands on the admin queue take their buffers from the admin pool, whatever I/O has used up.
#[test]
fn admin_has_its_own_buffers() {
    let params = crate::transport::QueueParams {
        qid: 0,
        entries: 32,
        flow_control_off: false,
    };
    let mut pair = Pair::connected(target_config(), HostConfig::default(), params);
    let mut hoard = Vec::new();
    while let Some(buf) = pair.pools.io.acquire(512) {
        hoard.push(buf);
    }
    pair.write(1, 11, 8192);
    pair.host.set_in_capsule_bytes(8192);
    pair.write(2, 12, 8192);
    hoard.clear();
    pair.run();
    assert!(pair.app.written[&1] == pattern(11, 8192));
    assert!(pair.app.written[&2] == pattern(12, 8192));
}

/// Drained: completed responses still arrive; then the controller closes its sending side, and the
/// connection ends when the host closes too.
#[test]
fn drained_close_delivers_responses() {
    let mut pair = Pair::connected(target_config(), HostConfig::default(), io_queue(false));
    pair.read(1, 5, 4096);
    while pair.app.log.is_empty() {
        pair.step();
    }
    pair.target.close(CloseWhy::Drained, pair.now);
    pair.run();
    assert_eq!(pair.outcomes[&1].status, StatusCode::SUCCESS);
    assert_eq!(pair.app.closed, Some(Closed::Local));
    assert!(pair.target.takes_shutdown());
    assert!(!pair.target.takes_shutdown());
    assert!(!pair.target.is_finished());
    // Further bytes of the host are dropped.
    pair.write(2, 5, 4096);
    pair.run();
    assert!(pair.to_target.is_empty());
    pair.target.peer_closed(None);
    assert!(pair.target.is_finished());
}

/// Now: nothing more is sent or read, and buffers are free at once.
#[test]
fn close_now_lets_everything_go() {
    let mut pair = Pair::connected(target_config(), HostConfig::default(), io_queue(false));
    pair.app.answer = false;
    pair.write(1, 5, 100_000);
    pair.run();
    let tag = crate::transport::ReqTag { cid: 1, index: 9 };
    pair.target
        .fetch(tag, pair.pools.io.acquire(100_000).unwrap(), pair.now);
    for _ in 0..2 {
        pair.step();
    }
    pair.target.close(CloseWhy::Now, pair.now);
    pair.step();
    assert_eq!(pair.app.closed, Some(Closed::Local));
    assert!(pair.target.is_finished());
    pair.host.close();
    pair.run();
    assert_eq!(pair.host_closed, Some(Closed::Local));
    pair.assert_no_leak();
}
