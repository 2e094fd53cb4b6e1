//! A model of one replica: its blocks and dirty log on a disk, behind the shipped gate.

use std::collections::BTreeMap;

use nacre_cluster_core::gate::{Admission, Gate, Key};
use nacre_cluster_core::mutation::Mutation;

use crate::names::BLOCKS;

/// What a holder asks of a replica.
#[derive(Debug, Clone)]
pub(crate) enum Io {
    Read {
        block: usize,
    },
    Write {
        block: usize,
        value: u64,
    },
    /// All blocks and the dirty log.
    ReadAll,
    /// These blocks.
    WriteSome {
        blocks: Vec<(usize, u64)>,
    },
}

/// The result of an I/O.
#[derive(Debug, Clone)]
pub(crate) enum IoResult {
    Done(u64),
    All([u64; BLOCKS], [bool; BLOCKS]),
    /// The gate has another key.
    Refused(Option<Key>),
}

/// An I/O on the disk.
#[derive(Debug, Clone)]
pub(crate) struct OnDisk {
    /// `None`: it went past the gate.
    pub admission: Option<Admission>,
    pub io: Io,
}

#[derive(Debug)]
pub(crate) struct SimReplica {
    /// The index of its node.
    pub node: usize,
    pub gate: Gate,
    stored_key: Option<Key>,
    pub blocks: [u64; BLOCKS],
    /// Blocks ever written: a longer log than a real one, which is cleaned.
    pub dirty: [bool; BLOCKS],
    pub on_disk: BTreeMap<u64, OnDisk>,
}

impl SimReplica {
    pub(crate) fn new(node: usize) -> Self {
        Self {
            node,
            gate: Gate::default(),
            stored_key: None,
            blocks: [0; BLOCKS],
            dirty: [false; BLOCKS],
            on_disk: BTreeMap::new(),
        }
    }

    /// Starts an I/O. `is_local`: the holder is on the replica's node.
    pub(crate) fn submit(
        &mut self,
        id: u64,
        io: Io,
        key: Key,
        session: u64,
        is_local: bool,
    ) -> Result<(), IoResult> {
        let admission = if is_local && Mutation::LocalPastGate.is_active() {
            None
        } else {
            let admitted = self.gate.admit(key, session);
            Some(admitted.map_err(|refused| IoResult::Refused(refused.current))?)
        };
        self.on_disk.insert(id, OnDisk { admission, io });
        Ok(())
    }

    /// The disk has done the I/O.
    pub(crate) fn complete(&mut self, id: u64) -> Option<IoResult> {
        let OnDisk { admission, io } = self.on_disk.remove(&id)?;
        if let Some(admission) = admission {
            self.gate.ended(admission);
        }
        Some(self.perform(io))
    }

    fn perform(&mut self, io: Io) -> IoResult {
        match io {
            Io::Read { block } => IoResult::Done(self.blocks[block]),
            Io::Write { block, value } => {
                self.blocks[block] = value;
                self.dirty[block] = true;
                IoResult::Done(value)
            }
            Io::ReadAll => IoResult::All(self.blocks, self.dirty),
            Io::WriteSome { blocks } => {
                for (block, value) in blocks {
                    self.blocks[block] = value;
                    self.dirty[block] = true;
                }
                IoResult::Done(0)
            }
        }
    }

    pub(crate) fn store_key(&mut self, key: Key) {
        self.stored_key = Some(key);
        self.gate.stored(key);
    }

    /// The process died: the kernel may still write the I/O that `lands`.
    pub(crate) fn die(&mut self, mut lands: impl FnMut() -> bool) {
        for (_, OnDisk { io, .. }) in std::mem::take(&mut self.on_disk) {
            if lands() {
                self.perform(io);
            }
        }
        self.gate = Gate::restore(self.stored_key);
    }
}
