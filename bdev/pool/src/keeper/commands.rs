//! Commands of management: requests to the core, and scans of the maps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev_pool_core::format::record::Identity;
use nacre_bdev_pool_core::ids::{Token, VersionId};
use nacre_bdev_pool_core::interface::{Answer as CoreAnswer, Refusal, Request};
use nacre_bdev_pool_core::pool::Pool;
use nacre_reactor::{Idle, Nanos};
use slab::Slab;
use uuid::Uuid;

use super::departure::Departures;
use super::disks::{Disks, grown};
use super::erasure::Erasure;
use super::externals::{Externals, Source, device_of, missing_of, parent_of};
use super::maps::{floor_of, show_mapped};
use super::opening::{OpenAnswer, OpenSender};
use super::{Keeper, Stage};
use crate::map::LvolMap;
use crate::model::{
    Answer, Command, CommandRequest, ExternalParent, KeeperCommand, LvolInfo, NotErased, Outcome,
    PoolError,
};
use crate::port::Shared;

/// Leaves that a scan visits in a turn: few, as reads and writes of the core wait meanwhile.
const LEAVES: usize = 8;
/// Commands in the keeper; more are refused.
const COMMANDS: usize = 256;
/// How long a keeper that ends waits for the erasure of disks that have left.
const ERASURE: Duration = Duration::from_secs(5);
/// A disk is late when the end of its pool has waited so long for it.
const LATE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Commands {
    open: Slab<Open>,
    scans: VecDeque<Scan>,
    /// The export in progress.
    export: Option<Answer>,
    /// Closing commands, which are answered when the keeper has ended.
    closing: Vec<Answer>,
    /// The last I/O may end; then the keeper ends.
    is_last: bool,
    /// The superblocks go before that.
    wipes: bool,
    erasure: Option<Erasure>,
    /// When the callers learn which disks the end waits for.
    late_at: Option<Nanos>,
    /// The keeper waits until then for disks that have left.
    erased_until: Option<Nanos>,
    /// The error of an opening that failed.
    pub failed: Option<(OpenAnswer, PoolError)>,
}

/// Answers to be given when everything else of the keeper is gone: the disk is free then.
#[derive(Default)]
pub(super) struct Farewell {
    closed: Vec<Answer>,
    /// Disks of a deleted pool that have superblocks yet.
    not_erased: Vec<NotErased>,
    /// An export that a close ended.
    not_exported: Option<Answer>,
    failed: Option<(OpenSender, PoolError)>,
}

impl Drop for Farewell {
    fn drop(&mut self) {
        for answer in self.closed.drain(..) {
            if self.not_erased.is_empty() {
                answer.send(Outcome::Done);
            } else {
                let disks = self.not_erased.clone();
                answer.fail(PoolError::NotErased { disks });
            }
        }
        if let Some(answer) = self.not_exported.take() {
            answer.closed();
        }
        if let Some((sender, error)) = self.failed.take() {
            // The caller may no longer wait.
            let _ = sender.send(Err(error));
        }
    }
}

/// A request in the core.
pub(super) enum Open {
    Command(Answer),
    AddDisk(Answer),
    /// It needs an external device.
    External(Answer, Source),
    /// It copies data that may come from an external device, which may go meanwhile.
    Copies(Answer, Source),
    /// The first request of a pool: once it is answered, the pool is on the disk.
    Opening(OpenAnswer),
    Export,
}

/// A count of the units of all versions, a few leaves a turn.
struct Scan {
    answer: Answer,
    left: VecDeque<VersionId>,
    next_place: u64,
    present: Option<(VersionId, LvolInfo)>,
    done: Vec<LvolInfo>,
}

impl Commands {
    pub(super) fn has_scan(&self) -> bool {
        !self.scans.is_empty()
    }

    pub(super) fn insert(&mut self, open: Open) -> Token {
        self.open.insert(open) as Token
    }

