//! Tests of the simulated controller without the driver.

mod control;
mod data;
mod host;
