//! The keeper: a poller on one reactor that alone changes the metadata of a storage pool.
//!
//! [`Pool`] of `nacre-bdev-pool-core` (below: the core) makes every decision and does no I/O. The
//! keeper passes events to it, and executes its intents: I/O of the log and of metadata, orders to
//! the pool's *lanes* (a lane is one core's queue to a volume), and answers.
//!
//! ```text
//!   poll   inbox ─▶ core.submit        requests of lanes; commands of management
//!          disk  ─▶ core.written …     completions of the keeper's own I/O
//!          time  ─▶ core.settle …      1 s after a change: settle; 5 s: checkpoint
//!          lanes ─▶ core.grace_ended   I/O from before the grace period has ended
//!   pump   core.poll ─▶ first the lanes' maps, then the intents
//! ```
//!
//! A grace period is that of RCU: it ends when all I/O that was in flight at its beginning, and
//! may use an older map, has completed. The keeper changes the maps that lanes read before it
//! executes the intents of the same turn. So each grace period begins after every lane can see the
//! change, and each answer arrives after it.

mod addition;
mod attachment;
mod commands;
mod departure;
mod disk;
mod disks;
mod erasure;
mod externals;
mod fills;
mod full;
mod interruption;
mod lanes;
mod maps;
mod opening;
mod status;
mod times;

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev::Status;
use nacre_bdev_pool_core::geometry::PAGE;
use nacre_bdev_pool_core::ids::{Token, VersionId};
use nacre_bdev_pool_core::interface::{Answer, Change, Intent, IoFailed, Refusal, Request};
use nacre_bdev_pool_core::pool::{Busy, Pool, is_own};
use nacre_reactor::{CoreHandle, Idle, Nanos, Poller, Work};

use crate::map::LvolMap;
use crate::model::PoolState;
use crate::port::{KeeperMessage, RequestId, Shared, ToKeeper, ToLane};

use addition::Additions;
use commands::{Commands, Farewell, Open};
use departure::Departures;
use disk::Tag;
pub(crate) use disk::{Disk, Ended};
pub(crate) use disks::Disks;
use externals::Externals;
use fills::Fills;
use full::Full;
use lanes::{Grace, LaneRequest, Lanes};
pub(crate) use opening::{OpenAnswer, Opening};
use status::StatusUpdates;
use times::Times;

/// How long a write to a full pool waits for space before it fails with a status that hosts retry.
/// Shorter than the deadline of a replicated volume's I/O, 8 s.
pub(crate) const FULL_WAIT: Duration = if cfg!(test) {
    Duration::from_millis(1500)
} else {
    Duration::from_secs(5)
};
/// Once the pool has been full for this time, writes that find no space fail without a retry. Linux
/// without multipath retries a command five times, then reports an I/O error instead of ENOSPC.
pub(crate) const FULL_PATIENCE: Duration = if cfg!(test) {
    Duration::from_millis(2200)
} else {
    Duration::from_secs(20)
};
/// Interval at which the keeper checks for the end of a grace period.
const GRACE_LOOK: Duration = Duration::from_micros(100);

/// This bit of a tag marks I/O that has no number of the core: the keeper's copies.
const FILL: Tag = 1 << 62;

/// The owner of one pool's metadata.
pub(crate) struct Keeper {
    core: CoreHandle,
    shared: Arc<Shared>,
    disks: Disks,
    additions: Additions,
    departures: Departures,
    externals: Externals,
    /// Units in the disk table that lanes have.
    table_units: u64,
    stage: Stage,
    commands: Commands,
    fills: Fills,
    full: Full,
    lanes: Lanes,
    /// The maps of open volumes and snapshots, which lanes read.
    maps: HashMap<VersionId, Arc<LvolMap>>,
    next_serial: u64,
    /// Requests that the core had no room for.
    backlog: VecDeque<(Token, Request)>,
    grace: Grace,
    times: Times,
    status: StatusUpdates,
    inbox: Vec<KeeperMessage>,
    ended: Vec<Ended>,
    changes: Vec<Change>,
    /// The last field: it answers callers when it is dropped, after the disks' queues and claims.
    farewell: Farewell,
}

enum Stage {
    Opening(Box<Opening>),
    Open(Box<Pool>),
    /// A disk may have lost writes. The I/O in flight ends, and nothing follows from it.
    Interrupted,
    Closed,
}

