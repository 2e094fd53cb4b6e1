//! The submission and completion queues of the simulated controller: their memory, the head and
//! tail of both sides, and the shadow doorbells.

use nacre_nvmf_wire::{Cqe, Sqe, StatusCode};
use nacre_reactor::Nanos;

use crate::faults::Action;
use crate::memory::{Iommu, UnmappedAddress};

/// A doorbell in memory that the driver writes in place of a register. The event index requests a
/// register write (Doorbell Buffer Config).
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShadowDoorbell {
    pub value: u64,
    pub event: u64,
}

pub(crate) struct Sq {
    pub id: u16,
    pub base: u64,
    pub entries: u16,
    pub cqid: u16,
    /// The index of the next entry to fetch.
    pub head: u16,
    /// The driver's tail.
    pub tail: u16,
    /// The head in the newest completion.
    pub reported_head: u16,
    /// Bitmap of identifiers in use.
    pub cids: Box<[u64; 1024]>,
    /// The first half of a fused pair, whose other half must come next.
    pub fused: Option<Sqe>,
    pub shadow: Option<ShadowDoorbell>,
    /// With a shadow doorbell: the driver wrote the register, so the controller reads the shadow
    /// doorbell in every turn.
    pub awake: bool,
    /// The number of consecutive turns without new entries. After [`IDLE_TURNS`] the controller
    /// stops reading the shadow doorbell.
    pub quiet: u8,
}

/// The number of turns in which the shadow doorbell is still read after the last new entry.
const IDLE_TURNS: u8 = 2;

impl Sq {
    pub(crate) fn new(id: u16, base: u64, entries: u16, cqid: u16) -> Self {
        Self {
            id,
            base,
            entries,
            cqid,
            head: 0,
            tail: 0,
            reported_head: 0,
            cids: Box::new([0; 1024]),
            fused: None,
            shadow: None,
            awake: false,
            quiet: 0,
        }
    }

    /// Sets the driver's tail. The error describes a wrong value: beyond the queue, or over entries
    /// that the reported head does not free yet. The latter is stored all the same.
    pub(crate) fn set_tail(&mut self, tail: u32) -> Result<(), String> {
        let (id, entries) = (self.id, u32::from(self.entries));
        if tail >= entries {
            return Err(format!("tail {tail} of queue {id}, which has {entries}"));
        }
        let between = |from: u16, to: u16| (u32::from(to) + entries - u32::from(from)) % entries;
        let (held, more) = (
            between(self.reported_head, self.tail),
            between(self.tail, tail as u16),
        );
        let overrun = held + more >= entries;
        let before = self.tail;
        self.tail = tail as u16;
        if overrun {
            return Err(format!(
                "tail {before} to {tail} of queue {id}: slots that the head, {}, does not free",
                self.reported_head
            ));
        }
        Ok(())
    }

