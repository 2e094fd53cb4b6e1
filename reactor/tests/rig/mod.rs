//! Helpers of the tests that run reactors on real threads.

use nacre_reactor::{Mode, ReactorConfig, ReactorHandle, spawn};

pub(crate) fn start(name: &str, mode: Mode, busy_poll_us: u64) -> ReactorHandle {
    let config = ReactorConfig {
        name: name.into(),
        mode,
        busy_poll_us,
        ..Default::default()
    };
    spawn(config, |_| {}).unwrap()
}

pub(crate) fn end(reactor: &ReactorHandle) {
    reactor.stop();
    reactor.join().unwrap();
    assert!(!reactor.is_alive());
}
