//! The state of a remote namespace: its identity, its size, and the limits announced to the users
//! of its bdev.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use nacre_bdev::{Limits, Op, OpenError, Size};
use nacre_nvmf::host::{LinkState, NamespaceInfo};
use nacre_nvmf_wire::identify::controller::Oncs;
use nacre_nvmf_wire::identify::namespace::Rescap;

use crate::paths::{DevicePath, DevicePaths};
use crate::shared::Shared;

/// Most blocks of a command (NLB: 16 bits, 0's based).
const COMMAND_BLOCKS: u64 = 1 << 16;

/// The state that a device shares with its queues.
pub(crate) struct Namespace {
    /// The name of its bdev.
    pub name: String,
    pub paths: DevicePaths,
    /// Connections to its subsystem, on all paths, that ended with possible loss of completed but
    /// unflushed writes.
    pub losses: Arc<AtomicU64>,
    /// Namespace properties at attachment; the present size is in `size`.
    pub attached: NamespaceInfo,
    pub size: Size,
    pub promise: AnnouncedLimits,
}

/// A connected path, as the management thread compares it with the device.
pub(crate) struct LivePath {
    pub shared: Arc<Shared>,
    pub link: LinkState,
}

/// The limits and operations that were announced at registration, on which the layer above relies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AnnouncedLimits {
    pub limits: Limits,
    compare: bool,
    write_zeroes: bool,
    unmap: bool,
    fused: bool,
    verify: bool,
}

impl AnnouncedLimits {
    fn of(namespace: &NamespaceInfo, link: &LinkState, queue_depth: u32) -> Self {
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
        Self {
            limits,
            compare,
            write_zeroes: oncs.contains(Oncs::WRITE_ZEROES),
            unmap: oncs.contains(Oncs::DATASET_MANAGEMENT),
            fused,
            verify: oncs.contains(Oncs::VERIFY),
        }
    }

    /// Describes the first property that `now` no longer satisfies.
    fn broken_by(&self, now: &Self) -> Option<String> {
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
    /// The namespace `attached` of `path`, which is its first path.
    pub(crate) fn new(
        name: String,
        path: &LivePath,
        attached: NamespaceInfo,
        losses: Arc<AtomicU64>,
    ) -> Self {
        let paths = DevicePaths::default();
        paths.add(&path.shared);
        Self {
            name,
            paths,
            losses,
            size: Size::new(attached.blocks),
            promise: AnnouncedLimits::of(&attached, &path.link, depth(&path.shared)),
            attached,
        }
    }

    /// True for operations that are sent to the target: those that it announced when the namespace
    /// was attached, except copy.
    pub(crate) fn does(&self, op: Op) -> bool {
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
    pub(crate) fn reserves(&self) -> bool {
        let list = self.paths.list();
        let connected = |path: &&Arc<DevicePath>| path.shared.link.generation().is_some();
        let Some(path) = list.iter().find(connected).or_else(|| list.first()) else {
            return false;
        };
        let link = path.shared.link.state();
        let found = link.namespaces.get(&self.attached.nsid);
        let rescap = Rescap::from_bits_retain(found.unwrap_or(&self.attached).rescap);
        Oncs::from_bits_retain(link.oncs).contains(Oncs::RESERVATIONS)
            && rescap.contains(Rescap::WRITE_EXCLUSIVE_ALL)
    }

    /// The reason why no path to the namespace is used although it exists; `None` while one is
    /// used.
    pub(crate) fn refusal(&self) -> Option<String> {
        let list = self.paths.list();
        let mut reasons = list.iter().map(|path| path.refusal());
        reasons
            .try_fold(None, |_, reason| reason.map(Some))
            .flatten()
    }

    pub(crate) fn cannot_open(&self, source: std::io::Error) -> OpenError {
        OpenError {
            bdev: self.name.clone(),
            what: "open an I/O queue".to_owned(),
            source,
        }
    }

    /// Compares the namespace on each connected path with this device. Paths with the same identity
    /// and sufficient limits are used; others are refused. The size is the smallest of the used
    /// paths: a path that has not noticed a growth yet would refuse I/O beyond its size. If that is
    /// less than the known size, the namespace has lost data, and all paths are refused.
    pub(crate) fn take_over(&self, live: &[LivePath]) {
        let known = NamespaceInfo {
            blocks: self.size.blocks(),
            ..self.attached.clone()
        };
        let mut smallest: Option<u64> = None;
        let mut fitting = Vec::new();
        for path in live {
            let Some(found) = path.link.namespaces.get(&known.nsid) else {
                continue;
            };
            if let Some(why) = self.other_than(&known, found, path) {
                self.refuse(path, why);
                continue;
            }
            // A smaller namespace is not a new path of this device.
            let is_known = self.paths.find(&path.shared).is_some();
            match known.difference(found) {
                Some(why) if !is_known => {
                    self.refuse(path, why);
                    continue;
                }
                _ => {}
            }
            smallest = Some(smallest.map_or(found.blocks, |least| least.min(found.blocks)));
            fitting.push((path, found));
        }
        if let Some(blocks) = smallest {
            // Note it even for a refused namespace: data beyond is lost, even when it is large
            // enough again.
            self.size.note(blocks);
            let now = NamespaceInfo {
                blocks,
                ..known.clone()
            };
            let cut = known.difference(&now);
            if cut.is_none() {
                self.size.set(blocks);
            }
            for (path, _) in fitting {
                self.paths.add(&path.shared);
                if let Some(known) = self.paths.find(&path.shared) {
                    known.set_refusal(cut.clone());
                }
            }
        }
        self.paths.update_refused();
    }

    /// The reason why the namespace on a path is another one, or no longer satisfies the announced
    /// limits.
    fn other_than(
        &self,
        known: &NamespaceInfo,
        found: &NamespaceInfo,
        path: &LivePath,
    ) -> Option<String> {
        if !known.same_identity(found) {
            return known.difference(found);
        }
        let now = AnnouncedLimits::of(found, &path.link, depth(&path.shared));
        self.promise.broken_by(&now)
    }

    /// Refuses a path. One that the device did not use before stays unused.
    fn refuse(&self, path: &LivePath, why: String) {
        if let Some(known) = self.paths.find(&path.shared) {
            known.set_refusal(Some(why));
        }
    }

    /// The reason why the device does not use a connected path; `None`: it uses it, or the path
    /// does not have the namespace.
    pub(crate) fn refusal_of(&self, path: &LivePath) -> Option<String> {
        if let Some(known) = self.paths.find(&path.shared) {
            return known.refusal();
        }
        let found = path.link.namespaces.get(&self.attached.nsid)?;
        let known = NamespaceInfo {
            blocks: self.size.blocks(),
            ..self.attached.clone()
        };
        self.other_than(&known, found, path)
            .or_else(|| known.difference(found))
    }
}

fn depth(shared: &Shared) -> u32 {
    u32::from(shared.config.options.queue_entries.max(2)) - 1
}
