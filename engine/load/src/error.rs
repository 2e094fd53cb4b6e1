//! The errors of a load run.

use std::time::Duration;

use nacre_bdev::OpenError;
use nacre_bdev_nvme::AttachError;
use nacre_bdev_nvme_vfio::VfioError;
use nacre_hugepages::{ArenaError, CarveError};
use nacre_reactor::{CallError, SpawnError};

use super::job::JobError;
use super::worker::WorkerError;

/// The error of a run that could not start or complete.
#[derive(Debug, thiserror::Error)]
pub enum PerfError {
    #[error(transparent)]
    Job(#[from] JobError),
    #[error("the {owner} has no namespace {nsid}{}{}", owner.narrowed(), names(.there))]
    NoNamespace {
        owner: Owner,
        nsid: u32,
        there: Vec<u32>,
    },
    #[error("the {owner} has no namespace{}", owner.narrowed())]
    Empty { owner: Owner },
    #[error("the {owner} has {} namespaces: choose one with --nsid{}", .there.len(), names(.there))]
    SeveralNamespaces { owner: Owner, there: Vec<u32> },
    #[error("the controller grants {granted} I/O queues, of {asked} asked for: fewer --queues")]
    Queues { asked: u16, granted: u16 },
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error("cannot make an I/O queue: {0}")]
    Queue(#[from] std::io::Error),
    #[error("no memory for I/O: {0}")]
    Memory(std::io::Error),
    #[error("a worker panicked")]
    Panicked,
    #[error(transparent)]
    Drive(#[from] DriveError),
}

/// The owner of the namespaces, for messages: an NVMe-oF subsystem or a local drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    Subsystem,
    Drive,
}

impl Owner {
    /// The usable subset of its namespaces, for messages.
    fn narrowed(self) -> &'static str {
        match self {
            Self::Subsystem => " for this host",
            Self::Drive => " that can be used",
        }
    }
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Subsystem => "subsystem",
            Self::Drive => "drive",
        })
    }
}

fn names(nsids: &[u32]) -> String {
    let shown: Vec<String> = nsids.iter().take(16).map(u32::to_string).collect();
    match shown.len() {
        0 => String::new(),
        n if n < nsids.len() => format!(" (there are {}, …)", shown.join(", ")),
        _ => format!(" (there are {})", shown.join(", ")),
    }
}

/// The error of opening a local drive or block device, or of its DMA memory.
#[derive(Debug, thiserror::Error)]
pub enum DriveError {
    #[error(transparent)]
    Vfio(#[from] VfioError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error(transparent)]
    Carve(#[from] CarveError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("cannot start a reactor: {0}")]
    Reactor(#[from] SpawnError),
    #[error("the drive's reactor ended: {0}")]
    Ended(#[from] CallError),
    #[error("the drive was not brought up within {0:?}")]
    Late(Duration),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: messages about a missing namespace name its owner.
    #[test]
    fn owners_are_named() {
        let there = vec![1, 2];
        let of = |owner| {
            let there = there.clone();
            let missing = PerfError::NoNamespace {
                owner,
                nsid: 3,
                there: there.clone(),
            };
            let several = PerfError::SeveralNamespaces { owner, there };
            [missing, PerfError::Empty { owner }, several].map(|error| error.to_string())
        };
        assert_eq!(
            of(Owner::Subsystem),
            [
                "the subsystem has no namespace 3 for this host (there are 1, 2)",
                "the subsystem has no namespace for this host",
                "the subsystem has 2 namespaces: choose one with --nsid (there are 1, 2)",
            ]
        );
        assert_eq!(
            of(Owner::Drive),
            [
                "the drive has no namespace 3 that can be used (there are 1, 2)",
                "the drive has no namespace that can be used",
                "the drive has 2 namespaces: choose one with --nsid (there are 1, 2)",
            ]
        );
    }
}
