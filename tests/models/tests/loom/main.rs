//! The models, one program.

mod doorbell;
mod phase;
