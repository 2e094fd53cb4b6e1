//! The messages of the management thread to the target side on one core: new connections, and
//! events of connections and devices.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_nvmf::transport::{Closed, QueueKind};
use nacre_nvmf_wire::{Cqe, Sqe};
use nacre_reactor::Interest;
use nacre_transport_rdma_verbs::{Lane, LaneConfig, Receiver, RecvConfig};

use super::{ByNumber, Device, RdmaTransport, Slot};
use crate::accept::CROWDED;
use crate::conn::{Conn, Limits, Names};
use crate::shared::{Ended, Incoming, ToControl, ToCore};
use crate::stats::add;

impl RdmaTransport {
    /// Handles all messages in the core's inbox.
    pub(super) fn take_messages(&mut self) {
        while let Some(message) = self.core.inbox.pop() {
            match message {
                ToCore::Incoming(incoming) => {
                    let id = incoming.id;
                    if let Err(why) = self.adopt(*incoming) {
                        self.shared.mailbox.send(ToControl::Refused(id, why));
                    }
                }
                ToCore::Established(id) => {
                    if let Some(&index) = self.by_id.get(&id) {
                        if let Some(conn) = self.slots[index as usize].conn.as_deref_mut() {
                            conn.live = true;
                        }
                        self.notice(index);
                    }
                }
                ToCore::Crowded => {
                    self.crowded_until = self.now + CROWDED;
                    self.next_deadline = self.now;
                }
                ToCore::DeviceGone => {}
                ToCore::QueuesFailed(queues) => {
                    let is_it = |device: &Option<Device>| {
                        device.as_ref().is_some_and(|d| d.queues.id() == queues)
                    };
                    if let Some(at) = self.devices.iter().position(is_it) {
                        self.device_failed(at, "its device reported it");
                    }
                }
                ToCore::LastReceive(id) => {
                    if let Some(&index) = self.by_id.get(&id)
                        && let Some(conn) = self.slots[index as usize].conn.as_deref_mut()
                    {
                        conn.last_receive = true;
                        if let Some(device) = &mut self.devices[conn.device] {
                            device.reports_last_receive = true;
                        }
                        self.notice(index);
                    }
                }
                ToCore::Ended(id, ended) => {
                    if let Some(&index) = self.by_id.get(&id) {
                        self.end(
                            index,
                            match ended {
                                Ended::Peer => Closed::Peer,
                                Ended::DeviceRemoved => {
                                    Closed::Broken("the RDMA device failed or was removed".into())
                                }
                                Ended::AddressChanged => Closed::Broken(
                                    "the address moved to another RDMA device".into(),
                                ),
                                Ended::Failed(event) => Closed::Broken(event.into()),
                            },
                        );
                    }
                }
            }
        }
        self.forget_devices();
    }

    /// Fails if the core's buffers do not suffice for `entries` more receives, beside the receives
    /// of all connections and shared receive queues.
    fn room_for(&self, entries: usize) -> Result<(), String> {
        let devices = self.devices.iter().flatten();
        let shared: u32 = devices.filter_map(|of| of.queues.srq_entries()).sum();
        let conns = self.slots.iter().filter_map(|slot| slot.conn.as_deref());
        let own = conns.filter(|conn| !conn.lane.queues().is_shared());
        let taken = shared as usize + own.map(|conn| conn.limits.depth).sum::<usize>();
        let limit = self.receives;
        if taken + entries <= limit {
            return Ok(());
        }
        Err(format!(
            "{entries} receives more are needed on core {}, and {taken} of {limit} are taken: use more cores, a smaller \
             srq_size or max_queue_depth; or restart, if devices have been added",
            self.core.core
        ))
    }

    /// Creates the connection of a new queue pair, and posts its receives. On failure the queue
    /// pair is destroyed.
    pub(super) fn adopt(&mut self, incoming: Incoming) -> Result<(), String> {
        let device = self.device(&incoming)?;
        let config = &self.shared.config;
        let shared = incoming.endpoint.queues().is_shared();
        if !shared {
            self.room_for(incoming.depth.into())?;
        }
        let headers = |entries: usize| self.headers.acquire(entries * Sqe::SIZE);
        let recv = if shared {
            None
        } else {
            Some(RecvConfig {
                headers: headers(incoming.depth.into()).ok_or("no memory for receives is left")?,
                header_bytes: Sqe::SIZE as u32,
                entries: incoming.depth.into(),
                data_bytes: config.receive_data_size(),
            })
        };
        // A device that cannot have a power of two cannot grant more than was asked for, either.
        let places = incoming.sends.next_power_of_two() as usize;
        let messages = self.messages.acquire(places * Cqe::SIZE);
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let made = (|| {
            let lane_config = LaneConfig {
                index,
                key_slot: incoming.key_slot,
                messages: messages.ok_or("no memory for responses is left")?,
                message_bytes: Cqe::SIZE as u32,
                recv,
            };
            let mut lane = Lane::new(incoming.endpoint, lane_config).map_err(|e| e.to_string())?;
            let posted = lane.post_recv(self.data.as_ref());
            let posted = posted.map_err(|e| e.to_string())?;
            add(&self.stats[device].receives_posted, posted as u64);
            Ok(lane)
        })();
        let lane = match made {
            Ok(lane) => lane,
            Err(why) => {
                self.free.push(index);
                return Err(why);
            }
        };
        let own = incoming.in_capsule != config.in_capsule_data_size;
        let caps = own.then(|| Box::new(config.caps(incoming.in_capsule)));
        let announced = caps.as_deref().unwrap_or(&self.caps);
        let limits = Limits {
            in_capsule: match incoming.kind {
                QueueKind::Admin => announced.admin_in_capsule_bytes,
                QueueKind::Io => announced.in_capsule_bytes,
            },
            max_descriptors: announced.max_sgl_descriptors,
            caps,
            depth: incoming.depth.into(),
            read_depth: incoming.read_depth.into(),
            invalidate: incoming.invalidate,
        };
        self.by_id.insert(incoming.id, index);
        if let Some(device) = &mut self.devices[device] {
            device.by_number.insert(lane.number(), index);
            device.conns += 1;
        }
        let names = Names {
            id: incoming.id,
            listener: incoming.listener,
            local: incoming.local,
            peer: incoming.peer,
        };
        let mut conn = Conn::new(lane, device, names, limits, self.now);
        if conn.lane.idle_receives() > 0 {
            conn.starved = true;
            self.starved.push_back(index);
        }
        if !shared {
            self.stats[device].receives_are(conn.limits.depth, 0);
        }
        self.slots[index as usize].conn = Some(Box::new(conn));
        self.count += 1;
        let timeout = self.connect_patience();
        self.next_deadline = self.next_deadline.min(self.now + timeout);
        self.shared.mailbox.send(ToControl::Ready(incoming.id));
        Ok(())
    }

