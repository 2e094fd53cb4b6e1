//! Requests of many steps (*jobs*): each step is a request that the pool submits to itself.
//!
//! | job | steps | end |
//! |---|---|---|
//! | shrink | [`Request::Unmap`] of each leaf with data beyond the new size | [`Request::Resize`] |
//! | inflate | [`Request::Fill`] of each place with shared units | record DETACH |
//! | decouple | the same, but only units shared with one ancestor | record DECOUPLE |
//! | set parent | [`Request::Copy`] of each place with units of the volume's own | record ADOPT |
//!
//! A leaf is a node of the volume's map with the entries of adjacent places. A shared unit belongs
//! to an ancestor of the volume (its parent, or a parent of that), and a fill copies it for the
//! volume. Then DETACH removes the volume's parent, or DECOUPLE replaces it by the ancestor's
//! parent. Set parent begins with the record PREPARE: it creates a hidden version with the contents
//! of the new parent, a snapshot or an external device. The job copies the volume's own granules to
//! that version. ADOPT exchanges the contents of the two, and the deletion frees the former ones.
//!
//! The log gets these last records once the copies are settled: a crash must not undo a copy that
//! the record depends on. Jobs are in memory only. A crash ends a job where it is, and the caller
//! repeats the request. A volume has one job at a time.

use std::collections::HashMap;

use super::deletion::Deletion;
use super::durable::{Durable, Until};
use super::store::{OWN_TOKENS, Store};
use crate::format::record::Record;
use crate::ids::{Generation, Lsn, Token, VersionId};
use crate::interface::{Answer, Refusal, Request};
use crate::mutation::Mutation;
use crate::state::Found;

/// Most steps of a job in flight. A shrink has one.
const WINDOW: usize = 8;

/// The jobs of a pool, and their steps in flight.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    jobs: Vec<Job>,
    /// Steps in flight, with the token of their job.
    steps: HashMap<Token, Token>,
    next_step: Token,
    /// A search for the next place has read as many leaves as one turn may, and found none. It
    /// continues in the next turn.
    is_searching: bool,
}

#[derive(Debug)]
struct Job {
    /// The token of the request.
    token: Token,
    /// The volume.
    version: VersionId,
    work: Work,
    /// Number of steps.
    in_flight: usize,
    /// The first refusal of a step, or a damaged map: the answer once no step is in flight.
    refused: Option<Refusal>,
    /// The last record in the log when all steps were done: the end waits until it is settled.
    last: Option<Lsn>,
}

/// The kind of a job, and its progress. `next`: the place where the search for a step continues.
#[derive(Debug, Clone, Copy)]
pub(super) enum Work {
    /// `units`: the new size of the volume.
    Shrink {
        units: u64,
    },
    Inflate {
        next: u64,
    },
    Decouple {
        ancestor: VersionId,
        /// The ancestor's parent when the search for units of the ancestor began.
        base: Option<VersionId>,
        next: u64,
    },
    SetParent {
        /// The new parent.
        source: VersionId,
        /// The hidden version that gets copies of the volume's own granules.
        new: VersionId,
        /// Units of a later generation than this are the volume's own.
        above: Generation,
        /// The number of the record PREPARE.
        prepared: Lsn,
        next: u64,
    },
}

impl Work {
    /// The other version of the job: the ancestor to decouple from, or the new parent.
    fn other(&self) -> Option<VersionId> {
        match self {
            Self::Shrink { .. } | Self::Inflate { .. } => None,
            Self::Decouple { ancestor, .. } => Some(*ancestor),
            Self::SetParent { source, .. } => Some(*source),
        }
    }
}

/// The parts of a pool that jobs read and change, borrowed for one turn.
pub(super) struct Ground<'a> {
    pub store: &'a mut Store,
    pub durable: &'a mut Durable,
    pub deletion: &'a mut Deletion,
    /// Requests that the pool attempts later in the turn: steps are added here.
    pub waiting: &'a mut std::collections::VecDeque<(Token, Request)>,
}

impl Jobs {
    /// Adds a job for the request `token` about a volume. [`Jobs::advance`] begins its steps.
    pub(super) fn begin(&mut self, token: Token, version: VersionId, work: Work) {
        self.jobs.push(Job {
            token,
            version,
            work,
            in_flight: 0,
            refused: None,
            last: None,
        });
    }

    /// True when a job is about this version, decouples a volume from it, or makes it a parent.
    pub(super) fn is_on(&self, version: VersionId) -> bool {
        let mut jobs = self.jobs.iter();
        jobs.any(|job| job.version == version || job.work.other() == Some(version))
    }

