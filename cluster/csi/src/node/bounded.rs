//! Accesses to devices that may wait without end: each has a deadline, and a device has one at a
//! time.
//!
//! A thread that waits for a dead device cannot be ended. It stays until the device answers, or is
//! gone. Meanwhile further accesses to the device are refused, so that retries add no threads.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use parking_lot::Mutex;

#[derive(Debug, Default, Clone)]
pub(crate) struct Bounded(Arc<Mutex<BTreeSet<PathBuf>>>);

impl Bounded {
    /// Does the work on a thread, and waits for it no longer than `patience`.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        device: &Path,
        patience: Duration,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        if !self.0.lock().insert(device.to_owned()) {
            let text = "an earlier access to the device has not ended";
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        let access = Access {
            all: self.clone(),
            device: device.to_owned(),
        };
        let (sender, receiver) = sync_channel(1);
        let run = move || {
            let outcome = work();
            drop(access);
            // Without a receiver, the result is dropped: an open file is closed.
            let _ = sender.send(outcome);
        };
        std::thread::Builder::new().spawn(run)?;
        receiver.recv_timeout(patience).unwrap_or_else(|error| {
            Err(match error {
                RecvTimeoutError::Timeout => {
                    let text = format!("the device does not answer within {patience:?}");
                    io::Error::new(io::ErrorKind::TimedOut, text)
                }
                RecvTimeoutError::Disconnected => io::Error::other("the access died"),
            })
        })
    }
}

struct Access {
    all: Bounded,
    device: PathBuf,
}

impl Drop for Access {
    fn drop(&mut self) {
        self.all.0.lock().remove(&self.device);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a dead device costs one thread and a bounded time, and another device nothing.
    #[test]
    fn a_dead_device_has_one_thread() {
        let bounded = Bounded::default();
        let (answer, device) = sync_channel::<()>(1);
        let (short, long) = (Duration::from_millis(50), Duration::from_secs(20));
        let dead = Path::new("/dev/dead");
        let late = bounded.run(dead, short, move || {
            let _ = device.recv();
            Ok(())
        });
        assert_eq!(
            late.map_err(|error| error.kind()),
            Err(io::ErrorKind::TimedOut)
        );
        let second = bounded.run(dead, long, || Ok(()));
        assert_eq!(
            second.map_err(|error| error.kind()),
            Err(io::ErrorKind::TimedOut)
        );
        let other = bounded.run(Path::new("/dev/other"), long, || Ok(7));
        assert_eq!(other.expect("it answers"), 7);
        answer.send(()).expect("the thread waits");
        let end = std::time::Instant::now() + long;
        while bounded.run(dead, long, || Ok(())).is_err() {
            assert!(std::time::Instant::now() < end, "it stays refused");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
