//! Goal: the simulator's checker finds lost, stale and differing data. Method: activates a
//! deliberate fault in the volume's code (`nacre_bdev_replica::mutation`), and tries seeds from one
//! on that finds it, until a read returns an impossible value, or replicas differ; other failures
//! of a run do not count. The same seed without the fault passes.
//!
//! After a change of the volume or the simulator, another seed may find the fault. The test prints
//! the seed that did. With `NACRE_TEST_AT_LENGTH` it tries all seeds from the first one on.

use std::sync::atomic::{AtomicUsize, Ordering};

use nacre_bdev_replica_sim::{Mutation, Options, has_leases, replay, run};
use nacre_random::seeds::on_all_cores;
use parking_lot::Mutex;

const FIRST: u64 = 1;
/// Most seeds tried.
const MOST: usize = 2000;

fn is_caught(mutation: Mutation, finder: u64) {
    is_caught_among(mutation, finder, |seed| !has_leases(seed));
}

/// For a fault of holders with leases.
fn is_caught_with_leases(mutation: Mutation, finder: u64) {
    is_caught_among(mutation, finder, has_leases);
}

fn is_caught_among(mutation: Mutation, finder: u64, suits: impl Fn(u64) -> bool + Sync) {
    let first = match std::env::var_os("NACRE_TEST_AT_LENGTH") {
        Some(_) => FIRST,
        None => finder,
    };
    let seeds: Vec<u64> = (first..).filter(|seed| suits(*seed)).take(MOST).collect();
    let next = AtomicUsize::new(0);
    let caught: Mutex<Option<(u64, String)>> = Mutex::new(None);
    let work = || {
        Mutation::activate(Some(mutation));
        while caught.lock().is_none() {
            let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)).copied() else {
                return;
            };
            if let Err(what) = run(seed, &Options::default())
                && ["block ", "held, "]
                    .iter()
                    .any(|text| what.starts_with(text))
            {
                caught.lock().get_or_insert((seed, what));
            }
        }
    };
    on_all_cores(work);
    let caught = caught.into_inner();
    let Some((seed, what)) = caught else {
        panic!("{mutation:?} is not noticed in {MOST} runs");
    };
    println!("{mutation:?}: seed {seed}: {what}");
    Mutation::activate(None);
    if let Err(what) = run(seed, &Options::default()) {
        panic!(
            "seed {seed} fails without {mutation:?}: {what}\nagain: {}",
            replay(seed)
        );
    }
}

#[test]
fn acknowledging_before_membership_is_durable() {
    is_caught(Mutation::AcknowledgeEarly, 20);
}

#[test]
fn skipping_the_dirty_region_log() {
    is_caught(Mutation::SkipLog, 2);
}

#[test]
fn reading_a_stale_replica() {
    is_caught(Mutation::ReadStale, 1);
}

#[test]
fn forgetting_to_fence() {
    is_caught(Mutation::ForgetFence, 1915);
}

#[test]
fn resyncing_in_the_wrong_direction() {
    is_caught(Mutation::ResyncBackwards, 2);
}

#[test]
fn ignoring_the_size_of_devices() {
    is_caught(Mutation::IgnoreSize, 18);
}

#[test]
fn answering_without_a_check_of_the_lease() {
    is_caught_with_leases(Mutation::AnswerUnchecked, 229);
}

#[test]
fn checking_the_lease_before_the_collection() {
    is_caught_with_leases(Mutation::CheckEarly, 261);
}

#[test]
fn confirmation_by_too_few_replicas() {
    is_caught_with_leases(Mutation::ConfirmedByFewer, 1589);
}

#[test]
fn confirmation_that_covers_later_answers() {
    is_caught_with_leases(Mutation::ConfirmedLate, 717);
}

#[test]
fn releasing_the_reservations_in_order() {
    is_caught_with_leases(Mutation::ReleaseAtClose, 645);
}

#[test]
fn keeping_an_unawaited_replica_in_sync() {
    is_caught_with_leases(Mutation::UnawaitedInSync, 277);
}

#[test]
fn keeping_a_silent_replica_in_sync() {
    is_caught_with_leases(Mutation::SilentInSync, 9309);
}

#[test]
fn holding_writes_too_early() {
    is_caught(Mutation::HoldEarly, 50);
}
