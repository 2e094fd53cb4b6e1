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

        /// The values of [`Stats`] at one moment.
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
    /// Connections ended, by cause. This one: the host closed the connection.
    closed_by_peer,
    /// A system call failed, or TLS failed.
    closed_broken,
    /// The host violated NVMe/TCP.
    closed_protocol,
    closed_timeout,
    closed_local,
    /// Bytes of PDUs. Over TLS they are counted before encryption, without record headers and tags.
    bytes_received,
    bytes_sent,
    receives,
    /// Receives that found nothing.
    receives_empty,
    /// Calls of epoll_wait.
    looks,
    sends,
    /// Sends that the kernel took only in part. Over TLS, also those refused with EAGAIN.
    sends_partial,
    pdus_received,
    pdus_sent,
    /// TLS connections taken over, and those of them that have ended.
    tls_opened,
    tls_closed,
    key_updates_sent,
    key_updates_received,
    /// Keys used for more records than AES-GCM allows (2^24.5), in both directions.
    keys_past_limit,
    /// Times that a connection stopped reading. Its core had no buffer for the data of a capsule,
    /// or too many of its responses were not sent yet.
    waits,
}

/// Adds without a locked instruction: there is one writer.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(n),
        Ordering::Relaxed,
    );
}
