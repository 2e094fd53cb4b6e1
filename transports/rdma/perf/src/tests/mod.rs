//! Both ends over simulated devices, with everything that can go wrong there.

mod faults;
mod probe;
mod refusals;
mod rig;
mod runs;
mod strangers;
mod wire;
