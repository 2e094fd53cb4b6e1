//! The parts shared by client and server: registered memory, a completion queue, send and receive
//! lanes, and waiting for completions.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::{
    Arena, ArenaOptions, ClassSpec, GRAIN, Piece, Pool, REGION_MAX, register_all_in,
};
use nacre_reactor::{EventSet, Events, Interest};
use nacre_transport_rdma_verbs::{
    Access, Batch, CmId, ConnectionManager, Device, Lane, LaneConfig, QpCaps, Queues, RecvConfig,
};

use crate::error::PerfError;
use crate::params::{Measure, Op};
use crate::wire::{MESSAGE_BYTES, SessionParameters};

/// Bytes of a measured message in the ring's slots; the rest is in separate buffers.
pub(crate) const HEAD: u32 = MESSAGE_BYTES as u32;

/// Most completions per turn.
const BATCH: usize = 64;

/// Sizes of a queue pair's rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneSizes {
    pub sends: u32,
    pub recvs: u32,
    /// Bytes of a received message beyond [`HEAD`].
    pub tail: u32,
    /// Buffers of `tail` bytes beyond those of the receives.
    pub spare: u32,
}

/// One entry of each send queue is reserved for the ring itself.
const OWN: u32 = 1;

/// A peer can answer a message before this end processes the acknowledgement, and thus the
/// completion, of its own message. This number of late completions is possible, beyond the messages
/// in flight.
const LATE: u32 = 16;
/// The same for echoes, each of which needs a buffer.
const LATE_ECHOES: u32 = 4;

impl LaneSizes {
    /// Sizes of the control connection, which carries occasional messages and the last one.
    pub(crate) const CONTROL: Self = Self {
        sends: 8 + OWN,
        recvs: 8,
        tail: 0,
        spare: 0,
    };

    /// Returns the sizes of a data connection of the client.
    pub(crate) fn client(terms: &SessionParameters) -> Self {
        let depth = u32::from(terms.depth);
        let (sends, recvs, tail) = match (terms.op, terms.measure) {
            // One credit is in flight, and one may overtake its completion.
            (Op::Send, Measure::Bandwidth) => (depth, 4, 0),
            (Op::Send, Measure::Latency) => (depth, depth + 1, tail_of(terms)),
            (Op::Write, _) if terms.verify => (2 * depth, depth + 1, 0),
            (Op::Write | Op::Read, _) => (depth, 1, 0),
        };
        Self {
            sends: sends + OWN,
            recvs,
            tail,
            spare: 0,
        }
    }

    /// Buffers of the client outside of rings: the data that it sends, writes and reads.
    pub(crate) fn client_buffers(terms: &SessionParameters) -> Vec<ClassSpec> {
        let size = match terms.op {
            Op::Send => tail_of(terms),
            Op::Write | Op::Read => terms.message_bytes,
        };
        // Sent data that is not compared needs only one buffer.
        let count = if terms.verify || terms.op == Op::Read {
            usize::from(terms.depth) * usize::from(terms.queue_pairs)
        } else {
            1
        };
        match size {
            0 => Vec::new(),
            size => vec![ClassSpec {
                size: size as usize,
                count,
            }],
        }
    }

    /// Returns the sizes of a data connection of the server.
    pub(crate) fn server(terms: &SessionParameters) -> Self {
        let depth = u32::from(terms.depth);
        let (sends, recvs, tail, spare) = match (terms.op, terms.measure) {
            // Twice the depth, so that the client continues while credits are in flight.
            (Op::Send, Measure::Bandwidth) => (2, 2 * depth, tail_of(terms), 0),
            (Op::Send, Measure::Latency) => {
                let sends = depth + LATE_ECHOES;
                (sends, depth + 1, tail_of(terms), sends)
            }
            (Op::Write, _) if terms.verify => (2 * depth + LATE, depth + 1, 0, 0),
            (Op::Write | Op::Read, _) => (1, 1, 0, 0),
        };
        Self {
            sends: sends + OWN,
            recvs,
            tail,
            spare,
        }
    }

    fn ring_bytes(&self) -> usize {
        self.sends.next_power_of_two() as usize * MESSAGE_BYTES
    }

    fn header_bytes(&self) -> usize {
        self.recvs as usize * MESSAGE_BYTES
    }

