//! Tests of authentication through the target: the commands served before and after it, on admin
//! and I/O queues, and the end of failed transactions.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::fabrics::{AuthRequirements, Authentication, ConnectResponse};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::registers::offset;
use nacre_nvmf_wire::{Cqe, Sgl, Sqe, StatusCode, commands::admin as commands, fabrics};

use super::rig::*;
use crate::auth::message::Failed;
use crate::auth::{
    Agreed, FixedKeys, Group, Hash, HostEnd, KeySource, Keys, Names, Offer, Progress, Reason,
    Secret, SystemRandom, TransactionStep,
};
use crate::subsystems::{HostSecrets, Rotation, SecretKind, TargetConfig, Teardown};
use crate::transport::{CloseWhy, ConnId, Response};

const REQUIRED: StatusCode = StatusCode::AUTHENTICATION_REQUIRED.with_dnr();
const GUESS: Reason = Reason::GivenUp(Failed::Authentication);

pub(super) fn secret() -> Secret {
    Secret::generate(Some(Hash::Sha256), &mut SystemRandom).unwrap()
}

fn secrets(keys: &Keys) -> HostSecrets {
    HostSecrets {
        keys: source(keys),
        ..HostSecrets::default()
    }
}

pub(super) fn source(keys: &Keys) -> Option<Arc<dyn KeySource>> {
    Some(Arc::new(FixedKeys(keys.clone())))
}

/// A rig whose host must authenticate itself, and the keys.
fn rig() -> (Rig, Keys) {
    let rig = Rig::with_malloc();
    let keys = Keys {
        host: secret(),
        controller: Some(secret()),
    };
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    let target = &rig.target;
    target
        .add_host_with(&subsystem, &host, secrets(&keys))
        .unwrap();
    (rig, keys)
}

pub(super) fn host_end(keys: &Keys, offer: Offer) -> HostEnd {
    let names = Names {
        host: nqn(HOSTNQN),
        subsystem: nqn(SUBNQN),
    };
    let keys = Arc::new(FixedKeys(keys.clone()));
    HostEnd::new(names, keys, offer, 1, Box::new(SystemRandom))
}

fn quick() -> Offer {
    Offer {
        hashes: vec![Hash::Sha256],
        groups: vec![Group::Null],
    }
}

fn authentication(length: u32) -> Authentication {
    Authentication {
        secp: Authentication::SECP_NVME,
        spsp0: 1,
        spsp1: 1,
        length,
    }
}

impl Rig {
    fn auth_send(&mut self, conn: ConnId, bytes: &[u8]) -> StatusCode {
        let length = bytes.len() as u32;
        let cid = self.cid();
        let sqe = authentication(length).to_send(cid, Sgl::Transport { length });
        self.status(conn, sqe, bytes)
    }

    fn auth_receive(&mut self, conn: ConnId) -> Response {
        let sqe = self.auth_receive_command(4096);
        self.call(conn, sqe, &[])
    }

    fn auth_receive_command(&mut self, length: u32) -> Sqe {
        let cid = self.cid();
        authentication(length).to_receive(cid, Sgl::Transport { length })
    }

    /// A transaction on a connected queue.
    pub(super) fn authenticate(
        &mut self,
        conn: ConnId,
        mut end: HostEnd,
    ) -> Result<Agreed, Reason> {
        self.authenticate_with(conn, &mut end)
    }

    pub(super) fn authenticate_with(
        &mut self,
        conn: ConnId,
        end: &mut HostEnd,
    ) -> Result<Agreed, Reason> {
        self.authenticate_between(conn, end, |_| {})
    }

