//! The RDMA requests of a queue pair of the host side.

/// Requests of one queue pair to its RDMA device, since it was connected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostWorkRequests {
    pub sends: u64,
    /// Posts of one or more sends.
    pub send_doorbells: u64,
    pub receives: u64,
    pub receive_doorbells: u64,
}

impl std::ops::AddAssign for HostWorkRequests {
    fn add_assign(&mut self, other: Self) {
        self.sends += other.sends;
        self.send_doorbells += other.send_doorbells;
        self.receives += other.receives;
        self.receive_doorbells += other.receive_doorbells;
    }
}
