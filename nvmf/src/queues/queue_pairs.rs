//! The table of a core's queue pairs, by index and generation.

use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::request::{Request, Step};
use crate::subsystems::core_handle::{QueueId, ReqRef};

pub(crate) struct QueuePairs {
    table: Vec<Option<Box<QueuePair>>>,
    free: Vec<u32>,
    /// Generation of the latest queue pair.
    generation: u32,
    max: usize,
}

impl QueuePairs {
    /// An empty table for at most `max` queue pairs.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            table: Vec::new(),
            free: Vec::new(),
            generation: 0,
            max,
        }
    }

    /// The id of the next queue pair. `None`: the table is full.
    pub(crate) fn reserve(&mut self) -> Option<QueueId> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.table.len() < self.max => {
                self.table.push(None);
                self.table.len() as u32 - 1
            }
            None => return None,
        };
        self.generation = self.generation.wrapping_add(1);
        Some(QueueId {
            index,
            generation: self.generation,
        })
    }

    /// Inserts a queue pair at the index of its reserved id.
    pub(crate) fn insert(&mut self, qp: QueuePair) {
        let place = qp.id.index as usize;
        self.table[place] = Some(Box::new(qp));
    }

    pub(crate) fn remove(&mut self, q: u32) -> Box<QueuePair> {
        self.free.push(q);
        self.table[q as usize].take().expect("queue pair")
    }

    /// Most queue pairs.
    pub(crate) fn max(&self) -> usize {
        self.max
    }

    /// Number of queue pairs.
    pub(crate) fn len(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// Number of indexes, with and without a queue pair.
    pub(crate) fn places(&self) -> u32 {
        self.table.len() as u32
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &QueuePair> {
        self.table.iter().flatten().map(Box::as_ref)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut QueuePair> {
        self.table.iter_mut().flatten().map(Box::as_mut)
    }

    /// A queue pair that must exist, because it has an event or an I/O in a device.
    #[inline]
    pub(crate) fn present(&mut self, q: u32) -> &mut QueuePair {
        self.table[q as usize].as_mut().expect("queue pair")
    }

    #[inline]
    pub(crate) fn get(&self, q: u32) -> Option<&QueuePair> {
        self.table.get(q as usize)?.as_deref()
    }

    /// The queue pair with this id, if it exists.
    pub(crate) fn find(&mut self, id: QueueId) -> Option<&mut QueuePair> {
        self.get_mut(id.index).filter(|qp| qp.id == id)
    }

    pub(crate) fn get_mut(&mut self, q: u32) -> Option<&mut QueuePair> {
        self.table.get_mut(q as usize)?.as_deref_mut()
    }

    /// The request with this name, if it is outstanding and its queue is open.
    pub(crate) fn current(&self, name: &ReqRef) -> Option<&Request> {
        let qp = self.get(name.queue)?;
        if qp.id.generation != name.generation || qp.stage == Stage::Ending {
            return None;
        }
        let request = &qp.requests[name.request];
        (request.step != Step::Free && request.begun() == name.begun).then_some(request)
    }

    pub(crate) fn waits_for_buffer(&self, name: &ReqRef) -> bool {
        self.current(name)
            .is_some_and(|request| request.step == Step::Buffer)
    }

    pub(crate) fn waits_for_room(&self, name: &ReqRef) -> bool {
        self.current(name).is_some_and(|request| request.waiting)
    }
}

#[cfg(test)]
mod tests {
    use nacre_nvmf_wire::Sqe;
    use nacre_reactor::Nanos;

    use super::*;
    use crate::queues::queue_pair::ConnectionEnds;
    use crate::subsystems::TargetConfig;
    use crate::subsystems::config::IoLimits;
    use crate::transport::{Address, ConnId, ListenerId, TransportCaps, TransportType};

    fn open(table: &mut QueuePairs) -> Option<QueueId> {
        let caps = TransportCaps {
            kind: TransportType::Loopback,
            in_capsule_bytes: 0,
            admin_in_capsule_bytes: 8192,
            max_transfer_bytes: 1 << 17,
            max_sgl_descriptors: 1,
            keyed_sgl: false,
        };
        let place = Address::Loopback("test".into());
        let ends = ConnectionEnds {
            listener: ListenerId(1),
            local: place.clone(),
            peer: place,
        };
        let limits = IoLimits::new(&TargetConfig::default(), &caps);
        let id = table.reserve()?;
        let conn = ConnId {
            index: id.index,
            generation: id.generation,
        };
        table.insert(QueuePair::new(id, (0, conn), ends, limits, Nanos::ZERO));
        Some(id)
    }

    /// Goal: the table holds at most `max` queue pairs, and reuses places with a new generation.
    #[test]
    fn places_are_bounded_and_reused() {
        let mut table = QueuePairs::new(3);
        let ids: Vec<QueueId> = std::iter::from_fn(|| open(&mut table)).collect();
        assert_eq!(ids.iter().map(|id| id.index).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!((table.len(), table.places(), table.max()), (3, 3, 3));
        assert_eq!(table.remove(1).id, ids[1]);
        assert_eq!((table.len(), table.places()), (2, 3));
        assert!(table.get(1).is_none() && table.get_mut(3).is_none());
        assert_eq!(
            table.iter().map(|qp| qp.id.index).collect::<Vec<_>>(),
            [0, 2]
        );
        let again = open(&mut table).unwrap();
        assert!(
            again.index == 1 && again.generation > ids[2].generation,
            "{again:?}"
        );
        assert!(open(&mut table).is_none());
    }

    /// Goal: the name of a command is good until the command ends, its queue pair ends, or another
    /// command or queue pair has its place.
    #[test]
    fn names_of_commands_go_out_of_date() {
        let mut table = QueuePairs::new(1);
        let id = open(&mut table).unwrap();
        let begin = |table: &mut QueuePairs, cid: u16| {
            let qp = table.present(id.index);
            let index = qp.requests.begin(Sqe::new(0, cid), Nanos::ZERO).unwrap();
            qp.name_of(index)
        };
        let first = begin(&mut table, 1);
        assert!(table.current(&first).is_some());
        assert!(!table.waits_for_room(&first) && !table.waits_for_buffer(&first));
        table.present(id.index).requests[first.request].step = Step::Buffer;
        table.present(id.index).requests[first.request].waiting = true;
        assert!(table.waits_for_room(&first) && table.waits_for_buffer(&first));
        table.present(id.index).requests.end(first.request);
        assert!(table.current(&first).is_none(), "it ended");

        let second = begin(&mut table, 2);
        assert_eq!(second.request, first.request);
        assert!(table.current(&first).is_none() && table.current(&second).is_some());
        table.present(id.index).stage = Stage::Ending;
        assert!(table.current(&second).is_none(), "its queue pair is ending");

        table.remove(id.index);
        assert!(table.current(&second).is_none(), "its queue pair went");
        assert_eq!(open(&mut table).unwrap().index, id.index);
        begin(&mut table, 2);
        assert!(
            table.current(&second).is_none(),
            "another queue pair has its place"
        );
    }
}
