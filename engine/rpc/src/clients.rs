//! Admission of clients (connections) to the RPC server: limits the number of clients and the bytes
//! of unsent replies, and selects the idle client that a new client replaces.
//!
//! A new client is admitted by the first rule that applies:
//!
//! ```text
//!   1. fewer than max_clients clients are connected
//!   2. a client has been idle for GRACE: the new client replaces the longest idle client of the
//!      origin with the most clients
//!   3. its origin has no other client, and one of the RESERVED slots is free
//!   4. otherwise it waits; it is refused when all clients have been busy for PATIENCE
//! ```
//!
//! The origin of a client of the Unix socket is its process, that of a client over TLS its address.
//! A client is idle while none of its calls runs. Its idle time begins again when it reads a part
//! of a reply. So the administrator's commands are served, however many connections other programs
//! leave open.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// Slots beyond `[rpc] max_clients`, for origins that have no other client.
pub const RESERVED: usize = 4;
/// A client that has been idle for less than this is not replaced.
pub const GRACE: Duration = Duration::from_secs(1);
/// How long a new client waits while the clients in all slots are busy.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// Limit of unsent replies over all clients, in bytes.
pub const UNSENT_BYTES: usize = 256 * 1024 * 1024;
/// Unsent bytes that each client may always have, so that short replies are never refused.
pub const UNSENT_EACH: usize = 64 * 1024;

/// Where a client comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// A process of this machine. `None`: it is outside the daemon's PID namespace.
    Process(Option<i32>),
    Address(IpAddr),
}

/// All connected clients, and the limits of their number and of their unsent bytes.
#[derive(Debug)]
pub struct Clients {
    max: usize,
    unsent_limit: usize,
    open: RefCell<BTreeMap<u64, Rc<Peer>>>,
    next: Cell<u64>,
    /// The time since when every slot has had a busy client.
    busy_since: Cell<Option<Instant>>,
    unsent: Cell<usize>,
    /// Notified when a client left or became idle.
    changed: Notify,
}

/// One connected client.
#[derive(Debug)]
pub struct Peer {
    id: u64,
    origin: Origin,
    running: Cell<usize>,
    /// The last time when it sent a request, one of its calls finished, or it read part of a reply.
    active: Cell<Instant>,
    unsent: Cell<usize>,
    leave: Notify,
    clients: Rc<Clients>,
}

/// The slot of a connected client. Dropping it frees the slot.
#[derive(Debug)]
pub struct Place(pub Rc<Peer>);

/// The result of [`Clients::enter`] for a new client.
#[derive(Debug)]
pub enum Entry {
    Admitted(Place),
    /// Admitted in place of an idle client of this origin.
    Replaced(Place, Origin),
    /// Retry after a change, or at this time.
    Wait(Instant),
    Full,
}

impl Clients {
    pub fn new(max: usize) -> Rc<Self> {
        Self::with_unsent(max, UNSENT_BYTES)
    }

    pub(super) fn with_unsent(max: usize, unsent_limit: usize) -> Rc<Self> {
        Rc::new(Self {
            max,
            unsent_limit,
            open: RefCell::default(),
            next: Cell::new(0),
            busy_since: Cell::new(None),
            unsent: Cell::new(0),
            changed: Notify::new(),
        })
    }

    pub fn max(&self) -> usize {
        self.max
    }

