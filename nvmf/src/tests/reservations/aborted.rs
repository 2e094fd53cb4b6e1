//! Tests of Preempt and Abort: of writes that hang in a device that can abort them, of a host with
//! two controllers, and of random commands of two hosts.

use std::sync::Arc;

use nacre_bdev::fault::{self, Action, Fault};
use nacre_bdev::registry::Registry;
use nacre_bdev::{Bdev, Op};
use nacre_nvmf_wire::commands::reservation::{AcquireAction, ReservationType};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};
use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::super::rig::*;
use super::{CONFLICT, KEY_A, KEY_B, OK, keys, rw};
use crate::subsystems::TargetConfig;

const KIND: ReservationType = ReservationType::WriteExclusive;

/// Goal: endless writes of the preempted host are aborted in the device, on both cores and on each
/// of its controllers, and those of others are not. Then the command completes, without another
/// event. Method: a fault bdev that lets writes hang; B has a controller on each of two cores, C
/// one beside A.
#[test]
fn hanging_writes_of_the_preempted_host_are_aborted() {
    let registry = Registry::new();
    let base = ram();
    let base_name = base.name().to_string();
    registry.register(base).unwrap();
    let config = fault::Config {
        base_name,
        uuid: None,
    };
    let device = fault::create(config, &registry).unwrap();
    let mut rig = Rig::on_cores(TargetConfig::default(), 2);
    rig.add_namespace(Arc::clone(&device) as Arc<dyn Bdev>);
    let (a, c) = (rig.host(0xa, KEY_A), rig.host(0xc, 0xcc));
    let b_here = rig.host(0xb, KEY_B);
    for host in [a, b_here, c] {
        rig.register(host);
    }
    rig.switch();
    let b_there = rig.host(0xb, KEY_B);
    rig.switch();
    device
        .inject(Fault::new(Action::Hang).on(&[Op::Write]))
        .unwrap();
    let hang = |rig: &mut Rig, host: super::Host| {
        let cid = rig.cid();
        rig.send(host.io, rw(opcode::WRITE, cid), None);
        rig.turn();
        rig.deliver(&[1; BLOCK as usize]);
        rig.turn();
        cid
    };
    let (here, others) = (hang(&mut rig, b_here), hang(&mut rig, c));
    rig.switch();
    let there = hang(&mut rig, b_there);
    assert!(rig.answers().is_empty());
    rig.switch();
    assert!(rig.answers().is_empty());

    let preempt = rig.acquire_sqe(AcquireAction::PreemptAndAbort, KIND);
    rig.send(a.io, preempt, None);
    rig.turn();
    rig.deliver(keys(KEY_A, KEY_B).as_bytes());
    for _ in 0..6 {
        rig.turn();
    }
    let answers = rig.answers();
    let status = |cid: u16| {
        answers
            .iter()
            .find(|cqe| cqe.cid() == cid)
            .map(|cqe| cqe.status())
    };
    assert_eq!(status(here), Some(StatusCode::ABORTED_PREEMPT_AND_ABORT));
    assert_eq!(status(preempt.cid()), Some(OK));
    assert_eq!(status(others), None, "it was not preempted");
    rig.switch();
    let answers = rig.answers();
    assert_eq!((answers.len(), answers[0].cid()), (1, there));
    assert_eq!(answers[0].status(), StatusCode::ABORTED_PREEMPT_AND_ABORT);
    rig.switch();
    device.clear();
    device.resume_pending();
    rig.turn();
    rig.turn();
    let answers = rig.answers();
    assert_eq!((answers.len(), answers[0].status()), (1, OK), "C's goes on");
}

/// A registration is the host's, on all of its controllers; another host's controller is not let in
/// by having the same name.
#[test]
fn a_host_is_its_identifier() {
    let mut rig = Rig::with_malloc();
    let first = rig.host(0xa, KEY_A);
    let second = rig.host(0xa, KEY_A);
    let other = rig.host(0xb, KEY_B);
    rig.register(first);
    assert_eq!(rig.acquire(second, KIND), OK, "registered on the other");
    for host in [first, second] {
        assert_eq!(rig.write(host), OK);
    }
    assert_eq!(rig.write(other), CONFLICT);
    // It stays when all of the host's controllers are gone.
    for conn in [first.io, first.admin, second.io, second.admin] {
        rig.hang_up(conn);
    }
    rig.turn();
    assert_eq!(rig.write(other), CONFLICT);
    let back = rig.host(0xa, KEY_A);
    assert_eq!(rig.write(back), OK);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Goal: whatever two hosts send, each command is answered once, and nothing is left of them.
    /// Method: reservation commands whose dwords and keys are random but small, among reads and
    /// writes, to one of two namespaces of which one does not exist.
    #[test]
    fn any_commands(steps in proptest::collection::vec(
        (any::<bool>(), 0usize..6, 0u32..4, 0u32..8, any::<bool>(), 0u64..3, 0u64..3, 1u32..12),
        1..60,
    )) {
        const OPCODES: [u8; 6] = [
            opcode::RESERVATION_REGISTER,
            opcode::RESERVATION_ACQUIRE,
            opcode::RESERVATION_RELEASE,
            opcode::RESERVATION_REPORT,
            opcode::WRITE,
            opcode::READ,
        ];
        let mut rig = Rig::with_malloc();
        let hosts = [rig.host(0xa, KEY_A), rig.host(0xb, KEY_B)];
        for (second, op, action, kind, ignore, current, other, nsid) in steps {
            let (host, op) = (hosts[usize::from(second)], OPCODES[op]);
            let cid = rig.cid();
            let nsid = if nsid == 11 { 2 } else { 1 };
            let mut data = vec![0; BLOCK as usize];
            data[..8].copy_from_slice(&current.to_le_bytes());
            data[8..16].copy_from_slice(&other.to_le_bytes());
            let mut sqe = Sqe::for_namespace(op, cid, nsid);
            let length = match op {
                opcode::WRITE | opcode::READ => BLOCK,
                opcode::RESERVATION_RELEASE => 8,
                opcode::RESERVATION_REPORT => 64,
                _ => 16,
            };
            sqe.cdw10 = match op {
                opcode::WRITE | opcode::READ => action,
                opcode::RESERVATION_REPORT => 15,
                _ => action | u32::from(ignore) << 3 | kind << 8,
            }
            .into();
            sqe.cdw11 = u32::from(op == opcode::RESERVATION_REPORT && !ignore).into();
            data.truncate(length as usize);
            let sqe = sqe.with_sgl(Sgl::Transport { length });
            // It fails if there is no answer, or more than one.
            rig.call(host.io, sqe, &data);
        }
        for host in hosts {
            rig.hang_up(host.io);
            rig.hang_up(host.admin);
        }
        rig.assert_clean();
    }
}