    /// True when the core is adding a disk.
    pub(super) fn adds_disk(&self) -> bool {
        let mut open = self.open.iter();
        open.any(|(_, open)| matches!(open, Open::AddDisk(_)))
    }

    /// True when the keeper begins no further work.
    pub(super) fn is_last(&self) -> bool {
        self.is_last
    }

    /// True when the keeper may end. A disk that has left is erased before, if that does not take
    /// long: an import of the pool may not find it any more.
    pub(super) fn is_closing_done(
        &mut self,
        now: Nanos,
        disks: &Disks,
        departures: &Departures,
    ) -> bool {
        if !self.is_last && self.failed.is_none() {
            return false;
        }
        let until = *self.erased_until.get_or_insert(now + ERASURE);
        let is_erased = self.erasure.as_ref().is_none_or(Erasure::is_done);
        is_erased && disks.is_idle() && (departures.is_idle() || now >= until)
    }

    /// Goes on with the end of the pool, if it has begun. Returns the amount of work.
    pub(super) fn advance_end(
        &mut self,
        now: Nanos,
        disks: &mut Disks,
        externals: &Externals,
    ) -> u32 {
        if self.export.is_some() || self.is_last {
            let until = *self.late_at.get_or_insert(now + LATE);
            if until <= now {
                disks.note_late(externals.busy());
            }
        } else if self.late_at.take().is_some() {
            // The export was refused.
            disks.note_late(Vec::new());
        }
        let Some(erasure) = &mut self.erasure else {
            return 0;
        };
        let count = erasure.advance(now, disks);
        if erasure.is_late(now) {
            let disks = erasure.not_erased();
            for answer in self.closing.drain(..) {
                let disks = disks.clone();
                answer.fail(PoolError::NotErased { disks });
            }
        }
        count
    }

    pub(super) fn due(&self, now: Nanos) -> Idle {
        let late = self.late_at.filter(|at| *at > now);
        let late = late.map_or(Idle::Quiet, Idle::Until);
        let erasure = self.erasure.as_ref();
        late.and(erasure.map_or(Idle::Quiet, |erasure| erasure.due(now)))
    }

    /// The last answers, which the keeper gives when it no longer uses the disk.
    pub(super) fn farewell(&mut self) -> Farewell {
        let (failed, error) = self.failed.take().unzip();
        let erasure = self.erasure.take();
        Farewell {
            closed: std::mem::take(&mut self.closing),
            not_erased: erasure.map_or_else(Vec::new, |erasure| erasure.not_erased()),
            not_exported: self.export.take(),
            failed: failed.map(|failed| failed.sender).zip(error),
        }
    }

    /// Ends the keeper when its I/O in flight has ended, then answers.
    fn close_when_idle(&mut self, answer: Answer) {
        self.closing.push(answer);
        self.is_last = true;
    }

    /// Ends all commands. A pool that was being opened or exported closes.
    pub(super) fn interrupt(&mut self) {
        let is_opening = |open: &Open| matches!(open, Open::Opening(_));
        self.is_last |= self.open.iter().any(|(_, open)| is_opening(open));
        self.is_last |= self.export.is_some();
        self.close();
    }

    pub(super) fn close(&mut self) {
        for (_, open) in std::mem::take(&mut self.open) {
            match open {
                Open::Command(answer)
                | Open::AddDisk(answer)
                | Open::External(answer, _)
                | Open::Copies(answer, _) => answer.closed(),
                Open::Opening(answer) => answer.fail(PoolError::Closed),
                Open::Export => {}
            }
        }
        self.scans.drain(..).for_each(|scan| scan.answer.closed());
        let closing = self.closing.drain(..).chain(self.export.take());
        closing.for_each(Answer::closed);
    }
}

/// The visible version with an id.
pub(super) fn find(pool: &Pool, id: Uuid) -> Result<VersionId, PoolError> {
    let mut versions = pool.state().versions.iter();
    let found = versions.find(|(_, version)| version.identity.id == id && version.is_visible());
    found
        .map(|(version, _)| *version)
        .ok_or(PoolError::Unknown { id })
}