impl Stage {
    /// True when a scan, or a search of the core, goes on without an event.
    fn searches(&self, commands: &Commands) -> bool {
        let is_searching = matches!(self, Self::Open(pool) if pool.is_searching());
        is_searching || commands.has_scan()
    }
}

/// Removes the poller that is calling this function from its reactor.
pub(crate) fn remove_current(core: &CoreHandle) {
    if let Some(poller) = core.current_poller() {
        core.remove_poller(poller);
    }
}

/// The core's token of a lane's request: the lane in the high 32 bits, the request in the low 32.
/// Commands have lane 0.
fn token_of(lane: u32, request: RequestId) -> Token {
    u64::from(lane) << 32 | u64::from(request)
}

impl Keeper {
    pub(crate) fn new(
        core: CoreHandle,
        shared: Arc<Shared>,
        disks: Disks,
        opening: Opening,
    ) -> Self {
        Self {
            core,
            disks,
            additions: Additions::default(),
            departures: Departures::new(Arc::clone(&shared)),
            externals: Externals::default(),
            table_units: 0,
            stage: Stage::Opening(Box::new(opening)),
            commands: Commands::default(),
            fills: Fills::default(),
            full: Full::default(),
            lanes: Lanes::default(),
            maps: HashMap::new(),
            next_serial: 1,
            backlog: VecDeque::new(),
            grace: Grace::default(),
            times: Times::default(),
            status: StatusUpdates::new(Arc::clone(&shared)),
            shared,
            inbox: Vec::new(),
            ended: Vec::new(),
            changes: Vec::new(),
            farewell: Farewell::default(),
        }
    }

    fn take_inbox(&mut self) -> u32 {
        if matches!(self.stage, Stage::Opening(_)) {
            return 0;
        }
        let mut inbox = std::mem::take(&mut self.inbox);
        self.shared.inbox.take(&mut inbox);
        let count = inbox.len() as u32;
        for message in inbox.drain(..) {
            match message {
                KeeperMessage::Lane(lane, message) => self.take_lane_message(lane, message),
                KeeperMessage::Command(request) => self.take_command(request),
            }
        }
        self.inbox = inbox;
        count
    }

    fn take_lane_message(&mut self, lane: u32, message: ToKeeper) {
        let Some(message) = interruption::unless_interrupted(self, lane, message) else {
            return;
        };
        let known = |maps: &HashMap<VersionId, Arc<LvolMap>>, version, serial| {
            let map: Option<&Arc<LvolMap>> = maps.get(&version);
            map.is_some_and(|map| map.serial == serial)
        };
        match message {
            ToKeeper::Load {
                request,
                map,
                place,
            } => {
                if known(&self.maps, map.version, map.serial) {
                    self.load(map.version, place);
                }
                self.send(lane, ToLane::Loaded { request });
            }
            ToKeeper::Write {
                request,
                serial,
                write,
            } => {
                if !known(&self.maps, write.version, serial) {
                    return self.refuse(lane, request, Refusal::UnknownVersion);
                }
                self.load(write.version, write.place);
                self.submit_for(lane, request, Request::Write(write));
            }
            ToKeeper::Unmap {
                request,
                map,
                first,
                granules,
            } => {
                if !known(&self.maps, map.version, map.serial) {
                    return self.refuse(lane, request, Refusal::UnknownVersion);
                }
                let unmap = Request::Unmap {
                    version: map.version,
                    first,
                    granules,
                };
                self.submit_for(lane, request, unmap);
            }
            ToKeeper::DataWritten { request, is_ok } => {
                let result = is_ok.then_some(()).ok_or(IoFailed);
                self.data_written(token_of(lane, request), result);
            }
            ToKeeper::SourceRead { request, sums } => {
                let result = sums.ok_or(IoFailed);
                self.source_read(token_of(lane, request), result);
            }
            ToKeeper::Disks { round, outcome } => {
                if self.disks.is_round(round) {
                    self.departures.lane_answered(lane);
                    let disks = &mut self.disks;
                    self.additions.lane_answered(lane, outcome, disks);
                }
            }
            ToKeeper::Closed => self.lane_closed(lane),
        }
    }

