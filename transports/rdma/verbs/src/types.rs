//! Plain data types of verbs and of the connection manager: attributes, work requests, completions,
//! events.

use std::fmt;
use std::net::SocketAddr;

use arrayvec::ArrayVec;

/// Identifies a device until it is removed. A device that returns gets a new id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

/// Identifies a connection or listener of one connection manager. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CmId(pub u64);

/// The network type of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wire {
    Infiniband,
    /// RDMA over Converged Ethernet, v1 or v2 (the GID's type shows which).
    Roce,
    Iwarp,
}

/// A device's identity and limits (`ibv_device_attr`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// The kernel's name of the device, such as `mlx5_0`.
    pub name: String,
    pub wire: Wire,
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub firmware: String,
    /// `vendor_id` and `vendor_part_id`.
    pub vendor: (u32, u32),
    pub ports: u8,
    /// The NUMA node of the device, if known.
    pub numa_node: Option<u32>,
    pub max_qp: u32,
    /// Most work requests of one send or receive queue.
    pub max_qp_wr: u32,
    pub max_sge: u32,
    /// Most scatter entries of an RDMA READ (iWARP: often 1).
    pub max_sge_rd: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_mr_size: u64,
    pub max_pd: u32,
    /// Most RDMA READs of the peer that one queue pair answers at the same time (`max_qp_rd_atom`).
    pub max_responder_resources: u8,
    /// Most outstanding RDMA READs of one queue pair (`max_qp_init_rd_atom`).
    pub max_initiator_depth: u8,
    /// 0: the device has no shared receive queues.
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    /// SEND_WITH_INVALIDATE works (`IBV_DEVICE_MEM_MGT_EXTENSIONS`). False also for siw and for
    /// Broadcom's devices, which report it and fail.
    pub send_with_invalidate: bool,
    /// `None`: unknown, because the device's library or the kernel does not report it.
    pub on_demand_paging: Option<OnDemandPaging>,
    /// Emulated by the kernel (rxe, siw) or simulated: works, but slowly.
    pub software: bool,
}

impl DeviceAttributes {
    /// True for soft-iWARP (siw), whose completions do not cover earlier requests: those of a SEND
    /// or WRITE overtake an earlier READ, and the data of an unsignaled request is sent from its
    /// pages after later completions.
    pub fn completes_early(&self) -> bool {
        self.software && self.wire == Wire::Iwarp
    }
}

/// On-demand paging: access of a device to memory that is not pinned. For information only: this
/// crate always pins memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OnDemandPaging {
    /// Regions of a chosen size.
    pub explicit: bool,
    /// A region of the whole address space.
    pub implicit: bool,
    /// Operations of reliable connected queue pairs, by the names of `ibv_devinfo`.
    pub operations: Vec<&'static str>,
}

/// State of a device's port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PortState {
    Down,
    Init,
    Armed,
    Active,
    ActiveDefer,
}

/// Access rights of a protection domain's memory regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Only the local device may access them (local write). For the target. On iWARP also remote
    /// write, because the data of an RDMA READ arrives there as a write of the peer.
    Local,
    /// The peer may access them as well, with the rkey (local write, remote read, remote write).
    /// For the host.
    Remote,
}

/// The keys of a registered memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MrKey {
    pub lkey: u32,
    pub rkey: u32,
}

impl MrKey {
    /// Packs both keys for [`nacre_hugepages::RegisterHook::register`]: the rkey in the upper 32
    /// bits. `Buf::key` returns this value.
    pub const fn to_bits(self) -> u64 {
        (self.rkey as u64) << 32 | self.lkey as u64
    }

    pub const fn from_bits(bits: u64) -> Self {
        Self {
            lkey: bits as u32,
            rkey: (bits >> 32) as u32,
        }
    }
}

/// Number of current registrations of a protection domain, and their total over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Registrations {
    pub regions: u64,
    pub bytes: u64,
    /// Registrations since the start; constant under load.
    pub registered_total: u64,
}

/// Private data of a connection manager message. The wire pads it with zeros, so received data may
/// be longer than sent data.
pub type PrivateData = ArrayVec<u8, MAX_PRIVATE_DATA>;

/// Most private data of a connection manager message, in bytes. InfiniBand's REP has 196; iWARP may
/// allow more, and the rest of received data is cut off.
pub const MAX_PRIVATE_DATA: usize = 196;

