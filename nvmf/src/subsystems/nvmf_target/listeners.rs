//! Listeners of the target: the limits, options and statistics of each, and its removal.

use std::collections::{BTreeMap, BTreeSet};

use super::Target;
use crate::subsystems::config::QueueLimits;
use crate::subsystems::stats::Totals;
use crate::transport::{Address, ListenerCounts, ListenerId, ListenerOptions, TransportType};

/// The statistics of a listener since it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerStats {
    pub transport: TransportType,
    pub address: Address,
    /// `None`: its transport does not count.
    pub counts: Option<ListenerCounts>,
    /// Totals of the queues that connected through the listener.
    pub totals: Totals,
}

impl Target {
    /// The limits of the queue pairs of one listener.
    pub fn listener_limits(&self, kind: TransportType, listener: ListenerId) -> QueueLimits {
        let mut limits = self.queue_limits(kind);
        if let Some(entries) = self.listener_options(listener).max_queue_depth {
            limits.max_io_entries = entries.max(2);
        }
        limits
    }

    /// The options of a listener; the defaults if it is closed.
    pub fn listener_options(&self, listener: ListenerId) -> ListenerOptions {
        let listeners = self.listeners();
        let listener = listeners.open.get(&listener);
        listener.map_or_else(ListenerOptions::default, |listener| listener.options)
    }

    /// Removes one user of a listener. A listener without users is closed.
    pub(crate) fn release_listener(&self, id: ListenerId) {
        let _opening = self.opening.lock();
        let mut listeners = self.listeners();
        let Some(listener) = listeners.open.get_mut(&id) else {
            return;
        };
        listener.users -= 1;
        if listener.users == 0 {
            let kind = listener.kind;
            listeners.open.remove(&id);
            drop(listeners);
            if let Ok(plug) = self.plug(kind) {
                plug.unlisten(id);
            }
        }
    }

    /// Largest in-capsule data of I/O queues of a listener, in bytes. `None` as for
    /// [`crate::transport::Plug::in_capsule_data_size`], or without such a transport.
    pub fn in_capsule_data_size(&self, kind: TransportType, id: ListenerId) -> Option<u32> {
        self.plug(kind).ok()?.in_capsule_data_size(id)
    }

    /// The statistics of each open listener, in the order of their ids. Sums the counters of
    /// queues, so commands need not count per listener.
    pub fn listener_stats(&self) -> Vec<ListenerStats> {
        let open: BTreeSet<ListenerId> = {
            let listeners = self.listeners();
            listeners.open.keys().copied().collect()
        };
        let mut sums: BTreeMap<ListenerId, Totals> = BTreeMap::new();
        // Ended queues first: a queue that ends meanwhile is missed until the next call, not
        // counted twice.
        for group in self.groups() {
            let gone = group.counts().retired_by_listener(|id| open.contains(&id));
            for (id, totals) in gone {
                *sums.entry(id).or_default() += totals;
            }
        }
        for subsystem in self.subsystems().iter().chain([&self.discovery]) {
            for queue in subsystem.controllers().iter().flat_map(|c| c.queues()) {
                *sums.entry(queue.listener).or_default() += queue.stats.totals();
            }
        }
        let mut stats = Vec::with_capacity(open.len());
        {
            let mut listeners = self.listeners();
            for (id, listener) in &mut listeners.open {
                let now = sums.get(id).copied().unwrap_or_default();
                listener.reported = listener.reported.max(&now);
                let of = ListenerStats {
                    transport: listener.kind,
                    address: listener.bound.clone(),
                    counts: None,
                    totals: listener.reported,
                };
                stats.push((*id, of));
            }
        }
        // Plugs have locks of their own.
        let with_counts = |(id, mut of): (ListenerId, ListenerStats)| {
            let plug = self.plug(of.transport).ok();
            of.counts = plug.and_then(|plug| plug.listener_counts(id));
            of
        };
        stats.into_iter().map(with_counts).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subsystems::core_handle::GroupCounts;
    use crate::subsystems::stats::KindTotals;

    fn reads(operations: u64) -> Totals {
        Totals {
            read: KindTotals {
                operations,
                bytes: operations * 512,
                errors: 0,
            },
            ..Totals::default()
        }
    }

    /// What queues did is kept by listener, and for as long as that is there.
    #[test]
    fn retired() {
        let counts = GroupCounts::default();
        for (listener, operations) in [(1, 5), (2, 7), (1, 6)] {
            counts.retire(ListenerId(listener), reads(operations));
        }
        let all = counts.retired_by_listener(|_| true);
        assert_eq!(all, [(ListenerId(1), reads(11)), (ListenerId(2), reads(7))]);
        let left = counts.retired_by_listener(|id| id == ListenerId(2));
        assert_eq!(left, [(ListenerId(2), reads(7))]);
        assert_eq!(counts.retired_by_listener(|_| true), left, "forgotten");
        assert_eq!(
            counts.retired_commands.into_inner(),
            18,
            "of the group, not of the listeners"
        );
    }

    /// A sum that missed a queue does not reduce a reported value.
    #[test]
    fn never_back() {
        let mut told = reads(9);
        told.write.errors = 1;
        let mut both = reads(9);
        both.write.errors = 3;
        let mut now = reads(4);
        now.write.errors = 3;
        assert_eq!(told.max(&now), both);
        assert_eq!(now.max(&told), both);
    }
}
