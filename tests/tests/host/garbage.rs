//! Tests of targets that violate the protocol: the host checks all data that they send.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::host::{ControllerState, HostController, HostError, HostOptions};
use nacre_nvmf::transport::{HostCommand, HostEvent, HostTransport};
use nacre_nvmf_wire::commands::admin::Identify;
use nacre_nvmf_wire::identify::cns;
use nacre_nvmf_wire::opcode::{admin, fabrics as fctype};
use nacre_nvmf_wire::{Cqe, Sqe, StatusCode};
use nacre_reactor::{Idle, Nanos};

use super::rig::options;

/// The answer of a scripted controller: a completion and data, or none.
type Answer = Option<(Cqe, Vec<u8>)>;

/// A controller defined by one function.
struct Scripted {
    answer: fn(&Sqe) -> Answer,
    events: VecDeque<HostEvent>,
}

impl HostTransport for Scripted {
    fn submit(&mut self, command: HostCommand) {
        let Some((mut cqe, data)) = (self.answer)(&command.sqe) else {
            return;
        };
        cqe.cid = command.sqe.cid;
        let mut read = command.read;
        let mut transferred = 0;
        if let Some(buf) = &mut read {
            let n = data.len().min(buf.len());
            buf.bytes_mut().unwrap().fill(0xdb);
            buf.bytes_mut().unwrap()[..n].copy_from_slice(&data[..n]);
            transferred = n as u32;
        }
        self.events.push_back(HostEvent::Completion {
            cqe,
            read,
            transferred,
        });
    }

    fn poll(&mut self, _now: Nanos, events: &mut Vec<HostEvent>, limit: usize) {
        let n = self.events.len().min(limit);
        events.extend(self.events.drain(..n));
    }

    fn set_in_capsule_bytes(&mut self, _bytes: u32) {}

    fn reclaim(&mut self) -> Option<HostCommand> {
        None
    }

    fn close(&mut self) {}

