//! Deliberate faults, to prove that the simulator's checkers find them.
//!
//! They exist only with the feature `mutations`, which release builds cannot enable; without it
//! every check here is a constant `false`. At most one is active at a time, and only on the thread
//! that activated it.

#[cfg(all(feature = "mutations", not(debug_assertions)))]
compile_error!("the feature `mutations` breaks clusters on purpose: it is for tests only");

/// A fault. Some are in the simulator's model of the data path, not in this crate's state machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Responses are sent without a check of the lease.
    AnswerWithoutClock,
    /// The lease is checked by the time before the data was collected.
    ClockOfTurn,
    /// The lease counts from the answer to the renewal, not from its start.
    LeaseFromAnswer,
    /// A fence does not compare the revision of the last renewal.
    FenceWithoutRevision,
    /// A node takes a volume although the holder's incarnation has not ended.
    TakeWithoutFence,
    /// Transactions do not compare the sender's incarnation.
    NoIncarnation,
    /// An observer counts the time in which it had no lease itself.
    ObserverWithoutLease,
    /// The confirmation of one replica suffices.
    ConfirmedByOne,
    /// Only the recorded replicas are asked for confirmation while a promotion is unanswered.
    ConfirmedByRecord,
    /// A fenced holder forgets a promotion whose answer is missing, before its lanes are dropped.
    FencedForgets,
    /// The holder's I/O to a replica on its own node does not pass the gate.
    LocalPastGate,
    /// A gate answers a new holder before the I/O of the former one has ended.
    GateBeforeEnd,
    /// A gate forgets its key when its node restarts.
    GateForgets,
    /// A holder leaves with I/O in flight: its control does not close the volume.
    LeaveWithoutDrain,
    /// The lowest free slot is assigned, even if it was free only a moment ago.
    SlotAtOnce,
    /// A take does not make the replicas equal where their logs are dirty.
    SkipMerge,
}

#[cfg(not(feature = "mutations"))]
impl Mutation {
    #[inline(always)]
    pub const fn is_active(self) -> bool {
        false
    }
}

#[cfg(feature = "mutations")]
mod switch {
    use std::cell::Cell;

    use super::Mutation;

    thread_local! {
        static ACTIVE: Cell<Option<Mutation>> = const { Cell::new(None) };
    }

    impl Mutation {
        pub fn is_active(self) -> bool {
            ACTIVE.get() == Some(self)
        }

        pub const ALL: [Self; 16] = [
            Self::AnswerWithoutClock,
            Self::ClockOfTurn,
            Self::LeaseFromAnswer,
            Self::FenceWithoutRevision,
            Self::TakeWithoutFence,
            Self::NoIncarnation,
            Self::ObserverWithoutLease,
            Self::ConfirmedByOne,
            Self::ConfirmedByRecord,
            Self::FencedForgets,
            Self::LocalPastGate,
            Self::GateBeforeEnd,
            Self::GateForgets,
            Self::LeaveWithoutDrain,
            Self::SlotAtOnce,
            Self::SkipMerge,
        ];

        /// Activates a fault on this thread, in place of the one before; `None`: no fault.
        pub fn activate(which: Option<Self>) {
            ACTIVE.set(which);
        }
    }
}
