//! The options of a simulation run, and the counters that it reports.

#[derive(Debug, Clone)]
pub struct Options {
    /// Prints the events of the run.
    pub trace: bool,
    /// Virtual seconds of load and injected failures.
    pub seconds: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            trace: false,
            seconds: 20,
        }
    }
}

/// The counters of a run. The program adds those of all runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    pub reads: u64,
    pub writes: u64,
    /// Operations that a host sent again on another path.
    pub retries: u64,
    /// Openings of the volume by a new holder.
    pub takes: u64,
    /// Fences of a node by another one.
    pub fences: u64,
    pub handovers: u64,
    /// Ends of nodes' processes, also of those that are lost for good.
    pub crashes: u64,
    /// Losses of two nodes at once.
    pub losses: u64,
    /// Stops of one core of a node, or of all, for a time.
    pub stalls: u64,
    /// Complete copies to a replica that returned, which is then to be in sync.
    pub promotions: u64,
    /// Answers that waited for a lease or for confirmation.
    pub held: u64,
    /// Rounds of confirmation that let answers leave.
    pub confirmations: u64,
    pub virtual_ms: u64,
}

impl std::ops::Add for Report {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            reads: self.reads + other.reads,
            writes: self.writes + other.writes,
            retries: self.retries + other.retries,
            takes: self.takes + other.takes,
            fences: self.fences + other.fences,
            handovers: self.handovers + other.handovers,
            crashes: self.crashes + other.crashes,
            losses: self.losses + other.losses,
            stalls: self.stalls + other.stalls,
            promotions: self.promotions + other.promotions,
            held: self.held + other.held,
            confirmations: self.confirmations + other.confirmations,
            virtual_ms: self.virtual_ms + other.virtual_ms,
        }
    }
}
