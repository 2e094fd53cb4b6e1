//! The steps from connecting a controller to its live state, and the command of each step.

use nacre_hugepages::{Buf, Pool};
use nacre_nvmf_wire::commands::admin::{GetLogPage, Identify, SetFeatures};
use nacre_nvmf_wire::fabrics::{
    Connect, ConnectAttributes, ConnectData, PropertyGet, PropertySet, PropertySize,
};
use nacre_nvmf_wire::features::{AsyncEvents, NumberOfQueues, fid};
use nacre_nvmf_wire::identify::cns;
use nacre_nvmf_wire::log::ana::AnaHeader;
use nacre_nvmf_wire::log::lid;
use nacre_nvmf_wire::registers::{Cc, offset};
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};
use zerocopy::IntoBytes;

use super::error::HostError;
use super::options::HostOptions;

/// Entries of the admin queue, the same as Linux hosts request.
pub(super) const ADMIN_ENTRIES: u16 = 32;
/// Bytes of Identify data structures and of the Changed Namespace List.
pub(super) const PAGE: usize = 4096;

/// A step of the controller, with at most one command in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostStep {
    /// Waits for the transport's handshake.
    Dialling,
    Connect,
    /// `queue::authentication::Transaction` sends the commands of this step.
    Authenticate,
    ReadCap,
    Enable,
    WaitReady,
    IdentifyController,
    IdentifyNvm,
    NumberOfQueues,
    ConfigureEvents,
    /// Identify, CNS 02h: active namespaces above this NSID.
    ListNamespaces(u32),
    IdentifyNamespace(u32),
    DescribeNamespace(u32),
    ReadChangedList,
    /// Get Log Page: the ANA log from this byte offset.
    ReadAccess(u32),
    /// Live, without a command of its own.
    Idle,
    ShutDown,
    WaitShutDown,
}

