//! Deliberate bugs for tests, to prove that the simulator's checker finds them.
//!
//! They exist only with the feature `mutations`, which release builds cannot enable; without it
//! every check here is a constant `false`. At most one is active at a time, and only on the thread
//! that activated it.

#[cfg(all(feature = "mutations", not(debug_assertions)))]
compile_error!("the feature `mutations` breaks volumes on purpose: it is for tests only");

/// A deliberate bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Acknowledges writes before the store knows that a replica that lacks them is out.
    AcknowledgeEarly,
    /// Writes to regions that no replica's dirty-region log names.
    SkipLog,
    /// Reads from replicas that lack the data.
    ReadStale,
    /// A holder continues although another holder owns the volume.
    ForgetFence,
    /// Copies from the outdated replica to the current ones.
    ResyncBackwards,
    /// Trusts replicas whose devices have, or had, fewer blocks than the volume needs.
    IgnoreSize,
    /// Answers leave whatever the lease of the holder's node.
    AnswerUnchecked,
    /// The lease is checked before the answers are collected.
    CheckEarly,
    /// Confirmation without one of the replicas that may be in sync.
    ConfirmedByFewer,
    /// A confirmation covers answers that were collected after its round began.
    ConfirmedLate,
    /// A holder with a lease releases the reservations when it closes the volume.
    ReleaseAtClose,
    /// A failed replica that is not awaited stays in sync in the store.
    UnawaitedInSync,
    /// A replica that is given up because of its silence stays in sync in the store, although its
    /// device is awaited.
    SilentInSync,
    /// Writes count as held back while some are in flight.
    HoldEarly,
}

#[cfg(feature = "mutations")]
mod switch {
    use std::cell::Cell;

    use super::Mutation;

    thread_local! {
        static ACTIVE: Cell<Option<Mutation>> = const { Cell::new(None) };
    }

    impl Mutation {
        pub const ALL: [Self; 14] = [
            Self::AcknowledgeEarly,
            Self::SkipLog,
            Self::ReadStale,
            Self::ForgetFence,
            Self::ResyncBackwards,
            Self::IgnoreSize,
            Self::AnswerUnchecked,
            Self::CheckEarly,
            Self::ConfirmedByFewer,
            Self::ConfirmedLate,
            Self::ReleaseAtClose,
            Self::UnawaitedInSync,
            Self::SilentInSync,
            Self::HoldEarly,
        ];

        /// Activates a bug on this thread, from now on; `None`: none is active.
        pub fn activate(which: Option<Self>) {
            ACTIVE.set(which);
        }

        pub fn is_active(self) -> bool {
            ACTIVE.get() == Some(self)
        }
    }
}

#[cfg(not(feature = "mutations"))]
impl Mutation {
    #[inline(always)]
    pub(crate) const fn is_active(self) -> bool {
        false
    }
}