/// Parameters of connect and accept (`rdma_conn_param`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConnParams {
    pub private_data: PrivateData,
    /// RDMA READs of the peer that this side answers at the same time.
    pub responder_resources: u8,
    /// Outstanding RDMA READs of this side.
    pub initiator_depth: u8,
    /// Retries of a request that is not acknowledged, 0 to 7. Set by the connecting side.
    pub retry_count: u8,
    /// Retries of a SEND that finds no posted receive (RNR NAK), 0 to 7; 7 retries forever.
    pub rnr_retry_count: u8,
}

/// Options of a listener or an outgoing connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CmOptions {
    /// Type of service (DSCP << 2); 0: the system's default.
    pub tos: u8,
    /// Local ACK timeout as an exponent (4.096 us * 2^n); `None`: the system's default.
    pub ack_timeout: Option<u8>,
}

/// A created listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listening {
    pub id: CmId,
    /// The address with the actual port.
    pub address: SocketAddr,
    /// The device that the address belongs to; `None` for a wildcard address.
    pub device: Option<DeviceId>,
}

/// Events of the connection manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CmEvent {
    /// The connection or listener of the event; for [`CmEventKind::ConnectRequest`] the new
    /// connection.
    pub id: CmId,
    pub kind: CmEventKind,
}

/// See `rdma_get_cm_event(3)`. A status is a negative errno or a reason from the wire, as there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CmEventKind {
    AddressResolved {
        device: DeviceId,
        port: u8,
        local: SocketAddr,
    },
    AddressError {
        status: i32,
    },
    RouteResolved,
    RouteError {
        status: i32,
    },
    ConnectRequest {
        listener: CmId,
        device: DeviceId,
        port: u8,
        local: SocketAddr,
        peer: SocketAddr,
        /// Parameters from this side's view. `initiator_depth` is the number of READs that the peer
        /// answers and this side may have outstanding. `responder_resources` is the number that the
        /// peer wants answered at the same time.
        params: ConnParams,
    },
    ConnectError {
        status: i32,
    },
    Unreachable {
        status: i32,
    },
    Rejected {
        status: i32,
        private_data: PrivateData,
    },
    /// The connection is established. On the connecting side, `params` are those of the peer's
    /// accept, seen from this side like those of a request.
    Established {
        params: ConnParams,
    },
    Disconnected,
    /// The device is being removed: destroy everything on it.
    DeviceRemoval,
    AddressChange,
    TimewaitExit,
    /// An event that this program does not use, by its number.
    Other {
        event: i32,
        status: i32,
    },
}

/// Events of a device outside of completions (`ibv_get_async_event(3)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AsyncEvent {
    PortActive {
        port: u8,
    },
    PortError {
        port: u8,
    },
    GidChange {
        port: u8,
    },
    LidChange {
        port: u8,
    },
    PkeyChange {
        port: u8,
    },
    SubnetManagerChange {
        port: u8,
    },
    ClientReregister {
        port: u8,
    },
    DeviceFatal,
    /// Error of the completion queue with this [`crate::CompletionQueue::number`].
    CqError {
        cq: u32,
    },
    QpFatal {
        qp: u32,
    },
    QpRequestError {
        qp: u32,
    },
    QpAccessError {
        qp: u32,
    },
    CommunicationEstablished {
        qp: u32,
    },
    SendQueueDrained {
        qp: u32,
    },
    LastWqeReached {
        qp: u32,
    },
    /// Error of the shared receive queue with this [`crate::SharedReceiveQueue::number`].
    SrqError {
        srq: u32,
    },
    SrqLimitReached,
    Other {
        event: i32,
    },
}

impl fmt::Display for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PortActive { port } => write!(f, "port {port} is active"),
            Self::PortError { port } => write!(f, "port {port} is down"),
            Self::GidChange { port } => write!(f, "the GIDs of port {port} changed"),
            Self::LidChange { port } => write!(f, "the LID of port {port} changed"),
            Self::PkeyChange { port } => write!(f, "the P_Keys of port {port} changed"),
            Self::SubnetManagerChange { port } => {
                write!(f, "port {port} has another subnet manager")
            }
            Self::ClientReregister { port } => {
                write!(
                    f,
                    "the subnet manager of port {port} asks clients to register again"
                )
            }
            Self::DeviceFatal => f.write_str("the device failed"),
            Self::CqError { cq } => write!(f, "completion queue {cq} failed"),
            Self::QpFatal { qp } => write!(f, "queue pair {qp} failed"),
            Self::QpRequestError { qp } => {
                write!(f, "queue pair {qp} got an invalid request")
            }
            Self::QpAccessError { qp } => {
                write!(f, "queue pair {qp} got an access that is not allowed")
            }
            Self::CommunicationEstablished { qp } => {
                write!(f, "queue pair {qp} got its first message")
            }
            Self::SendQueueDrained { qp } => {
                write!(f, "the send queue of queue pair {qp} is drained")
            }
            Self::LastWqeReached { qp } => {
                write!(f, "queue pair {qp} took its last receive")
            }
            Self::SrqError { srq } => write!(f, "shared receive queue {srq} failed"),
            Self::SrqLimitReached => f.write_str("a shared receive queue runs low"),
            Self::Other { event } => write!(f, "event {event}"),
        }
    }
}

