//! Machines in folders, read as the real one is.

mod capabilities;
mod machines;
use crate::testing as tree;
