//! Restores stored objects that depend on volumes, after these are open.

use std::rc::Rc;

use crate::services::Engine;

/// Restores namespaces, limits and devices on new volumes, in order. If many volumes appear at
/// once, one pass serves all that appeared before it began.
pub async fn replay_waiting(engine: &Rc<Engine>) {
    let volumes = &engine.volumes;
    let request = volumes.replays_requested.get() + 1;
    volumes.replays_requested.set(request);
    let mut done = volumes.replays_done.lock().await;
    if *done >= request {
        return;
    }
    let upto = volumes.replays_requested.get();
    for record in engine.journal.waiting() {
        engine.replay(&record).await;
    }
    *done = upto;
}