    /// Resolves when a client, after this call, disconnects or becomes idle: then
    /// [`Clients::enter`] may have another result.
    pub fn changed(&self) -> impl Future<Output = ()> + '_ {
        self.changed.notified()
    }

    /// Admits a new client by the rules of the module, or returns when to try again.
    pub fn enter(self: &Rc<Self>, origin: Origin, now: Instant) -> Entry {
        let open = self.open.borrow().len();
        if open < self.max {
            return Entry::Admitted(self.admit(origin, now));
        }
        if let Some(idle) = self.most_idle(now) {
            self.open.borrow_mut().remove(&idle.id);
            idle.leave.notify_one();
            return Entry::Replaced(self.admit(origin, now), idle.origin);
        }
        let others = self.clients_of(origin);
        if open < self.max + RESERVED && others == 0 {
            return Entry::Admitted(self.admit(origin, now));
        }
        let since = self.busy_since.get().unwrap_or(now);
        self.busy_since.set(Some(since));
        let end = since + PATIENCE;
        if now >= end {
            return Entry::Full;
        }
        let idle = |client: &Rc<Peer>| client.is_idle().then(|| client.active.get() + GRACE);
        let first = self.open.borrow().values().filter_map(idle).min();
        Entry::Wait(first.map_or(end, |first| first.min(end)))
    }

    fn admit(self: &Rc<Self>, origin: Origin, now: Instant) -> Place {
        self.busy_since.set(None);
        let id = self.next.get();
        self.next.set(id + 1);
        let client = Rc::new(Peer {
            id,
            origin,
            running: Cell::new(0),
            active: Cell::new(now),
            unsent: Cell::new(0),
            leave: Notify::new(),
            clients: Rc::clone(self),
        });
        self.open.borrow_mut().insert(id, Rc::clone(&client));
        Place(client)
    }

    fn clients_of(&self, origin: Origin) -> usize {
        let open = self.open.borrow();
        open.values().filter(|c| c.origin == origin).count()
    }

    /// The longest idle client of the origin with the most clients.
    fn most_idle(&self, now: Instant) -> Option<Rc<Peer>> {
        let open = self.open.borrow();
        let idle = |c: &&Rc<Peer>| c.is_idle() && now.duration_since(c.active.get()) >= GRACE;
        let mut of_origin = BTreeMap::<Origin, usize>::new();
        for client in open.values() {
            *of_origin.entry(client.origin).or_default() += 1;
        }
        let rank = |c: &&Rc<Peer>| {
            let most = std::cmp::Reverse(of_origin[&c.origin]);
            (most, c.active.get(), c.id)
        };
        open.values().filter(idle).min_by_key(rank).cloned()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let clients = &self.0.clients;
        clients.open.borrow_mut().remove(&self.0.id);
        clients.busy_since.set(None);
        clients.changed.notify_waiters();
    }
}

impl Peer {
    fn is_idle(&self) -> bool {
        self.running.get() == 0
    }

    pub fn max_clients(&self) -> usize {
        self.clients.max
    }

    pub fn unsent_limit(&self) -> usize {
        self.clients.unsent_limit
    }

    /// Restarts the client's idle time.
    pub fn touch(&self, now: Instant) {
        self.active.set(now);
    }

    pub fn begin(self: &Rc<Self>, now: Instant) -> Running {
        self.touch(now);
        self.running.set(self.running.get() + 1);
        Running(Rc::clone(self))
    }

    /// Resolves when the client has been idle for this long.
    pub async fn idles_for(&self, limit: Duration) {
        loop {
            let end = self.active.get() + limit;
            if self.is_idle() && Instant::now() >= end {
                return;
            }
            // A call in progress ends later than that, and touches the client when it does.
            let next = if self.is_idle() {
                end
            } else {
                Instant::now() + limit
            };
            tokio::time::sleep_until(next.into()).await;
        }
    }

    /// Resolves when a new client has replaced this one: the connection must be closed.
    pub async fn must_leave(&self) {
        self.leave.notified().await;
    }

    /// Counts a reply of `bytes` as unsent until the charge is dropped. `None` if too many bytes
    /// are unsent already.
    pub fn charge(self: &Rc<Self>, bytes: usize) -> Option<Charge> {
        let (own, all) = (self.unsent.get() + bytes, self.clients.unsent.get() + bytes);
        if own > UNSENT_EACH && all > self.clients.unsent_limit {
            return None;
        }
        self.unsent.set(own);
        self.clients.unsent.set(all);
        Some(Charge {
            client: Rc::clone(self),
            bytes,
        })
    }
}

/// A running call of a client: the client is busy until this is dropped.
#[derive(Debug)]
pub struct Running(Rc<Peer>);

