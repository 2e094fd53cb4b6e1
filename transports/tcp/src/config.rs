//! The options of the TCP transport.

use std::time::Duration;

use nacre_nvmf::tcp::TcpTargetConfig;
pub use nacre_nvmf::transport::ConfigError;
use nacre_nvmf::transport::{ListenerOptions, TransportCaps, TransportType};
use nacre_nvmf_wire::tcp::{ADMIN_IN_CAPSULE_BYTES, Digests, MIN_MAXH2CDATA};

/// Options of the TCP transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpConfig {
    /// Largest in-capsule data of an I/O command, in bytes.
    pub in_capsule_data_size: u32,
    /// Largest transfer of one command, in bytes: a power of two, at least 4096.
    pub max_io_size: u32,
    /// Largest payload of one H2CData PDU, in bytes: a multiple of 4, at least 4096.
    pub max_h2c_data_size: u32,
    /// Most connections of the whole transport.
    pub max_connections: usize,
    /// Most connections whose Connect has not been accepted yet. Others wait in the kernel's
    /// backlog, or replace one that has been pending for longer than a second.
    pub max_pending_connections: usize,
    /// Descriptors that connections leave to the rest of the process, at most a quarter of all.
    pub reserved_descriptors: u64,
    /// Connections that the kernel keeps until we accept them, per listener.
    pub backlog: i32,
    pub max_listeners: usize,
    /// From the connection to ICReq.
    pub icreq_timeout: Duration,
    /// From the connection to an accepted Connect.
    pub connect_timeout: Duration,
    /// For the rest of a PDU that has begun, and for data that the host was asked for (R2T).
    pub stall_timeout: Duration,
    /// For an accepted host that sends nothing at all. `None`: Keep Alive sees to it.
    pub idle_timeout: Option<Duration>,
    /// Time for the peer to acknowledge sent data, and to answer probes (TCP_USER_TIMEOUT).
    pub ack_timeout: Duration,
    /// Digests that hosts may ask for.
    pub allow_header_digest: bool,
    pub allow_data_digest: bool,
    /// Type of service of the packets sent (DSCP << 2).
    pub tos: u8,
    /// Socket buffers in bytes; `None`: the kernel sizes them by need.
    pub send_buffer: Option<usize>,
    pub receive_buffer: Option<usize>,
    /// Bytes of one receive buffer of a core, and their greatest number. More than two are made
    /// only when connections have to wait with input that cannot be handled yet.
    pub rx_buffer_size: usize,
    pub rx_buffers: usize,
    /// Bytes of data that the outstanding R2Ts of one connection request, each into a buffer of the
    /// core. They keep the host busy while the core handles the data of one command.
    pub fetch_window: usize,
}

impl Default for TcpConfig {
    fn default() -> TcpConfig {
        TcpConfig {
            in_capsule_data_size: 4096,
            max_io_size: 128 << 10,
            max_h2c_data_size: 128 << 10,
            max_connections: 10_000,
            max_pending_connections: 256,
            reserved_descriptors: 128,
            backlog: 512,
            max_listeners: 256,
            icreq_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(20),
            stall_timeout: Duration::from_secs(30),
            idle_timeout: None,
            ack_timeout: Duration::from_secs(30),
            allow_header_digest: true,
            allow_data_digest: true,
            tos: 0,
            send_buffer: None,
            receive_buffer: None,
            rx_buffer_size: 256 << 10,
            rx_buffers: 64,
            fetch_window: 1 << 20,
        }
    }
}

impl TcpConfig {
    pub fn validate(&self) -> Result<(), ConfigError> {
        let check = |ok: bool, option, actual: u64, allowed| {
            if ok {
                Ok(())
            } else {
                Err(ConfigError::OutOfRange {
                    option,
                    actual,
                    allowed,
                })
            }
        };
        let in_capsule = self.in_capsule_data_size;
        check(
            in_capsule.is_multiple_of(16) && in_capsule <= 1 << 20,
            "in_capsule_data_size",
            in_capsule.into(),
            "a multiple of 16, at most 1048576",
        )?;
        check(
            self.max_io_size.is_power_of_two() && (4096..=1 << 24).contains(&self.max_io_size),
            "max_io_size",
            self.max_io_size.into(),
            "a power of two from 4096 to 16777216",
        )?;
        check(
            self.max_h2c_data_size.is_multiple_of(4) && self.max_h2c_data_size >= MIN_MAXH2CDATA,
            "max_h2c_data_size",
            self.max_h2c_data_size.into(),
            "a multiple of 4, at least 4096",
        )?;
        check(self.max_connections > 0, "max_connections", 0, "at least 1")?;
        check(
            self.max_pending_connections > 0,
            "max_pending_connections",
            0,
            "at least 1",
        )?;
        check(self.backlog > 0, "backlog", 0, "at least 1")?;
        check(
            (4096..=64 << 20).contains(&self.rx_buffer_size),
            "rx_buffer_size",
            self.rx_buffer_size as u64,
            "from 4096 to 67108864",
        )?;
        check(
            self.rx_buffers >= 2,
            "rx_buffers",
            self.rx_buffers as u64,
            "at least 2",
        )
    }

    /// As it is for the connections of a listener with options of its own.
    pub(crate) fn with(&self, options: &ListenerOptions) -> TcpConfig {
        TcpConfig {
            in_capsule_data_size: options
                .in_capsule_data_size
                .unwrap_or(self.in_capsule_data_size),
            tos: options.tos.unwrap_or(self.tos),
            ..self.clone()
        }
    }

    pub(crate) fn caps(&self) -> TransportCaps {
        TransportCaps {
            kind: TransportType::Tcp,
            in_capsule_bytes: self.in_capsule_data_size,
            admin_in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES.max(self.in_capsule_data_size),
            max_transfer_bytes: self.max_io_size,
            max_sgl_descriptors: 1,
            keyed_sgl: false,
        }
    }

    pub(crate) fn machine(&self) -> TcpTargetConfig {
        TcpTargetConfig {
            in_capsule_bytes: self.in_capsule_data_size,
            admin_in_capsule_bytes: self.caps().admin_in_capsule_bytes,
            max_h2c_data_bytes: self.max_h2c_data_size,
            allow_digests: Digests {
                header: self.allow_header_digest,
                data: self.allow_data_digest,
            },
            handshake_timeout: self.icreq_timeout,
            connect_timeout: self.connect_timeout,
            stall_timeout: self.stall_timeout,
            idle_timeout: self.idle_timeout,
            ..TcpTargetConfig::default()
        }
    }
}
