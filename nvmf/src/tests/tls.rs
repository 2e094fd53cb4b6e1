//! Hosts with a PSK, and connections over TLS.

use std::sync::Arc;

use nacre_nvmf_wire::StatusCode;

use super::rig::*;
use crate::auth::SystemRandom;
use crate::subsystems::{HostSecrets, TargetPsks, Teardown};
use crate::tls::{Derivation, Psk, PskSource, SecureChannel, Suite, Version};

const REQUIRED: StatusCode = StatusCode::AUTHENTICATION_REQUIRED.with_dnr();
const OTHER_HOST: StatusCode = StatusCode::CONNECT_INVALID_HOST.with_dnr();
const OTHER: &str = "nqn.2025-01.io.nacre:other";

fn generated() -> Arc<Psk> {
    Arc::new(Psk::generate(&mut SystemRandom).unwrap())
}

fn secrets(psk: &Arc<Psk>) -> HostSecrets {
    HostSecrets {
        keys: None,
        psk: Some(Arc::clone(psk) as _),
    }
}

/// A rig whose host has a PSK.
fn rig() -> (Rig, Arc<Psk>) {
    let rig = Rig::with_malloc();
    let psk = generated();
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    rig.target
        .add_host_with(&subsystem, &host, secrets(&psk))
        .unwrap();
    (rig, psk)
}

/// Connections from here on are over TLS with the key of these names.
fn secure(rig: &Rig, psk: &Arc<Psk>, host: &str, subsystem: &str) {
    let (host, subsystem) = (nqn(host), nqn(subsystem));
    let derivation = Derivation::Standard;
    rig.wire.borrow_mut().secure = Some(Arc::new(SecureChannel {
        identity: psk.identity(Version::One, &host, &subsystem, derivation),
        psk: Arc::clone(psk) as _,
        suite: Suite::Aes128Sha256,
        derivation,
    }));
}

#[test]
fn a_host_with_a_psk_is_not_served_in_clear() {
    let (mut rig, psk) = rig();
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
    assert_eq!(cqe.status(), REQUIRED);
    // Its I/O queues neither.
    secure(&rig, &psk, HOSTNQN, SUBNQN);
    let (_, cntlid) = rig.admin();
    rig.wire.borrow_mut().secure = None;
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 1, cntlid, 16);
    assert_eq!(cqe.status(), REQUIRED);
    secure(&rig, &psk, HOSTNQN, SUBNQN);
    rig.io_queue(cntlid, 1);
    // A host without a key is served in clear, as before.
    rig.wire.borrow_mut().secure = None;
    let (_, cqe) = rig.connect_as(OTHER, SUBNQN, 0, 0xffff, 32);
    assert_eq!(cqe.status(), StatusCode::SUCCESS);
}

/// Goal: a host that is given a PSK while it is connected in clear must connect again.
#[test]
fn a_new_psk_ends_connections_in_clear() {
    let mut rig = Rig::with_malloc();
    let (_, cntlid) = rig.admin();
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let association = subsystem.controller(cntlid).unwrap();
    let psk = generated();
    let other = rig
        .target
        .add_host_with(&nqn(SUBNQN), &nqn(OTHER), secrets(&psk));
    other.unwrap();
    assert_eq!(association.teardown_reason(), None);
    let same = rig
        .target
        .add_host_with(&nqn(SUBNQN), &nqn(HOSTNQN), secrets(&psk));
    same.unwrap();
    let reason = association.teardown_reason();
    assert_eq!(reason, Some(Teardown::MustEncrypt));
}

/// Goal: no queue in clear joins a controller on TLS, also after its host's entry is gone.
#[test]
fn queues_are_all_on_tls_or_none_is() {
    let (mut rig, psk) = rig();
    rig.target.set_allow_any_host(&nqn(SUBNQN), true).unwrap();
    secure(&rig, &psk, HOSTNQN, SUBNQN);
    let (_, cntlid) = rig.admin();
    rig.target.remove_host(&nqn(SUBNQN), &nqn(HOSTNQN)).unwrap();
    rig.wire.borrow_mut().secure = None;
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 1, cntlid, 16);
    assert_eq!(cqe.status(), REQUIRED);
}

/// Goal: a finished handshake is worth nothing once its key is replaced or removed. Method: the key
/// of the host changes between handshake and Connect, of the admin queue and of an I/O queue.
#[test]
fn a_handshake_does_not_outlive_its_key() {
    const STALE: StatusCode = StatusCode::AUTHENTICATION_REQUIRED;
    let (mut rig, old) = rig();
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    rig.target.set_allow_any_host(&subsystem, true).unwrap();
    secure(&rig, &old, HOSTNQN, SUBNQN);
    let (_, cntlid) = rig.admin();
    rig.io_queue(cntlid, 1);
    rig.target.remove_host(&subsystem, &host).unwrap();
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 2, cntlid, 16);
    assert_eq!(cqe.status(), STALE);
    let new = generated();
    let added = rig.target.add_host_with(&subsystem, &host, secrets(&new));
    added.unwrap();
    for (qid, cntlid) in [(0, 0xffff), (2, cntlid)] {
        let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, qid, cntlid, 16);
        assert_eq!(cqe.status(), STALE, "queue {qid}");
    }
    secure(&rig, &new, HOSTNQN, SUBNQN);
    rig.io_queue(cntlid, 2);
    let failures = rig.target.authentication.take_tls_failures();
    // Each connection here has an address of its own.
    assert_eq!(failures.len(), 3);
    let failure = &failures[2];
    assert_eq!(failure.names, Some((host, subsystem)));
    assert!(
        failure.reason.contains("was replaced or removed"),
        "{failure:?}"
    );
    assert_eq!(failure.times, 1);
}

#[test]
fn the_identity_is_that_of_the_connect() {
    let (mut rig, psk) = rig();
    secure(&rig, &psk, OTHER, SUBNQN);
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
    assert_eq!(cqe.status(), OTHER_HOST);
    secure(&rig, &psk, HOSTNQN, OTHER);
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
    assert_eq!(cqe.status(), OTHER_HOST);
    secure(&rig, &psk, HOSTNQN, SUBNQN);
    let (_, cqe) = rig.connect_as(OTHER, SUBNQN, 0, 0xffff, 32);
    assert_eq!(cqe.status(), OTHER_HOST);
    rig.assert_clean();
    rig.io();
}

/// Goal: handshakes find the PSK of a host by the names of the identity, while it is in the list.
#[test]
fn psks_of_a_target() {
    let (rig, psk) = rig();
    let psks = TargetPsks::new(&rig.target);
    let find = |host: &str, subsystem: &str| {
        let derivation = Derivation::Standard;
        let found =
            psks.psks(&psk.identity(Version::Zero, &nqn(host), &nqn(subsystem), derivation));
        let psk = found.iter().map(|key| key.psk().unwrap());
        psk.collect::<Vec<Psk>>()
    };
    assert_eq!(find(HOSTNQN, SUBNQN), [Psk::clone(&psk)]);
    assert_eq!(find(OTHER, SUBNQN), []);
    assert_eq!(find(HOSTNQN, OTHER), []);
    rig.target.remove_host(&nqn(SUBNQN), &nqn(HOSTNQN)).unwrap();
    assert_eq!(find(HOSTNQN, SUBNQN), []);
}
