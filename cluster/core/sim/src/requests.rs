//! The simulated node's table of requests to the store. A request is in it until its answer
//! arrives, or can no longer arrive. After a second without an answer, the node's state machines
//! learn that the outcome is unknown.

use std::collections::BTreeMap;

use nacre_cluster_core::Incarnation;

use crate::names::SECOND;

/// Time after which a request counts as unanswered.
const LATE: u64 = SECOND;
/// Time after which an answer can no longer arrive.
const FORGOTTEN: u64 = 10 * SECOND;

/// The reason of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Read the node's own lease key, to join.
    Look,
    /// Create the node's lease.
    Create,
    /// Delete the lease of the node's former process.
    Replace,
    /// Renew the lease of this incarnation, with the number of the attempt.
    Renew(Incarnation, u64),
    /// Fence this node.
    Fence(usize),
    /// Read the lease of this node.
    Observe(usize),
    /// Change number of the volume's record, by `nacre_cluster_core::Volume` (a take or release).
    Commit(Incarnation, u64),
    /// Change number of the volume's record, by the control of the open volume.
    Change(Incarnation, u64),
}

impl Purpose {
    /// False for requests of a joining node: it accepts an answer only before it counts as late.
    fn may_be_late(self) -> bool {
        !matches!(self, Self::Look | Self::Create | Self::Replace)
    }
}

#[derive(Debug, Clone, Copy)]
struct Asked {
    purpose: Purpose,
    sent: u64,
    /// [`Requests::late`] has returned the request.
    is_late: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Requests(BTreeMap<u64, Asked>);

impl Requests {
    pub(crate) fn sent(&mut self, id: u64, purpose: Purpose, now: u64) {
        let asked = Asked {
            purpose,
            sent: now,
            is_late: false,
        };
        self.0.insert(id, asked);
    }

    /// Removes a request whose answer has arrived. `None`: the node no longer waits for it.
    pub(crate) fn answered(&mut self, id: u64) -> Option<Purpose> {
        self.0.remove(&id).map(|asked| asked.purpose)
    }

    /// The requests that have become late since the last call. Each is returned once, even if the
    /// core stalled until the answer can no longer arrive, because a state machine waits for
    /// either.
    pub(crate) fn late(&mut self, now: u64) -> Vec<Purpose> {
        let mut late = Vec::new();
        self.0.retain(|_, asked| {
            let age = now - asked.sent;
            if !asked.is_late && age >= LATE {
                asked.is_late = true;
                late.push(asked.purpose);
            }
            age < FORGOTTEN && (!asked.is_late || asked.purpose.may_be_late())
        });
        late
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A core that stalls for longer than an answer can take still learns that there is none.
    #[test]
    fn each_request_is_late_once() {
        let of = Incarnation(1);
        let mut requests = Requests::default();
        requests.sent(1, Purpose::Look, 0);
        requests.sent(2, Purpose::Commit(of, 7), 0);
        requests.sent(3, Purpose::Commit(of, 8), 2 * FORGOTTEN);
        let late = requests.late(2 * FORGOTTEN);
        assert_eq!(late, [Purpose::Look, Purpose::Commit(of, 7)]);
        assert!(requests.late(2 * FORGOTTEN + LATE - 1).is_empty());
        assert_eq!(
            requests.late(2 * FORGOTTEN + LATE),
            [Purpose::Commit(of, 8)]
        );
        assert!(requests.late(2 * FORGOTTEN + LATE + 1).is_empty());
        assert_eq!(requests.answered(3), Some(Purpose::Commit(of, 8)));
    }

    /// A node that joins takes only the answer that it waits for.
    #[test]
    fn a_late_look_is_forgotten() {
        let mut requests = Requests::default();
        requests.sent(1, Purpose::Look, 0);
        assert_eq!(requests.late(LATE), [Purpose::Look]);
        assert_eq!(requests.answered(1), None);
    }
}
