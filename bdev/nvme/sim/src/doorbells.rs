//! [`Doorbells`]: doorbell registers as atomics, for drives that do not check each doorbell write.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::state::State;

/// Doorbell registers without checks: a write stores the value, and the next tick handles it.
pub(crate) struct Doorbells {
    values: Box<[AtomicU32]>,
    stride: u32,
}

/// The value of a doorbell without a write since the last tick.
const SILENT: u32 = u32::MAX;

impl Doorbells {
    pub(crate) fn new(count: usize, stride: u8) -> Self {
        Self {
            values: (0..count).map(|_| AtomicU32::new(SILENT)).collect(),
            stride: 4 << stride,
        }
    }

    pub(crate) fn ring(&self, at: u32, value: u32) {
        if let Some(place) = self.values.get((at / self.stride) as usize) {
            place.store(value, Ordering::Release);
        }
    }

    pub(crate) fn clear(&self) {
        for value in &self.values {
            value.store(SILENT, Ordering::Relaxed);
        }
    }

    pub(crate) fn take(&self, state: &mut State) {
        for (index, value) in (0..).zip(&self.values) {
            if value.load(Ordering::Relaxed) != SILENT {
                let value = value.swap(SILENT, Ordering::Acquire);
                state.ring(index * self.stride, value);
            }
        }
    }
}