impl Drop for Running {
    fn drop(&mut self) {
        let client = &self.0;
        client.running.set(client.running.get() - 1);
        client.touch(Instant::now());
        client.clients.changed.notify_waiters();
    }
}

/// The bytes of an unsent reply. Dropping it subtracts them from the client's unsent bytes.
#[derive(Debug)]
pub struct Charge {
    client: Rc<Peer>,
    bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let (client, clients) = (&self.client, &self.client.clients);
        client.unsent.set(client.unsent.get() - self.bytes);
        clients.unsent.set(clients.unsent.get() - self.bytes);
    }
}

#[cfg(test)]
mod tests {
    //! Goal: no set of clients locks out another process for long, and unsent bytes are bounded.
    //! Method: instants chosen by the test.

    use super::*;

    const SCRIPT: Origin = Origin::Process(Some(100));
    const ADMINISTRATOR: Origin = Origin::Process(Some(200));

    fn admitted(entry: Entry) -> Place {
        match entry {
            Entry::Admitted(place) | Entry::Replaced(place, _) => place,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_longest_idle_client_of_the_busiest_process_makes_room() {
        let (clients, start) = (Clients::new(3), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        let _quiet = admitted(clients.enter(Origin::Process(Some(1)), at(0)));
        let first = admitted(clients.enter(SCRIPT, at(10)));
        let second = admitted(clients.enter(SCRIPT, at(20)));
        // All were active within the grace time: the reserved places are for other processes only.
        assert!(matches!(clients.enter(SCRIPT, at(30)), Entry::Wait(then) if then == at(1000)));
        first.0.touch(at(500));
        let entry = clients.enter(ADMINISTRATOR, at(1600));
        assert!(matches!(&entry, Entry::Replaced(_, SCRIPT)), "{entry:?}");
        assert!(!clients.open.borrow().contains_key(&second.0.id));
        assert!(clients.open.borrow().contains_key(&first.0.id));
        drop((first, second, entry));
        assert_eq!(clients.open.borrow().len(), 1);
    }

    #[test]
    fn reserved_places_come_before_waiting_for_busy_clients() {
        let (clients, start) = (Clients::new(2), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        let script = [0, 1].map(|_| admitted(clients.enter(SCRIPT, at(0))));
        let calls = script.each_ref().map(|place| place.0.begin(at(0)));
        let others: Vec<Place> = (0..RESERVED as i32)
            .map(|n| admitted(clients.enter(Origin::Process(Some(300 + n)), at(1))))
            .collect();
        let running: Vec<Running> = others.iter().map(|place| place.0.begin(at(1))).collect();
        assert!(matches!(clients.enter(SCRIPT, at(5000)), Entry::Wait(then) if then == at(7000)));
        assert!(matches!(
            clients.enter(ADMINISTRATOR, at(6999)),
            Entry::Wait(_)
        ));
        // The refusal of one client does not delay later ones.
        assert!(matches!(
            clients.enter(ADMINISTRATOR, at(7000)),
            Entry::Full
        ));
        assert!(matches!(
            clients.enter(ADMINISTRATOR, at(7001)),
            Entry::Full
        ));
        drop((running, others));
        admitted(clients.enter(ADMINISTRATOR, at(7002)));
        drop(calls);
    }

    #[test]
    fn unsent_answers_are_bounded_in_sum_and_short_ones_get_through() {
        let (clients, now) = (Clients::with_unsent(3, 1 << 20), Instant::now());
        let [one, two, three] = [0, 1, 2].map(|_| admitted(clients.enter(SCRIPT, now)));
        let first = one.0.charge(600 << 10).unwrap();
        assert!(two.0.charge(600 << 10).is_none(), "the sum is over 1 MiB");
        let second = two.0.charge(400 << 10).unwrap();
        assert!(two.0.charge(100 << 10).is_none());
        let short = three.0.charge(UNSENT_EACH).unwrap();
        assert!(three.0.charge(1).is_none());
        drop(first);
        three.0.charge(1).unwrap();
        drop((second, short));
        assert_eq!((clients.unsent.get(), two.0.unsent.get()), (0, 0));
    }
}
