//! A model of one replica: its blocks and its dirty-region log on a disk. The [`Gate`] of
//! `nacre_cluster_core`, which admits the I/O of one holder only, is the code under test.

use std::collections::BTreeMap;

use nacre_cluster_core::gate::{Admission, Gate, Key};
use nacre_cluster_core::mutation::Mutation;

use crate::names::BLOCKS;

/// A command of a holder to a replica.
#[derive(Debug, Clone)]
pub(crate) enum Io {
    Read {
        block: usize,
    },
    Write {
        block: usize,
        value: u64,
    },
    /// Reads all blocks and the dirty-region log.
    ReadAll,
    /// Writes several blocks: number and value of each.
    WriteSome {
        blocks: Vec<(usize, u64)>,
    },
}

/// The result of an I/O.
#[derive(Debug, Clone)]
pub(crate) enum IoResult {
    /// The value that a read found, or a write wrote; 0 for several blocks.
    Done(u64),
    /// The value of each block, and whether it is in the dirty-region log.
    All([u64; BLOCKS], [bool; BLOCKS]),
    /// The gate has another key, or none.
    Refused(Option<Key>),
}

/// An I/O in flight at the disk.
#[derive(Debug, Clone)]
pub(crate) struct OnDisk {
    /// `None`: the I/O did not pass the gate, which is a fault that the checker must find.
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

    /// Starts an I/O, if the gate admits it. `is_local`: the holder is on the replica's node.
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

    /// The disk executes the I/O now. `None`: it is not in flight.
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

    /// The gate's key is durable.
    pub(crate) fn store_key(&mut self, key: Key) {
        self.stored_key = Some(key);
        self.gate.stored(key);
    }

    /// The process dies. The kernel still executes each I/O in flight for which `lands` is true.
    pub(crate) fn die(&mut self, mut lands: impl FnMut() -> bool) {
        for (_, OnDisk { io, .. }) in std::mem::take(&mut self.on_disk) {
            if lands() {
                self.perform(io);
            }
        }
        self.gate = Gate::restore(self.stored_key);
    }
}
