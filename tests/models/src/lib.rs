//! Loom models of the code between cores: `tests/loom` includes each source file by its path, and
//! tries every interleaving and reordering that the memory model allows.
//!
//! ```text
//!   reactor/src/doorbell.rs ──┐
//!                             ├── with the atomics of loom ──▶ cargo test -p nacre-tests-models
//!   bdev/nvme/src/phase.rs  ──┘
//! ```
//!
//! The build script sets `cfg(loom)` for this package only. With `RUSTFLAGS` it would apply to all
//! dependencies, which Cargo would then build a second time.

#![forbid(unsafe_code)]
