//! A namespace of the controller as a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nacre_bdev::{Bdev, Geometry, Limits, Op, OpenError, Queue, Size, Support};
use nacre_hugepages::Pool;
use nacre_nvmf::host::{IoQueue, LinkState, NamespaceInfo};
use nacre_nvmf_wire::identify::controller::Oncs;
use nacre_nvmf_wire::identify::namespace::Rescap;
use nacre_nvmf_wire::log::ana::AnaState;
use nacre_reactor::Nanos;
use parking_lot::Mutex;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::attachment::Shared;
use crate::channel::RemoteQueue;

/// NLB of a command: a 16-bit number, less one.
const COMMAND_BLOCKS: u64 = 1 << 16;

/// Why a device has no queue for one more core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the target grants {granted} I/O queues to this host, and all of them are open: attach it with more (num_io_queues), \
     let the target grant more, or serve on fewer cores"
)]
pub struct NoQueue {
    pub granted: u16,
}

/// A remote namespace.
pub struct RemoteBdev {
    shared: Arc<Shared>,
    name: String,
    uuid: Uuid,
    /// As it was attached, but for its size.
    namespace: NamespaceInfo,
    size: Size,
    promise: Promise,
    /// Why all I/O completes with Gone, although the target has a namespace with this identifier.
    refusal: Mutex<Option<String>>,
    refused: AtomicBool,
}

/// The facts that the layer above got at registration and relies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Promise {
    limits: Limits,
    compare: bool,
    write_zeroes: bool,
    unmap: bool,
    fused: bool,
    verify: bool,
}

impl Promise {
    fn of(namespace: &NamespaceInfo, link: &LinkState, queue_depth: u32) -> Promise {
        let oncs = Oncs::from_bits_retain(link.oncs);
        let block = u64::from(namespace.block_size);
        let blocks = |bytes: u64| (bytes / block).clamp(1, COMMAND_BLOCKS);
        let compare = oncs.contains(Oncs::COMPARE);
        let fused = compare && link.fused_compare_and_write;
        let limits = Limits {
            max_blocks: blocks(link.max_transfer_bytes.into()) as u32,
            // One number for both; ranges of Dataset Management have 32 bits.
            max_unmap_blocks: blocks(link.write_zeroes_bytes),
            max_verify_blocks: blocks(link.verify_bytes) as u32,
            atomic_blocks: namespace.atomic_blocks.max(1),
            // Operations that the target lacks are emulated here, and bounded by the layer.
            compare_and_write_blocks: if fused {
                namespace.compare_and_write_blocks
            } else {
                u32::MAX
            },
            optimal_boundary_blocks: namespace.optimal_boundary_blocks,
            volatile_cache: link.volatile_cache,
            // Deallocation is only a hint to the target, whatever it announces about the contents
            // of deallocated blocks.
            unmap_zeroes: false,
            zeroes_deallocate: namespace.zeroes_deallocate && oncs.contains(Oncs::WRITE_ZEROES),
            read_only: namespace.read_only,
            ..Limits::unlimited(queue_depth)
        };
        Promise {
            limits,
            compare,
            write_zeroes: oncs.contains(Oncs::WRITE_ZEROES),
            unmap: oncs.contains(Oncs::DATASET_MANAGEMENT),
            fused,
            verify: oncs.contains(Oncs::VERIFY),
        }
    }

    /// What of it `now` does not keep.
    fn broken_by(&self, now: &Promise) -> Option<String> {
        let (was, is) = (&self.limits, &now.limits);
        let lost = [
            (self.compare && !now.compare, "compare"),
            (self.write_zeroes && !now.write_zeroes, "write zeroes"),
            (self.unmap && !now.unmap, "dataset management"),
            (self.fused && !now.fused, "fused compare-and-write"),
            (self.verify && !now.verify, "verify"),
            (
                is.volatile_cache && !was.volatile_cache,
                "no volatile cache",
            ),
            (is.read_only && !was.read_only, "writes"),
        ];
        if let Some((_, what)) = lost.iter().find(|(lost, _)| *lost) {
            return Some(format!(
                "it promised {what} when it was attached, and does not now"
            ));
        }
        let smaller = [
            (
                "transfer",
                u64::from(was.max_blocks),
                u64::from(is.max_blocks),
            ),
            ("write zeroes", was.max_unmap_blocks, is.max_unmap_blocks),
            (
                "verify",
                was.max_verify_blocks.into(),
                is.max_verify_blocks.into(),
            ),
            (
                "atomic write",
                was.atomic_blocks.into(),
                is.atomic_blocks.into(),
            ),
            (
                "fused compare-and-write",
                was.compare_and_write_blocks.into(),
                is.compare_and_write_blocks.into(),
            ),
        ];
        let smaller = smaller.iter().find(|(_, was, is)| is < was)?;
        let (what, was, is) = smaller;
        Some(format!(
            "its largest {what} was of {was} blocks when it was attached, and is of {is} now"
        ))
    }
}

