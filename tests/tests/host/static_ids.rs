//! Tests of the CNTLID that hosts of static controllers request, initially and after a loss.

use std::ops::RangeInclusive;
use std::time::Duration;

use nacre_nvmf::host::{ControllerId, ControllerState, HostController, HostOptions};
use nacre_nvmf::subsystems::{ControllerModel, SubsystemConfig};
use nacre_nvmf::transport::{Address, TransportType};
use nacre_tests::target::{SUBNQN, nqn};

use super::rig::{World, options};

const STATIC: &str = "nqn.2025-01.io.nacre:static";

impl World {
    fn with_static(ids: RangeInclusive<u16>) -> Self {
        let world = Self::new();
        world.add_static(ids);
        world
    }

    fn add_static(&self, ids: RangeInclusive<u16>) {
        let mut config = SubsystemConfig::new(nqn(STATIC));
        config.allow_any_host = true;
        config.controller_model = ControllerModel::Static;
        (config.min_cntlid, config.max_cntlid) = ids.into_inner();
        self.target().create_subsystem(config).unwrap();
        let address = Address::Loopback("here".into());
        self.target()
            .add_listener(&nqn(STATIC), TransportType::Loopback, &address)
            .unwrap();
    }

    /// Restarts the target with these controller ids.
    fn restarted(&mut self, ids: RangeInclusive<u16>) {
        self.kill_target();
        self.until("noticed", |w| !w.controller().is_live());
        self.start_target();
        self.add_static(ids);
    }

    fn comes_up(&mut self) -> u16 {
        self.until("live", |w| w.controller().is_live());
        self.controller().link().state().cntlid
    }

    fn refused(&mut self, controller: ControllerId, subnqn: &str) -> String {
        self.connect(HostOptions {
            subnqn: nqn(subnqn),
            ..asking(controller)
        });
        self.until("refused", |w| {
            matches!(w.controller().state(), ControllerState::Failed(_))
        });
        self.failure()
    }
}

fn asking(controller: ControllerId) -> HostOptions {
    HostOptions {
        subnqn: nqn(STATIC),
        controller,
        ..options(1)
    }
}

/// Goal: a host that accepts any controller gets the same one after a loss. If that one is gone or
/// used by another host, it gets another one, and never gives up because of that.
#[test]
fn an_assigned_controller_is_requested_again() {
    let mut world = World::with_static(10..=14);
    world.connect(asking(ControllerId::AnyStatic));
    let had = world.comes_up();
    assert!((10..=14).contains(&had));
    // Ranges in which the same position is another controller.
    for most in 14..=20 {
        world.restarted(had..=most);
        assert_eq!(world.comes_up(), had);
    }

    world.restarted(100..=101);
    let another = world.comes_up();
    assert!((100..=101).contains(&another), "{another}");

    world.restarted(another..=another + 1);
    let thief = asking(ControllerId::Static(another));
    let (dial, memory) = (world.dial(), world.memory.clone());
    let mut thief = HostController::new(thief, dial, memory, world.now);
    world.until("stolen", |w| {
        thief.poll(w.now);
        thief.is_live()
    });
    assert!(
        !world.controller().is_live(),
        "the host has not connected yet"
    );
    assert_eq!(world.comes_up(), another + 1);
}

/// Goal: a host that requests one controller gets that one each time. While another host uses it,
/// the host keeps retrying.
#[test]
fn a_requested_controller_is_kept() {
    let mut world = World::with_static(3..=6);
    world.connect(asking(ControllerId::Static(5)));
    assert_eq!(world.comes_up(), 5);
    let first = world.controller.take().unwrap();
    world.connect(asking(ControllerId::Static(5)));
    world.until("the event arrives", |w| {
        matches!(w.controller().state(), ControllerState::Waiting { .. })
    });
    assert!(
        world.failure().contains("Controller Busy"),
        "{}",
        world.failure()
    );
    drop(first);
    assert_eq!(world.comes_up(), 5);
    world.restarted(1..=9);
    assert_eq!(world.comes_up(), 5);
    world.pass(Duration::from_secs(60));
    assert!(world.controller().is_live());
}

/// Goal: a controller id that does not exist is refused permanently, with the field name.
#[test]
fn impossible_controller_ids_are_refused() {
    let mut world = World::with_static(3..=6);
    for (controller, subnqn) in [
        (ControllerId::Dynamic, STATIC),
        (ControllerId::Static(7), STATIC),
        (ControllerId::Static(3), SUBNQN),
        (ControllerId::AnyStatic, SUBNQN),
    ] {
        let why = world.refused(controller, subnqn);
        assert!(why.contains("cntlid"), "{controller:?}: {why}");
    }
}
