//! The label: identifies the volume and the replica on a device, and the time of the last label
//! write.
//!
//! | bytes | |
//! |---|---|
//! | 0..8 | `NACREVOL` |
//! | 8..12 | version |
//! | 12..16 | bit 0: closed cleanly |
//! | 16..48 | ids of the volume and of the replica |
//! | 48..80 | epoch, revision, sequence, blocks of the volume |
//! | 80..84 | bytes of a block |
//! | 84..88 | slot, log2 of the bytes of a region, number of replicas, bytes of the name |
//! | 88..344 | the volume's name |
//! | 344..504 | replicas, 32 bytes each: id, slot, state |
//! | 504..4092 | zero |
//! | 4092..4096 | CRC32C of all preceding bytes |

use arrayvec::ArrayVec;
use uuid::Uuid;

use crate::model::{MAX_REPLICAS, ReplicaState, Stamp};

use super::layout::{BLOCK, MAX_REGIONS, MIN_REGION_SHIFT};
use super::{CHECKSUM, Reader, Writer, block_of, is_sealed, seal};

const MAGIC: &[u8; 8] = b"NACREVOL";
const VERSION: u32 = 1;
const CLEAN: u32 = 1;
const NAME: usize = 88;
/// Longest name in bytes.
pub const MAX_NAME: usize = 255;
const REPLICAS: usize = 344;
const REPLICA: usize = 32;
const END: usize = REPLICAS + MAX_REPLICAS * REPLICA;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    pub volume: Uuid,
    /// The volume's name when the label was written; for people. Cut at [`MAX_NAME`] bytes.
    pub name: String,
    pub replica: Uuid,
    pub slot: u8,
    pub stamp: Stamp,
    /// Incremented with every label written to this device.
    pub sequence: u64,
    /// The volume was closed cleanly: the log is complete.
    pub clean: bool,
    pub block_size: u32,
    pub blocks: u64,
    pub region_shift: u8,
    /// All replicas when the label was written.
    pub replicas: ArrayVec<LabelReplica, MAX_REPLICAS>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LabelReplica {
    pub slot: u8,
    pub id: Uuid,
    pub state: LabelState,
}

/// [`ReplicaState`] without the parts that only the store knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum LabelState {
    InSync = 1,
    Out = 2,
    Filling = 3,
}

impl From<ReplicaState> for LabelState {
    fn from(state: ReplicaState) -> Self {
        match state {
            ReplicaState::InSync => Self::InSync,
            ReplicaState::Out { .. } => Self::Out,
            ReplicaState::Filling { .. } => Self::Filling,
        }
    }
}

/// Why a block is not a usable label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    #[error("there is no label: the block is all zeroes")]
    NotALabel,
    #[error("the block holds something other than a label")]
    Foreign,
    #[error("the label is of version {found}, and this program knows version {VERSION}")]
    Version { found: u32 },
    #[error("the label is damaged: its checksum does not match")]
    Checksum,
    /// The checksum is correct, so the program that wrote the label was wrong.
    #[error("the label's {name} is invalid")]
    Field { name: &'static str },
    #[error("the two labels name different replicas or volumes")]
    TwoOwners,
}

