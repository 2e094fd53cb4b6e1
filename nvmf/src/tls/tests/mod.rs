//! Vectors of other implementations, ClientHellos of other programs, and the fuzz target's corpus.

mod fuzz;
mod hello;
mod offers;
mod vectors;
