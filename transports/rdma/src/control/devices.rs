//! The RDMA devices in use: their asynchronous events, their failures, and their release after
//! removal.
//!
//! The kernel may delay the removal of a device until no process has it open. A device with a
//! listener or a connection reports its removal by an event; for others the thread has to check.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_reactor::Interest;
use nacre_transport_rdma_verbs::{AsyncEvent, CmId, Device, DeviceId, Queues, VerbsError};

use super::Control;
use crate::accept::Offered;
use crate::incident::Incident;
use crate::shared::{Ended, Shared, ToCore};

/// Interval of checks for removed devices without listeners and connections.
pub(super) const LOOK: Duration = Duration::from_secs(2);

/// A device in use.
pub(crate) struct Used {
    device: Arc<dyn Device>,
    /// The device is gone and delivers no further events.
    silent: bool,
}

/// An event of a device.
enum DeviceEvent {
    Event(AsyncEvent),
    /// The device has no more events.
    Over,
}

impl Control {
    /// Starts to use a device: registers its memory, and watches its events.
    pub(crate) fn use_device(&mut self, shared: &Shared, id: DeviceId) -> Result<(), VerbsError> {
        if self.devices.contains_key(&id) {
            return Ok(());
        }
        let device = shared.provider.device(id)?;
        shared.memory.domain(&*shared.provider, id)?;
        if let Err(error) = self.watched.add(device.async_fd(), 2, Interest::READ) {
            tracing::warn!(%error, device = device.attributes().name, "events of a device are not watched");
        }
        let silent = false;
        self.devices.insert(id, Used { device, silent });
        Ok(())
    }

    /// Like [`Control::use_device`], for the device of a listener, which the configuration may
    /// restrict.
    pub(crate) fn use_listeners_device(
        &mut self,
        shared: &Shared,
        address: SocketAddr,
        id: DeviceId,
    ) -> Result<(), VerbsError> {
        if let Some(wanted) = &shared.config.device {
            let found = shared.provider.device(id)?;
            let name = &found.attributes().name;
            if wanted != name {
                return Err(VerbsError::Unavailable {
                    what: format!("{address} belongs to {name}, not to {wanted}"),
                    remedy: "leave the option `device` out, or choose an address of that device"
                        .into(),
                });
            }
        }
        self.use_device(shared, id)
    }

