//! The admin queue of a drive: executes admin commands as futures of the controller's reactor, and
//! sends Asynchronous Event Requests.
//!
//! Each slot has one page of memory for data. Larger data uses an area that one command has at a
//! time. A timed-out command occupies its slot and memory until the controller is reset, because
//! the controller may still write to them.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use nacre_bdev::injection::{Injection, Injections};
use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::commands::admin::async_event_request;
use nacre_nvmf_wire::opcode::admin as opcode;
use nacre_nvmf_wire::{Sqe, StatusCode};
use nacre_reactor::CoreHandle;
use parking_lot::Mutex;
use tokio::sync::Notify;
use zerocopy::little_endian::U16;

use crate::command::set_pointer;
use crate::data::{PAGE, Pointer};
use crate::error::ControlError;
use crate::function::Function;
use crate::memory::{DmaMemory, MemoryError};
use crate::ring::{Doorbell, Head, Tail};

/// Entries of both admin rings.
pub(crate) const ENTRIES: u16 = 32;
/// Most outstanding asynchronous event requests.
pub(crate) const EVENTS_MAX: u16 = 4;
/// One entry of a ring stays empty, so that a full ring differs from an empty one.
const SLOTS: u16 = ENTRIES - 1;
/// Slots for commands other than event requests.
const COMMANDS: u16 = SLOTS - EVENTS_MAX;
/// Most data of one command.
pub(crate) const DATA_MAX: usize = 128 << 10;
/// Offset of the page list in the data area, behind the data. The first entry is in the command.
const LIST_AT: usize = DATA_MAX;
const _: () = assert!((DATA_MAX / PAGE - 1) * 8 <= PAGE);

/// Interval between attempts of a command to get a slot.
const MOMENT: Duration = Duration::from_micros(200);

/// Commands that are still accepted during shutdown.
const ENDING: [u8; 2] = [opcode::DELETE_IO_SQ, opcode::DELETE_IO_CQ];

pub(crate) struct Admin {
    state: Mutex<Inside>,
    /// Notified when an asynchronous event arrived.
    pub news: Notify,
}

struct Inside {
    queue: Option<Queue>,
    /// The memory of a closed queue, which the controller may access until it is disabled or its
    /// memory accesses are stopped.
    retained: Option<Arc<AdminMemory>>,
    slots: Vec<AdminSlot>,
    /// The slot that uses the data area, if it is in use.
    area_of: Option<usize>,
    events: VecDeque<AsyncEvent>,
    /// Number of completions that match no outstanding command.
    unmatched: u64,
    /// The reason why the queue is closed; `None`: it is open.
    closed: Option<ControlError>,
    /// The queue accepts only commands that delete I/O queues.
    ending: bool,
    injections: Injections,
}

/// The memory of the rings, and the current positions in them.
struct Queue {
    function: Arc<dyn Function>,
    memory: Arc<AdminMemory>,
    sq: Doorbell,
    cq: Doorbell,
    tail: Tail,
    head: Head,
}

pub(crate) struct AdminMemory {
    pub sq: DmaMemory,
    pub cq: DmaMemory,
    pages: DmaMemory,
    area: DmaMemory,
}

impl AdminMemory {
    pub(crate) fn allocate(function: &Arc<dyn Function>) -> Result<Self, MemoryError> {
        let area = DmaMemory::allocate(function, LIST_AT + PAGE)?;
        for page in 1..DATA_MAX / PAGE {
            let entry = area.address(page * PAGE).to_le_bytes();
            area.write(LIST_AT + (page - 1) * entry.len(), &entry);
        }
        Ok(Self {
            area,
            sq: DmaMemory::allocate(function, PAGE)?,
            cq: DmaMemory::allocate(function, PAGE)?,
            pages: DmaMemory::allocate(function, usize::from(COMMANDS) * PAGE)?,
        })
    }