fn info(pool: &Pool, externals: &Externals, version: VersionId) -> Option<LvolInfo> {
    let state = pool.state();
    let of = state.versions.get(&version).filter(|v| v.is_visible())?;
    let parent = state.visible_parent(version);
    let parent = parent.and_then(|parent| state.versions.get(&parent));
    let external = parent.filter(|parent| parent.is_external);
    let parent = parent.filter(|parent| !parent.is_external);
    Some(LvolInfo {
        id: of.identity.id,
        name: of.identity.name.clone(),
        bytes: of.units * state.geometry.unit_bytes(),
        is_snapshot: of.is_snapshot,
        is_read_only: of.is_read_only,
        is_thick: of.is_thick,
        parent: parent.map(|parent| parent.identity.id),
        external_parent: external.map(|parent| parent_of(&parent.identity)),
        is_degraded: missing_of(pool, externals, version).is_some(),
        used_bytes: 0,
        exclusive_bytes: 0,
    })
}

impl Keeper {
    pub(super) fn take_command(&mut self, request: CommandRequest) {
        let CommandRequest { command, answer } = request;
        if let (Stage::Interrupted, KeeperCommand::Public(Command::Close { export: false })) =
            (&self.stage, &command)
        {
            return self.commands.close_when_idle(answer);
        }
        let Stage::Open(pool) = &self.stage else {
            return answer.closed();
        };
        let commands = &self.commands;
        let count = commands.open.len() + commands.scans.len() + commands.closing.len();
        let closes = commands.is_last || commands.export.is_some();
        let command = match command {
            // Also while an export waits: the device is held until then.
            KeeperCommand::Detach { device, only_gone } => {
                if !only_gone || self.externals.is_gone(device) {
                    self.detach_external(device);
                }
                return answer.send(Outcome::Done);
            }
            _ if count >= COMMANDS => return answer.fail(PoolError::Busy),
            // An export waits for a disk that may never answer.
            KeeperCommand::Public(Command::Close { export: false }) => {
                return self.commands.close_when_idle(answer);
            }
            _ if closes => return answer.closed(),
            KeeperCommand::OpenMap(id) => return self.open_map(id, answer),
            KeeperCommand::AddDisk { claim, force } => {
                if commands.adds_disk() {
                    return answer.fail(PoolError::Busy);
                }
                let additions = &mut self.additions;
                return additions.begin(pool, &self.disks, claim, force, answer);
            }
            KeeperCommand::External { claim, work } => {
                return self.use_external(claim, work, answer);
            }
            KeeperCommand::Public(command) => command,
        };
        match command {
            Command::List => {
                let versions = pool.state().versions.iter();
                let visible = versions.filter(|(_, version)| version.is_visible());
                let all = visible.map(|(id, _)| *id).collect();
                self.begin_scan(answer, all);
            }
            Command::Count { lvol } => match find(pool, lvol) {
                Ok(version) => self.begin_scan(answer, VecDeque::from([version])),
                Err(error) => answer.fail(error),
            },
            Command::Names => {
                let versions = pool.state().versions.keys();
                let list = versions
                    .filter_map(|version| info(pool, &self.externals, *version))
                    .collect();
                answer.send(Outcome::List(list));
            }
            Command::Own { lvol, from } => match own_places(pool, lvol, from) {
                Ok(places) => answer.send(places),
                Err(error) => answer.fail(error),
            },
            Command::Mapped { lvol, from } => match mapped_places(pool, lvol, from) {
                Ok(places) => answer.send(places),
                Err(error) => answer.fail(error),
            },
            Command::Close { .. } | Command::Destroy => {
                self.commands.wipes = matches!(command, Command::Destroy);
                self.commands.export = Some(answer);
                let token = self.commands.open.insert(Open::Export) as Token;
                self.submit(token, Request::Export);
            }
            command => {
                let device = copied_device(pool, &command);
                match request_of(pool, (&self.shared, &self.externals), command) {
                    Err(error) => answer.fail(error),
                    Ok(request) => {
                        let open = match device {
                            None => Open::Command(answer),
                            Some(device) => {
                                Open::Copies(answer, Source::new(device, &self.externals))
                            }
                        };
                        let token = self.commands.open.insert(open) as Token;
                        self.submit(token, request);
                    }
                }
            }
        }
    }

