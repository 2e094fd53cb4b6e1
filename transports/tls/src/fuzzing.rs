//! The body of the fuzz target `tls_records`. It is a part of the crate, so that an ordinary test
//! replays its corpus.
//!
//! ```text
//!   byte 0    bit 0: AES-256 with SHA-384; bit 1: the receiver sends KeyUpdates at the limit
//!   then      operations: one byte, and what it takes
//!     0  n n        the sender seals n bytes of data, little endian
//!     1  asks       the sender sends a KeyUpdate
//!     2  alert      the sender closes with an alert
//!     3  n n        the receiver gets up to n of the bytes on their way, and reads
//!     4  at at to   a byte on its way is changed
//!     5  n bytes    n bytes are put in front of those on their way
//!     6  kind n bytes   the sender seals a record of this type
//!     7             the receiver sends 6 bytes of data, and the sender reads them
//! ```
//!
//! It checks that no panic occurs, and no error unless the input changed bytes or sealed other
//! records than data. It checks that the receiver reads a prefix of the data that the sender
//! sealed. It checks that the receiver's buffers stay within their bound.

use std::io::{IoSlice, IoSliceMut};

use nacre_nvmf::auth::Digest;
use nacre_nvmf::tls::{Alert, Suite};

use crate::error::Failure;
use crate::session::{MOST_BUFFER_BYTES, Session};

struct Ends {
    sender: Session,
    receiver: Session,
    /// Sealed bytes on their way.
    way: Vec<u8>,
    /// Data in the order in which it was sealed, and the number of bytes that were read.
    data: Vec<u8>,
    read: usize,
    /// Something was changed, or is no stream of data: an error is expected.
    is_odd: bool,
    failed: bool,
}

/// Most data of one input.
const MOST: usize = 1 << 20;

pub fn tls_records(input: &[u8]) {
    let [choice, rest @ ..] = input else { return };
    let suite = match choice & 1 {
        0 => Suite::Aes128Sha256,
        _ => Suite::Aes256Sha384,
    };
    let bytes = suite.hash().bytes();
    let secret = |byte: u8| Digest::new(&vec![byte; bytes]);
    let session = |receive, send| Session::new(suite, secret(receive), secret(send), &[]);
    let (Ok(sender), Ok(mut receiver)) = (session(1, 2), session(2, 1)) else {
        return;
    };
    if choice & 2 != 0 {
        receiver.use_key_updates();
    }
    let mut ends = Ends {
        sender,
        receiver,
        way: Vec::new(),
        data: Vec::new(),
        read: 0,
        is_odd: false,
        failed: false,
    };
    let mut rest = rest;
    while let Some(more) = ends.operation(rest) {
        rest = more;
    }
    while !ends.way.is_empty() && !ends.failed {
        ends.deliver(usize::MAX);
    }
    if !ends.is_odd {
        assert_eq!(ends.read, ends.data.len(), "all data arrives");
    }
}

impl Ends {
    /// Does one operation, and returns the bytes after it.
    fn operation<'a>(&mut self, input: &'a [u8]) -> Option<&'a [u8]> {
        let (operation, rest) = input.split_first()?;
        Some(match (operation % 8, rest) {
            (0, [low, high, rest @ ..]) => {
                self.seal(usize::from(u16::from_le_bytes([*low, *high])));
                rest
            }
            (1, [asks, rest @ ..]) => {
                // More of them than of data are a flood.
                self.is_odd = true;
                let _ = self.sender.update_keys(asks & 1 == 1);
                self.send();
                rest
            }
            (2, [alert, rest @ ..]) => {
                self.is_odd = true;
                self.sender.close(Alert(*alert));
                self.send();
                rest
            }
            (3, [low, high, rest @ ..]) => {
                self.deliver(usize::from(u16::from_le_bytes([*low, *high])));
                rest
            }
            (4, [low, high, to, rest @ ..]) => {
                let at = usize::from(u16::from_le_bytes([*low, *high]));
                if let Some(byte) = self.way.get_mut(at) {
                    self.is_odd |= *byte != *to;
                    *byte = *to;
                }
                rest
            }
            (5, [count, rest @ ..]) => {
                let (bytes, rest) = rest.split_at_checked(usize::from(*count))?;
                self.is_odd |= !bytes.is_empty();
                self.way.splice(..0, bytes.iter().copied());
                rest
            }
            (6, [kind, count, rest @ ..]) => {
                let (bytes, rest) = rest.split_at_checked(usize::from(*count))?;
                self.is_odd = true;
                // Zeros after the type are padding. Data has an operation of its own.
                let is_type = |byte: &&u8| **byte != 0;
                let last = bytes.iter().chain([kind]).rfind(is_type);
                if last != Some(&crate::records::kind::DATA) {
                    let _ = self.sender.put(*kind, bytes);
                    self.send();
                }
                rest
            }
            (7, rest) => {
                self.answer();
                rest
            }
            _ => return None,
        })
    }

    fn seal(&mut self, count: usize) {
        if self.data.len() + count > MOST {
            return;
        }
        let from = self.data.len();
        let data: Vec<u8> = (from..from + count).map(|at| (at % 251) as u8).collect();
        let sealed = self.sender.seal(&[IoSlice::new(&data)]).expect("sealed");
        self.data.extend_from_slice(&data[..sealed]);
        self.send();
    }

    fn send(&mut self) {
        self.way.extend_from_slice(self.sender.ciphertext());
        self.sender.sent(self.sender.ciphertext().len());
    }

    fn deliver(&mut self, most: usize) {
        if self.failed {
            return;
        }
        let room = self.receiver.room();
        let count = self.way.len().min(most).min(room.len());
        room[..count].copy_from_slice(&self.way[..count]);
        self.way.drain(..count);
        self.receiver.received(count);
        let mut place = vec![0; 20_000];
        loop {
            match self.receiver.read(&mut [IoSliceMut::new(&mut place)]) {
                Ok(0) => break,
                Ok(count) => {
                    let expected = self.data.get(self.read..self.read + count);
                    assert_eq!(expected, Some(&place[..count]), "data in order");
                    self.read += count;
                }
                Err(failure) => {
                    assert!(self.is_odd, "{failure}");
                    self.failed = true;
                    break;
                }
            }
        }
        if self.receiver.is_peer_closed() {
            self.failed = true;
        }
        self.receiver.return_input();
        assert!(self.receiver.buffer_bytes() <= MOST_BUFFER_BYTES);
    }

    /// The receiver sends, with the answer to a KeyUpdate if it owes one.
    fn answer(&mut self) {
        if self.failed || self.receiver.seal(&[IoSlice::new(b"answer")]) != Ok(6) {
            return;
        }
        let bytes = self.receiver.ciphertext().to_vec();
        self.receiver.sent(bytes.len());
        let room = self.sender.room();
        room[..bytes.len()].copy_from_slice(&bytes);
        self.sender.received(bytes.len());
        let mut place = [0; 6];
        match self.sender.read(&mut [IoSliceMut::new(&mut place)]) {
            Ok(6) => assert_eq!(&place, b"answer"),
            // So many answers to KeyUpdates.
            Err(Failure::Flood(_)) => self.failed = true,
            read => panic!("{read:?}"),
        }
        self.sender.return_input();
    }
}
