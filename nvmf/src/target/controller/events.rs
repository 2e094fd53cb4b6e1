//! Asynchronous events: what happened, what the host wants to hear, and the requests it left
//! with the controller to be answered (Base 5.2).
//!
//! One event of a type is outstanding at a time: after it was reported it is masked until the host
//! has read the log page that it names (without Retain Asynchronous Event).

use arrayvec::ArrayVec;
use nacre_nvmf_wire::{Cqe, StatusCode};

use crate::target::association::pending;

/// Notice types and log pages, in dword 0 of the answer (Base figures 147 to 151).
const NOTICE: u32 = 0x02;
const NAMESPACE_ATTRIBUTE_CHANGED: u32 = NOTICE | 0x04 << 16;
const ANA_CHANGE: u32 = NOTICE | 0x03 << 8 | 0x0c << 16;
const DISCOVERY_LOG_CHANGED: u32 = NOTICE | 0xf0 << 8 | 0x70 << 16;

/// The events of [`pending`], with the bit of the Asynchronous Event Configuration feature that
/// allows each, and dword 0 of its answer.
const EVENTS: [(u32, u32, u32); 3] = [
    (pending::NAMESPACES, 1 << 8, NAMESPACE_ATTRIBUTE_CHANGED),
    (pending::ANA, 1 << 11, ANA_CHANGE),
    (pending::DISCOVERY, 1 << 31, DISCOVERY_LOG_CHANGED),
];

pub(crate) struct Events {
    /// Held requests by command identifier, oldest first.
    requests: ArrayVec<u16, 16>,
    limit: usize,
    /// Asynchronous Event Configuration (feature 0Bh).
    pub configuration: u32,
    happened: u32,
    /// Reported, and their log page not read since.
    masked: u32,
    aborted: ArrayVec<u16, 16>,
}

impl Events {
    pub fn new(limit: u8) -> Events {
        Events {
            requests: ArrayVec::new(),
            limit: usize::from(limit).min(16),
            // Until the host says otherwise it hears of everything, as Linux hosts expect of
            // discovery controllers.
            configuration: 1 << 8 | 1 << 11 | 1 << 31,
            happened: 0,
            masked: 0,
            aborted: ArrayVec::new(),
        }
    }

    pub fn request(&mut self, cid: u16) -> Result<(), StatusCode> {
        if self.requests.len() >= self.limit {
            return Err(StatusCode::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED.with_dnr());
        }
        self.requests.push(cid);
        Ok(())
    }

    /// Notes events (bits of [`pending`]).
    pub fn notice(&mut self, events: u32) {
        self.happened |= events;
    }

    /// The host read the log page of these events.
    pub fn log_read(&mut self, events: u32) {
        self.masked &= !events;
    }

    pub fn abort(&mut self, cid: u16) -> bool {
        let Some(at) = self.requests.iter().position(|r| *r == cid) else {
            return false;
        };
        self.requests.remove(at);
        self.aborted.push(cid);
        true
    }

    /// The next answer to a held request.
    pub fn next(&mut self) -> Option<Cqe> {
        if let Some(cid) = self.aborted.pop() {
            return Some(Cqe::new(cid, StatusCode::ABORT_REQUESTED));
        }
        let (event, _, dword0) = *EVENTS.iter().find(|(event, allowed, _)| {
            self.happened & event != 0
                && self.masked & event == 0
                && self.configuration & allowed != 0
        })?;
        if self.requests.is_empty() {
            return None;
        }
        let cid = self.requests.remove(0);
        self.happened &= !event;
        self.masked |= event;
        Some(Cqe::success(cid).with_dword0(dword0))
    }
}