    /// The pool's size classes for `count` queue pairs.
    pub(crate) fn classes(&self, count: u32, into: &mut Vec<ClassSpec>) {
        let count = count as usize;
        let mut add = |size: usize, count: usize| {
            if size > 0 && count > 0 {
                into.push(ClassSpec { size, count });
            }
        };
        add(self.ring_bytes(), count);
        add(self.header_bytes(), count);
        add(
            self.tail as usize,
            count * (self.recvs + self.spare) as usize,
        );
    }
}

pub(crate) fn tail_of(terms: &SessionParameters) -> u32 {
    terms.message_bytes.saturating_sub(HEAD)
}

/// Memory, queues and lanes of one session.
pub(crate) struct End {
    pub device: Arc<dyn Device>,
    pub queues: Queues,
    pub pool: Pool,
    pub key_slot: usize,
}

impl End {
    /// Creates an end with a control connection and `count` data connections of the sizes `lanes`.
    /// Uses at most `memory` bytes.
    pub(crate) fn new(
        device: Arc<dyn Device>,
        access: Access,
        lanes: LaneSizes,
        count: u32,
        mut classes: Vec<ClassSpec>,
        memory: u64,
    ) -> Result<Self, PerfError> {
        check(&*device, lanes, count)?;
        LaneSizes::CONTROL.classes(1, &mut classes);
        lanes.classes(count, &mut classes);
        let needed = Pool::bytes_for(&classes) as u64;
        if needed > memory {
            return Err(PerfError::TooMuch {
                needed,
                limit: memory,
            });
        }
        let longest = longest_buffer(&*device);
        let larger = classes.iter().find(|class| class.size as u64 > longest);
        if let Some(class) = larger {
            return Err(PerfError::Device {
                what: "bytes in one buffer",
                needed: class.size as u64,
                limit: longest,
                device: device.attributes().name.clone(),
                remedy: "smaller messages, or with --verify less --depth",
            });
        }
        let arena = allocate(needed, device.attributes().numa_node)?;
        let domain = device.protection_domain(access)?;
        // A limit below the shortest piece fails at the registration, with the device's error.
        let piece = Piece::at_most(device.attributes().max_mr_size).unwrap_or(Piece::LONGEST);
        let arenas = std::slice::from_ref(&arena);
        let key_slot = register_all_in(arenas, &domain.hook(), piece)?;
        let entries = cq_entries(lanes, count);
        Ok(Self {
            queues: Queues::new(&domain, entries, None)?,
            pool: Pool::on_arena(&arena, &classes)?,
            key_slot,
            device,
        })
    }

    pub(crate) fn device_name(&self) -> String {
        self.device.attributes().name.clone()
    }

    /// Creates the queue pair of a connection and posts its receives.
    pub(crate) fn lane(
        &self,
        cm: &mut dyn ConnectionManager,
        id: CmId,
        index: u32,
        sizes: LaneSizes,
        peer: SocketAddr,
    ) -> Result<Lane, PerfError> {
        let caps = QpCaps {
            max_send_wr: sizes.sends,
            max_recv_wr: sizes.recvs,
            max_send_sge: 2,
            max_recv_sge: if sizes.tail > 0 { 2 } else { 1 },
            max_inline: HEAD,
        };
        let endpoint = self.queues.create_qp(cm, id, caps)?;
        let take = |bytes: usize| {
            self.pool
                .acquire(bytes)
                .expect("the pool has a buffer for every slot")
        };
        let mut lane = Lane::new(
            endpoint,
            LaneConfig {
                index,
                key_slot: self.key_slot,
                messages: take(sizes.ring_bytes()),
                message_bytes: HEAD,
                recv: Some(RecvConfig {
                    headers: take(sizes.header_bytes()),
                    header_bytes: HEAD,
                    entries: sizes.recvs,
                    data_bytes: sizes.tail,
                }),
            },
        )?;
        lane.post_recv(Some(&self.pool))
            .map_err(|source| PerfError::Post { peer, source })?;
        Ok(lane)
    }
}

/// The longest buffer that lies in one memory region wherever it starts, and so has one key.
pub(crate) fn longest_buffer(device: &dyn Device) -> u64 {
    let whole = device.attributes().max_mr_size >= REGION_MAX as u64;
    (if whole { REGION_MAX } else { GRAIN }) as u64 / 2
}

