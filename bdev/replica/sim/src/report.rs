//! The options of a run, and its counters.

#[derive(Debug, Clone)]
pub struct Options {
    /// Print everything that happens.
    pub trace: bool,
    /// Block of the volume to watch: prints each disk's commands to it.
    pub block: Option<u64>,
    /// I/Os of the load before all faults are healed.
    pub ios: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            trace: false,
            block: None,
            ios: 250,
        }
    }
}

/// Counters of a run, for the sum over many.
#[derive(Debug, Clone, Copy, Default)]
pub struct Report {
    pub ios: u64,
    pub reads: u64,
    pub writes: u64,
    /// I/Os that hosts aborted, and that ended aborted, or were asked to.
    pub aborts: u64,
    pub opens: u64,
    pub crashes: u64,
    pub power_losses: u64,
    pub retired: u64,
    pub resynced: u64,
    pub fenced: u64,
    pub grown: u64,
    pub salvaged: u64,
    pub forced: u64,
    /// Disks that lost their end, and those that regained it as replicas of the volume.
    pub cut: u64,
    pub cut_replicas: u64,
    /// Queues that hosts closed with I/O in flight.
    pub left: u64,
    /// How often a watermark of a filling replica was stored.
    pub watermarks: u64,
    /// I/Os completed, none of them with success, by a volume that was not open.
    pub waited: u64,
    /// Openings of a volume that was in use already.
    pub taken_over: u64,
    pub virtual_ms: u64,
}

impl std::ops::Add for Report {
    type Output = Report;

    fn add(self, other: Report) -> Report {
        Report {
            ios: self.ios + other.ios,
            reads: self.reads + other.reads,
            writes: self.writes + other.writes,
            aborts: self.aborts + other.aborts,
            opens: self.opens + other.opens,
            crashes: self.crashes + other.crashes,
            power_losses: self.power_losses + other.power_losses,
            retired: self.retired + other.retired,
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
            virtual_ms: self.virtual_ms + other.virtual_ms,
        }
    }
}
