//! Tests of listeners that are added while hosts are connected.

use std::sync::mpsc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use nacre_nvmf_wire::fabrics::ConnectData;
use parking_lot::Mutex;

use super::rig::*;
use crate::subsystems::{Refusal, SubsystemConfig, Target, TargetConfig};
use crate::transport::{
    Address, ListenError, ListenerId, ListenerOptions, Plug, Transport, TransportType,
};

/// The observations of a core while an address is being opened.
#[derive(Default)]
struct Observations {
    /// It could look at the bounds of a listener.
    limits: bool,
    /// The refusal of an early host.
    refusal: Option<Refusal>,
}

/// A transport that takes long to listen: until a core has done its work for a Connect.
struct Slow {
    target: Mutex<Weak<Target>>,
    seen: Arc<Mutex<Observations>>,
}

impl Plug for Slow {
    fn kind(&self) -> TransportType {
        TransportType::Loopback
    }

    fn listen(
        &self,
        id: ListenerId,
        address: &Address,
        _options: &ListenerOptions,
    ) -> Result<Address, ListenError> {
        let target = self.target.lock().upgrade().expect("it is there");
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            target.listener_limits(TransportType::Loopback, id);
            let subsystem = target.subsystem(&nqn(SUBNQN)).expect("it is there");
            let kind = TransportType::Loopback;
            let refused = subsystem.admit(
                ConnectData::CNTLID_DYNAMIC,
                &nqn(HOSTNQN),
                [1; 16],
                id,
                kind,
            );
            let _ = done.send(refused.err());
        });
        let patience = Duration::from_secs(10);
        if let Ok(refusal) = is_done.recv_timeout(patience) {
            let mut seen = self.seen.lock();
            (seen.limits, seen.refusal) = (true, refusal);
        }
        Ok(address.clone())
    }

    fn unlisten(&self, _id: ListenerId) {}

    fn open(
        &self,
        _core: usize,
        _wake: Arc<dyn Fn() + Send + Sync>,
    ) -> std::io::Result<Box<dyn Transport>> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

/// Goal: a transport may take long to open an address (over RDMA it registers all memory with a
/// device), and no core waits for that. A host that arrives before the listener gets a retry
/// status, not a permanent refusal.
#[test]
fn no_core_waits_for_an_address() {
    let target = Target::new(TargetConfig::default(), 1);
    let seen = Arc::new(Mutex::new(Observations::default()));
    let plug = Slow {
        target: Mutex::new(Arc::downgrade(&target)),
        seen: Arc::clone(&seen),
    };
    target.add_plug(Arc::new(plug)).unwrap();
    let mut config = SubsystemConfig::new(nqn(SUBNQN));
    config.allow_any_host = true;
    let subsystem = target.create_subsystem(config).unwrap();
    let address = Address::Loopback("slow".into());
    let kind = TransportType::Loopback;
    target.add_listener(&nqn(SUBNQN), kind, &address).unwrap();
    {
        let seen = seen.lock();
        assert!(seen.limits, "it had to wait");
        assert_eq!(seen.refusal, Some(Refusal::Busy));
    }
    let admit = |listener| {
        subsystem.admit(
            ConnectData::CNTLID_DYNAMIC,
            &nqn(HOSTNQN),
            [1; 16],
            listener,
            kind,
        )
    };
    let elsewhere = admit(ListenerId(77));
    assert_eq!(elsewhere.err(), Some(Refusal::NotOnThisListener));
    assert!(admit(subsystem.listeners()[0].id).is_ok());
}
