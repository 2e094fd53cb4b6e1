//! The options of the NVMe/TCP transport, their defaults and their ranges.

use std::ops::RangeInclusive;
use std::time::Duration;

use nacre_nvmf::tcp::TcpTargetConfig;
pub use nacre_nvmf::transport::ConfigError;
use nacre_nvmf::transport::{
    ListenerOptions, MAX_IN_CAPSULE_DATA, TransportCaps, TransportType, is_in_capsule_size, words,
};
use nacre_nvmf_wire::tcp::{ADMIN_IN_CAPSULE_BYTES, Digests, MIN_MAXH2CDATA};

use crate::socket::Marking;

/// The range of [`TcpConfig::max_io_size`], in bytes.
pub const IO_SIZES: RangeInclusive<u32> = 4096..=1 << 24;
const RX_BUFFER_SIZES: RangeInclusive<usize> = 4096..=64 << 20;

/// Options of the NVMe/TCP transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpConfig {
    /// Largest in-capsule data of an I/O command, in bytes: a multiple of 16, at most 1 MiB.
    pub in_capsule_data_size: u32,
    /// Largest transfer of one command, in bytes: a power of two from 4096 to 16 MiB (MDTS).
    pub max_io_size: u32,
    /// Largest payload of one H2CData PDU, in bytes: a multiple of 4, at least 4096 (MAXH2CDATA).
    pub max_h2c_data_size: u32,
    /// Most connections of the whole transport, 1 or more.
    pub max_connections: usize,
    /// Most pending connections (Connect command not accepted yet), 1 or more. Further
    /// connections wait in the kernel's backlog, or replace one that is pending for longer than a
    /// second.
    pub max_pending_connections: usize,
    /// File descriptors that connections leave to the rest of the process. At most a quarter of
    /// RLIMIT_NOFILE is reserved.
    pub reserved_descriptors: u64,
    /// Backlog of each listening socket: connections that the kernel holds until Nacre accepts
    /// them. 1 or more.
    pub backlog: i32,
    pub max_listeners: usize,
    /// Longest time from the TCP connection to the ICReq PDU. On listeners with TLS: longest time
    /// to the end of the TLS handshake, and then as long again to the ICReq PDU.
    pub icreq_timeout: Duration,
    /// Longest time from the TCP connection, or the end of the TLS handshake, to an accepted
    /// Connect command.
    pub connect_timeout: Duration,
    /// Longest wait for the rest of a PDU, and for each H2CData PDU that an R2T requests. It begins
    /// when the socket takes the R2T; with TLS, when the record of the R2T is sealed.
    pub stall_timeout: Duration,
    /// Longest time that a connected queue may be silent. `None`: only the Keep Alive Timer ends
    /// a silent controller.
    pub idle_timeout: Option<Duration>,
    /// Time for the peer to acknowledge sent data, and to answer probes (TCP_USER_TIMEOUT).
    pub ack_timeout: Duration,
    /// Before the limit of AES-GCM (2^24.5 records with one key), TLS connections send a KeyUpdate.
    /// They close if the host exceeds the limit. False: only with hosts that have sent a KeyUpdate.
    pub tls_key_updates: bool,
    /// PDU digests that the host may enable in ICReq (DGST).
    pub allow_header_digest: bool,
    pub allow_data_digest: bool,
    /// Type of Service byte of sent packets (DSCP << 2).
    pub tos: u8,
    /// Priority of sent packets on this machine (SO_PRIORITY); `None`: the kernel derives it from
    /// `tos`.
    pub priority: Option<u8>,
    /// SO_SNDBUF and SO_RCVBUF in bytes; `None`: the kernel adjusts the sizes.
    pub send_buffer: Option<usize>,
    pub receive_buffer: Option<usize>,
    /// Receive buffers of a core: bytes per buffer (4096 to 64 MiB), and most buffers (2 or
    /// more). A core allocates more than two only while connections hold input that they cannot
    /// handle yet.
    pub rx_buffer_size: usize,
    pub rx_buffers: usize,
    /// Most bytes that the outstanding R2Ts of one connection request together, each R2T into a
    /// buffer of the core. Several R2Ts keep the host sending while the core handles one command.
    pub fetch_window: usize,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
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
            tls_key_updates: false,
            allow_header_digest: true,
            allow_data_digest: true,
            tos: 0,
            priority: None,
            send_buffer: None,
            receive_buffer: None,
            rx_buffer_size: 256 << 10,
            rx_buffers: 64,
            fetch_window: 1 << 20,
        }
    }
}

impl TcpConfig {
    /// Checks the ranges; the error names the option.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let check = |ok: bool, option, actual: u64, allowed: String| {
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
            is_in_capsule_size(in_capsule),
            "in_capsule_data_size",
            in_capsule.into(),
            format!("a multiple of 16, at most {MAX_IN_CAPSULE_DATA}"),
        )?;
        let size = self.max_io_size;
        check(
            size.is_power_of_two() && IO_SIZES.contains(&size),
            "max_io_size",
            size.into(),
            format!("a power of two {}", words(&IO_SIZES)),
        )?;
        check(
            self.max_h2c_data_size.is_multiple_of(4) && self.max_h2c_data_size >= MIN_MAXH2CDATA,
            "max_h2c_data_size",
            self.max_h2c_data_size.into(),
            format!("a multiple of 4, at least {MIN_MAXH2CDATA}"),
        )?;
        for (option, value) in [
            ("max_connections", self.max_connections as u64),
            (
                "max_pending_connections",
                self.max_pending_connections as u64,
            ),
            ("backlog", self.backlog.try_into().unwrap_or(0)),
        ] {
            check(value > 0, option, 0, "at least 1".to_owned())?;
        }
        check(
            RX_BUFFER_SIZES.contains(&self.rx_buffer_size),
            "rx_buffer_size",
            self.rx_buffer_size as u64,
            words(&RX_BUFFER_SIZES),
        )?;
        check(
            self.rx_buffers >= 2,
            "rx_buffers",
            self.rx_buffers as u64,
            "at least 2".to_owned(),
        )
    }

    /// The options of a listener's connections: `options` overrides these where it is set.
    pub(crate) fn with(&self, options: &ListenerOptions) -> Self {
        Self {
            in_capsule_data_size: options
                .in_capsule_data_size
                .unwrap_or(self.in_capsule_data_size),
            tos: options.tos.unwrap_or(self.tos),
            ..self.clone()
        }
    }

    /// Type of Service and SO_PRIORITY of a listener and its connections. `priority` applies only
    /// to listeners with this `tos`; for others the kernel derives the priority.
    pub(crate) fn marking(&self, options: &ListenerOptions) -> Marking {
        match options.tos.filter(|tos| *tos != self.tos) {
            None => Marking {
                tos: self.tos,
                priority: self.priority,
            },
            Some(tos) => Marking {
                tos,
                priority: None,
            },
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