    /// Answers the opening when the pool has taken its first request.
    pub(super) fn answer_opening(&mut self, answer: OpenAnswer) {
        let token = self.commands.open.insert(Open::Opening(answer)) as Token;
        self.submit(token, Request::Flush);
    }

    pub(super) fn command_answered(&mut self, token: Token, result: Result<CoreAnswer, Refusal>) {
        let Some(open) = self.commands.open.try_remove(token as usize) else {
            return;
        };
        let answer = match open {
            Open::Command(answer) => {
                // The caller sees the new state.
                self.update_status();
                answer
            }
            Open::External(answer, source) => {
                let failure = source.failure(&self.externals);
                self.externals.unpin(source.device.id);
                self.refresh_externals(None);
                self.update_status();
                match failure {
                    Some(failure) if result == Err(Refusal::Medium) => return answer.fail(failure),
                    _ => answer,
                }
            }
            Open::Copies(answer, source) => {
                self.update_status();
                match source.failure(&self.externals) {
                    Some(failure) if result == Err(Refusal::Medium) => return answer.fail(failure),
                    _ => answer,
                }
            }
            Open::AddDisk(answer) => {
                // A pool that is held may have the disk in its last root.
                let is_held = matches!(&self.stage, Stage::Open(pool) if pool.is_held());
                if result.is_err() && !is_held {
                    self.disks.pop();
                }
                self.update_status();
                answer
            }
            Open::Opening(answer) => {
                match result {
                    Ok(_) => {
                        self.update_status();
                        self.refresh_externals(None);
                        answer.opened();
                    }
                    Err(refusal) => self.commands.failed = Some((answer, refusal.into())),
                }
                return;
            }
            Open::Export => {
                let answer = self.commands.export.take();
                if let Err(refusal) = result {
                    if let Some(answer) = answer {
                        answer.fail(refusal.into());
                    }
                    return;
                }
                self.commands.closing.extend(answer);
                self.commands.is_last = true;
                if self.commands.wipes
                    && let Stage::Open(pool) = &self.stage
                {
                    self.commands.erasure = Some(Erasure::of(pool, &self.shared));
                }
                return;
            }
        };
        let Stage::Open(pool) = &self.stage else {
            return answer.closed();
        };
        let id = |version: &VersionId| {
            let version = pool.state().versions.get(version);
            version.map(|version| version.identity.id)
        };
        match result {
            Err(refusal) => answer.fail(refusal.into()),
            Ok(CoreAnswer::Done) => answer.send(Outcome::Done),
            Ok(CoreAnswer::Created(version)) => {
                answer.send(Outcome::Created(id(&version).into_iter().collect()))
            }
            Ok(CoreAnswer::Snapshots(versions)) => {
                answer.send(Outcome::Created(versions.iter().filter_map(id).collect()))
            }
            Ok(CoreAnswer::Checked(report)) => answer.send(Outcome::Checked(report)),
        }
    }

    /// The map of a version for lanes: the same one while it exists.
    fn open_map(&mut self, id: Uuid, answer: Answer) {
        let (Stage::Open(pool), Answer::Map(answer)) = (&self.stage, answer) else {
            return;
        };
        let outcome = find(pool, id).and_then(|version| {
            let info = info(pool, &self.externals, version);
            let info = info.ok_or(PoolError::Unknown { id })?;
            let serial = self.next_serial;
            let units = pool.state().versions[&version].units;
            let map = self.maps.entry(version).or_insert_with(|| {
                let floor = floor_of(pool, version);
                let map = LvolMap::new(version, serial, units, floor);
                show_mapped(pool, &map);
                if pool.state().versions[&version].is_fixed() {
                    map.set_read_only();
                }
                Arc::new(map)
            });
            Ok((info, Arc::clone(map)))
        });
        self.next_serial += 1;
        if let Ok((_, map)) = &outcome {
            let version = map.version;
            self.refresh_externals(Some(&[version]));
        }
        // The caller may no longer wait.
        let _ = answer.send(outcome);
    }