    fn submit_for(&mut self, lane: u32, request: RequestId, what: Request) {
        let token = token_of(lane, request);
        self.lanes.requests.insert(token, LaneRequest::Waits);
        self.submit(token, what);
    }

    fn submit(&mut self, token: Token, request: Request) {
        self.backlog.push_back((token, request));
    }

    fn submit_backlog(&mut self) {
        let Stage::Open(pool) = &mut self.stage else {
            return;
        };
        while let Some((token, request)) = self.backlog.front() {
            if let Err(Busy) = pool.submit(*token, request.clone()) {
                return;
            }
            self.backlog.pop_front();
        }
    }

    fn data_written(&mut self, token: Token, result: Result<(), IoFailed>) {
        if self.lanes.end_write(token, &mut self.grace)
            && let Stage::Open(pool) = &mut self.stage
        {
            pool.data_written(token, result);
        }
    }

    fn source_read(&mut self, token: Token, result: Result<Vec<u32>, IoFailed>) {
        if self.lanes.end_read(token, &mut self.grace)
            && let Stage::Open(pool) = &mut self.stage
        {
            pool.source_read(token, result);
        }
    }

    /// Forgets a closed lane. Its I/O in flight counts as ended, with an unknown outcome.
    fn lane_closed(&mut self, lane: u32) {
        self.lanes.ports.remove(&lane);
        self.additions.lane_answered(lane, Ok(()), &mut self.disks);
        self.departures.lane_answered(lane);
        for token in self.lanes.requests_of(lane) {
            self.data_written(token, Err(IoFailed));
            self.source_read(token, Err(IoFailed));
        }
    }

    /// Sends a message. Returns false if the lane is gone.
    fn send(&mut self, lane: u32, message: ToLane) -> bool {
        self.lanes.send(&self.shared, lane, message)
    }

    fn refuse(&mut self, lane: u32, request: RequestId, refusal: Refusal) {
        let result = Err(refusal);
        self.send(lane, ToLane::Answer { request, result });
    }
}

/// The core's intents.
impl Keeper {
    fn pump(&mut self) {
        // Only the I/O in flight ends: a check or a copy of data would go on for long.
        if self.commands.is_last() {
            return;
        }
        self.submit_backlog();
        loop {
            let Stage::Open(pool) = &mut self.stage else {
                return;
            };
            let intent = pool.poll();
            self.publish_table();
            self.publish();
            let Some(intent) = intent else {
                let before = self.backlog.len();
                self.submit_backlog();
                if self.backlog.len() == before {
                    break;
                }
                continue;
            };
            self.carry_out(intent);
        }
        if let Stage::Open(pool) = &mut self.stage {
            let settled = pool.follow().settled_lsn();
            self.shared.settled.store(settled, Ordering::SeqCst);
        }
    }

    fn carry_out(&mut self, intent: Intent) {
        match intent {
            Intent::Write { io, at, bytes } => self.disks.write(io, at, bytes),
            Intent::Flush { io, disk } => self.disks.flush(io, disk),
            Intent::ReadPage { io, at } => self.disks.read(io, at, PAGE),
            Intent::Discard { io, at, len } => self.disks.discard(io, at, len),
            Intent::Data {
                token,
                unit,
                granules,
                copy,
            } => self.order_data(token, unit, granules, copy),
            Intent::ReadSource {
                token,
                unit,
                granules,
            } => self.order_read(token, unit, granules),
            Intent::ReadExternal {
                token,
                version,
                place,
                granules,
            } => self.order_external(token, (version, place), granules),
            Intent::Left { disk, result } => {
                if let Stage::Open(pool) = &self.stage {
                    self.departures.begin(pool, &mut self.disks, disk, result);
                }
                self.update_status();
            }
            Intent::Full { token } => self.full.begin(token),
            Intent::AwaitGrace { epoch } => {
                let before = self.shared.epoch.fetch_add(1, Ordering::SeqCst);
                self.grace.awaited = Some((epoch, before));
            }
            Intent::Answer { token, result } => self.answered(token, result),
        }
    }

