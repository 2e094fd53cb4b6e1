//! The state of a remote namespace: its identity, its size, and the limits that users rely on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nacre_bdev::{Limits, Op, Size};
use nacre_nvmf::host::{LinkState, NamespaceInfo};
use nacre_nvmf_wire::identify::controller::Oncs;
use nacre_nvmf_wire::identify::namespace::Rescap;
use parking_lot::Mutex;

use crate::shared::Shared;

/// Most blocks of a command (NLB: 16 bits, 0's based).
const COMMAND_BLOCKS: u64 = 1 << 16;

/// The state that a device shares with its queues.
pub(crate) struct Namespace {
    shared: Arc<Shared>,
    /// Namespace properties at attachment; the present size is in `size`.
    pub attached: NamespaceInfo,
    pub size: Size,
    pub promise: Promise,
    /// The reason why all I/O completes with `Gone` although the target has a namespace with this
    /// NSID.
    refusal: Mutex<Option<String>>,
    refused: AtomicBool,
}

/// The facts that the layer above got at registration and relies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Promise {
    pub limits: Limits,
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
            // The layer has one limit for unmap and write zeroes; Dataset Management allows more.
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

    /// Describes the first property that `now` no longer satisfies.
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

impl Namespace {
    pub fn new(shared: Arc<Shared>, attached: NamespaceInfo, link: &LinkState) -> Namespace {
        Namespace {
            size: Size::new(attached.blocks),
            promise: Promise::of(&attached, link, depth(&shared)),
            shared,
            attached,
            refusal: Mutex::default(),
            refused: AtomicBool::new(false),
        }
    }

    /// True when the target executes the operation.
    pub fn does(&self, op: Op) -> bool {
        match op {
            Op::Read | Op::Write | Op::Flush => true,
            Op::Compare => self.promise.compare,
            Op::CompareAndWrite => self.promise.fused,
            Op::Unmap => self.promise.unmap,
            Op::WriteZeroes => self.promise.write_zeroes,
            // A controller may refuse to copy blocks onto part of themselves; devices here must
            // not.
            Op::Copy => false,
            Op::Verify => self.promise.verify,
        }
    }

    /// True if the target supports reservations now; this may change when it restarts.
    pub fn reserves(&self) -> bool {
        let link = self.shared.link.state();
        let found = link.namespaces.get(&self.attached.nsid);
        let rescap = Rescap::from_bits_retain(found.unwrap_or(&self.attached).rescap);
        Oncs::from_bits_retain(link.oncs).contains(Oncs::RESERVATIONS)
            && rescap.contains(Rescap::WRITE_EXCLUSIVE_ALL)
    }

    /// The reason why the namespace is no longer used although it exists.
    pub fn refusal(&self) -> Option<String> {
        self.refusal.lock().clone()
    }

    pub fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Acquire)
    }

    /// Adopts the namespace's present size, or returns the reason why it cannot be used any more.
    pub fn take_over(&self, found: &NamespaceInfo, link: &LinkState) -> Option<String> {
        let known = NamespaceInfo {
            blocks: self.size.blocks(),
            ..self.attached.clone()
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
}

fn depth(shared: &Shared) -> u32 {
    u32::from(shared.config.options.queue_entries.max(2)) - 1
}