/// The requested size of a queue pair; [`crate::QueuePair::caps`] has the actual one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QpCaps {
    pub max_send_wr: u32,
    /// 0 with a shared receive queue.
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    /// Largest inline data of a send request, in bytes.
    pub max_inline: u32,
}

/// A range of registered memory. Laid out as `ibv_sge`, so that a list of them is posted unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    pub address: u64,
    pub length: u32,
    pub lkey: u32,
}

/// The operation of a send-queue work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOp {
    Send,
    /// SEND that invalidates a key of the receiver.
    SendWithInvalidate {
        rkey: u32,
    },
    Write {
        address: u64,
        rkey: u32,
    },
    Read {
        address: u64,
        rkey: u32,
    },
}

/// A work request of the send queue. Its scatter/gather entries are `first_sge..first_sge + sges`
/// of the slice that is posted with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendWr {
    pub wr_id: u64,
    pub op: SendOp,
    pub first_sge: u32,
    pub sges: u32,
    /// A success creates a completion. A failure always does.
    pub signaled: bool,
    /// The post copies the data; the entries need no valid lkey.
    pub inline: bool,
    /// The request starts after all earlier READs have completed.
    pub fence: bool,
}

/// A work request of a receive queue; see [`SendWr`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvWr {
    pub wr_id: u64,
    pub first_sge: u32,
    pub sges: u32,
}

/// The operation of a completed request. Undefined if the completion's status is an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WcOpcode {
    Send,
    Write,
    Read,
    Recv,
    Other(u32),
}

/// A work completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkCompletion {
    pub wr_id: u64,
    pub status: WcStatus,
    pub opcode: WcOpcode,
    /// Bytes received or read.
    pub byte_len: u32,
    pub qp: u32,
    pub vendor_error: u32,
    /// The key that the peer's SEND_WITH_INVALIDATE invalidated; receives only.
    pub invalidated: Option<u32>,
}

impl WorkCompletion {
    /// Initial value for arrays of completions.
    pub const EMPTY: Self = Self {
        wr_id: 0,
        status: WcStatus::Success,
        opcode: WcOpcode::Send,
        byte_len: 0,
        qp: 0,
        vendor_error: 0,
        invalidated: None,
    };
}

macro_rules! wc_status {
    ($($name:ident = $number:literal, $text:literal, $meaning:literal, $remedy:literal;)*) => {
        /// Status of a work completion (`ibv_wc_status`).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum WcStatus {
            $($name = $number,)*
        }

        impl WcStatus {
            /// All of them, in the order of their numbers.
            pub const ALL: &'static [WcStatus] = &[$(WcStatus::$name,)*];

            /// Converts from C. An unknown number becomes [`WcStatus::GeneralError`].
            pub const fn from_raw(raw: u32) -> WcStatus {
                match raw {
                    $($number => WcStatus::$name,)*
                    _ => WcStatus::GeneralError,
                }
            }

            /// The C name, for example `IBV_WC_RETRY_EXC_ERR`.
            pub const fn name(self) -> &'static str {
                match self { $(WcStatus::$name => $text,)* }
            }

            /// The error in words, for log messages.
            pub const fn meaning(self) -> &'static str {
                match self { $(WcStatus::$name => $meaning,)* }
            }

            /// Advice for the operator.
            pub const fn remedy(self) -> &'static str {
                match self { $(WcStatus::$name => $remedy,)* }
            }
        }
    };
}