    /// Returns the data memory for `bytes` of a slot's command, and the offset in it.
    fn place(&self, index: usize, bytes: usize) -> (&DmaMemory, usize) {
        if bytes > PAGE {
            (&self.area, 0)
        } else {
            (&self.pages, index * PAGE)
        }
    }

    fn pointer(&self, index: usize, bytes: usize) -> Pointer {
        let (memory, at) = self.place(index, bytes);
        let second = match bytes {
            ..=PAGE => 0,
            // Two pages need no page list.
            _ if bytes <= 2 * PAGE => memory.address(PAGE),
            _ => memory.address(LIST_AT),
        };
        Pointer::prp(memory.address(at), second)
    }
}

#[derive(Default)]
struct AdminSlot {
    /// Command identifier of the command in the ring; 0 means none.
    cid: u16,
    use_count: u16,
    stage: AdminStage,
    waker: Option<Waker>,
}

#[derive(Default, Clone, PartialEq, Eq)]
enum AdminStage {
    #[default]
    Free,
    Sent,
    /// Sent; the caller has stopped waiting for the completion.
    GivenUp,
    Event,
    Answered(AdminCompletion),
    Failed(ControlError),
}

/// The completion of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AdminCompletion {
    pub status: StatusCode,
    pub dword0: u32,
}

