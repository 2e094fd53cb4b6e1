//! The machines against each other, against raw bytes, and against the clock.

mod exchange;
mod fuzz;
mod pair;
