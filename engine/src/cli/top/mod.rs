//! `nacre top`.

pub mod rates;
