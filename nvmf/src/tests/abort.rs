//! Tests of Abort commands for commands on other cores: each is answered, even if the message
//! queues between the cores are full.

use std::sync::Arc;

use super::rig::*;
use crate::subsystems::core_handle::ReqRef;
use crate::subsystems::core_handle::{AbortReply, GroupHandle, GroupMessage};

/// Goal: an answer that finds the other core's list full is kept and arrives later, once.
#[test]
fn an_answer_waits_for_room() {
    let mut rig = Rig::with_malloc();
    let (_, cntlid) = rig.admin();
    rig.io_queue(cntlid, 1);
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let association = subsystem.controller(cntlid).unwrap();
    let other = GroupHandle::new(1, Arc::new(|| {}));
    let reply = |request| AbortReply {
        group: other.clone(),
        request: ReqRef {
            queue: 0,
            generation: 0,
            request,
            begun: 0,
        },
    };
    let mut fill = 0;
    while other
        .send(GroupMessage::Aborted {
            reply: reply(1000),
            aborted: false,
        })
        .is_ok()
    {
        fill += 1;
    }
    for request in 0..3 {
        let message = GroupMessage::Abort {
            queue: association.queue(1).unwrap().id,
            cid: 77,
            reply: reply(request),
        };
        assert!(rig.group.core.handle.send(message).is_ok());
    }
    rig.turn();
    rig.turn();
    for _ in 0..fill {
        other.take_message().expect("a message of the filling");
    }
    rig.turn();
    let mut answered = Vec::new();
    while let Some(message) = other.take_message() {
        let GroupMessage::Aborted { reply, aborted } = message else {
            panic!("an answer to something else");
        };
        assert!(!aborted, "no such command");
        answered.push(reply.request.request);
    }
    answered.sort_unstable();
    assert_eq!(answered, [0, 1, 2]);
    assert!(
        rig.group.core.handle.take_message().is_none(),
        "nothing is left"
    );
}