    fn order_data(&mut self, token: Token, unit: u64, granules: u16, copy: u16) {
        let epoch = self.shared.epoch.load(Ordering::SeqCst);
        self.grace.begin(epoch);
        if is_own(token) {
            debug_assert_eq!(granules, 0, "a fill has only copies");
            return self.write_fill(token, unit, copy, epoch);
        }
        let (lane, request) = ((token >> 32) as u32, token as u32);
        let state = LaneRequest::Writes { epoch };
        self.lanes.requests.insert(token, state);
        let order = ToLane::Data {
            request,
            unit,
            copy,
        };
        if !self.send(lane, order) {
            self.data_written(token, Err(IoFailed));
        }
    }

    fn order_read(&mut self, token: Token, unit: u64, granules: u16) {
        let epoch = self.shared.epoch.load(Ordering::SeqCst);
        self.grace.begin(epoch);
        if is_own(token) {
            return self.read_fill(token, unit, granules, epoch);
        }
        self.order_read_of(token, unit, granules, LaneRequest::Reads { epoch });
    }

    fn order_read_of(&mut self, token: Token, unit: u64, granules: u16, state: LaneRequest) {
        let (lane, request) = ((token >> 32) as u32, token as u32);
        self.lanes.requests.insert(token, state);
        let order = ToLane::ReadSource {
            request,
            unit,
            granules,
        };
        if !self.send(lane, order) {
            self.source_read(token, Err(IoFailed));
        }
    }

    fn answered(&mut self, token: Token, result: Result<Answer, Refusal>) {
        let lane = (token >> 32) as u32;
        if lane == 0 {
            return self.command_answered(token, result);
        }
        let result = self.full.ended(token, result);
        self.lanes.remove(token, &mut self.grace);
        let request = token as u32;
        let result = result.map(|_| ());
        self.send(lane, ToLane::Answer { request, result });
    }
}

/// I/O and time.
impl Keeper {
    fn poll_disk(&mut self, now: Nanos) -> u32 {
        let mut ended = std::mem::take(&mut self.ended);
        self.disks.poll(now, &mut ended);
        self.externals.poll(now, &mut ended);
        let count = ended.len() as u32;
        interruption::look_at_losses(self);
        for io in ended.drain(..) {
            match &mut self.stage {
                Stage::Opening(opening) => opening.ended(io),
                Stage::Open(pool) => {
                    let outcome = |status: Status| status.is_ok().then_some(()).ok_or(IoFailed);
                    match io {
                        Ended::Written(tag, status) if tag & FILL != 0 => {
                            self.fill_written(tag, status)
                        }
                        Ended::Read(tag, result) if tag & FILL != 0 => self.fill_read(tag, result),
                        Ended::Read(io, result) => {
                            pool.page_read(io, result.as_deref().map_err(|_| IoFailed))
                        }
                        Ended::Written(io, status) => pool.written(io, outcome(status)),
                        Ended::Flushed(io, status) => pool.flushed(io, outcome(status)),
                        Ended::Discarded(io, status) => pool.discarded(io, outcome(status)),
                    }
                }
                Stage::Interrupted | Stage::Closed => {}
            }
        }
        self.ended = ended;
        count
    }

    fn look_at_grace(&mut self) {
        let (Stage::Open(pool), Some((number, epoch))) = (&mut self.stage, self.grace.awaited)
        else {
            return;
        };
        if self.grace.ordered[(epoch % 3) as usize] > 0 {
            return;
        }
        let lanes = self.shared.lanes.lock();
        if lanes.iter().any(|lane| lane.counts.of(epoch) > 0) {
            return;
        }
        drop(lanes);
        self.grace.awaited = None;
        pool.grace_ended(number);
    }

    fn look_at_time(&mut self, now: Nanos) {
        if let Stage::Open(pool) = &mut self.stage {
            self.times.check_due(now, pool, self.status.has_hidden());
            let has_requests = !self.lanes.requests.is_empty();
            let is_busy = || {
                let lanes = self.shared.lanes.lock();
                has_requests || lanes.iter().any(|lane| lane.counts.are_any())
            };
            self.times.pace_moves(now, pool, is_busy);
        }
    }

    fn look_at_status(&mut self, now: Nanos, is_busy: bool) {
        if let Stage::Open(pool) = &self.stage {
            let last_lsn = self.times.last_lsn;
            let departures = &self.departures;
            self.status
                .check_due(now, is_busy, pool, departures, last_lsn);
        }
    }

    fn update_status(&mut self) {
        if let Stage::Open(pool) = &self.stage {
            self.status
                .update(pool, &self.departures, self.times.last_lsn);
        }
    }

