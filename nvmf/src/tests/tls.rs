//! Tests of hosts with a PSK, and of connections over TLS, through the target.

use std::sync::Arc;

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::fabrics::DISCOVERY_NQN;

use super::rig::*;
use crate::auth::SystemRandom;
use crate::subsystems::{HostSecrets, Rotation, SecretKind, SubsystemConfig, TargetPsks, Teardown};
use crate::tls::{Derivation, Psk, PskSource, SecureChannel, Suite, Version};

const REQUIRED: StatusCode = StatusCode::AUTHENTICATION_REQUIRED.with_dnr();
const OTHER_HOST: StatusCode = StatusCode::CONNECT_INVALID_HOST.with_dnr();
const OTHER: &str = "nqn.2025-01.io.nacre:other";

fn generated() -> Arc<Psk> {
    Arc::new(Psk::generate(&mut SystemRandom).unwrap())
}

fn secrets(psk: &Arc<Psk>) -> HostSecrets {
    HostSecrets {
        psk: Some(Arc::clone(psk) as _),
        ..HostSecrets::default()
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

/// Goal: during a rotation a host connects with either PSK, and after it with the new one only.
#[test]
fn rotation() {
    let (mut rig, former) = rig();
    let (subnqn, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    secure(&rig, &former, HOSTNQN, SUBNQN);
    let (_, cntlid) = rig.admin();
    let new = generated();
    let rotation = Rotation::Psk {
        new: Arc::clone(&new) as _,
        former: Some(Arc::clone(&former) as _),
    };
    rig.target.rotate(&subnqn, &host, rotation).unwrap();
    rig.io_queue(cntlid, 1);
    secure(&rig, &new, HOSTNQN, SUBNQN);
    let subsystem = rig.target.subsystem(&subnqn).unwrap();
    let has_rotated = || subsystem.has_rotated(&host, SecretKind::Psk);
    let (_, other) = rig.admin();
    assert!(!has_rotated(), "one controller has the former PSK");
    rig.io_queue(other, 1);
    let association = subsystem.controller(cntlid).unwrap();
    association.tear_down(Teardown::HostLeft);
    assert!(has_rotated());
    subsystem.end_rotation(&host, SecretKind::Psk);
    rig.io_queue(other, 2);
    secure(&rig, &former, HOSTNQN, SUBNQN);
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
    assert_eq!(cqe.status(), StatusCode::AUTHENTICATION_REQUIRED);
}

/// Goal: a rotation goes on while a path of the host is lost: it may return with the former PSK.
#[test]
fn a_path_is_lost_during_a_rotation() {
    let (mut rig, former) = rig();
    let (subnqn, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    secure(&rig, &former, HOSTNQN, SUBNQN);
    let paths = [rig.admin().1, rig.admin().1];
    let new = generated();
    let rotation = Rotation::Psk {
        new: Arc::clone(&new) as _,
        former: Some(Arc::clone(&former) as _),
    };
    rig.target.rotate(&subnqn, &host, rotation).unwrap();
    let subsystem = rig.target.subsystem(&subnqn).unwrap();
    for cntlid in paths {
        let association = subsystem.controller(cntlid).unwrap();
        association.tear_down(Teardown::HostLeft);
    }
    secure(&rig, &new, HOSTNQN, SUBNQN);
    for is_last in [false, true] {
        let (_, cntlid) = rig.admin();
        rig.io_queue(cntlid, 1);
        assert_eq!(subsystem.has_rotated(&host, SecretKind::Psk), is_last);
    }
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

/// Goal: a host gets the discovery log over TLS with its PSK of any subsystem, by each name of the
/// discovery subsystem, and in clear as before. Its own name and key count.
#[test]
fn discovery_over_tls() {
    const UNIQUE: &str = "nqn.2025-01.io.nacre:discovery";
    let (mut rig, psk) = rig();
    rig.target.set_discovery_nqn(Some(nqn(UNIQUE))).unwrap();
    let connect = |rig: &mut Rig, host: &str| {
        let (_, cqe) = rig.connect_as(host, DISCOVERY_NQN, 0, 0xffff, 32);
        cqe.status()
    };
    assert_eq!(connect(&mut rig, HOSTNQN), StatusCode::SUCCESS);
    for name in [DISCOVERY_NQN, UNIQUE] {
        secure(&rig, &psk, HOSTNQN, name);
        assert_eq!(connect(&mut rig, HOSTNQN), StatusCode::SUCCESS);
        assert_eq!(connect(&mut rig, OTHER), OTHER_HOST);
    }
    // An identity of one subsystem does not serve for another.
    secure(&rig, &psk, HOSTNQN, SUBNQN);
    assert_eq!(connect(&mut rig, HOSTNQN), OTHER_HOST);
    secure(&rig, &psk, HOSTNQN, DISCOVERY_NQN);
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
    assert_eq!(cqe.status(), OTHER_HOST);
    // Nor does a key that the host no longer has.
    rig.target.remove_host(&nqn(SUBNQN), &nqn(HOSTNQN)).unwrap();
    let stale = StatusCode::AUTHENTICATION_REQUIRED;
    assert_eq!(connect(&mut rig, HOSTNQN), stale);
}

/// Goal: handshakes find the PSK of a host by the names of the identity, while it is in the list.
/// For discovery they find each PSK of the host once.
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
    let second = generated();
    for (subsystem, psk) in [("second", &second), ("third", &psk)] {
        let subsystem = nqn(&format!("nqn.2025-01.io.nacre:{subsystem}"));
        let config = SubsystemConfig::new(subsystem.clone());
        rig.target.create_subsystem(config).unwrap();
        let added = rig
            .target
            .add_host_with(&subsystem, &nqn(HOSTNQN), secrets(psk));
        added.unwrap();
    }
    let both = find(HOSTNQN, DISCOVERY_NQN);
    assert_eq!(both.len(), 2);
    assert!(both.contains(&psk) && both.contains(&second));
    assert_eq!(find(OTHER, DISCOVERY_NQN), []);
    rig.target.remove_host(&nqn(SUBNQN), &nqn(HOSTNQN)).unwrap();
    assert_eq!(find(HOSTNQN, SUBNQN), []);
}
