//! A test device that several hosts share, with the part of NVMe reservations that volumes use.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nacre_bdev::reservation::{ActiveReservation, ReservationReport, ReservationRequest, Reserve};
use nacre_bdev::{
    Bdev, Busy, Completion, Done, Geometry, Io, Layer, LayerQueue, Limits, Op, OpenError, Queue,
    Status, Support, Token,
};
use nacre_hugepages::Pool;
use nacre_reactor::Nanos;
use parking_lot::Mutex;
use uuid::Uuid;

/// The reservation state of the shared device.
#[derive(Default)]
pub(super) struct Reservations {
    /// Registration keys by host.
    pub keys: BTreeMap<u8, u64>,
    pub held: ActiveReservation,
    /// Executed requests, except reports.
    pub requests: Vec<(u8, ReservationRequest)>,
    /// The failure of the next matching requests.
    pub failure: Option<InjectedFailure>,
    /// Queues do not return reservation requests when asked to.
    pub stubborn: bool,
    /// Opening a queue fails for lack of memory.
    pub short: bool,
    /// The device supports no reservations.
    pub unsupported: bool,
    /// Number of losses of its cache.
    pub losses: u64,
}

/// A failure of requests: those that `which` selects complete with `status` and are not executed.
pub(super) struct InjectedFailure {
    pub which: fn(&ReservationRequest) -> bool,
    pub status: Status,
    pub once: bool,
}

impl Reservations {
    fn may_write(&self, host: u8) -> bool {
        self.held == ActiveReservation::NotReserved || self.keys.contains_key(&host)
    }

    /// The Exclusive Access types exclude readers as well.
    fn may_read(&self, host: u8) -> bool {
        !matches!(self.held, ActiveReservation::Other(2 | 4 | 6)) || self.keys.contains_key(&host)
    }

    fn ask(&mut self, host: u8, ask: ReservationRequest) -> Result<ReservationReport, Status> {
        if let Some(InjectedFailure { status, once, .. }) =
            self.failure.take_if(|failure| (failure.which)(&ask))
        {
            if !once {
                let which = |_: &ReservationRequest| true;
                self.failure = Some(InjectedFailure {
                    which,
                    status,
                    once,
                });
            }
            return Err(status);
        }
        let is_mine = |key: u64, known: &Self| known.keys.get(&host) == Some(&key);
        let granted = match ask {
            ReservationRequest::Report => true,
            ReservationRequest::Register { current, .. } => {
                self.keys.get(&host).copied() == current
            }
            ReservationRequest::Unregister { key } => is_mine(key, self),
            ReservationRequest::Acquire { key } | ReservationRequest::Preempt { key } => {
                is_mine(key, self) && !matches!(self.held, ActiveReservation::Other(_))
            }
        };
        if !granted {
            return Err(Status::RESERVATION_CONFLICT);
        }
        match ask {
            ReservationRequest::Report => {
                let others = self.keys.iter().filter(|(h, _)| **h != host);
                return Ok(ReservationReport {
                    own: self.keys.get(&host).copied(),
                    others: others.map(|(_, key)| *key).collect(),
                    held: self.held,
                });
            }
            ReservationRequest::Register { key, .. } => drop(self.keys.insert(host, key)),
            ReservationRequest::Unregister { .. } => drop(self.keys.remove(&host)),
            ReservationRequest::Acquire { .. } => self.held = ActiveReservation::AllRegistrants,
            ReservationRequest::Preempt { .. } => self.keys.retain(|h, _| *h == host),
        }
        if self.keys.is_empty() {
            self.held = ActiveReservation::NotReserved;
        }
        self.requests.push((host, ask));
        Ok(ReservationReport::default())
    }
}

/// The shared device as the bdev of one host.
pub(super) struct SharedDevice {
    pub base: Arc<Layer>,
    pub name: String,
    pub host: u8,
    pub cut: Arc<Mutex<BTreeSet<String>>>,
    pub reservations: Arc<Mutex<Reservations>>,
}

impl SharedDevice {
    fn is_cut(&self) -> bool {
        self.cut.lock().contains(&self.name)
    }
}

impl Bdev for SharedDevice {
    fn name(&self) -> &str {
        self.base.name()
    }

    fn product_name(&self) -> &'static str {
        "shared device"
    }

    fn uuid(&self) -> Uuid {
        self.base.uuid()
    }

    fn geometry(&self) -> Geometry {
        self.base.geometry()
    }

    fn limits(&self) -> Limits {
        self.base.limits()
    }

    fn supports(&self, op: Op) -> Support {
        match self.base.supports(op) {
            Support::No => Support::No,
            _ => Support::Native,
        }
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        if self.reservations.lock().short {
            return Err(OpenError {
                bdev: self.name.clone(),
                what: "open".into(),
                source: std::io::ErrorKind::OutOfMemory.into(),
            });
        }
        Ok(Box::new(SharedQueue {
            base: self.base.open_queue(pool)?,
            device: self,
            refused: Vec::new(),
            request: None,
        }))
    }

    fn reserves(&self) -> bool {
        !self.reservations.lock().unsupported
    }

    fn losses(&self) -> u64 {
        self.reservations.lock().losses
    }
}

struct SharedQueue {
    base: LayerQueue,
    device: Arc<SharedDevice>,
    refused: Vec<Completion>,
    request: Option<Reserve>,
}

impl Queue for SharedQueue {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        let device = &self.device;
        let known = device.reservations.lock();
        let may = if io.op.is_write() {
            known.may_write(device.host)
        } else {
            known.may_read(device.host)
        };
        drop(known);
        let status = match device.is_cut() {
            true => Status::Gone,
            false if may => return self.base.submit(io),
            false => Status::RESERVATION_CONFLICT,
        };
        self.refused.push(io.complete(status));
        Ok(())
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        if let Some(Reserve { ask, answer }) = self.request.take() {
            let mut known = self.device.reservations.lock();
            let outcome = if self.device.is_cut() {
                Err(Status::Gone)
            } else {
                known.ask(self.device.host, ask)
            };
            drop(known);
            answer(outcome);
        }
        while done.has_room()
            && let Some(refused) = self.refused.pop()
        {
            done.push(refused);
        }
        self.base.poll(now, done);
        done.len() - before
    }

    fn abort(&mut self, token: Token) -> bool {
        let stubborn = self.device.reservations.lock().stubborn;
        !stubborn && self.base.abort(token)
    }

    fn inflight(&self) -> usize {
        self.base.inflight() + self.refused.len()
    }

    fn reserve(&mut self, request: Reserve) -> Result<(), Reserve> {
        match self.request {
            Some(_) => Err(request),
            None => {
                self.request = Some(request);
                Ok(())
            }
        }
    }
}
