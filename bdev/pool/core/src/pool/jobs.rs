//! Requests of many steps: each step is a request of the pool to itself.
//!
//! | job | steps | end |
//! |---|---|---|
//! | shrink | an unmap of each leaf with data beyond the new size | the resize, as a request |
//! | inflate | a fill of each place that shares a unit | DETACH, once the fills are settled |
//! | decouple | the same, with the units of one ancestor | DECOUPLE, once the fills are settled |
//! | set parent | a copy of each place that the volume owns | ADOPT, once the copies are settled |
//!
//! A crash ends a job where it is; the caller asks again. A volume has one job at a time.

use std::collections::HashMap;

use super::deletion::Deletion;
use super::durable::{Durable, Until};
use super::store::{OWN_TOKENS, Store};
use crate::format::record::Record;
use crate::ids::{Generation, Lsn, Token, VersionId};
use crate::interface::{Answer, Refusal, Request};
use crate::mutation::Mutation;
use crate::state::Found;

/// Steps of a job in flight.
const WINDOW: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Jobs {
    jobs: Vec<Job>,
    /// Steps in flight, with the token of their job.
    steps: HashMap<Token, Token>,
    next_step: Token,
    /// A search found nothing in the leaves that a turn looks at, and goes on in the next turn.
    is_searching: bool,
}

#[derive(Debug)]
struct Job {
    /// The token of the request.
    token: Token,
    version: VersionId,
    work: Work,
    in_flight: usize,
    refused: Option<Refusal>,
    /// The last record of the steps: the end waits until it is settled.
    last: Option<Lsn>,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Work {
    Shrink {
        units: u64,
    },
    /// `next`: the first place that has no fill yet.
    Inflate {
        next: u64,
    },
    Decouple {
        ancestor: VersionId,
        /// The ancestor's parent when the search for units of the ancestor began.
        base: Option<VersionId>,
        next: u64,
    },
    /// `new`: the contents to adopt, since the record `prepared`. They get the units above a
    /// generation.
    SetParent {
        source: VersionId,
        new: VersionId,
        above: Generation,
        prepared: Lsn,
        next: u64,
    },
}

impl Work {
    /// The version above that the work depends on.
    fn other(&self) -> Option<VersionId> {
        match self {
            Self::Shrink { .. } | Self::Inflate { .. } => None,
            Self::Decouple { ancestor, .. } => Some(*ancestor),
            Self::SetParent { source, .. } => Some(*source),
        }
    }
}

/// The parts of a pool that jobs work with.
pub(super) struct Ground<'a> {
    pub store: &'a mut Store,
    pub durable: &'a mut Durable,
    pub deletion: &'a mut Deletion,
    pub waiting: &'a mut std::collections::VecDeque<(Token, Request)>,
}

impl Jobs {
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

    pub(super) fn is_searching(&self) -> bool {
        self.is_searching
    }

    /// Forgets all jobs. Returns the tokens of their requests.
    pub(super) fn drain(&mut self) -> Vec<Token> {
        self.steps.clear();
        self.is_searching = false;
        self.jobs.drain(..).map(|job| job.token).collect()
    }

    /// Takes the outcomes of steps, and begins the steps that are possible.
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

/// The request for a place that was found; the search goes on behind it.
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
    /// Its search goes on in the next turn.
    Later,
    None,
}

/// True when the ancestor got another parent since the search for its units began: it owns the
/// units of the former one now.
fn has_moved(ancestor: VersionId, base: &mut Option<VersionId>, ground: &mut Ground) -> bool {
    let versions = &ground.store.state.versions;
    let now = versions.get(&ancestor).and_then(|of| of.parent);
    let has_moved = *base != now && !Mutation::DecoupleDuringPass.is_active();
    *base = now;
    ground.store.has_news |= has_moved;
    has_moved
}

/// Ends a separation from one ancestor. Returns false if that has to wait.
fn decouple(token: Token, version: VersionId, ancestor: VersionId, ground: &mut Ground) -> bool {
    let state = &ground.store.state;
    let path = state.path_beyond(version, ancestor).unwrap_or_default();
    if state.is_passed(&path) && !Mutation::DecoupleDuringPass.is_active() {
        return false;
    }
    end(token, Record::Decouple { version, ancestor }, ground)
}

/// Exchanges the contents of a volume. Returns false if that has to wait.
fn adopt(token: Token, version: VersionId, new: VersionId, ground: &mut Ground) -> bool {
    let has_ended = end(token, Record::Adopt { version, new }, ground);
    if has_ended {
        ground.durable.thaw(token);
    }
    has_ended
}

/// Lets the deletion free the contents that no volume adopts.
fn give_up(token: Token, new: VersionId, prepared: Lsn, ground: &mut Ground) {
    if let Some(version) = ground.store.state.versions.get_mut(&new) {
        version.hidden_at = prepared;
    }
    ground.durable.thaw(token);
    ground.deletion.search();
}

/// Appends the last record of a job. Returns false if the log does not take it now.
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

/// Ends an inflation. Returns false if that has to wait.
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
