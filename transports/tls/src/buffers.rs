//! The buffers of the TLS sessions of one thread, for reuse. A session has an input buffer only
//! while it has unread bytes, and an output buffer only while it has unsent bytes. An idle
//! connection therefore has none.

use std::cell::RefCell;

/// Most buffers of each kind that a thread keeps for its next session.
const MOST_SPARE: usize = 8;

#[derive(Default)]
struct SpareBuffers {
    input: Vec<Box<[u8]>>,
    output: Vec<Vec<u8>>,
}

thread_local! {
    static SPARE: RefCell<SpareBuffers> = RefCell::default();
}

/// A buffer of `bytes` for received records. It can contain bytes of another session.
pub(crate) fn take_input(bytes: usize) -> Box<[u8]> {
    let spare = SPARE.with_borrow_mut(|spare| spare.input.pop());
    spare.unwrap_or_else(|| vec![0; bytes].into_boxed_slice())
}

/// An empty buffer with a capacity of `bytes`, for encrypted records.
pub(crate) fn take_output(bytes: usize) -> Vec<u8> {
    let spare = SPARE.with_borrow_mut(|spare| spare.output.pop());
    spare.unwrap_or_else(|| Vec::with_capacity(bytes))
}

pub(crate) fn give_input(buffer: Box<[u8]>) {
    SPARE.with_borrow_mut(|spare| {
        if spare.input.len() < MOST_SPARE {
            spare.input.push(buffer);
        }
    });
}

pub(crate) fn give_output(mut buffer: Vec<u8>) {
    buffer.clear();
    SPARE.with_borrow_mut(|spare| {
        if spare.output.len() < MOST_SPARE {
            spare.output.push(buffer);
        }
    });
}
