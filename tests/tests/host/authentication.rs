//! Tests of DH-HMAC-CHAP in both directions: right, wrong and missing keys, and after a loss.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Status;
use nacre_nvmf::auth::{FixedKeys, Group, Hash, KeySource, Keys, Offer, Secret, SystemRandom};
use nacre_nvmf::host::{ControllerState, HostAuth, HostOptions, IoQueue};
use nacre_nvmf::subsystems::HostSecrets;
use nacre_reactor::Helper;
use nacre_tests::target::{SUBNQN, nqn};

use super::rig::{HOSTNQN, World, bytes, options};

fn secret() -> Secret {
    Secret::generate(Some(Hash::Sha256), &mut SystemRandom).unwrap()
}

fn keys(host: &Secret, controller: Option<&Secret>) -> Arc<dyn KeySource> {
    Arc::new(FixedKeys(Keys {
        host: host.clone(),
        controller: controller.cloned(),
    }))
}

fn asking(keys: Arc<dyn KeySource>, offer: Offer) -> HostOptions {
    HostOptions {
        authentication: Some(HostAuth {
            keys,
            offer,
            helper: Arc::new(Helper::at_once()),
        }),
        ..options(2)
    }
}

impl World {
    fn require(&self, keys: Arc<dyn KeySource>) {
        let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
        let target = self.target();
        let secrets = HostSecrets {
            keys: Some(keys),
            ..HostSecrets::default()
        };
        target.add_host_with(&subsystem, &host, secrets).unwrap();
    }

    /// Connects, and returns the text of the host's permanent failure.
    fn fails(&mut self, options: HostOptions) -> String {
        self.connect(options);
        self.until("refused", |w| {
            matches!(w.controller().state(), ControllerState::Failed(_))
        });
        self.failure()
    }
}

/// Goal: controller and I/O queues connect with keys, in each direction, and again after a loss.
#[test]
fn right_keys() {
    let (own, other) = (secret(), secret());
    for controller in [None, Some(&other)] {
        let mut world = World::new();
        world.require(keys(&own, Some(&other)));
        world.connect(asking(keys(&own, controller), Offer::default()));
        world.until("live", |w| w.controller().is_live());
        for qid in 1..=2 {
            world.open_queue(qid, 1);
        }
        world.until("queues live", |w| w.queues.iter().all(IoQueue::is_live));
        assert_eq!(world.write(0, 5, 3, 9), Status::Ok);
        assert_eq!(world.read(1, 5, 3), bytes(3, 9));
        let association = &world
            .target()
            .subsystem(&nqn(SUBNQN))
            .unwrap()
            .controllers()[0];
        for queue in association.queues() {
            let (_, chosen) = queue.auth.load().expect("each queue was authenticated");
            assert_eq!(chosen, Some((Hash::Sha256, Group::Ffdhe3072)));
        }
        assert_eq!(world.target().authentication.counts(), (3, 0));
        // Another target with the same keys, as after a restart.
        world.kill_target();
        world.until("noticed", |w| !w.controller().is_live());
        world.revive_target();
        world.require(keys(&own, Some(&other)));
        world.until("live", |w| w.controller().is_live());
        world.until("queues live", |w| w.queues.iter().all(IoQueue::is_live));
        assert_eq!(world.read(0, 5, 3), bytes(3, 9));
        world.assert_buffers_back(0);
    }
}

/// Goal: each mismatch is final, and its error names the cause.
#[test]
fn wrong_keys() {
    let (own, other, wrong) = (secret(), secret(), secret());
    let null = || Offer {
        groups: vec![Group::Null],
        ..Offer::default()
    };
    let table = [
        (options(1), "no key"),
        (asking(keys(&wrong, None), Offer::default()), "gave up"),
        (asking(keys(&wrong, None), null()), "authentication failed"),
        (
            asking(keys(&own, Some(&wrong)), null()),
            "different controller keys",
        ),
    ];
    for (options, expected) in table {
        let mut world = World::new();
        world.require(keys(&own, Some(&other)));
        let failure = world.fails(options);
        assert!(failure.contains(expected), "{failure:?} lacks {expected:?}");
        // The host makes no attempt after the refusal.
        let dials = world.net.borrow().dials.len();
        world.pass(Duration::from_secs(60));
        assert_eq!(world.net.borrow().dials.len(), dials);
        assert_eq!(dials, 1);
        world.assert_buffers_back(0);
    }
}

/// Goal: a host that requires the target's authentication refuses a target without it.
#[test]
fn a_target_that_does_not_prove_itself() {
    let (own, other) = (secret(), secret());
    let mut world = World::new();
    let failure = world.fails(asking(keys(&own, Some(&other)), Offer::default()));
    assert!(failure.contains("authentication failed"), "{failure}");
    // A target without a controller key does not check the host's key.
    let mut world = World::new();
    world.connect(asking(keys(&own, None), Offer::default()));
    world.until("live", |w| w.controller().is_live());
}

/// Goal: host and target must have a common hash function and a common group.
#[test]
fn offers() {
    let own = secret();
    let mut world = World::new();
    world.require(keys(&own, None));
    world.target().authentication.set_offer(Offer {
        hashes: vec![Hash::Sha512],
        groups: vec![Group::Ffdhe2048],
    });
    let strange = Offer {
        hashes: vec![Hash::Sha256],
        ..Offer::default()
    };
    let failure = world.fails(asking(keys(&own, None), strange));
    assert!(failure.contains("hash function not usable"), "{failure}");
    world.connect(asking(keys(&own, None), Offer::default()));
    world.until("live", |w| w.controller().is_live());
}

/// Goal: an I/O queue whose keys were removed is refused, and other queues continue.
#[test]
fn keys_change_between_queues() {
    let (own, new) = (secret(), secret());
    let mut world = World::new();
    world.require(keys(&own, None));
    world.connect(asking(keys(&own, None), Offer::default()));
    world.until("live", |w| w.controller().is_live());
    world.open_queue(1, 1);
    world.until("queue live", |w| w.queues[0].is_live());
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    let changed = Some(keys(&new, None));
    world
        .target()
        .set_host_keys(&subsystem, &host, changed)
        .unwrap();
    world.open_queue(2, 1);
    world.until("refused", |w| w.queues[1].refusal().is_some());
    let refusal = world.queues[1].refusal().unwrap().to_owned();
    assert!(refusal.contains("authentication failed"), "{refusal}");
    assert_eq!(world.write(0, 1, 1, 3), Status::Ok);
    assert!(world.controller().is_live());
}
