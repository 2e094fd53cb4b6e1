//! Tests of target and host over simulated devices, in one thread and in virtual time.

mod broken;
mod capsules;
mod descriptors;
mod dialling;
mod faults;
mod incidents;
mod paths;
mod pieces;
mod receives;
mod rig;
mod several_devices;
mod silent_connections;
mod sleeping;
mod stack;

use nacre_nvmf::transport::conformance;

use rig::{Options, TestRig};

/// The suite of all plugs, with a shared receive queue.
#[test]
fn conforms() {
    conformance::run(|| TestRig::new(Options::default()));
}

/// The same with a receive queue per connection, and where the device can do little at once.
#[test]
fn conforms_on_lesser_devices() {
    let own = |options: &mut Options| options.config.srq_size = 0;
    conformance::run(|| TestRig::new(Options::with(own)));
    let without_srq = |options: &mut Options| options.device.max_srq = 0;
    conformance::run(|| TestRig::new(Options::with(without_srq)));
    let small = |options: &mut Options| {
        options.device.max_initiator_depth = 1;
        options.device.max_qp_wr = 130;
        options.device.send_with_invalidate = false;
        options.config.max_inline_data = 0;
    };
    conformance::run(|| TestRig::new(Options::with(small)));
}