wc_status! {
    Success = 0, "IBV_WC_SUCCESS", "done", "none needed";
    LocalLength = 1, "IBV_WC_LOC_LEN_ERR", "a message was longer than the receive buffer, or a request longer than the port allows",
        "the peer sent more in a capsule than was announced to it; report it with the peer's version";
    LocalQpOperation = 2, "IBV_WC_LOC_QP_OP_ERR", "the queue pair cannot execute the request",
        "report it; a driver or firmware update may help";
    LocalEecOperation = 3, "IBV_WC_LOC_EEC_OP_ERR", "an end-to-end context is inconsistent",
        "update driver and firmware: reliable-connected queue pairs have none";
    LocalProtection = 4, "IBV_WC_LOC_PROT_ERR", "memory posted here is not registered for that use",
        "report it: memory of this program is registered at start";
    WorkRequestFlushed = 5, "IBV_WC_WR_FLUSH_ERR", "the queue pair had ended before this was its turn",
        "look for the error before this one, or for the end of the connection";
    MemoryWindowBind = 6, "IBV_WC_MW_BIND_ERR", "a memory window could not be bound",
        "update driver and firmware: none is bound here";
    BadResponse = 7, "IBV_WC_BAD_RESP_ERR", "the peer's device answered with something unexpected",
        "update driver and firmware at both ends";
    LocalAccess = 8, "IBV_WC_LOC_ACCESS_ERR", "data of the peer could not be written to local memory",
        "report it: memory of this program is registered at start";
    RemoteInvalidRequest = 9, "IBV_WC_REM_INV_REQ_ERR", "the peer's device refused the request as invalid",
        "compare message sizes and RDMA READ depth of both ends";
    RemoteAccess = 10, "IBV_WC_REM_ACCESS_ERR", "the peer's device refused access to its memory",
        "the host's key or address is wrong or was invalidated early; look at the host's log";
    RemoteOperation = 11, "IBV_WC_REM_OP_ERR", "the peer's device could not complete the request",
        "look at the peer's log";
    RetryExceeded = 12, "IBV_WC_RETRY_EXC_ERR", "the peer did not acknowledge in time, after all retries",
        "check link, cable and path MTU; on RoCE check for dropped packets (PFC, ECN) and for UDP port 4791 in firewalls";
    RnrRetryExceeded = 13, "IBV_WC_RNR_RETRY_EXC_ERR", "the peer had no receive buffer posted, after all retries",
        "the peer is overloaded or stuck; raise rnr_retry_count (7 retries forever) or its receive queue";
    LocalRddViolation = 14, "IBV_WC_LOC_RDD_VIOL_ERR", "the reliable datagram domains differ",
        "update driver and firmware: there are none here";
    RemoteInvalidRdRequest = 15, "IBV_WC_REM_INV_RD_REQ_ERR", "the peer refused a reliable datagram",
        "update driver and firmware: there are none here";
    RemoteAborted = 16, "IBV_WC_REM_ABORT_ERR", "the peer aborted the operation",
        "look at the peer's log";
    InvalidEecNumber = 17, "IBV_WC_INV_EECN_ERR", "an end-to-end context number is invalid",
        "update driver and firmware: there are none here";
    InvalidEecState = 18, "IBV_WC_INV_EEC_STATE_ERR", "an end-to-end context is in the wrong state",
        "update driver and firmware: there are none here";
    Fatal = 19, "IBV_WC_FATAL_ERR", "the device failed",
        "look at the kernel log; reset the device or update its firmware";
    ResponseTimeout = 20, "IBV_WC_RESP_TIMEOUT_ERR", "a response did not come in time",
        "check link and cable, and the peer's load";
    GeneralError = 21, "IBV_WC_GENERAL_ERR", "an error that has no status of its own",
        "look at the vendor error in the device's documentation";
}

impl WcStatus {
    pub const fn is_success(self) -> bool {
        matches!(self, Self::Success)
    }
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error of a control operation (everything but post).
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// A library, a kernel module or a device node is missing. `what` names it, `remedy` is the
    /// command that installs or loads it.
    #[error("RDMA is not available: {what}; {remedy}")]
    Unavailable { what: String, remedy: String },
    #[error("there is no device {0:?} any more")]
    NoSuchDevice(DeviceId),
    #[error("the connection {0:?} is not there any more")]
    NoSuchId(CmId),
    #[error("{what} is {asked}, the device {device} allows {limit}")]
    Limit {
        what: &'static str,
        asked: u64,
        limit: u64,
        device: String,
    },
    /// A call of the library or the kernel; `call` is its name in C.
    #[error("{call} failed: {source}")]
    Call {
        call: &'static str,
        source: std::io::Error,
    },
    /// Memory is not registered with the domain that a request is for.
    #[error("memory of {len} bytes is not registered with {device}")]
    NotRegistered { len: usize, device: String },
}

/// The error of a post: the queue accepted only the first `posted` work requests.
#[derive(Debug, thiserror::Error)]
#[error("{posted} work requests were accepted, then: {source}")]
pub struct PostError {
    /// Number of accepted requests of the batch. They will complete or flush.
    pub posted: usize,
    pub source: std::io::Error,
}