    /// Reads the shadow doorbell, if there is one and the queue is awake. A `careless`
    /// queue stops reading without notice: as if it had set the event index just when the driver
    /// wrote its doorbell, and each side had missed the other's write.
    pub(crate) fn read_shadow_doorbell(
        &mut self,
        iommu: &Iommu,
        careless: bool,
    ) -> Result<Result<(), String>, UnmappedAddress> {
        let Some(shadow) = self.shadow.filter(|_| self.awake) else {
            return Ok(Ok(()));
        };
        let tail = iommu.load(shadow.value)?;
        if tail != u32::from(self.tail) {
            self.quiet = 0;
            return Ok(self.set_tail(tail));
        }
        self.quiet += 1;
        if self.quiet < IDLE_TURNS {
            return Ok(Ok(()));
        }
        if careless {
            self.quiet = 0;
            self.awake = false;
            return Ok(Ok(()));
        }
        iommu.store(shadow.event, tail)?;
        // The driver may have written the doorbell between the read and the update of the event
        // index.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let tail = iommu.load(shadow.value)?;
        self.quiet = 0;
        self.awake = tail != u32::from(self.tail);
        if self.awake {
            return Ok(self.set_tail(tail));
        }
        Ok(Ok(()))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Fetches the next entry.
    pub(crate) fn fetch(&mut self, iommu: &Iommu) -> Result<Sqe, UnmappedAddress> {
        let mut sqe = Sqe::zeroed();
        let at = self.base + u64::from(self.head) * Sqe::SIZE as u64;
        iommu.read(at, zerocopy::IntoBytes::as_mut_bytes(&mut sqe))?;
        self.head = (self.head + 1) % self.entries;
        Ok(sqe)
    }

    /// Marks an identifier as used. Returns false if it was used already.
    pub(crate) fn take(&mut self, cid: u16) -> bool {
        let (word, bit) = (usize::from(cid) / 64, 1 << (cid % 64));
        let free = self.cids[word] & bit == 0;
        self.cids[word] |= bit;
        free
    }

    pub(crate) fn give_back(&mut self, cid: u16) {
        self.cids[usize::from(cid) / 64] &= !(1 << (cid % 64));
    }
}

pub(crate) struct Cq {
    pub id: u16,
    base: u64,
    entries: u16,
    /// The driver's head, the controller's tail, and the phase tag of the next completion.
    head: u16,
    tail: u16,
    phase: bool,
    /// `None`: no interrupts.
    pub vector: Option<u16>,
    pub shadow: Option<ShadowDoorbell>,
    awake: bool,
}

impl Cq {
    pub(crate) fn new(id: u16, base: u64, entries: u16, vector: Option<u16>) -> Self {
        Self {
            id,
            base,
            entries,
            head: 0,
            tail: 0,
            phase: true,
            vector,
            shadow: None,
            awake: true,
        }
    }

    pub(crate) fn set_head(&mut self, head: u32) -> Result<(), String> {
        let (id, entries) = (self.id, u32::from(self.entries));
        if head >= entries {
            return Err(format!(
                "head {head} of completion queue {id}, which has {entries}"
            ));
        }
        let between = |from: u16, to: u16| (u32::from(to) + entries - u32::from(from)) % entries;
        let before = self.head;
        let beyond = between(before, head as u16) > between(before, self.tail);
        self.head = head as u16;
        if beyond {
            return Err(format!(
                "head {before} to {head} of completion queue {id}, whose tail is {}",
                self.tail
            ));
        }
        Ok(())
    }

    /// Called when the driver writes the head doorbell register: from then on the head is read from
    /// the shadow doorbell again.
    pub(crate) fn wake(&mut self) {
        self.awake = true;
    }

    /// True if there is space for one more completion. Before it returns false, it reads the shadow
    /// doorbell if the queue is awake.
    pub(crate) fn has_room(
        &mut self,
        iommu: &Iommu,
    ) -> Result<Result<bool, String>, UnmappedAddress> {
        let room = |queue: &Self| (queue.tail + 1) % queue.entries != queue.head;
        if room(self) {
            return Ok(Ok(true));
        }
        let Some(shadow) = self.shadow.filter(|_| self.awake) else {
            return Ok(Ok(false));
        };
        iommu.store(shadow.event, u32::from(self.head))?;
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let head = iommu.load(shadow.value)?;
        if head == u32::from(self.head) {
            self.awake = false;
            return Ok(Ok(false));
        }
        Ok(self.set_head(head).map(|()| room(self)))
    }

    /// Posts a completion; the phase tag is written last.
    pub(crate) fn post(
        &mut self,
        mut cqe: Cqe,
        wrong_phase: bool,
        iommu: &Iommu,
    ) -> Result<(), UnmappedAddress> {
        cqe.set_phase(self.phase != wrong_phase);
        let at = self.base + u64::from(self.tail) * Cqe::SIZE as u64;
        let bytes = zerocopy::IntoBytes::as_bytes(&cqe);
        iommu.write(at, &bytes[..12])?;
        let last = u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]);
        iommu.store(at + 12, last)?;
        self.tail = (self.tail + 1) % self.entries;
        self.phase ^= self.tail == 0;
        Ok(())
    }
}

/// A completion that waits to be posted.
pub(crate) struct Post {
    pub due: Nanos,
    pub sqid: u16,
    pub cqid: u16,
    pub cid: u16,
    pub status: StatusCode,
    pub dword0: u32,
    pub action: Option<Action>,
}