    fn arm(&mut self, _now: Nanos) -> Idle {
        Idle::Quiet
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A correct controller, up to the namespace list.
fn proper(sqe: &Sqe) -> Answer {
    let ok = |result: u64| Some((Cqe::success(0).with_result(result), Vec::new()));
    if sqe.is_fabrics() {
        return match sqe.fctype() {
            fctype::CONNECT => ok(5),
            fctype::PROPERTY_SET => ok(0),
            _ if sqe.cdw11.get() == 0 => ok(127 | 1 << 37),
            _ => ok(1),
        };
    }
    match sqe.opcode {
        admin::IDENTIFY => {
            let mut data = vec![0; 4096];
            match Identify::parse(sqe).cns {
                cns::CONTROLLER => {
                    data[78] = 5;
                    data[111] = 1;
                    Some((Cqe::success(0), data))
                }
                cns::IO_CONTROLLER => Some((Cqe::new(0, StatusCode::INVALID_FIELD), Vec::new())),
                _ => Some((Cqe::success(0), data)),
            }
        }
        admin::SET_FEATURES => ok(0),
        // No events, and no keep-alive is due in these tests.
        admin::ASYNC_EVENT_REQUEST => None,
        opcode => panic!("unexpected opcode {opcode:#x}"),
    }
}

fn is_identify(sqe: &Sqe, cns: u8) -> bool {
    !sqe.is_fabrics() && sqe.opcode == admin::IDENTIFY && Identify::parse(sqe).cns == cns
}

/// The final state of a host with a controller that answers like this.
fn meet(answer: fn(&Sqe) -> Answer) -> (ControllerState, HostController) {
    meet_with(answer, options(1))
}

fn meet_with(
    answer: fn(&Sqe) -> Answer,
    options: HostOptions,
) -> (ControllerState, HostController) {
    let pool = Pool::heap(&[ClassSpec {
        size: 4096,
        count: 8,
    }]);
    let dial = move |_qid: u16| {
        let events = VecDeque::from([HostEvent::Ready]);
        Ok(Box::new(Scripted { answer, events }) as Box<dyn HostTransport>)
    };
    let mut controller = HostController::new(options, Box::new(dial), pool, Nanos(1));
    let mut now = Nanos(1);
    while *controller.state() == ControllerState::Connecting {
        now = now + Duration::from_millis(1);
        assert!(now < Nanos(60_000_000_000), "the controller never settles");
        controller.poll(now);
    }
    (controller.state().clone(), controller)
}

fn complaint(answer: fn(&Sqe) -> Answer) -> String {
    match meet(answer).0 {
        ControllerState::Waiting { error, .. } => error.to_string(),
        state => panic!("no complaint: {state:?}"),
    }
}

#[test]
fn a_correct_controller_becomes_live() {
    let (state, controller) = meet(proper);
    assert_eq!(state, ControllerState::Live);
    assert!(controller.link().state().namespaces.is_empty());
}

#[test]
fn identifiers() {
    let complaint_of_connect = complaint(|sqe| {
        if sqe.is_fabrics() {
            Some((Cqe::success(0).with_result(0xffff), Vec::new()))
        } else {
            proper(sqe)
        }
    });
    assert!(
        complaint_of_connect.contains("0xffff"),
        "{complaint_of_connect}"
    );
    let another = complaint(|sqe| {
        let (cqe, mut data) = proper(sqe)?;
        if is_identify(sqe, cns::CONTROLLER) {
            data[78] = 6;
        }
        Some((cqe, data))
    });
    assert!(another.contains("controller 6"), "{another}");
}

/// Goal: missing data is never taken from the buffer's previous contents.
#[test]
fn short_data_is_refused() {
    for length in [0, 100, 4095] {
        let answer = match length {
            0 => |sqe: &Sqe| cut(sqe, 0),
            100 => |sqe: &Sqe| cut(sqe, 100),
            _ => |sqe: &Sqe| cut(sqe, 4095),
        };
        let complaint = complaint(answer);
        assert!(
            complaint.contains(&format!("{length} bytes of Identify Controller")),
            "{complaint}"
        );
    }
    let list = complaint(|sqe| {
        let (cqe, mut data) = proper(sqe)?;
        if is_identify(sqe, cns::ACTIVE_NAMESPACES) {
            data.truncate(8);
        }
        Some((cqe, data))
    });
    assert!(list.contains("8 bytes of namespace list"), "{list}");
}

fn cut(sqe: &Sqe, length: usize) -> Answer {
    let (cqe, mut data) = proper(sqe)?;
    if is_identify(sqe, cns::CONTROLLER) {
        data.truncate(length);
    }
    Some((cqe, data))
}

/// Goal: a list that does not ascend is refused, because reading it could never end.
#[test]
fn namespace_lists() {
    let backwards = complaint(|sqe| {
        let (cqe, mut data) = proper(sqe)?;
        if is_identify(sqe, cns::ACTIVE_NAMESPACES) {
            (data[0], data[4]) = (7, 3);
        }
        Some((cqe, data))
    });
    assert!(backwards.contains("3 after 7"), "{backwards}");
    let endless = complaint(|sqe| {
        let (cqe, mut data) = proper(sqe)?;
        if is_identify(sqe, cns::ACTIVE_NAMESPACES) {
            let after = sqe.nsid.get();
            for (at, entry) in data.chunks_exact_mut(4).enumerate() {
                entry.copy_from_slice(&(after + 1 + at as u32).to_le_bytes());
            }
        }
        Some((cqe, data))
    });
    assert!(endless.contains("more than 65536"), "{endless}");
}

/// Goal: an unusable namespace is left out; the others stay usable.
#[test]
fn unusable_namespaces_are_left_out() {
    let (state, controller) = meet(|sqe| {
        let (cqe, mut data) = proper(sqe)?;
        if is_identify(sqe, cns::ACTIVE_NAMESPACES) && sqe.nsid.get() == 0 {
            (data[0], data[4], data[8], data[12]) = (1, 2, 3, 4);
        }
        if is_identify(sqe, cns::NAMESPACE) {
            data[0] = 100;
            data[130] = match sqe.nsid.get() {
                1 => 0,
                2 => 200,
                _ => 9,
            };
            data[128] = u8::from(sqe.nsid.get() == 3) * 8;
        }
        if is_identify(sqe, cns::NAMESPACE_DESCRIPTORS) {
            data.fill(0xff);
        }
        Some((cqe, data))
    });
    assert_eq!(state, ControllerState::Live);
    let namespaces = controller.link().state().namespaces;
    assert_eq!(namespaces.keys().copied().collect::<Vec<_>>(), [4]);
}

thread_local! {
    /// Number of answers to each Identify (by CNS) that the network still damages.
    static DAMAGED: RefCell<BTreeMap<u8, u32>> = const { RefCell::new(BTreeMap::new()) };
}

/// A controller with one namespace, on a network that damages the answers in [`DAMAGED`].
fn on_a_bad_network(sqe: &Sqe) -> Answer {
    let (cqe, mut data) = proper(sqe)?;
    if is_identify(sqe, cns::ACTIVE_NAMESPACES) && sqe.nsid.get() == 0 {
        data[0] = 1;
    }
    if is_identify(sqe, cns::NAMESPACE) {
        (data[0], data[130]) = (100, 9);
    }
    if is_identify(sqe, cns::NAMESPACE_DESCRIPTORS) {
        data[..4].copy_from_slice(&[3, 16, 0, 0]);
        data[4..20].fill(0x5a);
    }
    let damaged = DAMAGED.with_borrow_mut(|damaged| {
        let of = Some(sqe).filter(|sqe| !sqe.is_fabrics() && sqe.opcode == admin::IDENTIFY);
        let left = damaged.get_mut(&Identify::parse(of?).cns)?;
        *left = left.checked_sub(1)?;
        Some(())
    });
    match damaged {
        Some(()) => Some((Cqe::new(0, StatusCode::TRANSIENT_TRANSPORT_ERROR), data)),
        None => Some((cqe, data)),
    }
}

/// Goal: the host repeats commands with damaged answers; no namespace and no identifier is lost. If
/// every answer is damaged, the host drops the connection.
#[test]
fn damaged_answers() {
    let all = [
        cns::CONTROLLER,
        cns::ACTIVE_NAMESPACES,
        cns::NAMESPACE,
        cns::NAMESPACE_DESCRIPTORS,
    ];
    DAMAGED.set(all.into_iter().map(|cns| (cns, 3)).collect());
    let (state, controller) = meet(on_a_bad_network);
    assert_eq!(state, ControllerState::Live);
    let namespaces = controller.link().state().namespaces;
    let uuid = namespaces.get(&1).and_then(|namespace| namespace.uuid);
    assert_eq!(uuid.map(|uuid| uuid.into_bytes()), Some([0x5a; 16]));
    for (cns, what) in [
        (cns::NAMESPACE, "identify namespace"),
        (cns::NAMESPACE_DESCRIPTORS, "namespace descriptors"),
    ] {
        DAMAGED.set([(cns, 4)].into());
        let complaint = complaint(on_a_bad_network);
        assert!(
            complaint.contains(&format!("{what} was refused: Transient Transport Error")),
            "{complaint}"
        );
    }
}

/// Goal: the host gives up a controller that never completes its shutdown.
#[test]
fn controllers_that_never_shut_down() {
    let (state, mut controller) = meet(proper);
    assert_eq!(state, ControllerState::Live);
    let began = Nanos(10_000_000_000);
    let mut now = began;
    controller.disconnect(now);
    while *controller.state() == ControllerState::Live {
        now = now + Duration::from_millis(10);
        let limit = controller.options().admin_timeout + Duration::from_secs(1);
        assert!(now.since(began) < limit, "the host waits without a limit");
        controller.poll(now);
    }
    assert_eq!(*controller.state(), ControllerState::Closed);
}

#[test]
fn controllers_that_fail_or_never_get_ready() {
    let fatal = complaint(|sqe| {
        if sqe.is_fabrics() && sqe.cdw11.get() == 0x1c {
            Some((Cqe::success(0).with_result(2), Vec::new()))
        } else {
            proper(sqe)
        }
    });
    assert!(fatal.contains("CSTS.CFS"), "{fatal}");
    let never = complaint(|sqe| {
        if sqe.is_fabrics() && sqe.cdw11.get() == 0x1c {
            Some((Cqe::success(0), Vec::new()))
        } else {
            proper(sqe)
        }
    });
    assert!(never.contains("CSTS.RDY"), "{never}");
    let silent = complaint(|_| None);
    assert!(silent.contains("connect"), "{silent}");
}

#[test]
fn refusals_are_final_only_with_dnr() {
    let refuse: fn(&Sqe) -> Answer =
        |_| Some((Cqe::new(0, StatusCode::CONNECT_CONTROLLER_BUSY), Vec::new()));
    let (state, _) = meet(refuse);
    assert!(matches!(
        state,
        ControllerState::Waiting {
            error: HostError::Refused { .. },
            ..
        }
    ));
    let (state, _) = meet(|_| {
        let status = StatusCode::CONNECT_CONTROLLER_BUSY.with_dnr();
        Some((Cqe::new(0, status), Vec::new()))
    });
    assert!(matches!(state, ControllerState::Failed(_)), "{state:?}");
    let once = HostOptions {
        loss_timeout: Some(Duration::ZERO),
        ..options(1)
    };
    let (state, _) = meet_with(refuse, once);
    assert!(matches!(state, ControllerState::Failed(_)), "{state:?}");
}
