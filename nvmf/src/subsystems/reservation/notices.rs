//! Reservation notices for one controller's host: the notification log (80h) and its masks.

use std::collections::{BTreeMap, VecDeque};

use nacre_nvmf_wire::features::ReservationMask;
use nacre_nvmf_wire::log::ReservationNotification;
use zerocopy::little_endian::{U32, U64};

use super::state::Notice;

/// Most unread notifications. Beyond it the oldest one is dropped. The host sees the loss as a gap
/// in the log page count, and can read the namespace's state.
pub const MAX_NOTICES: usize = 64;

#[derive(Default)]
pub struct NoticeLog {
    waiting: VecDeque<Waiting>,
    /// Log page count of the latest notification since the controller was reset.
    count: u64,
    masks: BTreeMap<u32, ReservationMask>,
}

struct Waiting {
    count: u64,
    nsid: u32,
    notice: Notice,
}

impl Notice {
    fn mask(self) -> ReservationMask {
        match self {
            Self::RegistrationPreempted => ReservationMask::REGISTRATION_PREEMPTED,
            Self::Released => ReservationMask::RELEASED,
            Self::Preempted => ReservationMask::PREEMPTED,
        }
    }

    fn page_type(self) -> u8 {
        match self {
            Self::RegistrationPreempted => ReservationNotification::REGISTRATION_PREEMPTED,
            Self::Released => ReservationNotification::RELEASED,
            Self::Preempted => ReservationNotification::PREEMPTED,
        }
    }
}

impl NoticeLog {
    /// Adds a notification, unless the host has masked its type. Returns true if it was added.
    pub fn add(&mut self, nsid: u32, notice: Notice) -> bool {
        if self.mask(nsid).contains(notice.mask()) {
            return false;
        }
        // Zero says that there is no page.
        self.count = self.count.checked_add(1).unwrap_or(1);
        if self.waiting.len() == MAX_NOTICES {
            self.waiting.pop_front();
        }
        self.waiting.push_back(Waiting {
            count: self.count,
            nsid,
            notice,
        });
        true
    }

    /// The oldest notification and the number of further ones; an empty page if there is none.
    /// Removes it unless `retain`.
    pub fn page(&mut self, retain: bool) -> ReservationNotification {
        let mut page = ReservationNotification::zeroed();
        if let Some(oldest) = self.waiting.front() {
            page.log_page_count = U64::new(oldest.count);
            page.log_page_type = oldest.notice.page_type();
            page.available = u8::try_from(self.waiting.len() - 1).unwrap_or(u8::MAX);
            page.nsid = U32::new(oldest.nsid);
        }
        if !retain {
            self.waiting.pop_front();
        }
        page
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn mask(&self, nsid: u32) -> ReservationMask {
        self.masks.get(&nsid).copied().unwrap_or_default()
    }

    pub fn set_mask(&mut self, nsid: u32, mask: ReservationMask) {
        if mask.is_empty() {
            self.masks.remove(&nsid);
        } else {
            self.masks.insert(nsid, mask);
        }
    }

    /// Handles a Controller Level Reset.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}