    fn begin_scan(&mut self, answer: Answer, left: VecDeque<VersionId>) {
        self.commands.scans.push_back(Scan {
            answer,
            left,
            next_place: 0,
            present: None,
            done: Vec::new(),
        });
    }

    /// Goes on with the first scan, and puts it behind the others: a count of one version does not
    /// wait for a list of all. Returns the amount of work.
    pub(super) fn advance_scans(&mut self) -> u32 {
        let Stage::Open(pool) = &self.stage else {
            return 0;
        };
        let Some(mut scan) = self.commands.scans.pop_front() else {
            return 0;
        };
        if scan.advance(pool, &self.externals) {
            scan.answer.send(Outcome::List(scan.done));
        } else {
            self.commands.scans.push_back(scan);
        }
        1
    }
}

impl Scan {
    /// Returns true when it has ended.
    fn advance(&mut self, pool: &Pool, externals: &Externals) -> bool {
        let state = pool.state();
        let per_leaf = u64::from(state.geometry.units_per_leaf);
        for _ in 0..LEAVES {
            let Some((version, of)) = &mut self.present else {
                let Some(next) = self.left.pop_front() else {
                    return true;
                };
                self.next_place = 0;
                self.present = info(pool, externals, next).map(|info| (next, info));
                continue;
            };
            // It may be deleted while the scan goes on.
            let is_there = state.versions.get(version).is_some_and(|v| !v.is_hidden);
            let leaf = is_there
                .then(|| state.first_leaf_with_units(*version, self.next_place))
                .flatten();
            let Some(leaf) = leaf else {
                let present = self.present.take();
                self.done.extend(present.map(|(_, info)| info));
                continue;
            };
            let floor = state.floor(*version, leaf);
            let unit = state.geometry.unit_bytes();
            for place in leaf * per_leaf..(leaf + 1) * per_leaf {
                let entry = pool.lookup(*version, place).unwrap_or_default();
                for part in entry.units() {
                    of.used_bytes += unit;
                    of.exclusive_bytes += unit * u64::from(part.is_exclusive(floor));
                }
            }
            self.next_place = (leaf + 1) * per_leaf;
        }
        false
    }
}

/// The places from `from` on whose units the parent of the version does not have, of some leaves.
fn own_places(pool: &Pool, lvol: Uuid, from: u64) -> Result<Outcome, PoolError> {
    let (version, state) = (find(pool, lvol)?, pool.state());
    let per_leaf = u64::from(state.geometry.units_per_leaf);
    some_places(pool, version, from, |place| {
        let floor = state.floor(version, place / per_leaf);
        let entry = pool.lookup(version, place).unwrap_or_default();
        entry.parts().any(|part| part.is_exclusive(floor))
    })
}

fn mapped_places(pool: &Pool, lvol: Uuid, from: u64) -> Result<Outcome, PoolError> {
    let version = find(pool, lvol)?;
    some_places(pool, version, from, |place| {
        match pool.lookup(version, place) {
            Ok(entry) => !entry.is_empty(),
            // Beyond the end.
            Err(Refusal::OutOfRange) => false,
            // A read reports the damage.
            Err(_) => true,
        }
    })
}

