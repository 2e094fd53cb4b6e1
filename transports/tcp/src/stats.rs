//! Counters of the transport, one set per core. They are relaxed atomics, which any thread can
//! read.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one core. Written by that core only.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        /// What [`Stats`] said at one moment.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct StatsSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            pub fn snapshot(&self) -> StatsSnapshot {
                StatsSnapshot { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }

        impl std::ops::Add for StatsSnapshot {
            type Output = StatsSnapshot;

            fn add(self, other: StatsSnapshot) -> StatsSnapshot {
                StatsSnapshot { $($name: self.$name + other.$name,)* }
            }
        }
    };
}

counters! {
    /// Connections taken over from the accepting thread.
    accepted,
    /// Connections ended, by cause.
    closed_by_peer,
    closed_broken,
    closed_protocol,
    closed_timeout,
    closed_local,
    bytes_received,
    bytes_sent,
    receives,
    /// Receives that found nothing.
    receives_empty,
    /// Times that epoll was asked which sockets have something.
    looks,
    sends,
    /// Sends that the kernel did not take in full.
    sends_partial,
    pdus_received,
    pdus_sent,
    /// Connections over TLS, taken over and ended.
    tls_opened,
    tls_closed,
    key_updates_sent,
    key_updates_received,
    keys_past_limit,
    /// Turns in which a connection waited with reading because there was no buffer.
    waits,
}

/// Adds without a locked instruction: there is one writer.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(n),
        Ordering::Relaxed,
    );
}