impl RemoteBdev {
    pub(crate) fn new(
        shared: Arc<Shared>,
        name: String,
        namespace: NamespaceInfo,
        link: &LinkState,
    ) -> RemoteBdev {
        let depth = depth(&shared);
        RemoteBdev {
            uuid: uuid_of(&namespace),
            size: Size::new(namespace.blocks),
            promise: Promise::of(&namespace, link, depth),
            shared,
            name,
            namespace,
            refusal: Mutex::default(),
            refused: AtomicBool::new(false),
        }
    }

    pub fn nsid(&self) -> u32 {
        self.namespace.nsid
    }

    /// Why the namespace is no longer used, although it exists.
    pub fn refusal(&self) -> Option<String> {
        self.refusal.lock().clone()
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Acquire)
    }

    /// Adopts the size of the namespace that the target has now, or returns why it is not used.
    pub(crate) fn take_over(&self, found: &NamespaceInfo, link: &LinkState) -> Option<String> {
        let known = NamespaceInfo {
            blocks: self.size.blocks(),
            ..self.namespace.clone()
        };
        if known.same_identity(found) && known.block_size == found.block_size {
            // Note it even for a refused namespace: data beyond is lost, even when it is large
            // enough again.
            self.size.note(found.blocks);
        }
        let why = known.difference(found).or_else(|| {
            let now = Promise::of(found, link, depth(&self.shared));
            self.promise.broken_by(&now)
        });
        if why.is_none() {
            self.size.set(found.blocks);
        }
        *self.refusal.lock() = why.clone();
        self.refused.store(why.is_some(), Ordering::Release);
        why
    }

    fn fail(&self, source: std::io::Error) -> OpenError {
        OpenError {
            bdev: self.name.clone(),
            what: "open an I/O queue".to_owned(),
            source,
        }
    }
}

fn depth(shared: &Shared) -> u32 {
    u32::from(shared.config.options.queue_entries.max(2)) - 1
}

/// A namespace without a UUID gets one derived from its other identifiers.
fn uuid_of(namespace: &NamespaceInfo) -> Uuid {
    match namespace.uuid {
        Some(uuid) => uuid,
        None if namespace.nguid != [0; 16] => Uuid::from_bytes(namespace.nguid),
        None => Uuid::new_v5(&Uuid::NAMESPACE_OID, &namespace.eui64),
    }
}

fn ana_word(state: AnaState) -> &'static str {
    match state {
        AnaState::Optimized => "optimized",
        AnaState::NonOptimized => "non_optimized",
        AnaState::Inaccessible => "inaccessible",
        AnaState::PersistentLoss => "persistent_loss",
        AnaState::Change => "change",
    }
}

impl Bdev for RemoteBdev {
    fn name(&self) -> &str {
        &self.name
    }

