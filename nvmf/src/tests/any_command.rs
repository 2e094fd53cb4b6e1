//! Random commands of hosts: each is completed exactly once, and the target does not panic.

use std::fs;
use std::path::Path;

use nacre_nvmf_wire::opcode::admin;
use nacre_nvmf_wire::{Sgl, Sqe};
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::rig::*;
use crate::fuzzing;
use crate::transport::ConnId;

/// Answers fetches with these bytes over and over, until nothing moves; the number of answers.
fn answer_fetches(rig: &mut Rig, seed: &[u8]) -> usize {
    let mut answers = 0;
    for _ in 0..6 {
        rig.turn();
        answers += rig.answers().len();
        let fetches: Vec<_> = rig.wire.borrow_mut().fetches.drain(..).collect();
        for (conn, tag, mut buf) in fetches {
            let bytes = buf.bytes_mut().unwrap();
            for (to, from) in bytes.iter_mut().zip(seed.iter().cycle()) {
                *to = *from;
            }
            rig.fetched(conn, tag, buf);
        }
    }
    answers
}

/// A command whose parts are random, but likely enough to get somewhere.
fn command() -> impl Strategy<Value = Sqe> {
    let opcode = prop_oneof![
        4 => proptest::sample::select(vec![
            admin::IDENTIFY, admin::GET_LOG_PAGE, admin::GET_FEATURES, admin::SET_FEATURES,
            admin::ABORT, admin::KEEP_ALIVE, admin::GET_LBA_STATUS, nacre_nvmf_wire::opcode::FABRICS,
        ]),
        1 => any::<u8>(),
    ];
    let nsid = prop_oneof![Just(0u32), Just(1), Just(u32::MAX), any::<u32>()];
    let length = prop_oneof![Just(0u32), Just(16), Just(512), Just(4096), any::<u32>()];
    let dword = prop_oneof![0u32..0x100, Just(0x03ff_0002), any::<u32>()];
    let dwords = proptest::array::uniform5(dword);
    (any::<[u8; 64]>(), opcode, nsid, length, dwords, 0u8..8).prop_map(
        |(bytes, opcode, nsid, length, dwords, wild)| {
            let mut sqe = Sqe::read_from_bytes(&bytes).unwrap();
            sqe.opcode = opcode;
            if wild < 7 {
                sqe.flags = 0x40;
                sqe.nsid = nsid.into();
                sqe.set_sgl(Sgl::Transport { length });
                for (place, dword) in sqe.as_mut_bytes()[40..60].chunks_exact_mut(4).zip(dwords) {
                    place.copy_from_slice(&dword.to_le_bytes());
                }
            }
            sqe
        },
    )
}

fn survives(rig: &mut Rig, conn: ConnId, sqe: Sqe, seed: &[u8]) -> Result<(), TestCaseError> {
    rig.send(conn, sqe, None);
    let answers = answer_fetches(rig, seed);
    prop_assert_eq!(answers, 1, "{:?}", sqe);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Goal: any command on an admin queue of either kind gets exactly one answer, and the
    /// association goes on, or comes to a clean end.
    #[test]
    fn one_answer_each(
        commands in proptest::collection::vec(command(), 1..40),
        discovery in any::<bool>(),
        seed in any::<[u8; 7]>(),
    ) {
        let mut rig = Rig::with_malloc();
        let conn = if discovery { rig.discovery(HOSTNQN) } else { rig.admin().0 };
        for sqe in commands {
            // Held for as long as nothing happens: the events tests see to those.
            if sqe.opcode != admin::ASYNC_EVENT_REQUEST {
                survives(&mut rig, conn, sqe, &seed)?;
            }
        }
        rig.hang_up(conn);
        rig.assert_clean();
    }

    /// Goal: the operations of the fuzz target, at random.
    #[test]
    fn any_operations(input in proptest::collection::vec(any::<u8>(), 0..600)) {
        fuzzing::admin(&input);
    }

    /// Goal: the same, with commands that are likely to get somewhere.
    #[test]
    fn likely_operations(choice in any::<u8>(), steps in proptest::collection::vec(
        (0u8..8, any::<u8>(), 0u8..4, any::<[u8; 20]>(), any::<[u8; 4]>()), 0..60,
    )) {
        let mut input = vec![choice | 4];
        for (kind, op, nsid, dwords, cc) in steps {
            match kind {
                0..=4 => {
                    input.extend([1, op, nsid]);
                    input.extend(dwords);
                }
                5 => input.extend([3, op]),
                6 => input.extend([4, op]),
                _ => input.extend([2, cc[0] & 0x71, 0, cc[2] & 0x46, 0]),
            }
        }
        fuzzing::admin(&input);
    }
}

/// Inputs that once mattered keep being read without harm.
#[test]
fn corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/admin");
    let inputs: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("a readable folder").path())
        .collect();
    assert!(!inputs.is_empty(), "no corpus");
    for input in inputs {
        let bytes = fs::read(&input).expect("a readable input");
        if std::panic::catch_unwind(|| fuzzing::admin(&bytes)).is_err() {
            panic!("broke on {}", input.display());
        }
    }
}