fn cq_entries(lanes: LaneSizes, count: u32) -> u32 {
    let control = LaneSizes::CONTROL;
    (lanes.sends + lanes.recvs) * count + control.sends + control.recvs
}

/// Checks the device's limits; the error names the option to reduce.
fn check(device: &dyn Device, lanes: LaneSizes, count: u32) -> Result<(), PerfError> {
    let attributes = device.attributes();
    let limits = [
        (
            "requests per queue pair",
            lanes.sends.max(lanes.recvs),
            attributes.max_qp_wr,
            "less --depth",
        ),
        (
            "queue pairs",
            count + 1,
            attributes.max_qp,
            "fewer --queue-pairs",
        ),
        (
            "completion queue entries",
            cq_entries(lanes, count),
            attributes.max_cqe,
            "less --depth or fewer --queue-pairs",
        ),
        ("entries per request", 2, attributes.max_sge, "TCP"),
    ];
    for (what, needed, limit, remedy) in limits {
        if needed > limit {
            return Err(PerfError::Device {
                what,
                needed: needed.into(),
                limit: limit.into(),
                device: attributes.name.clone(),
                remedy,
            });
        }
    }
    Ok(())
}

/// Allocates memory on the device's NUMA node, or elsewhere if that node has no space.
fn allocate(bytes: u64, numa_node: Option<u32>) -> Result<Arena, PerfError> {
    let anywhere = ArenaOptions::new(bytes);
    let near = ArenaOptions {
        numa_node,
        ..anywhere
    };
    if numa_node.is_some()
        && let Ok(arena) = Arena::allocate(near)
    {
        return Ok(arena);
    }
    Ok(Arena::allocate(anywhere)?)
}

/// Sleeps until a descriptor is readable.
pub(crate) struct Waiter {
    set: EventSet,
    events: Events,
}

impl Waiter {
    pub(crate) fn new(fd: BorrowedFd<'_>) -> Result<Self, PerfError> {
        let set = EventSet::new().map_err(PerfError::Wait)?;
        set.add(fd, 0, Interest::READ).map_err(PerfError::Wait)?;
        Ok(Self {
            set,
            events: Events::with_capacity(4),
        })
    }

    pub(crate) fn add(&self, fd: BorrowedFd<'_>) -> Result<(), PerfError> {
        self.set.add(fd, 0, Interest::READ).map_err(PerfError::Wait)
    }

    /// Call this before closing the descriptor: a closed descriptor is no longer in the set.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = self.set.delete(fd);
    }

    pub(crate) fn wait(&mut self, longest: Duration) -> Result<(), PerfError> {
        self.set
            .wait(&mut self.events, longest)
            .map_err(PerfError::Wait)?;
        Ok(())
    }
}

/// Collects completions while there are any, else sleeps briefly.
pub(crate) struct Turns {
    pub batch: Batch,
    /// How long to poll for completions before sleeping.
    spin: Duration,
    busy: std::time::Instant,
}

/// The longest sleep, and so the interval of checks for keep-alives, deadlines and interruption.
pub(crate) const TICK: Duration = Duration::from_millis(5);

impl Turns {
    pub(crate) fn new(spin: Duration) -> Self {
        Self {
            batch: Batch::new(BATCH),
            spin,
            busy: std::time::Instant::now(),
        }
    }

    /// Puts the next completions into `batch`. Returns true if it slept.
    pub(crate) fn take(&mut self, queues: &Queues, waiter: &mut Waiter) -> Result<bool, PerfError> {
        let poll = |batch: &mut Batch| {
            let polled = queues.poll(batch, BATCH);
            polled.map_err(|source| PerfError::Queue { source })
        };
        if poll(&mut self.batch)? > 0 {
            self.busy = std::time::Instant::now();
            return Ok(false);
        }
        if self.busy.elapsed() < self.spin {
            return Ok(false);
        }
        let cq = queues.cq();
        cq.arm().map_err(|source| PerfError::Queue { source })?;
        // Completions from before the arming do not make the descriptor readable.
        if poll(&mut self.batch)? > 0 {
            self.busy = std::time::Instant::now();
            return Ok(false);
        }
        waiter.wait(TICK)?;
        cq.disarm();
        Ok(true)
    }
}
