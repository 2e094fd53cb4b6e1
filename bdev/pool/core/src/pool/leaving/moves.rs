//! Moves single units from a disk that leaves the pool to other disks.
//!
//! ```text
//!   Grace ──▶ Reading ──▶ Writing ──▶ Written ──▶ Flushing ──▶ Durable ──▶ Logged
//!   writes in                         one flush for several    MOVE        and writes go on
//!   place end
//! ```
//!
//! The grace period waits for reads, too, and a sick disk may never answer one. A move that waits
//! for long is given up, so that writes go on. The next move begins when that period has ended.
//!
//! From the first step to the last, writes to the unit wait, whichever version they are about: so
//! the copy stays right. Reads go on. Trims go on, too: a granule that nothing refers to any more
//! is copied in vain. MOVE changes all versions that share the unit, at the moment of its record,
//! so it needs no order with snapshots, clones and passes.
//!
//! MOVE has no checksums. The copy is durable before the record, and no recovery verifies records
//! about the old unit: they are settled. A recovery may drop a record about another unit, and with
//! it a newer granule: the old unit's one is in use again then. So the copy is of the whole unit.

use crate::format::record::Record;
use crate::ids::{Lsn, Token, VersionId};
use crate::interface::{Intent, IoFailed, Refusal};
use crate::map::Entry;
use crate::mutation::Mutation;
use crate::pool::Purpose;
use crate::pool::store::{OWN_TOKENS, Store};
use crate::state::Users;

/// Moves in flight: with units of 64 KiB, the copies take 1 MiB.
const WINDOW: usize = 16;
/// Allowances for which a move waits for the grace period: 100 ms, as one comes every 10 ms.
const PATIENCE: u64 = 10;
/// The same after moves that were given up. A slow disk needs longer than the first patience.
const MOST_PATIENCE: u64 = 80;
/// Tokens of moves, beside those of other requests of the pool itself.
pub(in crate::pool) const MOVE_TOKENS: Token = OWN_TOKENS | 1 << 62;

#[derive(Debug)]
pub(in crate::pool) struct Moves {
    list: Vec<Move>,
    next: Token,
    /// The number of the last allowance: the clock of the moves.
    allowance: u64,
    /// Allowances for which the next move waits for its grace period.
    patience: u64,
    /// No move begins before the end of this grace period: a move was given up for it.
    awaited: u64,
    /// The first failure since it was taken.
    failed: Option<Refusal>,
}

#[derive(Debug)]
struct Move {
    token: Token,
    /// A version that had the unit when the move began.
    version: VersionId,
    place: u64,
    from: u64,
    to: u64,
    granules: u16,
    step: MoveStep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MoveStep {
    /// `until`: the allowance that ends the wait.
    Grace {
        epoch: u64,
        until: u64,
    },
    Reading,
    Writing,
    Written,
    Flushing,
    Durable,
    Logged {
        lsn: Lsn,
    },
}

impl Default for Moves {
    fn default() -> Self {
        Self {
            list: Vec::new(),
            next: 0,
            allowance: 0,
            patience: PATIENCE,
            awaited: 0,
            failed: None,
        }
    }
}

impl Moves {
    /// Counts an allowance.
    pub(super) fn note_allowance(&mut self) {
        self.allowance += 1;
    }

    /// True when a further move may begin.
    pub(super) fn may_begin(&self, store: &Store) -> bool {
        self.list.len() < WINDOW && self.awaited <= store.grace.ended()
    }

    pub(in crate::pool) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// True when a unit of this entry is on its way.
    pub(in crate::pool) fn is_on(&self, entry: &Entry) -> bool {
        let mut list = self.list.iter();
        list.any(|of| entry.uses(of.from) || entry.uses(of.to))
    }

    /// True when this unit is on its way.
    pub(super) fn is_from(&self, unit: u64) -> bool {
        self.list.iter().any(|of| of.from == unit)
    }

    /// Units that no map refers to yet.
    pub(in crate::pool) fn new_units(&self) -> impl Iterator<Item = u64> {
        let list = self.list.iter();
        let list = list.filter(|of| !matches!(of.step, MoveStep::Logged { .. }));
        list.map(|of| of.to)
    }

