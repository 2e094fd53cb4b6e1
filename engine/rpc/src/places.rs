//! Limits the number of network clients. Each client takes one of a fixed number of places. If all
//! are taken, a new client replaces the oldest client of the origin (an IPv4 address, or an IPv6
//! network) with the most clients. So slow or idle clients of one machine cannot lock out others.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::rc::Rc;

use nacre_reactor::Origin;
use tokio::sync::Notify;

/// The places, and the clients in them in order of arrival.
#[derive(Debug)]
pub struct Places {
    max: usize,
    open: RefCell<BTreeMap<u64, (IpAddr, Rc<Notify>)>>,
    next: Cell<u64>,
}

/// A client's place, freed on drop.
#[derive(Debug)]
pub struct NetworkPlace {
    id: u64,
    leave: Rc<Notify>,
    places: Rc<Places>,
}

impl NetworkPlace {
    /// Resolves when a new client has replaced this one: the connection must be closed.
    pub async fn must_leave(&self) {
        self.leave.notified().await;
    }
}

impl Drop for NetworkPlace {
    fn drop(&mut self) {
        self.places.open.borrow_mut().remove(&self.id);
    }
}

impl Places {
    pub fn new(max: usize) -> Rc<Self> {
        Rc::new(Self {
            max,
            open: RefCell::default(),
            next: Cell::new(0),
        })
    }

    pub fn max(&self) -> usize {
        self.max
    }

    /// Takes a place for a client at `address`. Also returns the address of the client that it
    /// replaces, if any.
    pub fn enter(self: &Rc<Self>, address: IpAddr) -> (NetworkPlace, Option<IpAddr>) {
        let mut open = self.open.borrow_mut();
        let full = open.len() >= self.max;
        let gone = full.then(|| {
            let mut of_origin = HashMap::<Origin, usize>::new();
            for (address, _) in open.values() {
                *of_origin.entry(Origin::from(*address)).or_default() += 1;
            }
            // Keys ascend with time: the first of an origin is its oldest.
            let most = open.iter().min_by_key(|(id, (address, _))| {
                (std::cmp::Reverse(of_origin[&Origin::from(*address)]), **id)
            });
            *most.expect("it is full").0
        });
        let gone = gone
            .and_then(|id| open.remove(&id))
            .map(|(address, leave)| {
                leave.notify_one();
                address
            });
        let id = self.next.get();
        self.next.set(id + 1);
        let leave = Rc::new(Notify::new());
        open.insert(id, (address, Rc::clone(&leave)));
        let places = Rc::clone(self);
        (NetworkPlace { id, leave, places }, gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: addresses of one IPv6 network count together.
    #[test]
    fn a_network_makes_room() {
        let clients = Places::new(4);
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let first = clients.enter(address("2001:db8:0:1::1")).0;
        let many = [2, 3, 4].map(|n| clients.enter(address(&format!("2001:db8::{n}"))).0);
        let (last, gone) = clients.enter(address("2001:db8:0:2::1"));
        assert_eq!(gone, Some(address("2001:db8::2")));
        drop((first, many, last));
    }

    #[test]
    fn the_address_with_most_clients_makes_room() {
        const MAX: usize = 64;
        let clients = Places::new(MAX);
        let [lone, many]: [IpAddr; 2] = ["10.0.0.1", "10.0.0.2"].map(|a| a.parse().unwrap());
        let mut places = vec![clients.enter(lone).0];
        for _ in 1..MAX {
            let (place, gone) = clients.enter(many);
            assert_eq!(gone, None);
            places.push(place);
        }
        assert_eq!(clients.enter(lone).1, Some(many));
        assert!(!clients.open.borrow().contains_key(&1), "its oldest");
        drop(places);
        assert!(clients.open.borrow().is_empty());
    }
}
