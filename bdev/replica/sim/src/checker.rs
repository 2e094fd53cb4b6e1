//! Records every write, flush and read of the simulated hosts, and checks whether each value that a
//! read returned is possible.
//!
//! Each block is a register. Its value is a number, the *tag*: each write has tags of its own, and
//! 0 is a block of zeroes. The history of a block is the list of all values ever written to it,
//! each with the moments at which its write began and ended; a moment is the number of an event,
//! not a time.
//!
//! - A value is *superseded* when a write that began after the value's own write had ended is
//!   acknowledged: reads that begin later must not find it. Values in flight at the same time as
//!   that write stay possible, because the order in which the two took effect is unknown.
//! - Reads are *settled*: a read that found a value whose write had ended before the read began
//!   supersedes, for reads that begin after it, all other values with such a write. Two reads of
//!   the same data do not differ. While a write is in flight reads may find its value, and then the
//!   previous value again, as some replicas have the new data and others do not yet. While replicas
//!   are reconciled after an unclean stop reads come from one of them. If that replica is lost too,
//!   before the others have received their missing data, its values are open again (see
//!   [`Checker::unsettle`]).
//! - A failed write ended when the failure was reported: it may have taken effect, but not later.
//!   Until the volume has handled that failure, reads there may differ, because the replicas do. A
//!   write whose holder stopped ends when the next holder serves.
//! - A superseded value is *dead* when the superseding value is durable: it was written with FUA,
//!   or a flush that began after its acknowledgement succeeded. A dead value never appears again.
//! - Power failures bring back superseded values that are not dead. When *every* in-sync replica
//!   has lost power or its connection since the superseding write began (and was not resynced from
//!   another since), that write may be lost: a holder sees that a connection ended, and cannot know
//!   which data was lost with it, so it may keep any of them. One replica that was present all the
//!   time has all writes. When the holder stopped uncleanly it is enough that *one* in-sync replica
//!   has lost power. A new holder cannot know whose cache was lost, and unflushed data is lost with
//!   the controller, as with a single disk. Otherwise an acknowledged write stays, flushed or not.

use std::collections::BTreeMap;

/// The number of an event.
pub(crate) type Moment = u64;

/// The histories of all blocks, and the failures so far. A *disk* is an index of the simulation's
/// disks, with one replica each.
pub(crate) struct Checker {
    blocks: Vec<Vec<Value>>,
    /// Writes in flight at holders that have stopped (write number, first block, number of blocks),
    /// until the next holder serves.
    zombies: Vec<(u64, u64, u64)>,
    /// Last power loss of each disk since its last resync from another disk.
    losses: BTreeMap<usize, Moment>,
    /// Last loss of power or connection of each disk since its last resync from another disk.
    doubts: BTreeMap<usize, Moment>,
    /// Writes that began before this moment may be lost on every replica.
    all_lost: Option<Moment>,
    /// Start of the running reconcile, if any.
    reconciled_since: Option<Moment>,
    /// No further failures occur, and every failure has been judged.
    pub calm: bool,
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
}

#[derive(Debug, Clone)]
struct Value {
    tag: u64,
    /// The write's number.
    write: u64,
    began: Moment,
    ended: Option<Moment>,
    superseded: Option<Superseded>,
    dead: bool,
    failed: bool,
}

#[derive(Debug, Clone, Copy)]
struct Superseded {
    at: Moment,
    /// When the superseding write began.
    by: Moment,
    /// A read superseded the value, without an acknowledged write.
    by_read: bool,
}

impl Checker {
    pub(crate) fn new(blocks: u64) -> Self {
        let zero = Value {
            tag: 0,
            write: 0,
            began: 0,
            ended: Some(0),
            superseded: None,
            dead: false,
            failed: false,
        };
        Self {
            blocks: vec![vec![zero]; blocks as usize],
            zombies: Vec::new(),
            losses: BTreeMap::new(),
            doubts: BTreeMap::new(),
            all_lost: None,
            reconciled_since: None,
            calm: false,
            reads: 0,
            writes: 0,
            flushes: 0,
        }
    }

    /// Adds a value that `block` may have before the volume grows over it: one disk has `tag`
    /// there, and another disk may have another value.
    pub(crate) fn was_there(&mut self, block: u64, tag: u64) {
        let first = Value {
            tag,
            ..self.blocks[block as usize][0].clone()
        };
        self.blocks[block as usize].push(first);
    }

