//! Copies from a replica with unreadable blocks, which are read from other replicas.
//!
//! Readable blocks are copied from it, and the rest from another in-sync replica, preferably one
//! that has the region. During a reconcile there may be none. The differing data was not
//! acknowledged unless all replicas have it, so the contents of another replica are as valid, but
//! may differ from an earlier read. Hence the event [`VolumeEventKind::Salvaged`] is sent, and the
//! data is written, with FUA, first to the replica that could not read it. From then on this data
//! is returned, whatever fails next.

use std::rc::Rc;

use nacre_bdev::{Flags, Op};
use nacre_hugepages::Buf;

use super::chunk::{Chunk, Copier};
use super::state::Live;
use crate::handle::VolumeEventKind;
use crate::shared::Failure;

/// Most blocks of a chunk to take from other replicas: writes wait meanwhile, and a replica with
/// more unreadable blocks should be replaced.
const MOST: usize = 64;

/// A range of blocks that another replica could read.
struct Recovered {
    lba: u64,
    blocks: u64,
    slot: usize,
    /// The other replica has the whole region.
    whole: bool,
}

impl Copier {
    /// Returns the contents of a chunk that `source` cannot read completely. Returns `why` if no
    /// other replica can read the missing blocks.
    pub(super) async fn salvage(
        &self,
        chunk: &Chunk<'_>,
        source: &Rc<Live>,
        why: Failure,
    ) -> Result<Buf, Failure> {
        let others = self.others_than(source, chunk.lba, chunk.blocks);
        if others.is_empty() {
            return Err(why);
        }
        let (_, len) = self.bytes_of(0, chunk.blocks);
        let mut data = self.media.buffer(len as usize).await?;
        let Some(bytes) = data.bytes_mut() else {
            return Err(why);
        };
        let place = |lba: u64, blocks: u64| {
            let (at, len) = (
                self.bytes_of(0, 1).1 * (lba - chunk.lba),
                self.bytes_of(0, blocks).1,
            );
            at as usize..(at + len) as usize
        };
        let mut unread = Vec::new();
        let mut left = vec![(chunk.lba, chunk.blocks)];
        while let Some((lba, blocks)) = left.pop() {
            match self.read_range((lba, blocks), source).await {
                Ok(read) => bytes[place(lba, blocks)].copy_from_slice(&read),
                Err(why) if !why.is_unreadable() || unread.len() == MOST => return Err(why),
                Err(_) if blocks == 1 => unread.push(lba),
                Err(_) => {
                    let half = blocks / 2;
                    left.push((lba + half, blocks - half));
                    left.push((lba, half));
                }
            }
        }
        let mut taken: Vec<Recovered> = Vec::new();
        for lba in unread {
            let mut found = None;
            for (slot, live, whole) in &others {
                match self.read_range((lba, 1), live).await {
                    Ok(read) => {
                        bytes[place(lba, 1)].copy_from_slice(&read);
                        found = Some((*slot, *whole));
                        break;
                    }
                    Err(Failure::Shortage) => return Err(Failure::Shortage),
                    Err(_) => {}
                }
            }
            let (slot, whole) = found.ok_or(why)?;
            match taken.last_mut() {
                Some(last) if (last.lba + last.blocks, last.slot) == (lba, slot) => {
                    last.blocks += 1
                }
                _ => taken.push(Recovered {
                    lba,
                    blocks: 1,
                    slot,
                    whole,
                }),
            }
        }
        for run in &taken {
            let place = place(run.lba, run.blocks);
            let own = data.slice(place.start, place.len());
            self.write_back(run, source, own).await?;
        }
        Ok(data)
    }

    /// In-sync replicas that may have the blocks that `source` cannot read: first those with the
    /// whole range.
    fn others_than(
        &self,
        source: &Rc<Live>,
        lba: u64,
        blocks: u64,
    ) -> Vec<(usize, Rc<Live>, bool)> {
        let regions = self.context.shared.regions_of(lba, blocks);
        let whole = |slot: usize| !self.context.shared.missing[slot].contains_any(regions.clone());
        let state = self.context.state.borrow();
        let others = state
            .in_sync()
            .filter(|(_, live)| !Rc::ptr_eq(live, source));
        let mut others: Vec<_> = others
            .map(|(slot, live)| (slot, Rc::clone(live), whole(slot)))
            .collect();
        others.sort_by_key(|(_, _, whole)| !whole);
        others
    }

    async fn write_back(&self, run: &Recovered, to: &Rc<Live>, data: Buf) -> Result<(), Failure> {
        let slot = {
            let state = self.context.state.borrow();
            let mut live = state.live.iter();
            live.position(|live| live.as_ref().is_some_and(|live| Rc::ptr_eq(live, to)))
        };
        // The replica was detached meanwhile: the resync checks again which replicas are present.
        let slot = slot.ok_or(Failure::Status(nacre_bdev::Status::Gone))?;
        let (replica, blocks) = (self.context.replica_id(slot), run.blocks as u32);
        if !run.whole {
            self.context.emit(VolumeEventKind::Salvaged {
                replica,
                from: self.context.replica_id(run.slot),
                lba: run.lba,
                blocks,
            });
        }
        let (offset, len) = self.bytes_of(run.lba, run.blocks);
        let written = self
            .media
            .io(&to.disk, Op::Write, Flags::FUA, offset, len, Some(data));
        if let Err(why) = written.await {
            if !why.is_no_space() {
                self.context.suspect(slot, to.incarnation, why);
            }
            return Err(why);
        }
        if run.whole {
            self.context.emit(VolumeEventKind::ReadRepaired {
                replica,
                lba: run.lba,
                blocks,
            });
        }
        Ok(())
    }
}
