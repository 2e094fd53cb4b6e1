//! Goal: the simulator's checker finds lost, stale and differing data. Method: activates a
//! deliberate fault in the volume's code (`nacre_bdev_replica::mutation`), and tries seeds from the
//! first one on until a read returns an impossible value, or replicas differ; other failures of a
//! run do not count. The same seed without the fault passes.

use std::sync::atomic::{AtomicU64, Ordering};

use nacre_bdev_replica_sim::{Mutation, Options, replay, run};
use nacre_random::seeds::on_all_cores;
use parking_lot::Mutex;

const FIRST: u64 = 1;
/// Most seeds tried.
const MOST: u64 = 2000;

fn is_caught(mutation: Mutation) {
    let next = AtomicU64::new(FIRST);
    let caught: Mutex<Option<(u64, String)>> = Mutex::new(None);
    let work = || {
        Mutation::activate(Some(mutation));
        while caught.lock().is_none() {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= FIRST + MOST {
                return;
            }
            if let Err(what) = run(seed, &Options::default())
                && what.starts_with("block ")
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
    is_caught(Mutation::AcknowledgeEarly);
}

#[test]
fn skipping_the_dirty_region_log() {
    is_caught(Mutation::SkipLog);
}

#[test]
fn reading_a_stale_replica() {
    is_caught(Mutation::ReadStale);
}

#[test]
fn forgetting_to_fence() {
    is_caught(Mutation::ForgetFence);
}

#[test]
fn resyncing_in_the_wrong_direction() {
    is_caught(Mutation::ResyncBackwards);
}

#[test]
fn ignoring_the_size_of_devices() {
    is_caught(Mutation::IgnoreSize);
}
