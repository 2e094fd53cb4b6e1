//! Each step of the data path alone, with the test as the control and as the devices; then lanes on
//! real devices that fail and delay, against a model.

mod at_once;
mod reads;
mod real;
pub(crate) mod rig;
mod steps;
mod trouble;
mod waiting;