    fn product_name(&self) -> &'static str {
        "NVMe disk"
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.namespace.block_size,
            blocks: self.size.blocks(),
            physical_block_size: self.namespace.block_size,
        }
    }

    fn limits(&self) -> Limits {
        self.promise.limits
    }

    fn supports(&self, op: Op) -> Support {
        let does = match op {
            Op::Read | Op::Write | Op::Flush => true,
            Op::Compare => self.promise.compare,
            Op::CompareAndWrite => self.promise.fused,
            Op::Unmap => self.promise.unmap,
            Op::WriteZeroes => self.promise.write_zeroes,
            // A controller may refuse to copy blocks onto part of themselves; devices here must
            // not.
            Op::Copy => false,
            Op::Verify => self.promise.verify,
        };
        if does { Support::Native } else { Support::No }
    }

    fn native_fua(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let granted = self.shared.status().io_queues;
        let none = || {
            let kind = match granted {
                0 => std::io::ErrorKind::NotConnected,
                _ => std::io::ErrorKind::ResourceBusy,
            };
            self.fail(std::io::Error::new(kind, NoQueue { granted }))
        };
        let qid = self.shared.qids.take(granted).ok_or_else(none)?;
        let ids = (qid.value, self.namespace.nsid);
        let (options, link) = (
            self.shared.config.options.clone(),
            Arc::clone(&self.shared.link),
        );
        let dial = self.shared.connector.dialer();
        // The poller of the queue has the clock.
        let queue = IoQueue::new(options, link, dial, pool.clone(), ids, Nanos::ZERO);
        let queue = queue.map_err(|error| self.fail(error))?;
        let queue = queue.expecting(NamespaceInfo {
            blocks: self.size.blocks(),
            ..self.namespace.clone()
        });
        Ok(Box::new(RemoteQueue::new(queue, qid, self)))
    }

    /// With each end of the association, and of each of its I/O queues.
    fn losses(&self) -> u64 {
        self.shared.link.losses() + self.size.cuts()
    }

    fn least_blocks(&self) -> u64 {
        self.size.least()
    }

    fn forget_least(&self) -> u64 {
        self.size.forget_least()
    }

    /// The target's present answer: a restarted target may have reservations switched off, or on.
    fn reserves(&self) -> bool {
        let link = self.shared.link.state();
        let found = link.namespaces.get(&self.namespace.nsid);
        let rescap = Rescap::from_bits_retain(found.unwrap_or(&self.namespace).rescap);
        Oncs::from_bits_retain(link.oncs).contains(Oncs::RESERVATIONS)
            && rescap.contains(Rescap::WRITE_EXCLUSIVE_ALL)
    }

    /// As SPDK shows it, and how the connection is.
    fn driver_specific(&self) -> Value {
        let (config, status) = (&self.shared.config, self.shared.status());
        let link = self.shared.link.state();
        let found = link.namespaces.get(&self.namespace.nsid);
        let ana = found.map(|found| ana_word(link.access(found)));
        let info = &status.info;
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02X}")).collect::<String>();
        let (major, minor, tertiary) = info.version;
        let mut ns_data = json!({
            "id": self.namespace.nsid,
            "can_share": info.multi_controller,
            "nguid": hex(&self.namespace.nguid),
            "eui64": hex(&self.namespace.eui64),
        });
        if let Some(ana) = ana.filter(|_| info.ana_reporting) {
            ns_data["ana_state"] = ana.into();
        }
        json!({
            "nvme": [{
                "trid": {
                    "trtype": status.transport.to_string(),
                    "adrfam": if config.address.0.contains(':') { "IPv6" } else { "IPv4" },
                    "traddr": config.address.0,
                    "trsvcid": config.address.1,
                    "subnqn": config.options.subnqn.to_string(),
                },
                "ctrlr_data": {
                    "cntlid": info.cntlid,
                    "vendor_id": format!("0x{:04x}", info.vendor_id),
                    "model_number": info.model,
                    "serial_number": info.serial,
                    "firmware_revision": info.firmware,
                    "subnqn": config.options.subnqn.to_string(),
                    "oacs": {
                        "security": info.oacs & 1,
                        "format": info.oacs >> 1 & 1,
                        "firmware": info.oacs >> 2 & 1,
                        "ns_manage": info.oacs >> 3 & 1,
                    },
                    "multi_ctrlr": info.multi_controller,
                    "ana_reporting": info.ana_reporting,
                },
                "vs": { "nvme_version": match tertiary {
                    0 => format!("{major}.{minor}"),
                    _ => format!("{major}.{minor}.{tertiary}"),
                } },
                "ns_data": ns_data,
            }],
            "mp_policy": "active_passive",
            "controller": config.name,
            "state": status.state.word(),
            "losses": self.losses(),
            "refused": self.refusal(),
        })
    }
}
