//! [`QueueGroup`]: all queue pairs of one core, as one poller of its reactor.
//!
//! ```text
//!              Transport::poll                     Queue::submit
//!   capsule ──────────────────▶ decode ─▶ buffer ─▶ fetch ─▶ device
//!                                                              │ Queue::poll
//!   response ◀────────────────────── respond ◀─────────────────┘
//!              Transport::flush
//! ```
//!
//! Every command that completes ends in `QueuePair::conclude`, unless it got no place in the
//! request table. A command that must wait is in a bounded list. A command that waits for a buffer
//! is in the group's list. One that waits for a full device is in the device's list. One that waits
//! for the fetch window is in the queue pair's list. The group retries the first two lists each
//! turn. So a lack of buffers or of room in a device delays commands and does not fail them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nacre_bdev::Done;
use nacre_nvmf_wire::StatusCode;
use nacre_reactor::{Idle, Nanos, Poller, Work};

use crate::queues::buffers::Buffers;
use crate::queues::device;
use crate::queues::queue_pair::{ConnectionEnds, Stage};
use crate::queues::queue_pairs::QueuePairs;
use crate::queues::resources::Resources;
use crate::queues::waiting::WaitingList;
use crate::subsystems::core_handle::GroupHandle;
use crate::subsystems::nvmf_target::Target;
use crate::transport::{Event, Events, Pools};

/// The limits of a group.
#[derive(Debug, Clone, Copy)]
pub struct GroupConfig {
    /// Most queue pairs of the group.
    pub max_queues: usize,
    /// Most events of a transport, and most completions of a device, per turn.
    pub batch: usize,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self {
            max_queues: 16_384,
            batch: 512,
        }
    }
}

/// The queue pairs of one core.
pub struct QueueGroup {
    pub(crate) queues: QueuePairs,
    pub(crate) core: Resources,
    events: Events,
    done: Done,
    pub(super) upkeep_at: Nanos,
}

impl QueueGroup {
    /// Creates the group of `core` (from 0, below [`Target::cores`]). `wake` wakes its reactor.
    pub fn new(
        target: Arc<Target>,
        core: usize,
        pools: Pools,
        wake: Arc<dyn Fn() + Send + Sync>,
        config: GroupConfig,
    ) -> std::io::Result<Self> {
        assert!(
            core < target.cores(),
            "core {core} of a target for {}",
            target.cores()
        );
        let handle = GroupHandle::new(core, Arc::clone(&wake));
        target.add_group(handle.clone());
        // Open the transports that were added earlier.
        handle.wake();
        Ok(Self {
            queues: QueuePairs::new(config.max_queues),
            core: Resources::new(target, handle, pools, wake)?,
            events: Events::with_capacity(config.batch),
            done: Done::with_capacity(config.batch),
            upkeep_at: Nanos::ZERO,
        })
    }

    /// Runs one turn. Returns the number of handled events, completions, messages and waiting
    /// commands.
    pub fn turn(&mut self, now: Nanos) -> u32 {
        let mut did = 0;
        if self.core.handle.has_messages() {
            did += self.take_messages(now);
        }
        for port in 0..self.core.ports.count() {
            did += self.poll_port(port, now);
        }
        did += self.poll_devices(now);
        if !self.core.reserving.is_idle() {
            did += self.reservation_turn(now);
        }
        if !self.core.listings.is_idle() {
            did += self.listing_turn(now);
        }
        if !self.core.buffers.waiting_admin.is_empty() {
            did += self.feed(now, |buffers| &mut buffers.waiting_admin);
        }
        if !self.core.buffers.waiting.is_empty() {
            did += self.feed(now, |buffers| &mut buffers.waiting);
        }
        if now >= self.upkeep_at {
            self.upkeep(now);
        }
        self.core.ports.flush(now);
        did
    }

    fn poll_port(&mut self, port: usize, now: Nanos) -> u32 {
        let mut events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        let Resources { ports, buffers, .. } = &mut self.core;
        ports.poll(port, now, &buffers.pools, &mut events);
        let count = events.len() as u32;
        for event in events.drain() {
            self.handle_event(port, event, now);
        }
        self.events = events;
        count
    }

    #[inline]
    fn handle_event(&mut self, port: usize, event: Event, now: Nanos) {
        let event = match event {
            Event::Opened {
                conn,
                listener,
                local,
                peer,
            } => {
                let ends = ConnectionEnds {
                    listener,
                    local,
                    peer,
                };
                return self.open_queue((port, conn), ends, now);
            }
            event => event,
        };
        let Some(id) = self.core.ports.queue_of(port, event.conn()) else {
            return;
        };
        let (qp, core) = (self.queues.present(id.index), &mut self.core);
        let is_live = qp.stage != Stage::Ending;
        match event {
            Event::Capsule { sqe, data, .. } => core.capsule(qp, sqe, data, now),
            Event::Fetched { tag, data, .. } if is_live => {
                core.fetched(qp, tag.index, Ok(data), now);
            }
            Event::FetchDamaged { tag, .. } if is_live => {
                let status = StatusCode::TRANSIENT_TRANSPORT_ERROR;
                core.fetched(qp, tag.index, Err(status), now);
            }
            Event::FetchRefused { tag, status, .. } if is_live => {
                core.fetched(qp, tag.index, Err(status), now);
            }
            Event::CapsuleDamaged { sqe, .. } if is_live => core.capsule_damaged(qp, sqe, now),
            Event::Closed { why, .. } => core.connection_closed(qp, &why),
            _ => {}
        }
        self.after_access(id.index, now);
    }

