//! Goal: the checkers find the faults that they exist for. Method: activates a deliberate fault
//! (`nacre_cluster_core::mutation`), and tries seeds from one on that finds it, until a checker of
//! safety reports; a cluster that merely stops does not count. The same seed without the fault
//! passes.
//!
//! After a change of the core or the simulator, another seed may find the fault. The test prints
//! the seed that did. With `NACRE_TEST_AT_LENGTH` it tries all seeds from the first one on.

use std::sync::atomic::{AtomicU64, Ordering};

use nacre_cluster_core_sim::{Mutation, Options, replay, run};
use nacre_random::seeds::on_all_cores;
use parking_lot::Mutex;

const FIRST: u64 = 1;
/// Most seeds tried.
const MOST: u64 = 20_000;
/// The beginnings of the reports of safety's checkers.
const UNSAFE: [&str; 4] = ["block ", "two nodes ", "a fence ", "nodes "];

#[test]
fn every_mutation_is_caught() {
    let next = AtomicU64::new(0);
    let missed: Mutex<Vec<String>> = Mutex::default();
    let work = || {
        while let Some(mutation) = Mutation::ALL.get(next.fetch_add(1, Ordering::Relaxed) as usize)
        {
            if let Err(what) = is_caught(*mutation) {
                missed.lock().push(what);
            }
        }
    };
    on_all_cores(work);
    let missed = missed.into_inner();
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

fn is_caught(mutation: Mutation) -> Result<(), String> {
    let first = match std::env::var_os("NACRE_TEST_AT_LENGTH") {
        Some(_) => FIRST,
        None => finder(mutation),
    };
    Mutation::activate(Some(mutation));
    let caught = (first..first + MOST).find_map(|seed| {
        let what = run(seed, &Options::default()).err()?;
        let is_unsafe = UNSAFE.iter().any(|start| what.starts_with(start));
        is_unsafe.then_some((seed, what))
    });
    Mutation::activate(None);
    let Some((seed, what)) = caught else {
        return Err(format!("{mutation:?} is not noticed in {MOST} runs"));
    };
    println!(
        "{mutation:?}: seed {seed}: {}",
        what.lines().next().unwrap_or_default()
    );
    run(seed, &Options::default())
        .map(drop)
        .map_err(|what| format!("without {mutation:?}: {what}\nagain: {}", replay(seed)))
}

/// A seed that finds the fault.
fn finder(mutation: Mutation) -> u64 {
    match mutation {
        Mutation::AnswerWithoutClock => 37,
        Mutation::ClockOfTurn => 1167,
        Mutation::LeaseFromAnswer => 88,
        Mutation::FenceWithoutRevision => 41,
        Mutation::TakeWithoutFence => 1,
        Mutation::NoIncarnation => 142,
        Mutation::ObserverWithoutLease => 3,
        Mutation::ConfirmedByOne => 65,
        Mutation::ConfirmedByRecord => 1,
        Mutation::FencedForgets => 7,
        Mutation::LocalPastGate => 34,
        Mutation::GateBeforeEnd => 137,
        Mutation::GateForgets => 4131,
        Mutation::LeaveWithoutDrain => 709,
        Mutation::SlotAtOnce => 7,
        Mutation::SkipMerge => 113,
    }
}