    pub(super) fn take_failure(&mut self) -> Option<Refusal> {
        self.failed.take()
    }

    /// Forgets all moves: the log or metadata cannot be written.
    pub(super) fn drain(&mut self) {
        self.list.clear();
    }

    /// Begins to move a unit of these versions. No record in flight is about it.
    pub(super) fn begin(
        &mut self,
        store: &mut Store,
        users: &Users,
        place: u64,
        [from, to]: [u64; 2],
    ) {
        let Some(version) = users.versions.first().copied() else {
            return;
        };
        self.next += 1;
        let epoch = store.grace.request();
        self.list.push(Move {
            token: MOVE_TOKENS | self.next,
            version,
            place,
            from,
            to,
            granules: 0,
            step: MoveStep::Grace {
                epoch,
                until: self.allowance + self.patience,
            },
        });
        // Lanes stop to write to the unit in place.
        store.note_users(place, users);
        store.has_news = true;
    }

    /// The granules of a unit are read, or could not be. Returns false if no move asked for it.
    pub(in crate::pool) fn read(
        &mut self,
        store: &mut Store,
        token: Token,
        result: &Result<Vec<u32>, IoFailed>,
    ) -> bool {
        let Some(at) = self.list.iter().position(|of| of.token == token) else {
            return false;
        };
        let of = &mut self.list[at];
        if result.is_err() {
            self.failed.get_or_insert(Refusal::Medium);
            of.fail();
            return true;
        }
        of.step = MoveStep::Writing;
        store.out.push_back(Intent::Data {
            token,
            unit: of.to,
            granules: 0,
            copy: of.granules,
        });
        true
    }

    /// A copy is written, or could not be. Returns false if it is of no move.
    pub(in crate::pool) fn written(&mut self, token: Token, result: Result<(), IoFailed>) -> bool {
        let Some(of) = self.list.iter_mut().find(|of| of.token == token) else {
            return false;
        };
        match result {
            Ok(()) => of.step = MoveStep::Written,
            Err(IoFailed) => {
                of.fail();
                self.failed.get_or_insert(Refusal::Medium);
            }
        }
        true
    }

    /// A flush of copies has ended.
    pub(in crate::pool) fn flushed(&mut self, result: Result<(), IoFailed>) {
        let flushing = self.list.iter_mut();
        for of in flushing.filter(|of| of.step == MoveStep::Flushing) {
            of.step = MoveStep::Durable;
            if result.is_err() {
                of.fail();
                self.failed.get_or_insert(Refusal::Medium);
            }
        }
    }

    /// Takes every step that is possible. `is_ending`: units that are not read yet stay where they
    /// are, because the I/O that they wait for may never end.
    pub(super) fn advance(&mut self, store: &mut Store, looks: &mut Looks, is_ending: bool) {
        let (complete, ended) = (store.log.complete(), store.grace.ended());
        let mut is_late = false;
        for mut of in std::mem::take(&mut self.list) {
            let is_waiting = match of.step {
                MoveStep::Grace { epoch, until } => {
                    let is_over = ended >= epoch || Mutation::MoveWithoutGrace.is_active();
                    !is_over && self.allowance < until && !is_ending
                }
                MoveStep::Durable => false,
                MoveStep::Logged { lsn } => lsn > complete,
                _ => true,
            };
            // A step looks at all versions that have the unit.
            if is_waiting || looks.are_used() {
                self.list.push(of);
                continue;
            }
            let stays = match of.step {
                MoveStep::Grace { .. } if is_ending => {
                    give_up(store, looks, &of);
                    false
                }
                MoveStep::Grace { epoch, until } if ended < epoch && until <= self.allowance => {
                    give_up(store, looks, &of);
                    self.awaited = self.awaited.max(epoch);
                    is_late = true;
                    false
                }
                MoveStep::Grace { epoch, .. } => {
                    if ended >= epoch {
                        self.patience = PATIENCE;
                    }
                    read_after(store, looks, &mut of, epoch)
                }
                MoveStep::Durable => record(store, looks, &mut of),
                MoveStep::Logged { lsn } if lsn <= complete => {
                    let users = looks.users(store, &of, of.to);
                    store.note_users(of.place, &users);
                    // Writes to the unit wait for this.
                    store.has_news = true;
                    false
                }
                _ => true,
            };
            if stays {
                self.list.push(of);
            }
        }
        if is_late {
            self.patience = (2 * self.patience).min(MOST_PATIENCE);
        }
        self.flush(store);
    }