impl Label {
    pub fn encode(&self, out: &mut [u8; BLOCK]) {
        out.fill(0);
        let name = cut(&self.name);
        let mut w = Writer { out, at: 0 };
        w.put(MAGIC);
        w.put(&VERSION.to_le_bytes());
        w.put(&(if self.clean { CLEAN } else { 0 }).to_le_bytes());
        w.put(self.volume.as_bytes());
        w.put(self.replica.as_bytes());
        for word in [
            self.stamp.epoch,
            self.stamp.revision,
            self.sequence,
            self.blocks,
        ] {
            w.put(&word.to_le_bytes());
        }
        w.put(&self.block_size.to_le_bytes());
        let count = self.replicas.len() as u8;
        w.put(&[self.slot, self.region_shift, count, name.len() as u8]);
        w.put(name.as_bytes());
        for (index, replica) in self.replicas.iter().enumerate() {
            w.at = REPLICAS + index * REPLICA;
            w.put(replica.id.as_bytes());
            w.put(&[replica.slot, replica.state as u8]);
        }
        seal(out);
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, LabelError> {
        let block = block_of(bytes).ok_or(LabelError::Foreign)?;
        if block.iter().all(|byte| *byte == 0) {
            return Err(LabelError::NotALabel);
        }
        let mut r = Reader {
            bytes: block,
            at: 0,
        };
        if r.take() != *MAGIC {
            return Err(LabelError::Foreign);
        }
        // Checked before the version: only a sealed block proves that another program version wrote
        // it.
        if !is_sealed(block) {
            return Err(LabelError::Checksum);
        }
        let version = r.u32();
        if version != VERSION {
            return Err(LabelError::Version { found: version });
        }
        let flags = r.u32();
        check(flags & !CLEAN == 0, "flags")?;
        let volume = id(r.take(), "volume id")?;
        let replica = id(r.take(), "replica id")?;
        let stamp = Stamp {
            epoch: r.u64(),
            revision: r.u64(),
        };
        let sequence = r.u64();
        let blocks = r.u64();
        let block_size = r.u32();
        let [slot, region_shift, count, name_len] = r.take();
        let in_a_block = block_size.is_power_of_two() && (512..=BLOCK as u32).contains(&block_size);
        check(in_a_block, "block size")?;
        let bytes = blocks.checked_mul(u64::from(block_size));
        let bytes = bytes.filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or(LabelError::Field {
            name: "number of blocks",
        })?;
        let fits = (MIN_REGION_SHIFT..64).contains(&region_shift)
            && bytes.div_ceil(1 << region_shift) <= MAX_REGIONS;
        check(fits, "region size")?;
        check(usize::from(slot) < MAX_REPLICAS, "slot")?;
        debug_assert_eq!(r.at, NAME);
        let name = std::str::from_utf8(r.slice(usize::from(name_len)));
        let name = name.map_err(|_| LabelError::Field { name: "name" })?;
        check(r.zero_until(REPLICAS), "name")?;
        let replicas = replicas(&mut r, usize::from(count))?;
        check(r.zero_until(CHECKSUM), "reserved area")?;
        Ok(Self {
            volume,
            name: name.to_owned(),
            replica,
            slot,
            stamp,
            sequence,
            clean: flags & CLEAN != 0,
            block_size,
            blocks,
            region_shift,
            replicas,
        })
    }

    /// Decides which of a device's two labels is valid: the greater one.
    fn age(&self) -> (Stamp, u64) {
        (self.stamp, self.sequence)
    }
}

fn replicas(
    r: &mut Reader<'_>,
    count: usize,
) -> Result<ArrayVec<LabelReplica, MAX_REPLICAS>, LabelError> {
    const TABLE: &str = "table of replicas";
    check((1..=MAX_REPLICAS).contains(&count), "number of replicas")?;
    let mut replicas = ArrayVec::<LabelReplica, MAX_REPLICAS>::new();
    for index in 0..count {
        let id = id(r.take(), TABLE)?;
        let [slot, state] = r.take();
        let state = match state {
            1 => LabelState::InSync,
            2 => LabelState::Out,
            3 => LabelState::Filling,
            _ => return Err(LabelError::Field { name: TABLE }),
        };
        let taken = replicas.iter().any(|m| m.slot == slot || m.id == id);
        check(!taken && usize::from(slot) < MAX_REPLICAS, TABLE)?;
        check(r.zero_until(REPLICAS + (index + 1) * REPLICA), TABLE)?;
        replicas.push(LabelReplica { slot, id, state });
    }
    check(r.zero_until(END), TABLE)?;
    Ok(replicas)
}

fn check(holds: bool, name: &'static str) -> Result<(), LabelError> {
    if holds {
        Ok(())
    } else {
        Err(LabelError::Field { name })
    }
}

fn id(bytes: [u8; 16], name: &'static str) -> Result<Uuid, LabelError> {
    let id = Uuid::from_bytes(bytes);
    check(!id.is_nil(), name)?;
    Ok(id)
}

fn cut(name: &str) -> &str {
    let mut len = name.len().min(MAX_NAME);
    while !name.is_char_boundary(len) {
        len -= 1;
    }
    &name[..len]
}

/// One of the two positions of a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LabelCopy {
    A,
    B,
}

/// The position of the next label when the valid one is at `which`: a write torn by a power failure
/// destroys only the older label. Code that takes over a device with other labels must erase both
/// positions first, or an old label may still be valid.
pub fn next_copy(which: LabelCopy) -> LabelCopy {
    match which {
        LabelCopy::A => LabelCopy::B,
        LabelCopy::B => LabelCopy::A,
    }
}

/// Returns the newer valid one of a device's two labels, and its position. Fails if one of them is
/// of another version, if they name different replicas, or if neither is valid. If neither is
/// valid, it returns the more specific of the two errors. So a damaged label does not look like an
/// empty device.
pub fn newest(a: &[u8], b: &[u8]) -> Result<(Label, LabelCopy), LabelError> {
    match (Label::decode(a), Label::decode(b)) {
        // A newer program wrote this device last, or may have: its label must not be overlooked.
        (Err(error @ LabelError::Version { .. }), _)
        | (_, Err(error @ LabelError::Version { .. })) => Err(error),
        (Ok(a), Ok(b)) if (a.volume, a.replica) != (b.volume, b.replica) => {
            Err(LabelError::TwoOwners)
        }
        (Ok(a), Ok(b)) if b.age() > a.age() => Ok((b, LabelCopy::B)),
        (Ok(a), _) => Ok((a, LabelCopy::A)),
        (_, Ok(b)) => Ok((b, LabelCopy::B)),
        (Err(a), Err(b)) => Err(if rank(b) > rank(a) { b } else { a }),
    }
}

fn rank(error: LabelError) -> u8 {
    match error {
        LabelError::NotALabel => 0,
        LabelError::Foreign => 1,
        LabelError::Checksum => 2,
        LabelError::Field { .. } | LabelError::TwoOwners => 3,
        LabelError::Version { .. } => 4,
    }
}

/// Byte offset of a label.
pub fn label_offset(place: LabelCopy) -> u64 {
    match place {
        LabelCopy::A => 0,
        LabelCopy::B => BLOCK as u64,
    }
}