    /// Calls `before` before each message of the host.
    pub(super) fn authenticate_between(
        &mut self,
        conn: ConnId,
        end: &mut HostEnd,
        mut before: impl FnMut(&mut Self),
    ) -> Result<Agreed, Reason> {
        loop {
            match end.step() {
                TransactionStep::Send(bytes) => {
                    before(self);
                    let status = self.auth_send(conn, &bytes);
                    assert!(status.is_success(), "{status}");
                    end.sent();
                }
                TransactionStep::Receive => {
                    let response = self.auth_receive(conn);
                    assert!(response.cqe.status().is_success());
                    end.received(&response.data[0]);
                }
                TransactionStep::Compute(job) => end.answered(job.run()),
                TransactionStep::Wait => panic!("every step was reported"),
                TransactionStep::Completed(agreed) => return Ok(agreed),
                TransactionStep::Failed(reason) => return Err(reason),
            }
        }
    }

    pub(super) fn connect_admin(&mut self) -> (ConnId, ConnectResponse) {
        let (conn, cqe) = self.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
        assert!(cqe.status().is_success(), "{}", cqe.status());
        (conn, ConnectResponse::from_cqe(&cqe))
    }

    /// An enabled controller whose host has authenticated itself.
    fn proven_admin(&mut self, keys: &Keys) -> (ConnId, u16) {
        let (conn, response) = self.connect_admin();
        self.authenticate(conn, host_end(keys, quick())).unwrap();
        self.enable(conn);
        (conn, response.cntlid)
    }

    fn is_closed(&mut self, conn: ConnId) -> bool {
        self.pass(Duration::from_millis(250));
        self.wire.borrow().closes.iter().any(|(c, _)| *c == conn)
    }
}

fn property_get(cid: u16) -> Sqe {
    let (size, offset) = (fabrics::PropertySize::Eight, offset::CAP);
    fabrics::PropertyGet { size, offset }.to_sqe(cid)
}

fn read(cid: u16) -> Sqe {
    let mut sqe = Sqe::for_namespace(opcode::READ, cid, 1);
    sqe = sqe.with_sgl(Sgl::Transport { length: BLOCK });
    sqe
}

/// Goal: until its host has proved itself, an admin queue serves nothing but that. Method: every
/// kind of command, before and in the middle of the transaction, and one after it.
#[test]
fn admin_queue() {
    let (mut rig, keys) = rig();
    let (conn, response) = rig.connect_admin();
    assert_eq!(response.auth, AuthRequirements::AUTHENTICATION);
    let refused = |rig: &mut Rig| {
        let commands = [
            property_get(1),
            commands::keep_alive(2),
            commands::async_event_request(3),
            commands::Identify::new(1).to_sqe(4, 0),
            fabrics::disconnect(5),
        ];
        for sqe in commands {
            assert_eq!(rig.status(conn, sqe, &[]), REQUIRED, "{sqe:?}");
        }
        let association = &rig.target.subsystem(&nqn(SUBNQN)).unwrap().controllers()[0];
        assert!(!association.is_authenticated());
    };
    refused(&mut rig);
    let mut end = host_end(&keys, Offer::default());
    let TransactionStep::Send(negotiate) = end.step() else {
        panic!("no Negotiate");
    };
    assert!(rig.auth_send(conn, &negotiate).is_success());
    end.sent();
    refused(&mut rig);
    let agreed = rig.authenticate(conn, end).unwrap();
    assert!(agreed.mutual);
    assert!(rig.status(conn, property_get(1), &[]).is_success());
    let association = &rig.target.subsystem(&nqn(SUBNQN)).unwrap().controllers()[0];
    assert!(association.is_authenticated());
    let state = association.queue(0).unwrap().auth.load();
    let chosen = Some((agreed.hash, agreed.group));
    assert_eq!(state, Some((Progress::Completed, chosen)));
    assert_eq!(rig.target.authentication.counts(), (1, 0));
    rig.hang_up(conn);
    rig.assert_clean();
}

