//! Lock files (flock) that allow one change of the appliance at a time. A lock ends when it is
//! dropped, or with the process.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use rustix::fs::{FlockOperation, flock};

use crate::place::{Places, create_folder};

#[derive(Debug)]
pub struct Lock(File);

#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error(
        "another `nacre appliance` command is changing this machine; try again when it has ended"
    )]
    Taken,
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl Lock {
    /// The lock for updates, rollback, restore and reset. Fails at once with [`LockError::Taken`]
    /// if it has an owner. The other locks wait for their owner.
    pub fn of_system(places: &Places) -> Result<Self, LockError> {
        Self::take(places, "lock", FlockOperation::NonBlockingLockExclusive)
    }

    /// The lock of the network's files. Its owners hold it for a moment only.
    pub fn of_network(places: &Places) -> Result<Self, LockError> {
        Self::take(places, "network.lock", FlockOperation::LockExclusive)
    }

    /// The lock of the file that records updates and other acts. Its owners hold it for a moment
    /// only.
    pub fn of_history(places: &Places) -> Result<Self, LockError> {
        Self::take(places, "history.lock", FlockOperation::LockExclusive)
    }

    /// The lock of the list of drives for vfio-pci. Its owners hold it while they bind a drive.
    pub fn of_drives(places: &Places) -> Result<Self, LockError> {
        Self::take(places, "drives.lock", FlockOperation::LockExclusive)
    }

    fn take(places: &Places, name: &str, how: FlockOperation) -> Result<Self, LockError> {
        let path = places.notes().join(name);
        let failed = |source| LockError::Io {
            path: path.clone(),
            source,
        };
        create_folder(&places.notes(), 0o700).map_err(failed)?;
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        match flock(&file, how) {
            Ok(()) => Ok(Self(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(LockError::Taken),
            Err(error) => Err(failed(error.into())),
        }
    }
}

impl Drop for Lock {
    /// A child of another thread has the descriptor until its exec, and closing ours would leave
    /// the lock with it. An unlock counts for every copy. Its only error is a bad descriptor.
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_owner_at_a_time() {
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        let lock = Lock::of_system(&places).unwrap();
        assert!(matches!(Lock::of_system(&places), Err(LockError::Taken)));
        drop(Lock::of_network(&places).unwrap());
        drop(lock);
        Lock::of_system(&places).unwrap();
    }

    /// Goal: a child that is between fork and exec does not keep the lock. Method: a copy of the
    /// descriptor outlives the lock.
    #[test]
    fn a_copy_of_the_descriptor_keeps_no_lock() {
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        let lock = Lock::of_system(&places).unwrap();
        let copy = lock.0.try_clone().unwrap();
        assert!(matches!(Lock::of_system(&places), Err(LockError::Taken)));
        drop(lock);
        Lock::of_system(&places).unwrap();
        drop(copy);
    }
}
