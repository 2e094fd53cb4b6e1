//! The simulated controller itself, by hand-written queues.

mod control;
mod data;
mod hand;
