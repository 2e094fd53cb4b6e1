//! Loom test of the doorbell protocol (`phase.rs`), under every interleaving and reordering that
//! the memory model allows.
//!
//! ```text
//! cargo test -p nacre-tests-models phase
//! ```
//!
//! The doorbell register is an atomic without any ordering. The control writes 0 to it when it
//! recreates the queue. An owner's earlier value must never appear there afterwards.

#[path = "../../../../bdev/nvme/src/phase.rs"]
#[allow(dead_code)]
mod source;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use source::{Phase, QueueState, encode};

const STALE: u32 = 7;

/// One owner that rings once, one control that resets once. Returns the final value of the
/// register.
fn reset_while_ringing(waits: bool) {
    loom::model(move || {
        let phase = Arc::new(Phase::new());
        let register = Arc::new(AtomicU32::new(0));
        phase.set(QueueState::Live(1));
        let owner = {
            let (phase, register) = (Arc::clone(&phase), Arc::clone(&register));
            thread::spawn(move || {
                if phase.enter(encode(QueueState::Live(1))) {
                    register.store(STALE, Ordering::Relaxed);
                    phase.leave();
                }
            })
        };
        phase.set(QueueState::Quiescing);
        while waits && phase.is_busy() {
            thread::yield_now();
        }
        register.store(0, Ordering::Relaxed);
        phase.set(QueueState::Live(2));
        owner.join().unwrap();
        assert_eq!(register.load(Ordering::Relaxed), 0, "a stale doorbell");
    });
}

/// Goal: after a reset no doorbell of before it is written.
#[test]
fn no_doorbell_write_survives_a_reset() {
    reset_while_ringing(true);
}

/// The model sees the fault that it excludes: a control that does not wait for the owner.
#[test]
#[should_panic(expected = "a stale doorbell")]
fn waiting_is_needed() {
    reset_while_ringing(false);
}