/// The wanted places in some leaves from a place on.
fn some_places(
    pool: &Pool,
    version: VersionId,
    from: u64,
    mut is_wanted: impl FnMut(u64) -> bool,
) -> Result<Outcome, PoolError> {
    let state = pool.state();
    let per_leaf = u64::from(state.geometry.units_per_leaf);
    let (mut places, mut next) = (Vec::new(), from);
    for _ in 0..LEAVES {
        let Some(leaf) = state.next_leaf(version, next) else {
            return Ok(Outcome::Places { places, next: None });
        };
        let first = leaf * per_leaf;
        let all = first.max(next)..first + per_leaf;
        places.extend(all.filter(|place| is_wanted(*place)));
        next = first + per_leaf;
    }
    let next = Some(next);
    Ok(Outcome::Places { places, next })
}

/// The external device below the version whose data a command copies.
fn copied_device(pool: &Pool, command: &Command) -> Option<ExternalParent> {
    let (Command::Inflate { lvol: source }
    | Command::Decouple { lvol: source }
    | Command::SetParent {
        snapshot: source, ..
    }) = command
    else {
        return None;
    };
    device_of(pool, find(pool, *source).ok()?)
}

/// The number of a disk of the pool.
fn number_of(pool: &Pool, disk: Uuid) -> Result<usize, PoolError> {
    let number = pool.superblock().disks.position(disk);
    number.ok_or_else(|| PoolError::Unfit {
        what: "disk",
        why: format!("{disk} is no disk of the pool"),
    })
}

fn request_of(
    pool: &Pool,
    (shared, externals): (&Shared, &Externals),
    command: Command,
) -> Result<Request, PoolError> {
    let unit = pool.superblock().geometry.unit_bytes();
    // Copies may need the data of a device that a version shows.
    let copied = |id| {
        let version = find(pool, id)?;
        let missing = missing_of(pool, externals, version);
        missing.map_or(Ok(version), |device| Err(PoolError::Degraded(device)))
    };
    Ok(match command {
        Command::Create {
            id,
            name,
            bytes,
            thick,
        } => Request::Create {
            identity: Identity { id, name },
            units: bytes.div_ceil(unit),
            thick,
        },
        Command::Snapshot { cuts } => {
            let cut = |(volume, id, name)| Ok((find(pool, volume)?, Identity { id, name }));
            let cuts: Result<_, PoolError> = cuts.into_iter().map(cut).collect();
            Request::Snapshot(cuts?)
        }
        Command::Clone {
            source,
            id,
            name,
            thick,
        } => Request::Clone {
            source: find(pool, source)?,
            identity: Identity { id, name },
            thick,
        },
        Command::Resize { lvol, bytes } => Request::Resize {
            version: find(pool, lvol)?,
            units: bytes.div_ceil(unit),
        },
        Command::Rename { lvol, name } => Request::Rename {
            version: find(pool, lvol)?,
            name,
        },
        Command::Restore { lvol, snapshot } => Request::Restore {
            version: find(pool, lvol)?,
            source: find(pool, snapshot)?,
        },
        Command::Inflate { lvol } => Request::Inflate {
            version: copied(lvol)?,
        },
        Command::Decouple { lvol } => Request::Decouple {
            version: copied(lvol)?,
        },
        Command::SetParent { lvol, snapshot } => Request::SetParent {
            version: find(pool, lvol)?,
            source: copied(snapshot)?,
        },
        Command::ReadOnly { lvol } => Request::ReadOnly {
            version: find(pool, lvol)?,
        },
        Command::Delete { lvol } => Request::Delete {
            version: find(pool, lvol)?,
        },
        Command::Grow => {
            let (disk, disk_bytes) = grown(pool, shared)?;
            Request::Grow { disk, disk_bytes }
        }
        Command::RemoveDisk { disk } => Request::RemoveDisk {
            disk: number_of(pool, disk)?,
        },
        Command::KeepDisk { disk } => Request::KeepDisk {
            disk: number_of(pool, disk)?,
        },
        Command::RenamePool { name } => Request::RenamePool { name },
        Command::Check => Request::Check,
        Command::List
        | Command::Count { .. }
        | Command::Names
        | Command::Own { .. }
        | Command::Mapped { .. }
        | Command::Close { .. }
        | Command::Destroy => {
            return Err(PoolError::Closed);
        }
    })
}
