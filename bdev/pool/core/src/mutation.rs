//! Deliberate faults, to prove that the tests find the rules that they break.
//!
//! They exist in this crate's own tests only; everywhere else every check here is a constant
//! `false`. At most one is active at a time, and only on the thread that activated it.

/// The rule that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// Acknowledges a write before the records before its own are on the disk.
    ForgetPrefix,
    /// Acknowledges a write before its data is on the disk.
    ForgetData,
    /// Acknowledges an unmap of empty places before the record that emptied them is on the disk.
    UnmapUnlogged,
    /// Counts records without comparing the data.
    SkipVerification,
    /// Writes granules in place that an unsettled record is about.
    OverwriteUnsettled,
    /// Does the above by the place in the volume only: a trim gets round the rule.
    OverwriteAfterUnmap,
    /// Settles without the flush before the mark.
    SettleWithoutFirstFlush,
    /// Settles without the flush after the mark.
    SettleWithoutSecondFlush,
    /// Reuses a unit although the record that freed it may be lost.
    ReuseUnsettled,
    /// Reuses a unit although a read of it is in flight.
    ReuseWithoutGrace,
    /// Writes a root before its pages are durable.
    RootBeforePages,
    /// Reuses pages of the root that is on the disk.
    ReuseRootPages,
    /// Answers a snapshot while writes in place to it are in flight.
    SnapshotWithoutGrace,
    /// Answers a snapshot although writes in place to it are not durable.
    SnapshotWithoutFlush,
    /// Copies granules of a unit although writes in place to it are in flight.
    CopyWithoutGrace,
    /// Cuts a snapshot although records of the volume are in flight.
    SnapshotWithoutDrain,
    /// Writes in place to units that a snapshot shares.
    WriteShared,
    /// Runs several background passes at once.
    TwoPasses,
    /// Separates a volume from its parent although a crash may undo copies.
    DetachUnsettled,
    /// Separates a volume from an ancestor without copying the ancestor's units.
    DecoupleUncopied,
    /// Separates a volume from all ancestors, with the copies for one.
    DecoupleFromAll,
    /// Separates a volume from an ancestor while a pass changes owners of units above it.
    DecoupleDuringPass,
    /// Exchanges a volume's contents although a crash may undo copies.
    AdoptUnsettled,
    /// Frees new contents that a volume is about to adopt.
    FreePrepared,
    /// Answers a read-only request while writes in place are in flight.
    ReadOnlyWithoutGrace,
    /// Uses a feature before the superblocks name it.
    FeatureUnnamed,
    /// Begins to free a version before its deletion is durable.
    FreeBeforeHidden,
    /// Opens without making durable the log that it read.
    ImportWithoutFlush,
    /// An import overwrites units whose records it verified, before its root is durable.
    ReuseVerified,
    /// Answers a flush at once.
    ForgetFlush,
    /// Does not record that data could not be written.
    ForgetCancel,
    /// Uses a page whose checksum is wrong.
    TrustPages,
    /// Allocates units that are being discarded.
    AllocateDiscarding,
    /// Discards units whose freeing may be undone by a crash, or that are being read.
    DiscardLimbo,
    /// Uses the units of a grown disk while the root before has the smaller size.
    GrowAfterOneRoot,
    /// A check reads a root whose pages may be reused meanwhile.
    CheckWithoutRoot,
    /// A check does not compare checksums.
    CheckNoSums,
    /// Takes log pages of a later import for old ones.
    IgnoreLaterImports,
    /// Frees pages of a root that the import gave up.
    KeepGarbage,
    /// Settles when the first disk alone is flushed.
    SettleFirstDiskOnly,
    /// Writes a root that names a disk before the disk is known by its superblocks.
    RootBeforeLabels,
    /// Writes data of a further disk to the place of the same number on the first one.
    WrongDisk,
    /// An import takes the newest root of any disk.
    RootOfAnyDisk,
    /// An import flushes the disk with the log only.
    ImportFlushesFirstDisk,
    /// A host's flush leaves out the disks of the pool's own copies. Lanes flush, not the core.
    #[cfg(test)]
    FlushWithoutCopies,
    /// Copies a unit to another disk although writes in place to it are in flight.
    MoveWithoutGrace,
    /// Lets writes go on to a unit while it is copied.
    MoveBesideWrites,
    /// Copies only the granules of a unit that a map has.
    MoveUsedGranules,
    /// Changes the map for a copy that a loss of power may undo.
    MoveUnflushed,
    /// Moves a unit of one version, and not of the others that share it.
    MoveOneVersion,
    /// Allocates units of a disk that leaves.
    AllocateLeaving,
    /// Drops a disk from the table before its last unit has moved.
    DropBeforeEmpty,
    /// Gives a disk up when one root leaves it out: the root before names it.
    DropAfterOneRoot,
    /// Gives a disk up before a root leaves it out.
    DropBeforeRoot,
    /// Forgets an external device although volumes show it.
    ForgetShownExternal,
    /// Forgets that a trim of a whole leaf hides the external device there.
    ForgetRemovedLeaf,
    /// Changes maps of external devices although the next root has no room for them.
    MapWithoutRoom,
    /// Writes interior nodes without their external children.
    OmitExternalNodes,
    /// An import keeps pages that name the places of lost nodes.
    KeepParentOfLost,
    /// Puts metadata into units whose records a second import would verify.
    ReuseUnsettledZones,
}

#[cfg(test)]
mod switch {
    use std::cell::Cell;

    use super::Mutation;

    thread_local! {
        static ACTIVE: Cell<Option<Mutation>> = const { Cell::new(None) };
    }

    impl Mutation {
        /// Activates a fault from here on, on this thread.
        pub(crate) fn activate(which: Option<Self>) {
            ACTIVE.set(which);
        }

        pub(crate) fn is_active(self) -> bool {
            ACTIVE.get() == Some(self)
        }

        pub(crate) fn is_any_active() -> bool {
            ACTIVE.get().is_some()
        }
    }
}

#[cfg(not(test))]
impl Mutation {
    #[inline(always)]
    pub(crate) const fn is_active(self) -> bool {
        false
    }
}