impl Admin {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(Inside {
                queue: None,
                retained: None,
                slots: (0..SLOTS).map(|_| AdminSlot::default()).collect(),
                area_of: None,
                events: VecDeque::new(),
                unmatched: 0,
                closed: Some(ControlError::Detached),
                ending: false,
                injections: Injections::default(),
            }),
            news: Notify::new(),
        }
    }

    /// Opens the queue with empty rings. The controller is disabled, so it does not use earlier
    /// rings.
    pub(crate) fn open(&self, function: Arc<dyn Function>, memory: Arc<AdminMemory>, stride: u32) {
        memory.cq.zero(0, PAGE);
        let mut state = self.state.lock();
        state.end(ControlError::Gone);
        state.closed = None;
        state.retained = None;
        state.ending = false;
        state.queue = Some(Queue {
            function,
            memory,
            sq: Doorbell::submission(0, stride),
            cq: Doorbell::completion(0, stride),
            tail: Tail::new(ENTRIES),
            head: Head::new(ENTRIES),
        });
    }

    /// Sets the rule of error injection for an opcode; `None` removes it.
    pub(crate) fn inject(&self, opcode: u8, injection: Option<Injection>) {
        self.state.lock().injections.set(opcode, injection);
    }

    /// Closes the queue: pending and later commands fail with `why`. The queue's memory stays
    /// allocated until [`Admin::open`] or [`Admin::release_memory`], because the controller may
    /// still access it.
    pub(crate) fn close(&self, why: ControlError) {
        let mut state = self.state.lock();
        state.end(why.clone());
        state.closed = Some(why);
        if let Some(queue) = state.queue.take() {
            state.retained = Some(queue.memory);
        }
    }

    /// Frees the memory of a closed queue. Call this when the controller can no longer access
    /// memory.
    pub(crate) fn release_memory(&self) {
        let mut state = self.state.lock();
        state.retained = None;
    }

    /// Sends a command and waits for its completion, of any status. The controller reads `data`;
    /// the bytes that it writes are copied to `into`.
    pub(crate) async fn execute(
        &self,
        core: &CoreHandle,
        sqe: Sqe,
        limit: Duration,
        data: &[u8],
        into: &mut [u8],
    ) -> Result<AdminCompletion, ControlError> {
        let opcode = sqe.opcode;
        let bytes = data.len().max(into.len());
        if bytes > DATA_MAX {
            return Err(ControlError::DataLength {
                opcode,
                bytes,
                maximum: DATA_MAX,
            });
        }
        let withheld = self.state.lock().injections.withhold(opcode);
        if let Some((sct, sc, delay)) = withheld {
            core.after(delay.min(limit)).await;
            return if delay > limit {
                Err(ControlError::Timeout { opcode, limit })
            } else {
                Ok(AdminCompletion {
                    status: StatusCode::new(sct, sc),
                    dword0: 0,
                })
            };
        }
        let deadline = core.now() + limit;
        let index = loop {
            if let Some(index) = self.send(&sqe, data, bytes)? {
                break index;
            }
            if core.now() >= deadline {
                return Err(ControlError::Busy);
            }
            core.after(MOMENT).await;
        };
        let waiting = Waiting { admin: self, index };
        let answered = poll_fn(|context| {
            let mut state = self.state.lock();
            let slot = &mut state.slots[usize::from(index)];
            match &slot.stage {
                AdminStage::Answered(answer) => Poll::Ready(Ok(*answer)),
                AdminStage::Failed(error) => Poll::Ready(Err(error.clone())),
                _ => {
                    slot.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        });
        let mut answer = core
            .timeout(limit, answered)
            .await
            .unwrap_or(Err(ControlError::Timeout { opcode, limit }))?;
        if answer.status.is_success()
            && let Some((sct, sc)) = self.state.lock().injections.fail(opcode)
        {
            answer.status = StatusCode::new(sct, sc);
        }
        if !into.is_empty() && answer.status.is_success() {
            let state = self.state.lock();
            if let Some(queue) = &state.queue {
                let (memory, at) = queue.memory.place(index.into(), bytes);
                memory.read(at, into);
            }
        }
        drop(waiting);
        Ok(answer)
    }

    /// Returns `None` when no slot is free, or another command uses the data area.
    fn send(&self, sqe: &Sqe, data: &[u8], bytes: usize) -> Result<Option<u16>, ControlError> {
        let mut state = self.state.lock();
        if let Some(why) = &state.closed {
            return Err(why.clone());
        }
        if state.ending && !ENDING.contains(&sqe.opcode) {
            return Err(ControlError::Detached);
        }
        let commands = &state.slots[..usize::from(COMMANDS)];
        let Some(index) = commands
            .iter()
            .position(|slot| slot.stage == AdminStage::Free)
        else {
            return Ok(None);
        };
        let area_of = state.area_of.filter(|owner| *owner != index);
        let is_taken = area_of.is_some_and(|owner| state.slots[owner].stage != AdminStage::Free);
        if bytes > PAGE && is_taken {
            return Ok(None);
        }
        let Some(queue) = &state.queue else {
            return Err(ControlError::Gone);
        };
        let mut sqe = *sqe;
        if bytes > 0 {
            let (memory, at) = queue.memory.place(index, bytes);
            memory.zero(at, bytes.max(PAGE));
            memory.write(at, data);
            set_pointer(&mut sqe, &queue.memory.pointer(index, bytes));
        } else {
            sqe.set_psdt(nacre_nvmf_wire::sqe::Psdt::Prp);
        }
        state.area_of = if bytes > PAGE { Some(index) } else { area_of };
        state.push(index, sqe, AdminStage::Sent);
        Ok(Some(index as u16))
    }

    /// Rejects all admin commands from now on, except those that delete I/O queues.
    pub(crate) fn reject_new(&self) {
        self.state.lock().ending = true;
    }

    /// Keeps `count` asynchronous event requests outstanding.
    pub(crate) fn request_events(&self, count: u16) {
        let mut state = self.state.lock();
        if state.queue.is_none() || state.ending {
            return;
        }
        for index in usize::from(COMMANDS)..usize::from(COMMANDS + count.min(EVENTS_MAX)) {
            if state.slots[index].stage == AdminStage::Free {
                let mut sqe = async_event_request(0);
                sqe.set_psdt(nacre_nvmf_wire::sqe::Psdt::Prp);
                state.push(index, sqe, AdminStage::Event);
            }
        }
    }

    pub(crate) fn take_events(&self) -> Vec<AsyncEvent> {
        self.state.lock().events.drain(..).collect()
    }

    /// Number of completions so far that matched no outstanding command.
    pub(crate) fn unmatched(&self) -> u64 {
        self.state.lock().unmatched
    }

    /// True if a caller waits for a completion.
    pub(crate) fn is_awaited(&self) -> bool {
        let state = self.state.lock();
        state
            .slots
            .iter()
            .any(|slot| slot.stage == AdminStage::Sent)
    }

    /// Processes the controller's completions and returns their number.
    pub(crate) fn poll(&self) -> u32 {
        let mut state = self.state.lock();
        let queue = state.queue.as_ref();
        if queue.is_none_or(|queue| queue.head.peek(&queue.memory.cq).is_none()) {
            // The usual case, because every turn of the reactor polls.
            return 0;
        }
        let mut wakers = [const { None }; ENTRIES as usize];
        let mut found = 0;
        let mut events = false;
        for waker in &mut wakers {
            let Some(queue) = &mut state.queue else {
                break;
            };
            let Some(seen) = queue.head.peek(&queue.memory.cq) else {
                break;
            };
            let dword0 = queue.head.dword0(&queue.memory.cq);
            queue.head.advance();
            found += 1;
            let answer = AdminCompletion {
                status: StatusCode::from_field(seen.status),
                dword0,
            };
            let index = usize::from(seen.cid & (ENTRIES - 1));
            match state.slots.get_mut(index) {
                Some(slot) if slot.cid == seen.cid && slot.cid != 0 => {
                    slot.cid = 0;
                    *waker = slot.waker.take();
                    match slot.stage {
                        AdminStage::Event => {
                            slot.stage = AdminStage::Free;
                            if answer.status.is_success() && state.events.len() < 64 {
                                state.events.push_back(AsyncEvent::from_dword0(dword0));
                                events = true;
                            }
                        }
                        AdminStage::Sent => slot.stage = AdminStage::Answered(answer),
                        _ => slot.stage = AdminStage::Free,
                    }
                }
                _ => state.unmatched += 1,
            }
        }
        if found > 0
            && let Some(queue) = &mut state.queue
        {
            let (_, head) = queue.head.ring();
            queue.cq.write(&*queue.function, head);
        }
        drop(state);
        wakers.into_iter().flatten().for_each(Waker::wake);
        if events {
            self.news.notify_one();
        }
        found
    }
}

impl Inside {
    fn push(&mut self, index: usize, mut sqe: Sqe, stage: AdminStage) {
        let Some(queue) = &mut self.queue else {
            return;
        };
        let slot = &mut self.slots[index];
        // Never 0, which marks a free slot.
        slot.use_count = slot.use_count % 0x3fe + 1;
        slot.cid = index as u16 | slot.use_count << ENTRIES.trailing_zeros();
        slot.stage = stage;
        slot.waker = None;
        sqe.cid = U16::new(slot.cid);
        queue.tail.push(&queue.memory.sq, &sqe);
        let (_, tail) = queue.tail.ring();
        queue.sq.write(&*queue.function, tail);
    }

    /// Ends all commands; the controller can no longer access their pages.
    fn end(&mut self, why: ControlError) {
        for slot in &mut self.slots {
            slot.cid = 0;
            match slot.stage {
                AdminStage::Sent => {
                    slot.stage = AdminStage::Failed(why.clone());
                    if let Some(waker) = slot.waker.take() {
                        waker.wake();
                    }
                }
                AdminStage::GivenUp | AdminStage::Event => slot.stage = AdminStage::Free,
                AdminStage::Free | AdminStage::Answered(_) | AdminStage::Failed(_) => {}
            }
        }
    }
}

/// Frees the slot after its command, or marks it as abandoned when the caller drops its future.
struct Waiting<'a> {
    admin: &'a Admin,
    index: u16,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.admin.state.lock();
        let slot = &mut state.slots[usize::from(self.index)];
        slot.waker = None;
        slot.stage = match slot.stage {
            AdminStage::Sent => AdminStage::GivenUp,
            _ => AdminStage::Free,
        };
    }
}