    /// The volume has grown: the old data in the new area is reconciled from one of the replicas.
    pub(crate) fn grew(&mut self, in_sync: &[usize], now: Moment) {
        if in_sync.len() > 1 {
            self.reconciled_since.get_or_insert(now);
        }
    }

    /// A write began, with consecutive tags from `tag` on, one per block; with `tag` 0 it writes
    /// zeroes.
    pub(crate) fn write_began(&mut self, write: u64, lba: u64, blocks: u64, tag: u64, now: Moment) {
        for index in 0..blocks {
            self.blocks[(lba + index) as usize].push(Value {
                tag: if tag == 0 { 0 } else { tag + index },
                write,
                began: now,
                ended: None,
                superseded: None,
                dead: false,
                failed: false,
            });
        }
    }

    /// The write with this number completed: without an error if `acknowledged`. `durable`: it was
    /// written with FUA.
    pub(crate) fn write_ended(
        &mut self,
        write: u64,
        (lba, blocks): (u64, u64),
        acknowledged: bool,
        durable: bool,
        now: Moment,
    ) {
        self.writes += u64::from(acknowledged);
        for block in lba..lba + blocks {
            let values = &mut self.blocks[block as usize];
            let own = values.iter_mut().find(|value| value.write == write);
            let own = own.expect("it began");
            // A former holder reports its write late: the write has ended, and its failure is
            // judged, since the next holder serves.
            own.failed = !acknowledged && own.ended.is_none();
            own.ended.get_or_insert(now);
            let by = own.began;
            // Replicas executed the write and lost it before all of them completed it.
            let lost = !durable && self.all_lost.is_some_and(|lost| by <= lost);
            if !acknowledged || lost {
                continue;
            }
            for value in values.iter_mut().filter(|value| value.write != write) {
                if value.ended.is_some_and(|ended| ended < by) {
                    value.superseded.get_or_insert(Superseded {
                        at: now,
                        by,
                        by_read: false,
                    });
                    value.dead |= durable;
                }
            }
        }
    }

    /// The holder stopped with the write in flight.
    pub(crate) fn write_orphaned(&mut self, write: u64, lba: u64, blocks: u64) {
        self.zombies.push((write, lba, blocks));
    }

    /// A flush that began at `began` succeeded.
    pub(crate) fn flushed(&mut self, began: Moment) {
        self.flushes += 1;
        for values in self.blocks.iter_mut().filter(|values| values.len() > 1) {
            for value in values.iter_mut() {
                value.dead |= value.superseded.is_some_and(|s| s.at < began);
            }
        }
    }

    /// A read of the blocks from `lba` that began at `began` found `tags`, one per block. The error
    /// describes an impossible value.
    pub(crate) fn read_ended(
        &mut self,
        lba: u64,
        tags: &[u64],
        began: Moment,
        now: Moment,
    ) -> Result<(), String> {
        self.reads += 1;
        for (block, tag) in (lba..).zip(tags) {
            let values = &mut self.blocks[block as usize];
            let possible = |v: &&Value| v.tag == *tag && v.superseded.is_none_or(|s| s.at > began);
            let found = values.iter().filter(possible).min_by_key(|v| v.began);
            let Some(found) = found else {
                let history: Vec<String> = values.iter().map(Value::describe).collect();
                return Err(format!(
                    "block {block} read as {tag} (read {began}..{now}); its history:\n    {}",
                    history.join("\n    ")
                ));
            };
            let by = found.began;
            // Several writes may have written zeroes.
            let mut found = values.iter().filter(possible);
            let calm = self.calm;
            if found.any(|v| v.ended.is_none_or(|e| e > began) || v.failed && !calm) {
                continue;
            }
            for value in values.iter_mut().filter(|value| value.tag != *tag) {
                if value.failed && !calm {
                    continue;
                }
                if value.ended.is_some_and(|ended| ended < began) {
                    value.superseded.get_or_insert(Superseded {
                        at: now,
                        by,
                        by_read: true,
                    });
                }
            }
        }
        Ok(())
    }

