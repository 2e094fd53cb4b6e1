//! Hosts, with one operation at a time.

/// A command on the way to a node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Command {
    pub client: usize,
    pub attempt: u64,
    /// `SimNode::connections` of the node at the time of sending.
    pub connection: u64,
    pub block: usize,
    /// `None`: a read.
    pub write: Option<u64>,
}

/// A host with one operation at a time.
#[derive(Debug, Default)]
pub(crate) struct Client {
    pub operation: Option<Operation>,
    pub path: usize,
    pub last_attempt: u64,
    /// Blocks to read before it stops.
    pub last_reads: Vec<usize>,
    pub ends: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Operation {
    pub number: usize,
    pub block: usize,
    pub write: Option<u64>,
    /// The node of the current attempt, and its life.
    pub sent: Option<(usize, u64)>,
    pub patient_until: u64,
}

impl Client {
    /// The client waits for its present attempt.
    pub(crate) fn be_patient(&mut self, until: u64) {
        if let Some(operation) = &mut self.operation {
            operation.patient_until = until;
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.operation.is_none() && self.last_reads.is_empty()
    }
}
