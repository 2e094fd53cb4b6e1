//! The operations of short histories, and the disks that these run on.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Write,
    Overwrite,
    Partial,
    Unmap,
    Snapshot,
    Clone,
    Delete,
    Flush,
    Checkpoint,
    Resize,
    Restore,
    Inflate,
    Grow,
    Decouple,
    SetParent,
    ReadOnly,
    /// Not among the operations of one disk.
    AddDisk,
    /// The second disk leaves: the operation ends when it has left.
    RemoveDisk,
    /// With external devices: a volume on the first one; the volume gets the second one as parent.
    CloneExternal,
    SetExternal,
    /// A trim of a whole leaf.
    UnmapLeaf,
    /// To the places whose contents are compared.
    Shrink,
}

/// The disks of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disks {
    One,
    /// The volume shows an external device.
    External,
    /// The second one can be added.
    Beside,
    Two,
    Three,
}

pub(super) const OPS: [Op; 16] = [
    Op::Write,
    Op::Overwrite,
    Op::Partial,
    Op::Unmap,
    Op::Snapshot,
    Op::Clone,
    Op::Delete,
    Op::Flush,
    Op::Checkpoint,
    Op::Resize,
    Op::Restore,
    Op::Inflate,
    Op::Grow,
    Op::Decouple,
    Op::SetParent,
    Op::ReadOnly,
];