/// Goal: each I/O queue has to be authenticated by itself.
#[test]
fn io_queue() {
    let (mut rig, keys) = rig();
    let (admin, cntlid) = rig.proven_admin(&keys);
    let (conn, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 1, cntlid, 16);
    assert_eq!(
        ConnectResponse::from_cqe(&cqe).auth,
        AuthRequirements::AUTHENTICATION
    );
    for sqe in [read(7), fabrics::disconnect(8), Sqe::new(0, 9)] {
        assert_eq!(rig.status(conn, sqe, &[]), REQUIRED, "{sqe:?}");
    }
    let agreed = rig.authenticate(conn, host_end(&keys, Offer::default()));
    assert_eq!(agreed.unwrap().group, Group::Ffdhe3072);
    assert!(rig.status(conn, read(7), &[]).is_success());
    rig.hang_up(admin);
    // The device closes with the upkeep after the last queue.
    rig.pass(Duration::from_millis(200));
    rig.assert_clean();
}

/// Goal: a wrong key, or none, ends the connection and the controller, and is reported.
#[test]
fn wrong_key() {
    let (mut rig, keys) = rig();
    let (conn, _) = rig.connect_admin();
    let wrong = Keys {
        host: secret(),
        controller: None,
    };
    let result = rig.authenticate(conn, host_end(&wrong, Offer::default()));
    assert_eq!(result, Err(GUESS));
    assert_eq!(rig.status(conn, property_get(1), &[]), REQUIRED);
    assert!(rig.is_closed(conn));
    rig.assert_clean();
    let failures = rig.target.authentication.take_failures();
    let [failure] = &failures[..] else {
        panic!("{failures:?}");
    };
    assert_eq!(failure.reason, Reason::WrongResponse);
    assert_eq!((&failure.host, failure.qid), (&nqn(HOSTNQN), 0));
    assert_eq!(failure.subsystem, nqn(SUBNQN));
    // It is the key, not the host.
    rig.proven_admin(&keys);
}

/// Goal: a host that has the wrong controller key is gone, and the failure is its own.
#[test]
fn wrong_controller_key() {
    let (mut rig, mut keys) = rig();
    keys.controller = Some(secret());
    let (conn, _) = rig.connect_admin();
    let result = rig.authenticate(conn, host_end(&keys, quick()));
    assert_eq!(result, Err(Reason::WrongControllerResponse));
    assert_eq!(rig.status(conn, property_get(1), &[]), REQUIRED);
    assert!(rig.is_closed(conn));
    assert_eq!(rig.target.authentication.take_failures()[0].reason, GUESS);
    rig.assert_clean();
}

/// Goal: claims without a proof have a part of the connections only. Each proof or end makes room.
#[test]
fn unproven_queues_are_bounded() {
    let mut rig = Rig::new(TargetConfig {
        max_connections: 4,
        ..TargetConfig::default()
    });
    rig.add_namespace(ram());
    let keys = Keys {
        host: secret(),
        controller: None,
    };
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    let target = &rig.target;
    target
        .add_host_with(&subsystem, &host, secrets(&keys))
        .unwrap();
    let (first, _) = rig.connect_admin();
    assert_eq!(rig.target.unauthenticated_queues(), 1);
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
    let busy = StatusCode::CONNECT_CONTROLLER_BUSY;
    assert_eq!(cqe.status(), busy, "no DNR: it may work later");
    rig.hang_up(first);
    rig.turn();
    let (conn, _) = rig.connect_admin();
    rig.authenticate(conn, host_end(&keys, quick())).unwrap();
    assert_eq!(rig.target.unauthenticated_queues(), 0);
    rig.connect_admin();
}

/// Goal: a host that goes on sending, and never fetches the failure, does not hold its place.
#[test]
fn endless_messages() {
    let (mut rig, _) = rig();
    let (conn, _) = rig.connect_admin();
    let step = Duration::from_millis(u64::from(rig.kato_ms) / 3);
    for _ in 0..3 {
        assert!(rig.auth_send(conn, &[9; 64]).is_success());
        rig.pass(step);
    }
    assert!(rig.is_closed(conn));
    rig.assert_clean();
}

