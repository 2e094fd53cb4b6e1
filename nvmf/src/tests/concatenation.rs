//! Secure channel concatenation as a host meets it: a PSK from an authentication in clear, and the
//! queues that are served with it.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::fabrics::AuthRequirements;

use super::authentication::{host_end, secret, source};
use super::rig::*;
use crate::auth::message::Failed;
use crate::auth::{Concatenation, Group, Hash, HostEnd, KeySource, Keys, Offer, Reason};
use crate::subsystems::{HostSecrets, ListenOptions, Rotation, SecretKind};
use crate::tls::{Derivation, Identity, Psk, SecureChannel, Suite};
use crate::transport::{Address, ConnId, ListenerId, ListenerOptions, TlsPolicy, TransportType};

const REQUIRED: StatusCode = StatusCode::AUTHENTICATION_REQUIRED.with_dnr();

/// A rig whose host has keys, on a listener with this policy.
fn rig(tls: TlsPolicy, concat: bool) -> (Rig, Keys) {
    let mut rig = Rig::with_malloc();
    let keys = Keys {
        host: secret(),
        controller: None,
    };
    let secrets = HostSecrets {
        keys: source(&keys),
        concat,
        ..HostSecrets::default()
    };
    let target = &rig.target;
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    target.add_host_with(&subsystem, &host, secrets).unwrap();
    let options = ListenOptions {
        listener: ListenerOptions {
            tls: Some(tls),
            ..ListenerOptions::default()
        },
        ..ListenOptions::default()
    };
    let address = Address::Loopback("secure".into());
    target
        .add_listener_with(&subsystem, TransportType::Loopback, &address, options)
        .unwrap();
    rig.listener = ListenerId(2);
    (rig, keys)
}

fn end(keys: &Keys, channel: Concatenation) -> HostEnd {
    let offer = Offer {
        hashes: vec![Hash::Sha256],
        groups: vec![Group::Ffdhe2048],
    };
    host_end(keys, offer).with_channel(channel)
}

/// What the host knows after an authentication that made a PSK.
fn generate(rig: &mut Rig, conn: ConnId, keys: &Keys, channel: Concatenation) -> Psk {
    let mut end = end(keys, channel);
    rig.authenticate_with(conn, &mut end).unwrap();
    Psk::generated(&end.take_generated().unwrap())
}

fn identity(psk: &Psk) -> Identity {
    psk.offer(&nqn(HOSTNQN), &nqn(SUBNQN))
}

/// Connections from here on are over TLS with this PSK, if the target knows it.
fn secure(rig: &Rig, psk: &Psk) -> bool {
    let identity = identity(psk);
    let found = rig.target.authentication.generated.find(&identity, rig.now);
    let is_known = found.is_some();
    rig.wire.borrow_mut().secure = found.map(|psk| {
        Arc::new(SecureChannel {
            identity,
            psk,
            suite: Suite::Aes128Sha256,
            derivation: Derivation::Standard,
        })
    });
    is_known
}

/// Goal: a host authenticates itself in clear, and then has all its queues over TLS with that PSK,
/// and only those.
#[test]
fn queues_use_the_psk_that_authentication_made() {
    let (mut rig, keys) = rig(TlsPolicy::Allow, true);
    let (plain, response) = rig.connect_admin();
    // ASCR stays clear: Linux 6.12 refuses it.
    assert_eq!(response.auth, AuthRequirements::AUTHENTICATION);
    let psk = generate(&mut rig, plain, &keys, Concatenation::New);
    // The association in clear gets no I/O queue, in clear or over TLS.
    rig.enable(plain);
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 1, response.cntlid, 16);
    assert_eq!(cqe.status(), REQUIRED);
    assert!(secure(&rig, &psk));
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 1, response.cntlid, 16);
    assert_eq!(cqe.status(), REQUIRED);

    rig.hang_up(plain);
    rig.pass(Duration::from_secs(50));
    assert!(secure(&rig, &psk), "it outlives its association");
    let (admin, response) = rig.connect_admin();
    assert_eq!(response.auth, AuthRequirements::empty());
    rig.enable(admin);
    rig.io_queue(response.cntlid, 1);
    rig.wire.borrow_mut().secure = None;
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 2, response.cntlid, 16);
    assert_eq!(cqe.status(), REQUIRED, "an I/O queue in clear");
    // The PSK of another association of the same host.
    let (other, _) = rig.connect_admin();
    let others = generate(&mut rig, other, &keys, Concatenation::New);
    assert!(secure(&rig, &others));
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 2, response.cntlid, 16);
    assert_eq!(cqe.status(), REQUIRED, "another PSK");
    assert!(secure(&rig, &psk));
    rig.io_queue(response.cntlid, 2);
}