    /// Handles all pending events of devices.
    pub(super) fn device_events(&mut self, shared: &Shared) {
        let mut news = Vec::new();
        for (id, used) in self.devices.iter_mut().filter(|(_, used)| !used.silent) {
            loop {
                match used.device.next_async_event() {
                    Ok(Some(event)) => news.push((*id, DeviceEvent::Event(event))),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::debug!(%error, device = used.device.attributes().name, "a device has no events any more");
                        used.silent = true;
                        // The descriptor stays readable, so stop watching it.
                        let _ = self.watched.delete(used.device.async_fd());
                        news.push((*id, DeviceEvent::Over));
                        break;
                    }
                }
            }
        }
        let mut changed = false;
        for (id, news) in news {
            match news {
                DeviceEvent::Event(event) => changed |= self.device_event(shared, id, event),
                DeviceEvent::Over => {
                    self.device_failed(shared, id);
                    changed = true;
                }
            }
        }
        if changed {
            shared.notify_changed();
        }
    }

    /// Returns true if addresses may have changed.
    fn device_event(&mut self, shared: &Shared, id: DeviceId, event: AsyncEvent) -> bool {
        self.counts.async_events += 1;
        let Some(used) = self.devices.get(&id) else {
            return false;
        };
        let device = Arc::clone(&used.device);
        let name = &device.attributes().name;
        match event {
            AsyncEvent::CommunicationEstablished { .. } | AsyncEvent::SendQueueDrained { .. } => {
                return false;
            }
            AsyncEvent::LastWqeReached { qp } => {
                if let Some((id, conn)) = self.of_queue_pair(id, qp) {
                    conn.core.send(ToCore::LastReceive(id));
                }
                return false;
            }
            AsyncEvent::PortActive { .. } => {
                tracing::info!(device = name, "RDMA device: {event}");
                return true;
            }
            AsyncEvent::DeviceFatal => {
                tracing::error!(device = name, "the RDMA device failed: its connections end");
                self.device_failed(shared, id);
                return true;
            }
            // Addresses were added or removed.
            AsyncEvent::GidChange { .. }
            | AsyncEvent::LidChange { .. }
            | AsyncEvent::PkeyChange { .. }
            | AsyncEvent::SubnetManagerChange { .. }
            | AsyncEvent::ClientReregister { .. } => {
                tracing::info!(device = name, "RDMA device: {event}");
            }
            _ => tracing::warn!(device = name, "RDMA device: {event}"),
        }
        // A failed queue may deliver no completion that would report the failure.
        match event {
            AsyncEvent::CqError { cq } => {
                queues_failed(shared, id, |queues| queues.cq().number() == cq);
                false
            }
            AsyncEvent::SrqError { srq } => {
                queues_failed(shared, id, |queues| queues.srq_number() == Some(srq));
                false
            }
            AsyncEvent::QpFatal { qp } => {
                self.queue_pair_failed(id, qp, "IBV_EVENT_QP_FATAL");
                false
            }
            AsyncEvent::QpRequestError { qp } => {
                self.queue_pair_failed(id, qp, "IBV_EVENT_QP_REQ_ERR");
                false
            }
            AsyncEvent::QpAccessError { qp } => {
                self.queue_pair_failed(id, qp, "IBV_EVENT_QP_ACCESS_ERR");
                false
            }
            _ => true,
        }
    }

    fn of_queue_pair(&mut self, device: DeviceId, number: u32) -> Option<(CmId, &mut Offered)> {
        let mut conns = self.conns.iter_mut();
        let found = conns.find(|(_, c)| c.device == device && c.info.number == number);
        found.map(|(id, conn)| (*id, conn))
    }

    fn queue_pair_failed(&mut self, device: DeviceId, number: u32, event: &'static str) {
        if let Some((id, conn)) = self.of_queue_pair(device, number) {
            conn.end(id, Ended::Failed(event));
        }
    }

    /// Ends all connections of a failed device; its listeners are restored if it recovers.
    fn device_failed(&mut self, shared: &Shared, device: DeviceId) {
        for (id, conn) in &mut self.conns {
            if conn.device == device {
                conn.end(*id, Ended::DeviceRemoved);
            }
        }
        let listeners = self.listeners.values();
        let here = listeners.filter(|listener| listener.device == Some(device));
        let here: Vec<CmId> = here.filter_map(|listener| listener.id).collect();
        for id in here {
            self.lose(shared, id, "its device failed");
        }
        self.device_gone(shared, device, "its device failed");
    }

    pub(super) fn device_gone(&mut self, shared: &Shared, device: DeviceId, why: &'static str) {
        self.note_gone(shared, device, why);
        self.forget_gone(shared);
    }

    pub(super) fn note_gone(&mut self, shared: &Shared, id: DeviceId, why: &'static str) {
        let Some(used) = self.devices.get(&id) else {
            return;
        };
        if !self.gone.contains(&id) {
            self.gone.push(id);
            let device = used.device.attributes().name.clone();
            shared.incidents.add(Incident::DeviceLost { device, why });
        }
    }

    /// Devices without listeners and connections.
    pub(super) fn idle_devices(&self) -> impl Iterator<Item = DeviceId> {
        let all = self.devices.keys().copied();
        all.filter(|id| !self.is_used(*id))
    }

    fn is_used(&self, id: DeviceId) -> bool {
        let mut listeners = self.listeners.values();
        listeners.any(|listener| listener.device == Some(id))
            || self.conns.values().any(|conn| conn.device == id)
    }

    /// Releases removed devices that are not in use.
    pub(super) fn forget_gone(&mut self, shared: &Shared) {
        let idle: Vec<DeviceId> = self.idle_devices().collect();
        for id in idle {
            self.gone.retain(|gone| *gone != id);
            if shared.provider.device(id).is_ok() {
                continue;
            }
            for core in shared.cores().iter() {
                core.queues().remove(&id);
                core.send(ToCore::DeviceGone);
            }
            if let Some(Used { device, silent }) = self.devices.remove(&id)
                && !silent
            {
                let _ = self.watched.delete(device.async_fd());
            }
            shared.memory.forget(id);
        }
    }

    /// Releases devices whose removal caused no event, because they had no listener or connection.
    pub(super) fn release_idle_devices(&mut self, shared: &Shared) {
        if self.idle_devices().next().is_none() {
            return;
        }
        let now = Instant::now();
        if self.looked_at.is_some_and(|at| now < at + LOOK) {
            return;
        }
        self.looked_at = Some(now);
        // Listing the devices makes the provider detect a removal.
        if let Err(error) = shared.provider.devices() {
            tracing::debug!(%error, "the RDMA devices cannot be listed");
        }
        self.forget_gone(shared);
    }
}

/// Handles failed completion or receive queues of a device on one core. New connections get other
/// queues.
fn queues_failed(shared: &Shared, device: DeviceId, is_it: impl Fn(&Queues) -> bool) {
    for core in shared.cores().iter() {
        let mut all = core.queues();
        let queues = all.get(&device).map(|(queues, _)| queues);
        if let Some(queues) = queues.filter(|queues| is_it(queues)) {
            let id = queues.id();
            all.remove(&device);
            core.send(ToCore::QueuesFailed(id));
        }
    }
}
