//! Vectors from an independent computation, and the two ends against each other.

mod channel;
mod fuzz;
mod pair;
mod vectors;
