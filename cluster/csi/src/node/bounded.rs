//! Calls of the kernel that may wait without end: each has a deadline, and a device or a path has
//! one at a time.
//!
//! A thread that waits for a dead device cannot be ended. It stays until the device answers, or is
//! gone. Meanwhile further accesses to the device are refused, so that retries add no threads.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use parking_lot::Mutex;

/// Most accesses at the same time. Calls run at most 64; the others are accesses that hang.
const MOST: usize = 256;

/// Accesses in progress, each with its device or path.
#[derive(Debug)]
pub(crate) struct Bounded<K: Ord>(Arc<Mutex<BTreeSet<K>>>);

impl<K: Ord> Clone for Bounded<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K: Ord> Default for Bounded<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// Why an access has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AccessError {
    #[error("an earlier access has not ended")]
    Pending,
    #[error("no answer within {0:?}")]
    Late(Duration),
    #[error("{MOST} other accesses have not ended")]
    Full,
    #[error("the access died")]
    Died,
    #[error(transparent)]
    Failed(#[from] io::Error),
}

impl AccessError {
    /// True if the kernel does not answer, to this access or to earlier ones.
    pub(crate) fn is_late(&self) -> bool {
        matches!(self, Self::Pending | Self::Late(_) | Self::Full)
    }

    pub(crate) fn kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Failed(error) => Some(error.kind()),
            _ => None,
        }
    }
}

impl<K: Ord + Clone + Send + 'static> Bounded<K> {
    /// Does the work on a thread, and waits for it no longer than `patience`. Fails at once while
    /// an earlier access with this key runs, or [`MOST`] accesses do.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        key: &K,
        patience: Duration,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, AccessError> {
        let access = self.start(key)?;
        let (sender, receiver) = sync_channel(1);
        let run = move || {
            let outcome = work();
            drop(access);
            // Without a receiver, the result is dropped: an open file is closed.
            let _ = sender.send(outcome);
        };
        std::thread::Builder::new().spawn(run)?;
        match receiver.recv_timeout(patience) {
            Ok(outcome) => Ok(outcome?),
            Err(RecvTimeoutError::Timeout) => Err(AccessError::Late(patience)),
            Err(RecvTimeoutError::Disconnected) => Err(AccessError::Died),
        }
    }

    fn start(&self, key: &K) -> Result<AccessInProgress<K>, AccessError> {
        let mut all = self.0.lock();
        if all.contains(key) {
            return Err(AccessError::Pending);
        }
        if all.len() >= MOST {
            return Err(AccessError::Full);
        }
        all.insert(key.clone());
        Ok(AccessInProgress {
            all: self.clone(),
            key: key.clone(),
        })
    }

    /// The key of an access in progress for which `fits` is true.
    pub(crate) fn find(&self, fits: impl Fn(&K) -> bool) -> Option<K> {
        let all = self.0.lock();
        all.iter().find(|key| fits(key)).cloned()
    }
}

struct AccessInProgress<K: Ord> {
    all: Bounded<K>,
    key: K,
}

impl<K: Ord> Drop for AccessInProgress<K> {
    fn drop(&mut self) {
        self.all.0.lock().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// Goal: a dead device costs one thread and a bounded time, and another device nothing.
    #[test]
    fn a_dead_device_has_one_thread() {
        let bounded = Bounded::default();
        let (answer, device) = sync_channel::<()>(1);
        let short = Duration::from_millis(50);
        let late = bounded.run(&"dead", short, move || {
            let _ = device.recv();
            Ok(())
        });
        assert!(matches!(late, Err(AccessError::Late(_))), "{late:?}");
        let second = bounded.run(&"dead", LONG, || Ok(()));
        assert!(matches!(second, Err(AccessError::Pending)), "{second:?}");
        assert_eq!(bounded.find(|key| key.starts_with('d')), Some("dead"));
        let other = bounded.run(&"other", LONG, || Ok(7));
        assert_eq!(other.expect("it answers"), 7);
        answer.send(()).expect("the thread waits");
        let end = std::time::Instant::now() + LONG;
        while bounded.run(&"dead", LONG, || Ok(())).is_err() {
            assert!(std::time::Instant::now() < end, "it stays refused");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Goal: accesses that hang have a bound, and an access that dies is not one of them.
    #[test]
    fn accesses_have_a_bound() {
        let bounded = Bounded::default();
        let died = bounded.run(&0, LONG, || -> io::Result<()> { panic!("it dies") });
        assert!(matches!(died, Err(AccessError::Died)), "{died:?}");
        let held: Vec<_> = (0..MOST).map(|key| bounded.start(&key)).collect();
        assert!(held.iter().all(Result::is_ok));
        let refused = bounded.run(&MOST, LONG, || Ok(()));
        assert!(matches!(refused, Err(AccessError::Full)), "{refused:?}");
        drop(held);
        bounded.run(&MOST, LONG, || Ok(())).expect("all have ended");
    }
}
