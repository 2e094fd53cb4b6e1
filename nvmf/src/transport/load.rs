//! The load of each core: a weighted number of its admin and I/O queues, by which a transport
//! selects the core of a new connection.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The weight of an I/O queue. An admin queue has weight 1: it carries little more than Keep
/// Alives.
const IO_QUEUE: usize = 16;

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    Admin,
    Io,
}

impl QueueKind {
    /// Queue 0 is the admin queue (Base 6.3).
    #[inline]
    pub fn of(qid: u16) -> Self {
        match qid {
            0 => Self::Admin,
            _ => Self::Io,
        }
    }

    fn weight(self) -> usize {
        match self {
            Self::Admin => 1,
            Self::Io => IO_QUEUE,
        }
    }
}

/// The load of one core: its connections, established or assigned.
#[derive(Debug, Default)]
pub struct CoreLoad(AtomicUsize);

impl CoreLoad {
    /// A connection of unknown purpose counts as an I/O queue.
    pub fn add(&self, kind: QueueKind) {
        self.0.fetch_add(kind.weight(), Ordering::Relaxed);
    }

    pub fn remove(&self, kind: QueueKind) {
        self.0.fetch_sub(kind.weight(), Ordering::Relaxed);
    }

    /// The load for comparison: the number of I/O queues, plus one per sixteen admin queues. So I/O
    /// queues spread evenly wherever the admin queues are, and many admin queues spread too.
    pub fn rank(&self) -> usize {
        self.0.load(Ordering::Relaxed) / IO_QUEUE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The core that the next connection goes to.
    fn least(cores: &[CoreLoad]) -> usize {
        let ranked = cores.iter().map(CoreLoad::rank).enumerate();
        ranked
            .min_by_key(|&(at, rank)| (rank, at))
            .expect("a core")
            .0
    }

    /// As a host connects: its admin queue, then its I/O queues.
    #[test]
    fn every_core_gets_an_io_queue_before_one_gets_two() {
        let cores: [CoreLoad; 2] = Default::default();
        for _ in 0..5 {
            cores[least(&cores)].add(QueueKind::Admin);
            let placed = [(); 2].map(|()| {
                let at = least(&cores);
                cores[at].add(QueueKind::Io);
                at
            });
            assert_eq!(placed, [0, 1]);
        }
    }

    #[test]
    fn many_admin_queues_spread() {
        let cores: [CoreLoad; 2] = Default::default();
        let mut counts = [0_usize; 2];
        for _ in 0..100 {
            let at = least(&cores);
            cores[at].add(QueueKind::Admin);
            counts[at] += 1;
        }
        assert!(counts[0].abs_diff(counts[1]) <= IO_QUEUE, "{counts:?}");
        cores[0].remove(QueueKind::Admin);
        assert_eq!(QueueKind::of(0), QueueKind::Admin);
        assert_eq!(QueueKind::of(1), QueueKind::Io);
    }
}