impl HostStep {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Dialling => "connecting the transport",
            Self::Connect => "connect",
            Self::Authenticate => "authenticate",
            Self::ReadCap => "reading CAP",
            Self::Enable => "enabling the controller",
            Self::WaitReady => "waiting for CSTS.RDY",
            Self::IdentifyController => "identify controller",
            Self::IdentifyNvm => "identify controller (NVM command set)",
            Self::NumberOfQueues => "set number of queues",
            Self::ConfigureEvents => "configure events",
            Self::ListNamespaces(_) => "list namespaces",
            Self::IdentifyNamespace(_) => "identify namespace",
            Self::DescribeNamespace(_) => "namespace descriptors",
            Self::ReadChangedList => "read changed namespace list",
            Self::ReadAccess(_) => "read ANA log",
            Self::Idle => "idle",
            Self::ShutDown => "shut down",
            Self::WaitShutDown => "waiting for CSTS.SHST",
        }
    }

    /// The error of a target that refused the command of this step.
    pub(super) fn refused(self, status: StatusCode) -> HostError {
        HostError::Refused {
            step: self.name(),
            status,
            fabrics: self.is_fabrics(),
        }
    }

    /// True if its command is a fabrics command, which gives some status codes another meaning.
    fn is_fabrics(self) -> bool {
        matches!(
            self,
            Self::Connect
                | Self::Authenticate
                | Self::ReadCap
                | Self::Enable
                | Self::WaitReady
                | Self::ShutDown
                | Self::WaitShutDown
        )
    }

    /// True for the steps that read namespaces one by one. Their total time depends on the number
    /// of namespaces.
    pub(super) fn is_listing(self) -> bool {
        matches!(
            self,
            Self::ListNamespaces(_)
                | Self::IdentifyNamespace(_)
                | Self::DescribeNamespace(_)
                | Self::ReadAccess(_)
        )
    }

    /// True if the step has a command to send.
    pub(super) fn has_command(self) -> bool {
        !matches!(self, Self::Dialling | Self::Authenticate | Self::Idle)
    }

    pub(super) fn is_shutting_down(self) -> bool {
        matches!(self, Self::ShutDown | Self::WaitShutDown)
    }

    /// The step's command with its data buffer. `None`: the step has none, or no buffer is free.
    pub(super) fn command(
        self,
        options: &HostOptions,
        pool: &Pool,
        (asked, events_offered): (u16, u32),
    ) -> Option<(Sqe, Option<Buf>, Option<Buf>)> {
        let get = |offset, size| Some((PropertyGet { size, offset }.to_sqe(0), None, None));
        let set_cc = |cc: Cc| {
            let value = u64::from(cc.0);
            let (size, offset) = (PropertySize::Four, offset::CC);
            let set = PropertySet {
                size,
                offset,
                value,
            };
            Some((set.to_sqe(0), None, None))
        };
        let identify = |cns, nsid| {
            let sqe = Identify::new(cns).to_sqe(0, nsid);
            Some((sqe, None, Some(pool.acquire(PAGE)?)))
        };
        let set_feature =
            |fid, value| Some((SetFeatures::new(fid, value).to_sqe(0, 0), None, None));
        match self {
            Self::Connect => {
                let (sqe, data) = connect(options, pool, 0, ADMIN_ENTRIES, asked)?;
                Some((sqe, Some(data), None))
            }
            Self::ReadCap => get(offset::CAP, PropertySize::Eight),
            Self::Enable => set_cc(Cc::enabled()),
            Self::WaitReady | Self::WaitShutDown => get(offset::CSTS, PropertySize::Four),
            Self::IdentifyController => identify(cns::CONTROLLER, 0),
            Self::IdentifyNvm => identify(cns::IO_CONTROLLER, 0),
            Self::NumberOfQueues => {
                let wanted = u32::from(options.io_queues.max(1));
                let queues = NumberOfQueues {
                    submission: wanted,
                    completion: wanted,
                };
                set_feature(fid::NUMBER_OF_QUEUES, queues.dword())
            }
            Self::ConfigureEvents => {
                let wanted = AsyncEvents::NAMESPACE_ATTRIBUTE
                    | AsyncEvents::ANA_CHANGE
                    | AsyncEvents::DISCOVERY_LOG;
                set_feature(
                    fid::ASYNC_EVENT_CONFIGURATION,
                    wanted.bits() & events_offered,
                )
            }
            Self::ListNamespaces(after) => identify(cns::ACTIVE_NAMESPACES, after),
            Self::IdentifyNamespace(nsid) => identify(cns::NAMESPACE, nsid),
            Self::DescribeNamespace(nsid) => identify(cns::NAMESPACE_DESCRIPTORS, nsid),
            Self::ReadChangedList => {
                let log = GetLogPage::new(lid::CHANGED_NAMESPACE_LIST, PAGE as u32, 0);
                Some((log.to_sqe(0, u32::MAX), None, Some(pool.acquire(PAGE)?)))
            }
            Self::ReadAccess(offset) => {
                let mut log =
                    GetLogPage::new(lid::ASYMMETRIC_NAMESPACE_ACCESS, PAGE as u32, offset.into());
                log.lsp = AnaHeader::LSP_GROUPS_ONLY;
                Some((log.to_sqe(0, u32::MAX), None, Some(pool.acquire(PAGE)?)))
            }
            Self::ShutDown => set_cc(Cc::enabled().with_shn(1)),
            Self::Dialling | Self::Authenticate | Self::Idle => None,
        }
    }
}

/// The Connect command for queue `qid` with its 1024 bytes of data. `None`: no buffer is free.
pub(super) fn connect(
    options: &HostOptions,
    pool: &Pool,
    qid: u16,
    entries: u16,
    cntlid: u16,
) -> Option<(Sqe, Buf)> {
    let data = ConnectData::new(options.hostid, cntlid, &options.subnqn, &options.hostnqn);
    let mut buf = pool.acquire(data.as_bytes().len())?;
    buf.bytes_mut()?.copy_from_slice(data.as_bytes());
    let mut attributes = ConnectAttributes::empty();
    attributes.set(
        ConnectAttributes::DISABLE_SQ_FLOW_CONTROL,
        qid > 0 && options.disable_sq_flow_control,
    );
    let kato = u32::try_from(options.keep_alive.as_millis()).unwrap_or(u32::MAX);
    let connect = Connect {
        qid,
        sqsize: entries - 1,
        attributes,
        priority_class: 0,
        kato_ms: if qid == 0 { kato } else { 0 },
    };
    let length = buf.len() as u32;
    Some((connect.to_sqe(0, Sgl::Transport { length }), buf))
}
