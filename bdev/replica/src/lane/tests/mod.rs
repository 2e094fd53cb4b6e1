//! Tests of the data path: single steps, with the test in place of the control and of the devices;
//! and lanes on real devices with faults and delays, compared with a model.

mod answers;
mod failures;
mod reads;
mod real;
pub(crate) mod rig;
mod space;
mod steps;
mod sync;
mod waiting;