    /// True when a job copies units for a volume.
    pub(super) fn copies_for(&self, version: VersionId) -> bool {
        let mut jobs = self.jobs.iter().filter(|job| job.version == version);
        jobs.any(|job| !matches!(job.work, Work::Shrink { .. }))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// True when a search continues in the next turn, without an event.
    pub(super) fn is_searching(&self) -> bool {
        self.is_searching
    }

    /// Forgets all jobs. Returns the tokens of their requests.
    pub(super) fn drain(&mut self) -> Vec<Token> {
        self.steps.clear();
        self.is_searching = false;
        self.jobs.drain(..).map(|job| job.token).collect()
    }

    /// Takes the outcomes of steps, begins steps up to the limit, and ends jobs without further
    /// steps.
    pub(super) fn advance(&mut self, ground: &mut Ground) {
        while let Some((step, result)) = ground.store.own_answers.pop_front() {
            let job = self.steps.remove(&step);
            let job = job.and_then(|token| self.jobs.iter_mut().find(|job| job.token == token));
            if let Some(job) = job {
                job.in_flight -= 1;
                job.refused = job.refused.or_else(|| result.err());
            }
        }
        self.is_searching = false;
        for at in (0..self.jobs.len()).rev() {
            if self.advance_one(at, ground) {
                self.jobs.remove(at);
            }
        }
    }

    /// Returns true when the job has ended.
    fn advance_one(&mut self, at: usize, ground: &mut Ground) -> bool {
        let (token, version) = (self.jobs[at].token, self.jobs[at].version);
        if let Some(refusal) = self.jobs[at].refused {
            if self.jobs[at].in_flight > 0 {
                return false;
            }
            if let Work::SetParent { new, prepared, .. } = self.jobs[at].work {
                give_up(token, new, prepared, ground);
            }
            ground.store.answer(token, Err(refusal));
            return true;
        }
        while self.jobs[at].in_flight < WINDOW {
            let state = &ground.store.state;
            let in_flight = self.jobs[at].in_flight;
            let step = match &mut self.jobs[at].work {
                Work::Shrink { .. } if in_flight > 0 => Ok(Step::None),
                Work::Shrink { units } => {
                    // Each step removes the leaf that it finds.
                    let leaf = state.next_leaf_beyond(version, *units);
                    Ok(leaf.map_or(Step::None, |leaf| {
                        let geometry = &state.geometry;
                        let per_leaf = u64::from(geometry.units_per_leaf);
                        let per_unit = u64::from(geometry.granules_per_unit);
                        let end = ((leaf + 1) * per_leaf).min(state.versions[&version].units);
                        let first = (leaf * per_leaf).max(*units);
                        Step::Request(Request::Unmap {
                            version,
                            first: first * per_unit,
                            granules: (end - first) * per_unit,
                        })
                    }))
                }
                Work::Inflate { next } => {
                    let found = state.next_shared(version, *next, None);
                    found
                        .map(|found| next_of(next, found, |place| Request::Fill { version, place }))
                }
                Work::Decouple { .. } if Mutation::DecoupleUncopied.is_active() => Ok(Step::None),
                Work::Decouple { ancestor, next, .. } => {
                    let found = state.next_shared(version, *next, Some(*ancestor));
                    found
                        .map(|found| next_of(next, found, |place| Request::Fill { version, place }))
                }
                Work::SetParent {
                    new, above, next, ..
                } => {
                    let (from, version, above) = (version, *new, *above);
                    let found = state.next_above(from, *next, above);
                    found.map(|found| {
                        next_of(next, found, |place| Request::Copy {
                            version,
                            from,
                            above,
                            place,
                        })
                    })
                }
            };
            let Ok(step) = step else {
                self.jobs[at].refused = Some(Refusal::Damaged);
                ground.store.has_news = true;
                return false;
            };
            let step = match step {
                Step::Request(step) => step,
                Step::Later => {
                    self.is_searching = true;
                    ground.store.has_news = true;
                    return false;
                }
                Step::None => break,
            };
            self.next_step += 1;
            let step_token = OWN_TOKENS | self.next_step;
            self.steps.insert(step_token, token);
            self.jobs[at].in_flight += 1;
            ground.waiting.push_back((step_token, step));
            ground.store.has_news = true;
        }
        let job = &mut self.jobs[at];
        if job.in_flight > 0 {
            return false;
        }
        match job.work {
            // The size changes as if nothing had ever been mapped beyond it.
            Work::Shrink { units } => {
                let request = Request::Resize { version, units };
                ground.waiting.push_back((token, request));
                ground.store.has_news = true;
                true
            }
            // A crash must not undo a copy that the end depends on.
            Work::Inflate { .. } | Work::Decouple { .. } | Work::SetParent { .. } => {
                let last = *job
                    .last
                    .get_or_insert_with(|| ground.store.log.next_lsn() - 1);
                let may_be_lost = ground.store.settle.settled() < last;
                let unsettled = match job.work {
                    Work::SetParent { .. } => Mutation::AdoptUnsettled,
                    _ => Mutation::DetachUnsettled,
                };
                if may_be_lost && !unsettled.is_active() {
                    ground.store.settle.want(last);
                    return false;
                }
                match &mut job.work {
                    Work::Decouple {
                        ancestor,
                        base,
                        next,
                    } => {
                        if has_moved(*ancestor, base, ground) {
                            *next = 0;
                            job.last = None;
                            return false;
                        }
                        decouple(token, version, *ancestor, ground)
                    }
                    Work::SetParent { new, .. } => adopt(token, version, *new, ground),
                    _ => detach(token, version, ground),
                }
            }
        }
    }
}

/// The step for the outcome of a search. Moves `next` to the place where the search continues.
fn next_of(next: &mut u64, found: Found, request: impl FnOnce(u64) -> Request) -> Step {
    match found {
        Found::Place(place) => {
            *next = place + 1;
            Step::Request(request(place))
        }
        Found::Later(place) => {
            *next = place;
            Step::Later
        }
        Found::Nothing => Step::None,
    }
}

/// The next step of a job.
enum Step {
    Request(Request),
    /// The search for it continues in the next turn.
    Later,
    /// The job needs no further step.
    None,
}

/// True when the ancestor has another parent than at the start of the search for its units. The
/// deletion has then merged its former parent into it, so there are more units to copy.
fn has_moved(ancestor: VersionId, base: &mut Option<VersionId>, ground: &mut Ground) -> bool {
    let versions = &ground.store.state.versions;
    let now = versions.get(&ancestor).and_then(|of| of.parent);
    let has_moved = *base != now && !Mutation::DecoupleDuringPass.is_active();
    *base = now;
    ground.store.has_news |= has_moved;
    has_moved
}

/// Ends a decouple with its record. Returns false if that has to wait for the log. Also returns
/// false while a deletion changes the owners of units between the volume and the ancestor's parent.
fn decouple(token: Token, version: VersionId, ancestor: VersionId, ground: &mut Ground) -> bool {
    let state = &ground.store.state;
    let path = state.path_beyond(version, ancestor).unwrap_or_default();
    if state.is_passed(&path) && !Mutation::DecoupleDuringPass.is_active() {
        return false;
    }
    end(token, Record::Decouple { version, ancestor }, ground)
}

/// Ends a set parent: exchanges the contents of the volume and `new`, and lets the volume's writes
/// continue. Returns false if the log does not take the record now.
fn adopt(token: Token, version: VersionId, new: VersionId, ground: &mut Ground) -> bool {
    let has_ended = end(token, Record::Adopt { version, new }, ground);
    if has_ended {
        ground.durable.thaw(token);
    }
    has_ended
}

/// Ends a set parent that failed: lets the deletion free `new`, and the volume's writes continue.
fn give_up(token: Token, new: VersionId, prepared: Lsn, ground: &mut Ground) {
    if let Some(version) = ground.store.state.versions.get_mut(&new) {
        version.hidden_at = prepared;
    }
    ground.durable.thaw(token);
    ground.deletion.search();
}

/// Appends and applies the last record of a job; the answer waits until it is settled. Returns
/// false if the log does not take it now.
fn end(token: Token, record: Record, ground: &mut Ground) -> bool {
    let store = &mut *ground.store;
    if !store.log_takes(&record) {
        return false;
    }
    let lsn = store.append(&record);
    store.apply(lsn, &record);
    store.settle.want(lsn);
    ground
        .durable
        .wait(token, lsn, Until::Settled, Answer::Done);
    ground.deletion.search();
    true
}

/// Ends an inflate with its record; a volume without a parent needs none. Returns false if that has
/// to wait: for the log, or while a deletion changes the owners of the parent's units.
fn detach(token: Token, version: VersionId, ground: &mut Ground) -> bool {
    let store = &mut *ground.store;
    let parent = store.state.versions[&version].parent;
    let Some(parent) = parent else {
        store.answer(token, Ok(Answer::Done));
        return true;
    };
    let record = Record::Detach { version };
    let is_passed = store.state.versions[&parent].pass.is_some();
    if is_passed {
        return false;
    }
    end(token, record, ground)
}