    /// Begins a flush of all copies that are written, if none is in flight.
    fn flush(&mut self, store: &mut Store) {
        if self.list.iter().any(|of| of.step == MoveStep::Flushing) {
            return;
        }
        let mut disks = 0;
        for of in self
            .list
            .iter_mut()
            .filter(|of| of.step == MoveStep::Written)
        {
            of.step = MoveStep::Flushing;
            disks |= 1 << store.superblock.disks.disk_of(of.to);
        }
        if disks != 0 {
            store.flush_disks(
                Purpose::MoveFlush,
                Mutation::MoveUnflushed.is_active(),
                disks,
            );
        }
    }
}

impl Move {
    /// There is no copy: the next turn gives the new unit back.
    fn fail(&mut self) {
        self.granules = 0;
        self.step = MoveStep::Durable;
    }
}

/// Reads the unit once writes in place have ended. Returns false if nothing uses it any more.
fn read_after(store: &mut Store, looks: &mut Looks, of: &mut Move, epoch: u64) -> bool {
    if store.grace.ended() < epoch && !Mutation::MoveWithoutGrace.is_active() {
        return true;
    }
    let users = looks.users(store, of, of.from);
    let used = store.state.granules_of_users(&users, of.place, of.from);
    if used == 0 {
        stay(store, &users, of);
        return false;
    }
    of.granules = if Mutation::MoveUsedGranules.is_active() {
        used
    } else {
        store.state.geometry.whole()
    };
    of.step = MoveStep::Reading;
    store.out.push_back(Intent::ReadSource {
        token: of.token,
        unit: of.from,
        granules: of.granules,
    });
    true
}

/// Appends the record of a copy. Returns false if there is none to append.
fn record(store: &mut Store, looks: &mut Looks, of: &mut Move) -> bool {
    let record = Record::Move {
        place: of.place,
        from: of.from,
        to: of.to,
    };
    if of.granules != 0 && !store.log_takes(&record) {
        return true;
    }
    let users = looks.users(store, of, of.from);
    let used = store.state.granules_of_users(&users, of.place, of.from);
    if used == 0 || used & !of.granules != 0 {
        stay(store, &users, of);
        return false;
    }
    store.note_users(of.place, &users);
    let lsn = store.append(&record);
    store.apply(lsn, &record);
    of.step = MoveStep::Logged { lsn };
    true
}

/// The unit stays where it is.
fn give_up(store: &mut Store, looks: &mut Looks, of: &Move) {
    let users = looks.users(store, of, of.from);
    stay(store, &users, of);
}

fn stay(store: &mut Store, users: &Users, of: &Move) {
    store.space.give_back(of.to);
    store.note_users(of.place, users);
    store.has_news = true;
}

/// Entries that the moves may look at until the next allowance. The last step may take more, which
/// the next allowances make up for. So a unit of many versions does not hold up the reactor.
#[derive(Debug, Default)]
pub(super) struct Looks {
    left: i64,
}

impl Looks {
    pub(super) fn allow(&mut self, looks: u32) {
        let looks = i64::from(looks);
        self.left = (self.left + looks).min(looks);
    }

    pub(super) fn are_used(&self) -> bool {
        self.left <= 0
    }

    pub(super) fn take(&mut self, users: &Users) {
        self.left -= users.looks as i64;
    }

    fn users(&mut self, store: &Store, of: &Move, unit: u64) -> Users {
        let users = store.state.users(of.version, of.place, unit);
        self.take(&users);
        users
    }
}
