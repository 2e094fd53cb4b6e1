//! The workloads of a comparison, one per line of its table: I/O pattern, block size, queue depth.

use serde::Serialize;

/// A load: the pattern, size and number of I/Os in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Workload {
    pub random: bool,
    /// Percentage of reads, 0 to 100.
    pub read_percent: u8,
    /// Bytes of each I/O.
    pub size_bytes: u32,
    /// I/Os in flight per queue.
    pub depth: u16,
}

const KIB: u32 = 1 << 10;

const fn random(read_percent: u8, kib: u32, depth: u16) -> Workload {
    Workload {
        random: true,
        read_percent,
        size_bytes: kib * KIB,
        depth,
    }
}

impl Workload {
    /// The workloads of a run without a choice. Other projects publish the sequential read and the
    /// random write with 128 I/Os in flight.
    pub const ALL: [Self; 10] = [
        random(100, 4, 1),
        random(0, 4, 1),
        random(100, 4, 32),
        random(0, 4, 32),
        random(100, 4, 128),
        random(0, 4, 128),
        Self {
            random: false,
            ..random(100, 4, 128)
        },
        random(70, 4, 32),
        random(100, 128, 16),
        random(0, 128, 16),
    ];

    pub fn writes(&self) -> bool {
        self.read_percent < 100
    }

    /// The name by which people choose it: `4 KiB random read, depth 1`.
    pub fn name(&self) -> String {
        let order = if self.random { "random" } else { "sequential" };
        let direction = match self.read_percent {
            100 => "read".to_owned(),
            0 => "write".to_owned(),
            reads => format!("read/write {reads}/{}", 100 - reads),
        };
        let (kib, depth) = (self.size_bytes / KIB, self.depth);
        format!("{kib} KiB {order} {direction}, depth {depth}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ() {
        let names = Workload::ALL.map(|workload| workload.name());
        assert_eq!(names[0], "4 KiB random read, depth 1");
        assert_eq!(names[6], "4 KiB sequential read, depth 128");
        assert_eq!(names[7], "4 KiB random read/write 70/30, depth 32");
        for (at, name) in names.iter().enumerate() {
            assert!(!names[..at].contains(name), "{name}");
        }
    }
}