/// Goal: SC_C 3 replaces the PSK for later connections, and those that exist go on.
#[test]
fn a_psk_is_replaced() {
    let (mut rig, keys) = rig(TlsPolicy::Allow, true);
    let (plain, _) = rig.connect_admin();
    let first = generate(&mut rig, plain, &keys, Concatenation::New);
    rig.hang_up(plain);
    assert!(secure(&rig, &first));
    let (admin, response) = rig.connect_admin();
    rig.enable(admin);
    rig.io_queue(response.cntlid, 1);
    let second = generate(&mut rig, admin, &keys, Concatenation::Replace);
    assert!(!secure(&rig, &first), "unknown identity: alert 115");
    assert!(secure(&rig, &second));
    rig.io_queue(response.cntlid, 2);
    let third = generate(&mut rig, admin, &keys, Concatenation::Replace);
    assert!(!secure(&rig, &second), "also what replaced the first");
    assert!(secure(&rig, &third));
    // SC_C 2 has no place there.
    let refused = rig.authenticate(admin, end(&keys, Concatenation::New));
    let mismatch = Reason::GivenUp(Failed::ConcatenationMismatch);
    assert_eq!(refused, Err(mismatch));
}

/// Goal: during a rotation either key makes a PSK, and queues over it do not end the rotation, as
/// they prove neither key. The end of the rotation ends the PSKs of the former key only.
#[test]
fn rotation() {
    let (mut rig, former) = rig(TlsPolicy::Allow, true);
    let new = Keys {
        host: secret(),
        controller: None,
    };
    let (subnqn, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    let subsystem = rig.target.subsystem(&subnqn).unwrap();
    let rotate = |rig: &Rig, new: &Arc<dyn KeySource>, former| {
        let new = Arc::clone(new);
        let rotation = Rotation::Keys { new, former };
        rig.target.rotate(&subnqn, &host, rotation).unwrap();
    };
    let (plain, _) = rig.connect_admin();
    let before = generate(&mut rig, plain, &former, Concatenation::New);
    rig.hang_up(plain);
    let keys = source(&new).unwrap();
    rotate(&rig, &keys, subsystem.host_keys(&host));
    assert!(secure(&rig, &before));
    rig.wire.borrow_mut().secure = None;
    let made = [&new, &former].map(|keys| {
        let (plain, _) = rig.connect_admin();
        let psk = generate(&mut rig, plain, keys, Concatenation::New);
        rig.hang_up(plain);
        assert!(secure(&rig, &psk));
        let (admin, response) = rig.connect_admin();
        rig.enable(admin);
        rig.io_queue(response.cntlid, 1);
        assert!(!subsystem.has_rotated(&host, SecretKind::Keys));
        rig.wire.borrow_mut().secure = None;
        psk
    });
    rotate(&rig, &keys, None);
    let found = [&before, &made[0], &made[1]].map(|psk| secure(&rig, psk));
    assert_eq!(found, [false, true, false]);
    rig.wire.borrow_mut().secure = None;
    let (plain, _) = rig.connect_admin();
    let refused = rig.authenticate(plain, end(&former, Concatenation::New));
    assert_eq!(refused, Err(Reason::GivenUp(Failed::Authentication)));
}

/// Goal: a PSK that no association uses is forgotten after a minute, and not before.
#[test]
fn an_unused_psk_is_forgotten() {
    let (mut rig, keys) = rig(TlsPolicy::Allow, false);
    let (plain, _) = rig.connect_admin();
    let psk = generate(&mut rig, plain, &keys, Concatenation::New);
    rig.pass(Duration::from_secs(1));
    rig.hang_up(plain);
    rig.pass(Duration::from_secs(1));
    let generated = &rig.target.authentication.generated;
    generated.sweep(rig.now);
    let later = |s| rig.now + Duration::from_secs(s);
    assert!(generated.find(&identity(&psk), later(59)).is_some());
    assert!(generated.find(&identity(&psk), later(60)).is_none());
}

/// Goal: keys that change during a transaction leave no PSK behind. Method: the host's keys are
/// replaced before its last message.
#[test]
fn keys_that_end_during_a_transaction_make_no_psk() {
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    for replaced in [false, true] {
        let (mut rig, keys) = rig(TlsPolicy::Allow, false);
        let (conn, _) = rig.connect_admin();
        let other = Keys {
            host: secret(),
            controller: None,
        };
        let mut end = end(&keys, Concatenation::New);
        let mut messages = 0;
        let before = |rig: &mut Rig| {
            messages += 1;
            if messages == 2 && replaced {
                let target = &rig.target;
                let changed = target.set_host_keys(&subsystem, &host, source(&other));
                changed.unwrap();
            }
        };
        rig.authenticate_between(conn, &mut end, before).unwrap();
        assert_eq!(messages, 2);
        let psk = Psk::generated(&end.take_generated().unwrap());
        assert_eq!(secure(&rig, &psk), !replaced);
    }
}

/// Goal: a PSK does not outlive the keys that proved it: other keys of its host, a host that was
/// removed, or a subsystem that was deleted.
#[test]
fn a_psk_ends_with_its_keys() {
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    for change in ["keys", "host", "subsystem"] {
        let (mut rig, keys) = rig(TlsPolicy::Allow, false);
        let (conn, _) = rig.connect_admin();
        let psk = generate(&mut rig, conn, &keys, Concatenation::New);
        assert!(secure(&rig, &psk));
        let other = Keys {
            host: secret(),
            controller: None,
        };
        let target = &rig.target;
        match change {
            "keys" => target
                .set_host_keys(&subsystem, &host, source(&other))
                .unwrap(),
            "host" => target.remove_host(&subsystem, &host).unwrap(),
            _ => drop(target.delete_subsystem(&subsystem).unwrap()),
        }
        assert!(!secure(&rig, &psk), "{change}");
    }
}

/// Goal: where concatenation cannot work, it fails with RCE 3, and an entry that requires it admits
/// no host without it.
#[test]
fn refusals() {
    let mismatch = Err(Reason::GivenUp(Failed::ConcatenationMismatch));
    for tls in [TlsPolicy::Off, TlsPolicy::Require] {
        let (mut rig, keys) = rig(tls, false);
        let (conn, _) = rig.connect_admin();
        let outcome = rig.authenticate(conn, end(&keys, Concatenation::New));
        assert_eq!(outcome, mismatch, "{tls:?}");
    }
    let (mut rig, keys) = rig(TlsPolicy::Allow, true);
    for channel in [Concatenation::None, Concatenation::Replace] {
        let (conn, _) = rig.connect_admin();
        assert_eq!(rig.authenticate(conn, end(&keys, channel)), mismatch);
    }
    assert_eq!(rig.target.authentication.generated.count(), 0);
    // Without the host's keys its PSKs are worth nothing.
    let (conn, _) = rig.connect_admin();
    let psk = generate(&mut rig, conn, &keys, Concatenation::New);
    assert!(secure(&rig, &psk));
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    subsystem.set_host_keys(&nqn(HOSTNQN), None).unwrap();
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
    assert_eq!(cqe.status(), REQUIRED);
    rig.wire.borrow_mut().secure = None;
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
    assert_eq!(cqe.status(), REQUIRED, "in clear, and without a key");
}

/// Goal: an entry that requires concatenation counts for a Connect that already runs: no queue
/// stays in clear without authentication. Method: the entry is made at each look of the Connect for
/// TLS keys of its connection.
#[test]
fn a_running_connect_meets_the_entry() {
    for look in 1..=5 {
        let mut rig = Rig::with_malloc();
        let keys = Keys {
            host: secret(),
            controller: None,
        };
        let target = Arc::clone(&rig.target);
        let entry = move || {
            let secrets = HostSecrets {
                keys: source(&keys),
                concat: true,
                ..HostSecrets::default()
            };
            let added = target.add_host_with(&nqn(SUBNQN), &nqn(HOSTNQN), secrets);
            added.unwrap();
        };
        rig.wire.borrow_mut().at_look = Some((look, Box::new(entry)));
        let (conn, response) = rig.connect_admin();
        assert!(
            rig.wire.borrow().at_look.is_none(),
            "fewer than {look} looks"
        );
        let must_authenticate = response.auth == AuthRequirements::AUTHENTICATION;
        assert_eq!(must_authenticate, look <= 2, "look {look}");
        rig.pass(Duration::from_millis(250));
        let is_closed = rig.wire.borrow().closes.iter().any(|(c, _)| *c == conn);
        assert_eq!(is_closed, !must_authenticate, "look {look}");
    }
}
