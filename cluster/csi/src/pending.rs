//! One operation at a time per volume, snapshot or subsystem, by its id or NQN: a second one is
//! refused with `ABORTED`.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tonic::Status;

#[derive(Debug, Default, Clone)]
pub(crate) struct Pending(Arc<Mutex<BTreeSet<String>>>);

impl Pending {
    /// Starts an operation on this volume. It lasts until the result is dropped.
    pub(crate) fn start(&self, volume: &str) -> Result<Operation, Status> {
        self.try_start(volume).ok_or_else(|| {
            Status::aborted(format!(
                "volume {volume}: an operation is pending for it; try again when it has ended"
            ))
        })
    }

    pub(crate) fn try_start(&self, volume: &str) -> Option<Operation> {
        let is_first = self.0.lock().insert(volume.to_owned());
        is_first.then(|| Operation {
            all: self.clone(),
            volume: volume.to_owned(),
        })
    }
}

#[derive(Debug)]
pub(crate) struct Operation {
    all: Pending,
    volume: String,
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.all.0.lock().remove(&self.volume);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_one_operation_at_a_time() {
        let pending = Pending::default();
        let first = pending.start("v").expect("none is pending");
        let second = pending.start("v").expect_err("one is pending");
        assert_eq!(second.code(), tonic::Code::Aborted);
        let other = pending.start("w").expect("another volume");
        drop(first);
        assert!(pending.try_start("v").is_some());
        drop(other);
    }
}