    /// Returns the amount of work.
    fn advance_addition(&mut self, now: Nanos) -> u32 {
        let Stage::Open(pool) = &self.stage else {
            return 0;
        };
        let (count, ready) = self.additions.advance(now, pool, &mut self.disks);
        if let Some((request, answer)) = ready {
            let token = self.commands.insert(Open::AddDisk(answer));
            self.submit(token, request);
        }
        count
    }

    /// Registers the descriptors of the queues after these have changed.
    fn refresh_fds(&mut self) {
        if let Some(poller) = self.core.current_poller()
            && self.disks.take_new_fds() | self.externals.take_new_fds()
        {
            self.core.refresh_wake_fds(poller);
        }
    }

    /// Closes the pool: answers all requests, and makes the maps unusable for lanes. The caller
    /// removes the poller.
    pub(super) fn close(&mut self) {
        if matches!(self.stage, Stage::Closed) {
            return;
        }
        if let Stage::Opening(opening) = &mut self.stage {
            opening.give_up();
        }
        self.stage = Stage::Closed;
        self.shared.status.lock().state = PoolState::Closed;
        self.shared.news.notify_one();
        for map in self.maps.values() {
            map.set_gone();
        }
        self.shared.announce_external();
        let left = self.shared.inbox.close();
        for message in left {
            match message {
                KeeperMessage::Command(request) => request.answer.closed(),
                KeeperMessage::Lane(lane, message) => {
                    if let Some(request) = message.request() {
                        self.refuse(lane, request, Refusal::Exported);
                    }
                }
            }
        }
        for token in std::mem::take(&mut self.lanes.requests).into_keys() {
            self.refuse((token >> 32) as u32, token as u32, Refusal::Exported);
        }
        self.additions.close();
        self.commands.close();
        self.shared.release_claims();
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.close();
    }
}

impl Poller for Keeper {
    fn name(&self) -> &str {
        "pool"
    }

    fn poll(&mut self, now: Nanos, _budget: u32) -> Work {
        let mut count = self.take_inbox();
        count += self.poll_disk(now);
        if matches!(self.stage, Stage::Opening(_)) {
            self.advance_opening();
        }
        count += self.advance_addition(now);
        let departed = self.departures.advance(now, &mut self.disks);
        if departed > 0 {
            self.update_status();
            self.departures.announce_ended();
        }
        count += departed
            + self
                .commands
                .advance_end(now, &mut self.disks, &self.externals);
        self.look_at_time(now);
        self.look_at_full(now);
        self.look_at_grace();
        self.pump();
        count += self.advance_scans();
        // New I/O reaches the disk in this turn.
        count += self.poll_disk(now);
        if count > 0 {
            self.pump();
        }
        self.refresh_fds();
        self.look_at_status(now, count > 0);
        if self.externals.is_idle()
            && self
                .commands
                .is_closing_done(now, &self.disks, &self.departures)
        {
            self.farewell = self.commands.farewell();
            self.close();
            remove_current(&self.core);
        }
        match count {
            0 => Work::None,
            count => Work::Did(count),
        }
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        self.shared.inbox.arm();
        let times = [
            self.status.due(),
            self.full.next(),
            self.grace.awaited.map(|_| now + GRACE_LOOK),
        ];
        let idle = times.into_iter().flatten().chain(self.times.due());
        let disks = self.disks.arm(now).and(self.additions.due(now));
        let disks = disks.and(self.externals.arm(now));
        let disks = disks.and(self.departures.due(now));
        let disks = disks.and(self.commands.due(now));
        if matches!(self.stage, Stage::Interrupted) {
            return disks;
        }
        let idle = idle.fold(disks, |idle, at| idle.and(Idle::Until(at)));
        if self.stage.searches(&self.commands) || !self.backlog.is_empty() || self.full.has_new() {
            return Idle::Busy;
        }
        idle
    }

    fn disarm(&mut self) {
        self.shared.inbox.disarm();
        self.disks.disarm();
        self.externals.disarm();
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        let fds = self.disks.wake_fds().chain(self.externals.wake_fds());
        let fds = fds.chain([self.shared.inbox.as_fd()]);
        fds.map(|fd| fd.try_clone_to_owned()).collect()
    }
}
