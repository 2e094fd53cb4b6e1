//! Injects the failures (*troubles*) of a run at random times, most often at the holder, and ends
//! them.

use nacre_cluster_core::slots::controller_ids;
use nacre_cluster_core::volume::HoldingState;

use crate::events::{Event, Trouble};
use crate::names::{ALL_CORES, MILLI, SECOND, node_id};
use crate::world::World;

pub(crate) struct Troubles<'a>(pub &'a mut World);

impl Troubles<'_> {
    pub(crate) fn make(&mut self) {
        if !self.0.lively {
            return;
        }
        let pause = self.0.random.within(50, 1500) * MILLI;
        self.0.after(pause, Event::Trouble);
        if self.0.now < self.0.quiet_until {
            return;
        }
        let count = self.0.nodes.len();
        let holder = (0..count).find(|n| self.0.nodes[*n].volume.state() == HoldingState::Holding);
        // Most troubles meet the holder.
        let node = match holder {
            Some(holder) if self.0.random.percent(60) => holder,
            _ => self.0.random.index(count),
        };
        let other = (node + 1 + self.0.random.index(count - 1)) % count;
        match self.0.random.below(23) {
            0..=3 => {
                let which = self.0.random.below(6);
                let ms = self.0.random.within(50, 6000);
                self.0.stall(node, which, ms);
            }
            4..=6 => self.crash(node, 8000),
            7 => {
                let away = Trouble::StoreAway;
                self.begin(away, 6000);
            }
            8 => self.begin(Trouble::StoreFull, 5000),
            9..=11 => self.begin(Trouble::StoreCut(node), 6000),
            12 => self.begin(Trouble::Watch(node), 5000),
            13 | 14 => {
                let both = self.0.random.one_in(2);
                self.begin(Trouble::Link(node, other, both), 6000);
            }
            15 | 16 => self.begin(Trouble::Isolation(node), 6000),
            17 | 18 => self.handover(node, other),
            19 => self.begin(Trouble::Slow(node), 3000),
            20 | 21 => self.restart_others(node),
            _ => self.publish(node),
        }
    }

    pub(crate) fn begin(&mut self, trouble: Trouble, most_ms: u64) {
        let lasts = self.0.random.within(100, most_ms);
        self.0.note(|| format!("{trouble:?} for {lasts} ms"));
        self.set(trouble, true);
        self.0.after(lasts * MILLI, Event::Heal(trouble));
    }

    pub(crate) fn heal(&mut self, trouble: Trouble) {
        self.set(trouble, false);
        if let Trouble::Slow(node) = trouble
            && self.0.lively
            && !self.0.random.one_in(4)
        {
            self.begin(Trouble::Isolation(node), 6000);
        }
        // Watches go on where they were.
        for node in 0..self.0.nodes.len() {
            self.0.notify(node);
        }
    }

    fn set(&mut self, trouble: Trouble, on: bool) {
        match trouble {
            Trouble::StoreAway => match (on, self.0.health.away_since) {
                (true, None) => self.0.health.away_since = Some(self.0.now),
                (false, Some(since)) => {
                    self.0.health.away_since = None;
                    self.0.health.last_absence = Some((since, self.0.now));
                }
                _ => {}
            },
            Trouble::StoreFull => self.0.health.is_full = on,
            Trouble::StoreCut(node) => self.0.nodes[node].link.is_cut = on,
            Trouble::Watch(node) => self.0.nodes[node].link.is_watch_stalled = on,
            Trouble::Slow(node) => self.0.nodes[node].link.is_slow = on,
            Trouble::Link(from, to, both) => {
                self.0.cut[from][to] = on;
                self.0.cut[to][from] = on && both;
            }
            Trouble::Isolation(node) => {
                for other in 0..self.0.nodes.len() {
                    if other != node {
                        self.0.cut[node][other] = on;
                        self.0.cut[other][node] = on;
                    }
                }
                self.0.nodes[node].link.is_cut = on;
            }
        }
    }

    /// Ends all troubles.
    pub(crate) fn calm(&mut self) {
        self.0.note(|| "the troubles end".to_owned());
        self.0.lively = false;
        let count = self.0.nodes.len();
        for trouble in [Trouble::StoreAway, Trouble::StoreFull] {
            self.set(trouble, false);
        }
        for node in 0..count {
            self.set(Trouble::Watch(node), false);
            self.set(Trouble::Slow(node), false);
            self.set(Trouble::Isolation(node), false);
            for stalled in &mut self.0.nodes[node].stalled {
                *stalled = (*stalled).min(self.0.now);
            }
            if !self.0.nodes[node].up && !self.0.lost.contains(&node) {
                self.0.after(MILLI, Event::Start { node });
            }
        }
        for node in 0..count {
            self.0.notify(node);
        }
    }

    /// The node stalls and loses the store until another one has taken over. Then all other nodes
    /// restart: the gates of their replicas must know the new holder when the old one goes on.
    fn restart_others(&mut self, node: usize) {
        let lasts = self.0.random.within(4600, 5200);
        self.0.stall(node, ALL_CORES, lasts);
        self.begin(Trouble::StoreCut(node), 9000);
        let at = self.0.random.within(3500, 4500);
        for other in (0..self.0.nodes.len()).filter(|other| *other != node) {
            let has_replica = self.0.replicas.iter().any(|replica| replica.node == other);
            let down_ms = if has_replica { 300 } else { 3000 };
            let event = Event::Crash {
                node: other,
                down_ms,
            };
            self.0.after(at * MILLI, event);
        }
    }

    /// Two nodes die at once, most often the holder and another one, and stay down. Each may have
    /// been an observer of the other.
    pub(crate) fn lose_two(&mut self) {
        let count = self.0.nodes.len();
        let holder = (0..count).find(|n| self.0.nodes[*n].volume.state() == HoldingState::Holding);
        let first = holder.unwrap_or(0);
        let second = (first + 1 + self.0.random.index(count - 1)) % count;
        for node in [first, second] {
            self.0.note(|| format!("node {node} is lost"));
            self.0.lost.push(node);
            self.die(node);
        }
        self.0.report.losses += 1;
    }

    /// The node's process ends; another one starts later.
    pub(crate) fn crash(&mut self, node: usize, most_ms: u64) {
        if !self.0.nodes[node].up {
            return;
        }
        let dead = self.0.nodes[node].holder();
        self.die(node);
        if let Some(dead) = dead
            && self.0.random.one_in(2)
        {
            let delay = self.0.random.within(2, 50) * MILLI;
            self.0.after(delay, Event::FenceOff { dead });
        }
        let down = self.0.random.within(50, most_ms) * MILLI;
        self.0.after(down, Event::Start { node });
    }

    fn die(&mut self, node: usize) {
        if !self.0.nodes[node].up {
            return;
        }
        self.0.report.crashes += 1;
        self.0.note(|| format!("node {node} crashes"));
        let place = &mut self.0.nodes[node];
        place.up = false;
        place.life += 1;
        for replica in self.0.replicas.iter_mut().filter(|m| m.node == node) {
            replica.die(|| self.0.random.one_in(2));
        }
    }

    fn handover(&mut self, node: usize, to: usize) {
        let clock = self.0.nodes[node].clock(self.0.now);
        let place = &mut self.0.nodes[node];
        if place.up && place.volume.handover(node_id(to), clock) {
            self.0.report.handovers += 1;
            self.0
                .note(|| format!("node {node} hands over to node {to}"));
        }
    }

    /// Removes two nodes from those that show the volume, and adds both again. Hosts keep the
    /// controllers of the first one for 1 to 5 s. Fails the run if controller ids of two nodes are
    /// equal meanwhile.
    fn publish(&mut self, node: usize) {
        let id = node_id(node);
        if let Some(slot) = self.0.slots.of(id) {
            let until = self.0.now + self.0.random.within(SECOND, 5 * SECOND);
            self.0.controllers.push((node, slot, until));
        }
        self.0.slots.remove(id);
        let other = self.0.random.index(self.0.nodes.len());
        self.0.slots.remove(node_id(other));
        for node in [other, node] {
            let Some(slot) = self.0.slots.assign(node_id(node)) else {
                continue;
            };
            let now = self.0.now;
            self.0.controllers.retain(|(_, _, until)| *until > now);
            let ids = controller_ids(slot);
            let twice =
                self.0.controllers.iter().find(|(of, slot, _)| {
                    *of != node && controller_ids(*slot).start() == ids.start()
                });
            if let Some((of, slot, _)) = twice {
                let (of, slot) = (*of, *slot);
                self.0.failure = Some(format!(
                    "nodes {of} and {node} have the same controller ids (slot {slot})"
                ));
            }
        }
    }
}
