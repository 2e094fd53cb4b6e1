//! The options of a simulation run, and the counters that it reports.

use nacre_bdev_replica::handle::VolumeEventKind;

use crate::holds::HoldCounts;

#[derive(Debug, Clone)]
pub struct Options {
    /// Prints the events, I/Os and completions of the run.
    pub trace: bool,
    /// Prints each disk's commands to this block of the volume.
    pub block: Option<u64>,
    /// The number of I/Os before all faults end and the run checks the result. They end after 120 s
    /// of virtual time at the latest.
    pub ios: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            trace: false,
            block: None,
            ios: 250,
        }
    }
}

/// The counters of a run. The program adds those of all runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Report {
    pub ios: u64,
    pub reads: u64,
    pub writes: u64,
    /// Aborts of hosts that the volume's queue accepted.
    pub aborts: u64,
    /// Holders' openings of the volume that succeeded.
    pub opens: u64,
    /// Holders that were stopped, also after a close.
    pub crashes: u64,
    pub power_losses: u64,
    /// Replicas put out of sync (the event `ReplicaOut`).
    pub retired: u64,
    /// Replicas of `retired` whose disk was silent for less than the I/O deadline, while the holder
    /// believed that the disk's node has a lease.
    pub silent: u64,
    /// Events of volumes: `ResyncEnded`, `Fenced`, `Grown` and `Salvaged`.
    pub resynced: u64,
    pub fenced: u64,
    pub grown: u64,
    pub salvaged: u64,
    /// Changes of the record by which the volume continues from a replica that lacks data.
    pub forced: u64,
    /// Truncations of disks.
    pub cut: u64,
    /// Truncated disks that got their size back while they were replicas of the volume.
    pub cut_replicas: u64,
    /// Queues closed by hosts with I/O in flight.
    pub left: u64,
    /// How often the watermark of a resynchronising replica was stored.
    pub watermarks: u64,
    /// I/Os that a prepared device completed, with an error, before the volume was open.
    pub waited: u64,
    /// Openings of the volume with hosts connected to the prepared device.
    pub taken_over: u64,
    pub leases: LeaseCounts,
    pub holds: HoldCounts,
    pub virtual_ms: u64,
}

/// The counters of holders with leases.
#[derive(Debug, Clone, Copy, Default)]
pub struct LeaseCounts {
    /// Holders whose lease was ended while they ran.
    pub ended: u64,
    /// Stopped holders with an open volume that went on while a successor served.
    pub outlived: u64,
    /// I/Os with success whose holder had no good lease: their answers left by confirmation.
    pub confirmed: u64,
}

impl Report {
    pub(crate) fn count(&mut self, event: &VolumeEventKind) {
        match event {
            VolumeEventKind::ReplicaOut { .. } => self.retired += 1,
            VolumeEventKind::ResyncEnded { .. } => self.resynced += 1,
            VolumeEventKind::Fenced { .. } => self.fenced += 1,
            VolumeEventKind::Salvaged { .. } => self.salvaged += 1,
            VolumeEventKind::Grown { .. } => self.grown += 1,
            _ => {}
        }
    }
}

impl std::ops::Add for Report {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            ios: self.ios + other.ios,
            reads: self.reads + other.reads,
            writes: self.writes + other.writes,
            aborts: self.aborts + other.aborts,
            opens: self.opens + other.opens,
            crashes: self.crashes + other.crashes,
            power_losses: self.power_losses + other.power_losses,
            retired: self.retired + other.retired,
            silent: self.silent + other.silent,
            resynced: self.resynced + other.resynced,
            fenced: self.fenced + other.fenced,
            grown: self.grown + other.grown,
            salvaged: self.salvaged + other.salvaged,
            forced: self.forced + other.forced,
            cut: self.cut + other.cut,
            cut_replicas: self.cut_replicas + other.cut_replicas,
            left: self.left + other.left,
            watermarks: self.watermarks + other.watermarks,
            waited: self.waited + other.waited,
            taken_over: self.taken_over + other.taken_over,
            leases: self.leases + other.leases,
            holds: self.holds + other.holds,
            virtual_ms: self.virtual_ms + other.virtual_ms,
        }
    }
}

impl std::ops::Add for LeaseCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            ended: self.ended + other.ended,
            outlived: self.outlived + other.outlived,
            confirmed: self.confirmed + other.confirmed,
        }
    }
}