    /// A new holder serves. `in_sync` are the disks of in-sync replicas; `unclean` means that the
    /// previous holder did not close the volume.
    pub(crate) fn serves(&mut self, in_sync: &[usize], unclean: bool, now: Moment) {
        for (write, lba, blocks) in std::mem::take(&mut self.zombies) {
            for block in lba..lba + blocks {
                let values = &mut self.blocks[block as usize];
                if let Some(value) = values.iter_mut().find(|value| value.write == write) {
                    value.ended = Some(now);
                }
            }
        }
        let lost = in_sync
            .iter()
            .filter_map(|disk| self.losses.get(disk))
            .max();
        if let Some(lost) = lost.copied().filter(|_| unclean) {
            self.bring_back(lost);
        }
        self.losses.clear();
        self.doubts.clear();
        self.reconciled_since = (unclean && in_sync.len() > 1).then_some(now);
    }

    /// Replicas in sync are equal again.
    pub(crate) fn reconciled(&mut self) {
        self.reconciled_since = None;
    }

    /// An in-sync replica is lost. If it was the source of a reconcile, its values, even those
    /// flushed since, may exist nowhere else. This is more than one failure: an unclean stop, the
    /// loss of caches, and then the loss of the source.
    pub(crate) fn unsettle(&mut self) {
        let Some(since) = self.reconciled_since else {
            return;
        };
        reopen(&mut self.blocks, since);
    }

    /// The source of a reconcile cannot read these blocks: the data of another replica is valid
    /// from now on, and may differ from earlier reads. This applies once: the next read is settled
    /// again.
    pub(crate) fn salvaged(&mut self, lba: u64, blocks: u64) {
        let Some(since) = self.reconciled_since else {
            return;
        };
        let blocks = &mut self.blocks[lba as usize..(lba + blocks) as usize];
        reopen(blocks, since);
    }

    /// The operator forced the volume to continue from a replica that was not in sync. The writes
    /// that it missed are lost, or partly present, because it may have been the target of a resync.
    /// Each block holds some former value.
    pub(crate) fn forced(&mut self) {
        for value in self.blocks.iter_mut().flatten() {
            value.superseded = None;
            value.dead = false;
        }
        self.reconciled_since = None;
    }

    /// A disk starts or stops being an in-sync replica: it gets its missing data from others.
    pub(crate) fn replaced(&mut self, disk: usize) {
        self.losses.remove(&disk);
        self.doubts.remove(&disk);
    }

    /// A disk lost power, and with it all data that was not flushed.
    pub(crate) fn lost_power(&mut self, disk: usize, in_sync: &[usize], now: Moment) {
        if !in_sync.contains(&disk) {
            return;
        }
        self.losses.insert(disk, now);
        self.lost_connection(disk, in_sync, now);
    }

    /// The holder lost its connection to a disk: it cannot know whether data was lost.
    pub(crate) fn lost_connection(&mut self, disk: usize, in_sync: &[usize], now: Moment) {
        if !in_sync.contains(&disk) {
            return;
        }
        self.unsettle();
        self.doubts.insert(disk, now);
        let all = in_sync.iter().map(|disk| self.doubts.get(disk).copied());
        if let Some(since) = all.min().flatten() {
            self.all_lost = self.all_lost.max(Some(since));
            self.bring_back(since);
        }
    }

    /// Makes superseded values possible again, where the superseding write began before `lost` and
    /// is not durable.
    fn bring_back(&mut self, lost: Moment) {
        for value in self.blocks.iter_mut().flatten() {
            if !value.dead && value.superseded.is_some_and(|s| s.by <= lost) {
                value.superseded = None;
            }
        }
    }
}

/// Makes values possible again that only reads have superseded, after `since`.
fn reopen(blocks: &mut [Vec<Value>], since: Moment) {
    for value in blocks.iter_mut().flatten() {
        if value.superseded.is_some_and(|s| s.by_read && s.at > since) {
            value.superseded = None;
            value.dead = false;
        }
    }
}