/// Goal: a keep-alive timeout of weeks does not give a silent host weeks.
#[test]
fn long_keep_alive() {
    let (mut rig, _) = rig();
    rig.kato_ms = u32::MAX;
    let (conn, _) = rig.connect_admin();
    rig.pass(Duration::from_secs(121));
    assert!(rig.is_closed(conn));
    rig.assert_clean();
}

/// Goal: a host that is silent, or stops in the middle, does not hold its place.
#[test]
fn silence() {
    for begun in [false, true] {
        let (mut rig, keys) = rig();
        let (conn, _) = rig.connect_admin();
        if begun {
            let TransactionStep::Send(negotiate) = host_end(&keys, quick()).step() else {
                panic!("no Negotiate");
            };
            rig.auth_send(conn, &negotiate);
            rig.turn();
        }
        rig.pass(Duration::from_millis(u64::from(rig.kato_ms) - 200));
        assert_eq!(rig.group.queue_pairs(), 1);
        let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
        let association = subsystem.controllers().remove(0);
        assert!(rig.is_closed(conn));
        let reason = association.teardown_reason();
        assert_eq!(reason, Some(Teardown::NotAuthenticated));
        drop(association);
        rig.assert_clean();
    }
}

/// Goal: guesses are slowed down, more with each.
#[test]
fn guesses() {
    let (mut rig, _) = rig();
    let wrong = Keys {
        host: secret(),
        controller: None,
    };
    for failures in 0..8u32 {
        let (conn, _) = rig.connect_admin();
        // One address: the loopback addresses of a rig's connections differ.
        let mut end = host_end(&wrong, quick());
        for _ in 0..2 {
            match end.step() {
                TransactionStep::Send(bytes) => {
                    rig.auth_send(conn, &bytes);
                    end.sent();
                }
                TransactionStep::Receive => end.received(&rig.auth_receive(conn).data[0]),
                other => panic!("{other:?}"),
            }
        }
        if let TransactionStep::Compute(job) = end.step() {
            end.answered(job.run());
        }
        let TransactionStep::Send(reply) = end.step() else {
            panic!("no Reply");
        };
        rig.auth_send(conn, &reply);
        let receive = rig.auth_receive_command(4096);
        rig.send(conn, receive, None);
        rig.turn();
        rig.turn();
        let is_delayed = rig.wire.borrow().responses.is_empty();
        assert_eq!(is_delayed, failures >= 5, "failure {failures}");
        rig.pass(Duration::from_millis(500));
        assert_eq!(rig.answers().len(), 1, "failure {failures}");
        rig.hang_up(conn);
        rig.reuse(conn);
        rig.turn();
    }
    rig.assert_clean();
}

/// Goal: a live queue can be authenticated again while it carries I/O: with the new keys from then
/// on, and a failure ends it.
#[test]
fn again() {
    let (mut rig, keys) = rig();
    let (_, cntlid) = rig.proven_admin(&keys);
    let conn = {
        let (conn, _) = rig.connect_as(HOSTNQN, SUBNQN, 1, cntlid, 16);
        rig.authenticate(conn, host_end(&keys, quick())).unwrap();
        conn
    };
    let new = Keys {
        host: secret(),
        controller: None,
    };
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    rig.target
        .set_host_keys(&subsystem, &host, source(&new))
        .unwrap();
    assert!(rig.status(conn, read(1), &[]).is_success(), "it goes on");
    let mut end = host_end(&new, quick());
    let TransactionStep::Send(negotiate) = end.step() else {
        panic!("no Negotiate");
    };
    rig.auth_send(conn, &negotiate);
    end.sent();
    assert!(rig.status(conn, read(1), &[]).is_success(), "in between");
    rig.authenticate(conn, end).unwrap();
    assert!(rig.status(conn, read(1), &[]).is_success());
    let result = rig.authenticate(conn, host_end(&keys, quick()));
    assert_eq!(result, Err(GUESS), "the old key is no good");
    assert!(rig.is_closed(conn));
}