    /// The index of the connection's device on this core. Adds the device at its first connection.
    pub(super) fn device(&mut self, incoming: &Incoming) -> Result<usize, String> {
        let queues = incoming.endpoint.queues();
        let is_it =
            |known: &Option<Device>| known.as_ref().is_some_and(|d| d.queues.is_same(queues));
        if let Some(at) = self.devices.iter().position(is_it) {
            return Ok(at);
        }
        let entries = queues.srq_entries();
        let receiver = match entries {
            None => None,
            Some(entries) => {
                self.room_for(entries as usize)?;
                let headers = self.headers.acquire(entries as usize * Sqe::SIZE);
                let recv = RecvConfig {
                    headers: headers.ok_or("no memory for another device's receives is left")?,
                    header_bytes: Sqe::SIZE as u32,
                    entries,
                    data_bytes: self.shared.config.receive_data_size(),
                };
                let made = Receiver::new(queues, incoming.key_slot, recv);
                made.map_err(|error| error.to_string())?
            }
        };
        let stats = self.core.stats(&queues.domain().attributes().name);
        let mut device = Device {
            id: incoming.device,
            queues: queues.clone(),
            receiver,
            by_number: ByNumber::default(),
            conns: 0,
            dead: false,
            reports_last_receive: false,
            may_invalidate: Arc::clone(&incoming.may_invalidate),
        };
        if let Some(receiver) = &mut device.receiver {
            let posted = receiver
                .post(self.data.as_ref())
                .map_err(|error| error.to_string())?;
            add(&stats.receives_posted, posted as u64);
        }
        self.wakes
            .add(queues.cq().fd(), 0, Interest::READ)
            .map_err(|error| error.to_string())?;
        stats.receives_are(entries.unwrap_or(0) as usize, 0);
        let at = self
            .devices
            .iter()
            .position(Option::is_none)
            .unwrap_or_else(|| {
                self.devices.push(None);
                self.stats.push(Arc::clone(&stats));
                self.devices.len() - 1
            });
        self.stats[at] = stats;
        self.devices[at] = Some(device);
        Ok(at)
    }

    /// Posts receives of connections that wait for buffers, as far as there are free ones.
    pub(super) fn feed(&mut self) {
        for _ in 0..self.starved.len() {
            let Some(index) = self.starved.pop_front() else {
                return;
            };
            let conn = self.slots[index as usize].conn.as_deref_mut();
            let Some(conn) = conn.filter(|conn| conn.closing.is_none()) else {
                continue;
            };
            let posted = conn.lane.post_recv(self.data.as_ref());
            if let Ok(receives) = posted {
                let counted = &self.stats[conn.device].receives_posted;
                add(counted, receives as u64);
            }
            match posted {
                Ok(_) if conn.lane.idle_receives() == 0 => conn.starved = false,
                // There are no more: it goes on with this one.
                Ok(_) => return self.starved.push_front(index),
                Err(error) => self.end(index, Closed::Broken(error.to_string())),
            }
        }
    }

    /// Forgets devices and queues that the management thread has released, once no queue pair uses
    /// them: one that this core has returned to the thread may still write to posted buffers.
    pub(super) fn forget_devices(&mut self) {
        if self.devices.iter().flatten().all(|device| device.conns > 0) {
            return;
        }
        let known = self.core.queues();
        for (place, stats) in self.devices.iter_mut().zip(&self.stats) {
            if let Some(device) = place
                && device.conns == 0
                && !device.queues.has_endpoints()
                && known
                    .get(&device.id)
                    .is_none_or(|(queues, _)| !queues.is_same(&device.queues))
            {
                let _ = self.wakes.delete(device.queues.cq().fd());
                let shared = device.queues.srq_entries().unwrap_or(0);
                stats.receives_are(0, shared as usize);
                stats.receives_waiting.store(0, Ordering::Relaxed);
                *place = None;
            }
        }
    }
}
