//! Faults that are put in on purpose, to see that the simulator's checker finds them.
//!
//! They exist with the feature `mutations` alone, which no build for use can have; without it every question
//! in here is a constant `false`. At most one is active at a time, and only on the thread that asked for it.

#[cfg(all(feature = "mutations", not(debug_assertions)))]
compile_error!("the feature `mutations` breaks volumes on purpose: it is for tests only");

/// What is done wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Writes are acknowledged before the store knows that a member that lacks them is out.
    AcknowledgeEarly,
    /// Regions are written to that no member's dirty-region log names.
    SkipLog,
    /// Members are read that lack what is read.
    ReadStale,
    /// A holder goes on although another one has the volume.
    ForgetFence,
    /// Members are brought up to date from the one that is not.
    ResyncBackwards,
    /// Members are believed whose devices have, or had, fewer blocks than the volume needs.
    IgnoreSize,
}

#[cfg(feature = "mutations")]
mod switch {
    use std::cell::Cell;

    use super::Mutation;

    thread_local! {
        static ACTIVE: Cell<Option<Mutation>> = const { Cell::new(None) };
    }

    impl Mutation {
        pub const ALL: [Mutation; 6] = [
            Mutation::AcknowledgeEarly,
            Mutation::SkipLog,
            Mutation::ReadStale,
            Mutation::ForgetFence,
            Mutation::ResyncBackwards,
            Mutation::IgnoreSize,
        ];

        /// From here on, on this thread.
        pub fn activate(which: Option<Mutation>) {
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
