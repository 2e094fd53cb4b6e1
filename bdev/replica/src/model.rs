//! What a volume is, as the store keeps it.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Replicas of one volume at most.
pub const MAX_MEMBERS: usize = 5;
/// Bytes at the start of each member's device that are the volume's own: labels and the dirty-region log.
/// The volume's first block comes after them.
pub const RESERVED: u64 = 1 << 20;

/// One volume. The store's copy is the authority: every change of it is a compare-and-swap on
/// [`VolumeRecord::version`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    pub id: Uuid,
    pub name: String,
    /// Bytes per logical block; all members' devices have the same.
    pub block_size: u32,
    /// Size of the volume in blocks.
    pub blocks: u64,
    /// log2 of the bytes of a region of the dirty-region log.
    pub region_shift: u8,
    /// Raised by each opening: whoever has a lower one is fenced.
    pub epoch: u64,
    /// The last epoch in which every in-sync member was stamped before anything was served. A member
    /// whose label is older than this is not in sync, whatever is said of it. Goes back only when an operator
    /// chooses a replica that is older.
    pub serving: u64,
    /// Grows with every change.
    pub revision: u64,
    /// Who has it open, or had it last.
    pub holder: Option<Uuid>,
    pub members: Vec<MemberRecord>,
    #[serde(default)]
    pub settings: Settings,
    /// What it promised when it was opened last; `None`: it never was, or by a version that did not keep that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<KeptLimits>,
}

/// What a volume is shown with before its members are there. Whether they have a cache is not kept: one that nobody
/// can look at may have one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptLimits {
    pub max_blocks: u32,
    pub max_unmap_blocks: u64,
    pub atomic_blocks: u32,
    pub lend_blocks: u32,
    pub read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRecord {
    pub id: Uuid,
    /// Its place in the volume's tables, below [`MAX_MEMBERS`]; no two members share one.
    pub slot: u8,
    /// The block device's name.
    pub device: String,
    pub state: MemberState,
    /// The member that goes as soon as this one is in sync.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<Uuid>,
    /// Taken out by the operator: it does not return by itself.
    #[serde(default)]
    pub offline: bool,
    /// Its device had fewer blocks than the volume needs, and no other member was there to fill it
    /// from: what was beyond is lost, and nothing is served from it until an operator says so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut: bool,
    /// Why it is not in sync, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Which of a member's blocks can be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum MemberState {
    /// It has every acknowledged write.
    InSync,
    /// It has what was acknowledged before it left; since then the dirty-region log counts what it misses.
    Out {
        /// What its label says if nobody else has written to it since.
        last_label: Stamp,
    },
    /// It was never in sync, or cannot be believed any more: regions below the watermark have been copied,
    /// but for those that the dirty-region log names.
    Filling {
        watermark: u64,
        /// As above.
        #[serde(default)]
        last_label: Stamp,
    },
}

/// The moment at which a label was written: compared in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Stamp {
    pub epoch: u64,
    pub revision: u64,
}

/// Which in-sync member a read goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReadPolicy {
    /// A member in this machine, if one is in sync. Of several each has its stripes of 256 KiB, so that they cache
    /// different parts of the volume; one with clearly more to do than another is relieved.
    #[default]
    LocalFirst,
    LeastOutstanding,
    RoundRobin,
}

/// What can be set of a volume, live.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    pub read_policy: ReadPolicy,
    /// Writes wait while fewer members than this are in sync; 1 to the number of members.
    pub min_in_sync: u8,
    /// Milliseconds after which a member that does not answer an I/O is out.
    pub deadline_ms: u64,
    /// Milliseconds that hosts' commands wait while nothing is in sync, before they are answered with a
    /// path-related status, without DNR, so that hosts ask again. Below the 30 s of Linux hosts.
    pub frozen_hold_ms: u64,
    /// Read errors of a member within an hour after which it is out.
    pub read_errors: u32,
    /// Bytes per second that resync and rebuild may copy at most; 0: no limit.
    pub resync_bytes_per_s: u64,
    /// Milliseconds for which nothing is copied to a member that returns, nor by a holder that has just opened
    /// the volume or has closed a queue with writes under way, so that nothing of former connections can still
    /// arrive.
    pub settle_ms: u64,
    /// Hours between verifications that run by themselves; 0: none.
    pub verify_hours: u32,
    /// Which transports its hosts may use.
    pub transport_policy: TransportPolicy,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            read_policy: ReadPolicy::default(),
            min_in_sync: 1,
            deadline_ms: 8_000,
            frozen_hold_ms: 20_000,
            read_errors: 16,
            resync_bytes_per_s: 0,
            settle_ms: 500,
            verify_hours: 0,
            transport_policy: TransportPolicy::default(),
        }
    }
}

/// Which transports the hosts of a volume may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransportPolicy {
    /// What the listeners offer.
    #[default]
    Inherit,
    Any,
    RdmaOnly,
    TcpOnly,
}

impl VolumeRecord {
    /// What a compare-and-swap compares.
    pub fn version(&self) -> Stamp {
        Stamp {
            epoch: self.epoch,
            revision: self.revision,
        }
    }

    pub fn member(&self, slot: usize) -> Option<&MemberRecord> {
        self.members.iter().find(|m| usize::from(m.slot) == slot)
    }

    pub fn member_mut(&mut self, slot: usize) -> Option<&mut MemberRecord> {
        self.members
            .iter_mut()
            .find(|m| usize::from(m.slot) == slot)
    }

    /// Blocks of a region of the dirty-region log.
    pub fn region_blocks(&self) -> u64 {
        (1u64 << self.region_shift) / u64::from(self.block_size)
    }

    pub fn regions(&self) -> u64 {
        self.blocks.div_ceil(self.region_blocks())
    }

    pub fn in_sync(&self) -> impl Iterator<Item = &MemberRecord> {
        self.members
            .iter()
            .filter(|m| m.state == MemberState::InSync)
    }
}