impl Value {
    fn describe(&self) -> String {
        let Self {
            tag, write, began, ..
        } = self;
        let ended = self
            .ended
            .map_or_else(|| "?".to_owned(), |at| at.to_string());
        let superseded = match self.superseded {
            Some(s) => format!(", superseded at {} by one begun at {}", s.at, s.by),
            None => String::new(),
        };
        let dead = if self.dead { ", for good" } else { "" };
        format!("{tag} by write {write} ({began}..{ended}){superseded}{dead}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes one block, acknowledged.
    fn write(checker: &mut Checker, tag: u64, at: Moment) {
        checker.write_began(tag, 0, 1, tag, at);
        checker.write_ended(tag, (0, 1), true, false, at + 1);
    }

    /// True if a read at `at` may return the tag. Does not settle the value.
    fn may(checker: &Checker, tag: u64, at: Moment) -> bool {
        let mut copy = Checker {
            blocks: checker.blocks.clone(),
            ..Checker::new(0)
        };
        copy.read_ended(0, &[tag], at, at + 1).is_ok()
    }

    #[test]
    fn reads_return_acknowledged_writes() {
        let mut checker = Checker::new(1);
        write(&mut checker, 5, 1);
        assert!(may(&checker, 5, 10) && !may(&checker, 0, 10) && !may(&checker, 6, 10));
        assert!(
            may(&checker, 0, 1),
            "a read that began before it was acknowledged"
        );
        checker.write_began(6, 0, 1, 6, 10);
        checker.write_began(7, 0, 1, 7, 11);
        assert!([5, 6, 7].iter().all(|tag| may(&checker, *tag, 12)));
        checker.write_ended(6, (0, 1), true, false, 13);
        assert!([6, 7].iter().all(|tag| may(&checker, *tag, 14)) && !may(&checker, 5, 14));
        checker.write_ended(7, (0, 1), true, false, 15);
        assert!(
            [6, 7].iter().all(|tag| may(&checker, *tag, 16)),
            "in either order"
        );
        assert_eq!(checker.read_ended(0, &[6], 17, 18), Ok(()));
        assert!(may(&checker, 6, 19) && !may(&checker, 7, 19), "settled");
        checker.write_began(8, 0, 1, 8, 20);
        assert_eq!(checker.read_ended(0, &[8], 21, 22), Ok(()));
        assert!(may(&checker, 6, 23), "not on every replica yet");
    }

    #[test]
    fn a_failed_write_may_have_happened_but_not_later() {
        let mut checker = Checker::new(1);
        checker.write_began(5, 0, 1, 5, 1);
        checker.write_ended(5, (0, 1), false, false, 2);
        assert!(may(&checker, 5, 3) && may(&checker, 0, 3));
        assert_eq!(checker.read_ended(0, &[0], 3, 4), Ok(()));
        assert!(may(&checker, 5, 5) && may(&checker, 0, 5), "not judged yet");
        checker.calm = true;
        assert_eq!(checker.read_ended(0, &[0], 5, 5), Ok(()));
        assert!(!may(&checker, 5, 6) && may(&checker, 0, 6));
        checker.write_began(6, 0, 1, 6, 6);
        checker.write_orphaned(6, 0, 1);
        assert_eq!(checker.read_ended(0, &[0], 7, 8), Ok(()));
        assert!(may(&checker, 6, 9), "until the next holder serves");
        checker.serves(&[0, 1], true, 10);
        assert_eq!(checker.read_ended(0, &[0], 11, 12), Ok(()));
        assert!(!may(&checker, 6, 13));
    }

    /// A former holder reports a failure late: its write does not take effect any more.
    #[test]
    fn a_write_of_a_former_holder_has_ended() {
        let mut checker = Checker::new(1);
        checker.write_began(5, 0, 1, 5, 1);
        checker.write_orphaned(5, 0, 1);
        checker.serves(&[0, 1], true, 2);
        assert!(may(&checker, 5, 3) && may(&checker, 0, 3));
        write(&mut checker, 6, 4);
        checker.write_ended(5, (0, 1), false, false, 7);
        assert!(may(&checker, 6, 8) && !may(&checker, 5, 8));
    }

    #[test]
    fn unflushed_writes_are_lost_with_the_last_replica() {
        let mut checker = Checker::new(1);
        write(&mut checker, 5, 1);
        checker.lost_power(0, &[0, 1], 5);
        assert!(!may(&checker, 0, 6), "the other replica has it");
        checker.lost_power(1, &[0, 1], 7);
        assert!(may(&checker, 0, 8) && may(&checker, 5, 8));
        // Again, with one of them resynced in between.
        let mut checker = Checker::new(1);
        write(&mut checker, 5, 1);
        checker.lost_power(0, &[0, 1], 5);
        checker.replaced(0);
        checker.lost_power(1, &[0, 1], 7);
        assert!(!may(&checker, 0, 8));
        // With one of them only disconnected.
        let mut checker = Checker::new(1);
        write(&mut checker, 5, 1);
        checker.lost_connection(0, &[0, 1], 5);
        checker.lost_power(1, &[0, 1], 7);
        assert!(may(&checker, 0, 8));
        // A write after the first loss is on a replica that kept it.
        let mut checker = Checker::new(1);
        write(&mut checker, 5, 1);
        checker.lost_power(0, &[0, 1], 5);
        write(&mut checker, 6, 6);
        checker.lost_power(1, &[0, 1], 9);
        assert!(may(&checker, 0, 10) && may(&checker, 6, 10) && !may(&checker, 5, 10));
    }

    /// The replicas had the write when the power failed, and the holder acknowledged it before it
    /// detected the failure.
    #[test]
    fn writes_in_flight_are_lost_with_the_last_replica() {
        for fua in [false, true] {
            let mut checker = Checker::new(1);
            checker.write_began(5, 0, 1, 5, 1);
            checker.lost_power(0, &[0, 1], 2);
            checker.lost_power(1, &[0, 1], 3);
            checker.write_ended(5, (0, 1), true, fua, 4);
            checker.flushed(5);
            assert!(may(&checker, 5, 6));
            assert_eq!(may(&checker, 0, 6), !fua);
            assert_eq!(checker.read_ended(0, &[5], 7, 8), Ok(()));
            assert!(!may(&checker, 0, 9), "settled");
            write(&mut checker, 6, 10);
            assert!(!may(&checker, 5, 12), "it began when that was over");
        }
    }

    #[test]
    fn durable_writes_are_never_lost() {
        for fua in [false, true] {
            let mut checker = Checker::new(1);
            checker.write_began(5, 0, 1, 5, 1);
            checker.write_ended(5, (0, 1), true, fua, 2);
            if !fua {
                checker.flushed(2);
                let mut early = Checker {
                    blocks: checker.blocks.clone(),
                    ..Checker::new(0)
                };
                early.lost_power(0, &[0], 3);
                assert!(may(&early, 0, 4), "the flush did not begin after it");
                checker.flushed(3);
            }
            checker.lost_power(0, &[0], 4);
            assert!(!may(&checker, 0, 5) && may(&checker, 5, 5));
        }
    }

    /// While replicas are reconciled, two reads of the same data do not differ, even where the
    /// source cannot read, except when that is reported.
    #[test]
    fn answers_do_not_alternate() {
        let mut checker = Checker::new(2);
        for block in 0..2 {
            checker.write_began(5 + block, block, 1, 5 + block, 1);
            checker.write_orphaned(5 + block, block, 1);
        }
        checker.serves(&[0, 1], true, 2);
        assert_eq!(checker.read_ended(0, &[5, 6], 3, 4), Ok(()));
        assert!(!may(&checker, 0, 5), "another replica served the read");
        checker.salvaged(0, 1);
        assert!(checker.read_ended(1, &[0], 5, 6).is_err(), "not this one");
        assert_eq!(checker.read_ended(0, &[0], 5, 6), Ok(()));
        assert!(!may(&checker, 5, 7) && may(&checker, 0, 7), "settled again");
        checker.reconciled();
        checker.salvaged(0, 1);
        assert!(!may(&checker, 5, 8), "they are equal");
    }

    /// After an unclean stop one lost cache is enough.
    #[test]
    fn a_stop_and_a_loss() {
        for (unclean, lost) in [(true, true), (false, false)] {
            let mut checker = Checker::new(1);
            write(&mut checker, 5, 1);
            checker.lost_power(0, &[0, 1], 5);
            checker.serves(&[0, 1], unclean, 6);
            assert_eq!(may(&checker, 0, 7), lost);
        }
        let mut checker = Checker::new(1);
        write(&mut checker, 5, 1);
        checker.serves(&[0, 1], true, 6);
        assert!(!may(&checker, 0, 7), "the caches are there");
    }
}