/// Goal: during a rotation the host uses either key while its I/O goes on, and the former key ends
/// when each queue used the new one.
#[test]
fn rotation() {
    let (mut rig, former) = rig();
    let (admin, cntlid) = rig.proven_admin(&former);
    rig.enable(admin);
    let (conn, _) = rig.connect_as(HOSTNQN, SUBNQN, 1, cntlid, 16);
    rig.authenticate(conn, host_end(&former, quick())).unwrap();
    let new = Keys {
        host: secret(),
        controller: None,
    };
    let (subnqn, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    let subsystem = rig.target.subsystem(&subnqn).unwrap();
    let rotation = Rotation::Keys {
        new: source(&new).unwrap(),
        former: subsystem.host_keys(&host),
    };
    rig.target.rotate(&subnqn, &host, rotation).unwrap();
    let has_rotated = || subsystem.has_rotated(&host, SecretKind::Keys);
    assert!(!has_rotated());
    for (conn, keys, expected) in [
        (conn, &former, false),
        (conn, &new, false),
        (admin, &new, true),
        (conn, &former, false),
        (conn, &new, true),
    ] {
        rig.authenticate(conn, host_end(keys, quick())).unwrap();
        assert!(rig.status(conn, read(1), &[]).is_success() || conn == admin);
        assert_eq!(has_rotated(), expected);
    }
    subsystem.end_rotation(&host, SecretKind::Keys);
    assert!(rig.status(conn, read(1), &[]).is_success());
    let result = rig.authenticate(conn, host_end(&former, quick()));
    assert_eq!(result, Err(GUESS), "the former key has ended");
    assert!(rig.is_closed(conn));
    assert!(!rig.is_closed(admin));
    assert!(
        rig.target
            .authentication
            .last_access(&subnqn, &host)
            .is_some()
    );
}

/// Goal: a transaction on a live queue that the host drops costs the queue nothing.
#[test]
fn an_abandoned_transaction_costs_the_queue_nothing() {
    let (mut rig, keys) = rig();
    rig.kato_ms = 0;
    let (conn, _) = rig.proven_admin(&keys);
    let TransactionStep::Send(negotiate) = host_end(&keys, quick()).step() else {
        panic!("no Negotiate");
    };
    rig.auth_send(conn, &negotiate);
    rig.turn();
    rig.pass(Duration::from_secs(121));
    rig.pass(Duration::from_millis(200));
    assert!(rig.status(conn, property_get(1), &[]).is_success());
    rig.authenticate(conn, host_end(&keys, quick())).unwrap();
}

/// Goal: a host without a key here is served without, and a transaction of its own accord fails.
#[test]
fn without_a_key() {
    let (mut rig, keys) = rig();
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    rig.target.set_host_keys(&subsystem, &host, None).unwrap();
    let (conn, response) = rig.connect_admin();
    assert_eq!(response.auth, AuthRequirements::empty());
    assert!(rig.status(conn, property_get(1), &[]).is_success());
    let result = rig.authenticate(conn, host_end(&keys, quick()));
    assert_eq!(result, Err(GUESS));
    assert!(rig.is_closed(conn));
    let failures = rig.target.authentication.take_failures();
    assert_eq!(failures[0].reason, Reason::NoKey);
    rig.assert_clean();
}

/// Goal: only what the target offers is agreed on.
#[test]
fn offers() {
    let (mut rig, keys) = rig();
    rig.target.authentication.set_offer(Offer {
        hashes: vec![Hash::Sha512],
        groups: vec![Group::Ffdhe2048],
    });
    let (conn, _) = rig.connect_admin();
    let agreed = rig.authenticate(conn, host_end(&keys, Offer::default()));
    let agreed = agreed.unwrap();
    assert_eq!(
        (agreed.hash, agreed.group),
        (Hash::Sha512, Group::Ffdhe2048)
    );
    let (conn, _) = rig.connect_admin();
    let result = rig.authenticate(conn, host_end(&keys, quick()));
    assert_eq!(result, Err(Reason::GivenUp(Failed::HashUnusable)));
}

/// Goal: commands that break the rules of Base 6.1 and 6.2 are refused.
#[test]
fn bad_commands() {
    let (mut rig, _) = rig();
    let (conn, _) = rig.connect_admin();
    let invalid = StatusCode::INVALID_FIELD.with_dnr();
    let length = 64;
    let sgl = Sgl::Transport { length };
    let good = authentication(length);
    for bad in [
        Authentication { secp: 0, ..good },
        Authentication { spsp0: 0, ..good },
        Authentication { spsp1: 2, ..good },
        Authentication { length: 0, ..good },
    ] {
        assert_eq!(
            rig.status(conn, bad.to_send(1, sgl), &[]),
            invalid,
            "{bad:?}"
        );
        let receive = bad.to_receive(1, sgl);
        assert_eq!(rig.status(conn, receive, &[]), invalid, "{bad:?}");
    }
    let long = authentication(4097);
    let sgl = Sgl::Transport { length: 4097 };
    assert_eq!(rig.status(conn, long.to_send(1, sgl), &[]), invalid);
    let short = Sgl::Transport { length: 8 };
    let status = rig.status(conn, good.to_receive(1, short), &[]);
    assert_eq!(status, StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr());
    // Nothing to receive yet.
    let receive = rig.auth_receive_command(4096);
    let status = rig.status(conn, receive, &[]);
    assert_eq!(status, StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr());
    // Bytes that are no message: the Send succeeds, and Failure1 has the reason.
    assert!(rig.auth_send(conn, &[9; 64]).is_success());
    let response = rig.auth_receive(conn);
    assert_eq!(response.data[0][..], [0, 0xf1, 0, 0, 0, 0, 1, 6]);
    drop(response);
    assert!(rig.is_closed(conn));
    rig.assert_clean();
}

/// Goal: a buffer that is too short for any answer costs the connection.
#[test]
fn short_receive() {
    let (mut rig, keys) = rig();
    let (conn, _) = rig.connect_admin();
    let TransactionStep::Send(negotiate) = host_end(&keys, quick()).step() else {
        panic!("no Negotiate");
    };
    rig.auth_send(conn, &negotiate);
    rig.turn();
    let receive = rig.auth_receive_command(7);
    let cqe: Cqe = rig.call(conn, receive, &[]).cqe;
    assert_eq!(cqe.status(), StatusCode::INVALID_FIELD.with_dnr());
    let closes = rig.wire.borrow().closes.clone();
    assert!(closes.contains(&(conn, CloseWhy::Drained)));
    rig.assert_clean();
}

/// Goal: a queue that ends while the helper thread works for it leaves nothing behind.
#[test]
fn ends_in_the_middle() {
    let (mut rig, keys) = rig();
    let (conn, _) = rig.connect_admin();
    let TransactionStep::Send(negotiate) = host_end(&keys, Offer::default()).step() else {
        panic!("no Negotiate");
    };
    rig.auth_send(conn, &negotiate);
    let receive = rig.auth_receive_command(4096);
    rig.send(conn, receive, None);
    rig.hang_up(conn);
    rig.assert_clean();
    rig.reuse(conn);
    rig.proven_admin(&keys);
}

/// Goal: rules about the list of hosts.
#[test]
fn keys_belong_to_hosts_of_the_list() {
    let rig = Rig::with_malloc();
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    let keys = Keys {
        host: secret(),
        controller: None,
    };
    let unknown = rig.target.set_host_keys(&subsystem, &host, source(&keys));
    assert!(unknown.unwrap_err().to_string().contains("not in the list"));
    rig.target.add_host(&subsystem, &host).unwrap();
    let twice = rig.target.add_host_with(&subsystem, &host, secrets(&keys));
    assert!(twice.unwrap_err().to_string().contains("already allowed"));
    let found = rig.target.subsystem(&subsystem).unwrap().host_keys(&host);
    assert!(found.is_none(), "a refused call changes nothing");
}