    /// Handles requests of a command to the whole core. Call this after each access to a queue
    /// pair.
    #[inline]
    pub(super) fn after_access(&mut self, q: u32, now: Nanos) {
        if !self.core.aborts.is_empty() {
            self.start_aborts(now);
        }
        if self.queues.present(q).stage == Stage::Ending {
            self.reap(q);
        }
    }

    /// Continues commands that wait for a buffer, in order, while buffers are free.
    fn feed(&mut self, now: Nanos, list: fn(&mut Buffers) -> &mut WaitingList) -> u32 {
        let queues = &self.queues;
        list(&mut self.core.buffers).tidy(|known| queues.waits_for_buffer(known));
        let mut fed = 0;
        while let Some(first) = list(&mut self.core.buffers).first() {
            let waits = self.queues.waits_for_buffer(&first);
            if waits {
                let qp = self.queues.present(first.queue);
                let mut command = self.core.command(qp, first.request, now);
                if !command.try_gather(false) {
                    break;
                }
                self.after_access(first.queue, now);
            }
            list(&mut self.core.buffers).pop();
            fed += u32::from(waits);
        }
        fed
    }

    fn poll_devices(&mut self, now: Nanos) -> u32 {
        let mut did = 0;
        for at in 0..self.core.devices.busy() {
            let slot = self.core.devices.busy_at(at);
            let mut done = std::mem::replace(&mut self.done, Done::with_capacity(0));
            self.core.devices.poll(slot, now, &mut done);
            did += done.len() as u32;
            for completion in done.drain() {
                let (q, index, child) = device::split_token(completion.token);
                let qp = self.queues.present(q);
                let mut command = self.core.command(qp, index, now);
                command.child_done(child, completion);
                self.after_access(q, now);
            }
            self.done = done;
            did += self.resubmit(slot, now);
        }
        self.core.devices.remove_idle(did > 0);
        did
    }

    /// Resubmits commands that wait for a full device, in order, while it accepts them.
    fn resubmit(&mut self, slot: usize, now: Nanos) -> u32 {
        let mut did = 0;
        self.core.devices.tidy_waiting(slot, &self.queues);
        while let Some(first) = self.core.devices.next_waiting(slot) {
            if !self.queues.waits_for_room(&first) {
                continue;
            }
            let qp = self.queues.present(first.queue);
            let mut command = self.core.command(qp, first.request, now);
            command.request().waiting = false;
            if command.advance(Some(slot)) {
                break;
            }
            did += 1;
        }
        did
    }

    /// Continues reservation commands that wait. Returns the number of completed ones and of
    /// drained fences.
    fn reservation_turn(&mut self, now: Nanos) -> u32 {
        let mut did = self.core.reserving.report_drained(&self.queues);
        for _ in 0..self.core.reserving.waiting() {
            let Resources {
                reserving, handle, ..
            } = &mut self.core;
            if let Some((request, status)) = reserving.continue_next(handle) {
                did += 1;
                if let Some(mut command) = self.deferred(&request, now) {
                    command.finish(status);
                }
            }
        }
        did
    }

    /// Number of bdev queues that are open on this core.
    pub fn devices_open(&self) -> usize {
        self.core.devices.open()
    }

    /// Number of queue pairs on this core.
    pub fn queue_pairs(&self) -> usize {
        self.queues.len()
    }
}

impl Poller for QueueGroup {
    fn name(&self) -> &str {
        "nvmf"
    }

    fn poll(&mut self, now: Nanos, _budget: u32) -> Work {
        match self.turn(now) {
            0 => Work::None,
            did => Work::Did(did),
        }
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        let Resources {
            handle,
            buffers,
            devices,
            ports,
            ..
        } = &mut self.core;
        if handle.has_messages() || buffers.all_waiting() > 0 {
            return Idle::Busy;
        }
        let mut idle = devices.arm(now).and(ports.arm(now));
        // The upkeep closes devices that stay open after the last queue pair.
        if self.queues.len() > 0 || devices.open() > 0 {
            idle = idle.and(Idle::Until(self.upkeep_at));
        }
        idle
    }

    fn disarm(&mut self) {
        self.core.devices.disarm();
        self.core.ports.disarm();
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(vec![self.core.sleepers.wake_fd()?])
    }
}
