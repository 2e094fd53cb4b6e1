//! The record layer of a TLS connection after its handshake: plain data on one side, encrypted
//! records on the other.
//!
//! ```text
//!   socket ─▶ room, received ─▶ input ─▶ open in place ─▶ read ─▶ the machine's slices
//!   socket ◀─ ciphertext, sent ◀─ output ◀─ seal ◀─ the machine's slices
//! ```
//!
//! The NVMe/TCP connection machine gets data only after its tag is verified. Every malformed record
//! ends the connection.
//!
//! AES-GCM may seal 2^24.5 records with one key. Before that limit a session sends a KeyUpdate, and
//! asks the peer for one if the peer's key is near the limit. It does so only with peers that
//! support KeyUpdate: those that have sent one, and those for which the caller has called
//! [`Session::use_key_updates`].
//!
//! The NVMe/TCP host of Linux does not support KeyUpdate, as seen with 6.12: it stops reading the
//! connection until its I/O times out. The kernel's TLS can change keys from 6.14 on, but leaves
//! the KeyUpdate to a process, and this host has none. With such peers the session continues, and
//! counts the keys that are past the limit. The security margin decreases slowly: 2^32 records of
//! full length give an attacker a chance of 2^-45.

use std::io::{IoSlice, IoSliceMut};

use nacre_nvmf::auth::Digest;
use nacre_nvmf::tls::{Alert, Suite};

use crate::buffers;
use crate::error::Failure;
use crate::records::{
    Direction, HEADER, MOST_DATA, MOST_PROTECTED, MOST_RECORDS, TRAILER, header, kind,
};

/// Bytes of the buffer for received records: eight of the longest. One receive can take several
/// records, and a system call costs more than the copy of an incomplete record to the front.
const INPUT: usize = 8 * (HEADER + MOST_PROTECTED);
/// While this number of encrypted bytes waits for the socket, nothing more is encrypted.
const OUTPUT: usize = 256 << 10;
/// The last record begins below [`OUTPUT`]; messages without data may follow.
const OUTPUT_BUFFER: usize = OUTPUT + HEADER + MOST_DATA + TRAILER + 128;
/// The most memory of a session's buffers, in bytes.
pub const MOST_BUFFER_BYTES: usize = INPUT + OUTPUT_BUFFER;
/// Records with one key after which a KeyUpdate is due. The rest, up to the limit, is for records
/// that an end seals while the request for a KeyUpdate is on its way.
const UPDATE_DUE: u64 = MOST_RECORDS - (1 << 20);
/// Most records without data (KeyUpdate, tickets, empty ones) beyond the number of those with data.
/// Also the most KeyUpdates received in [`UPDATES_PERIOD`].
const MOST_WITHOUT_DATA: u32 = 64;
/// Records with data after which the count of KeyUpdates restarts.
const UPDATES_PERIOD: u32 = 1024;
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

/// The record layer of one connection: decrypts received records, encrypts data to send.
pub struct Session {
    receive: Direction,
    send: Direction,
    /// Received records. Empty, without memory, while there are none; `output` likewise.
    input: Box<[u8]>,
    /// Start of the received bytes in `input` that are not taken yet.
    start: usize,
    /// End of the received bytes in `input`.
    end: usize,
    /// The range of decrypted data in `input` that [`Session::read`] has not copied yet.
    opened: (usize, usize),
    output: Vec<u8>,
    /// Bytes of `output` that are sent.
    left: usize,
    without_data: u32,
    /// KeyUpdates received in this period.
    updates: u32,
    /// Records with data received in this period; [`UPDATES_PERIOD`] of them end it.
    with_data: u32,
    /// The peer has asked for new keys of our direction. One answer serves several requests (RFC
    /// 8446, 4.6.3).
    owes_update: bool,
    /// The peer supports KeyUpdate, and must send one before it reaches the limit.
    takes_updates: bool,
    /// A KeyUpdate that requests one of the peer has been sent, and is not answered.
    asked: bool,
    counts: SessionCounts,
    /// A failure behind data that [`Session::read`] returned; the next read returns the failure.
    failed: Option<Failure>,
    /// The peer has closed its direction.
    peer_closed: bool,
    /// Nothing more is sealed: close_notify or an alert is in `output`.
    closed: bool,
}

/// Counts of a session since its handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SessionCounts {
    pub key_updates_sent: u64,
    pub key_updates_received: u64,
    /// Keys, of both directions, used for more records than AES-GCM allows (2^24.5).
    pub keys_past_limit: u64,
}

impl Session {
    /// `early`: bytes that arrived after the last one of the handshake.
    pub(crate) fn new(
        suite: Suite,
        receive: Digest,
        send: Digest,
        early: &[u8],
    ) -> Result<Self, Failure> {
        let mut session = Self {
            receive: Direction::new(suite, receive)?,
            send: Direction::new(suite, send)?,
            input: Box::default(),
            start: 0,
            end: 0,
            opened: (0, 0),
            output: Vec::new(),
            left: 0,
            without_data: 0,
            updates: 0,
            with_data: 0,
            owes_update: false,
            takes_updates: false,
            asked: false,
            counts: SessionCounts::default(),
            failed: None,
            peer_closed: false,
            closed: false,
        };
        if !early.is_empty() {
            let place = session.room().get_mut(..early.len());
            let place = place.ok_or(Failure::LongHandshake(INPUT))?;
            place.copy_from_slice(early);
            session.received(early.len());
        }
        Ok(session)
    }

    /// Declares that the peer supports KeyUpdate: the session sends KeyUpdates before the limit of
    /// AES-GCM, and fails with [`Failure::KeyLimit`] if the peer exceeds the limit.
    pub fn use_key_updates(&mut self) {
        self.takes_updates = true;
    }

    pub fn counts(&self) -> SessionCounts {
        self.counts
    }

    /// The free part of the input buffer, for the next receive. It is not empty after a
    /// [`Session::read`] that returned fewer bytes than its slices take.
    pub fn room(&mut self) -> &mut [u8] {
        if self.input.is_empty() {
            self.input = buffers::take_input(INPUT);
        }
        if self.opened.0 == self.opened.1 && self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            self.opened = (0, 0);
        }
        &mut self.input[self.end..]
    }

    /// Notes that `count` bytes were received into [`Session::room`].
    pub fn received(&mut self, count: usize) {
        self.end += count;
    }

    /// Gives the input buffer back for reuse by this thread's sessions, if it is empty.
    pub fn return_input(&mut self) {
        if self.start == self.end && self.opened.0 == self.opened.1 && !self.input.is_empty() {
            buffers::give_input(std::mem::take(&mut self.input));
            (self.start, self.end, self.opened) = (0, 0, (0, 0));
        }
    }

    /// Bytes of memory of the buffers now, at most [`MOST_BUFFER_BYTES`].
    pub fn buffer_bytes(&self) -> usize {
        self.input.len() + self.output.capacity()
    }

    /// Decrypts records into the slices and returns the bytes of data. Fewer than the slices take:
    /// no whole record is left, the peer has closed, or the next read returns a failure.
    pub fn read(&mut self, slices: &mut [IoSliceMut<'_>]) -> Result<usize, Failure> {
        if let Some(failure) = self.failed.take() {
            return Err(failure);
        }
        let mut total = 0;
        for slice in slices {
            let mut slice = &mut slice[..];
            while !slice.is_empty() {
                let (from, to) = self.opened;
                if from == to {
                    if self.peer_closed {
                        return Ok(total);
                    }
                    match self.open_next() {
                        Ok(true) => continue,
                        Ok(false) => return Ok(total),
                        Err(failure) if total == 0 => return Err(failure),
                        // The data before it counts.
                        Err(failure) => {
                            self.failed = Some(failure);
                            return Ok(total);
                        }
                    }
                }
                let count = slice.len().min(to - from);
                let (place, rest) = slice.split_at_mut(count);
                place.copy_from_slice(&self.input[from..from + count]);
                slice = rest;
                self.opened.0 += count;
                total += count;
            }
        }
        Ok(total)
    }

    /// True if [`Session::read`] has work without another receive: data, a whole record (perhaps
    /// without data, such as a KeyUpdate), an error or the end.
    pub fn has_input(&self) -> bool {
        self.failed.is_some()
            || self.peer_closed
            || self.opened.0 != self.opened.1
            || self.whole_record().is_some()
    }

    /// True if the peer has sent close_notify, and all data before it has been read.
    pub fn is_peer_closed(&self) -> bool {
        self.peer_closed && self.opened.0 == self.opened.1
    }

    /// Length of the next record with its header. `None`: it has not arrived as a whole. An error
    /// if its header announces too many bytes.
    fn whole_record(&self) -> Option<Result<usize, Failure>> {
        let waiting = &self.input[self.start..self.end];
        let (_, length) = header(waiting)?;
        if length > MOST_PROTECTED {
            let most = MOST_PROTECTED;
            return Some(Err(Failure::Long {
                bytes: length,
                most,
            }));
        }
        let length = HEADER + length;
        (waiting.len() >= length).then_some(Ok(length))
    }

    /// Decrypts the next record. `false`: it has not arrived as a whole.
    fn open_next(&mut self) -> Result<bool, Failure> {
        let Some(length) = self.whole_record() else {
            return Ok(false);
        };
        let length = length?;
        let at = self.start;
        let record = &mut self.input[at..at + length];
        if record[0] != kind::DATA {
            return Err(Failure::Type {
                kind: record[0],
                expected: kind::DATA,
            });
        }
        if self.receive.count() >= MOST_RECORDS {
            if self.takes_updates {
                return Err(Failure::KeyLimit(MOST_RECORDS));
            }
            self.counts.keys_past_limit += u64::from(self.receive.count() == MOST_RECORDS);
        }
        let (kind, bytes) = self.receive.open(record)?;
        self.start += length;
        let data = (at + HEADER, at + HEADER + bytes);
        if kind == kind::DATA && bytes > 0 {
            self.without_data = self.without_data.saturating_sub(1);
            self.with_data += 1;
            if self.with_data == UPDATES_PERIOD {
                (self.with_data, self.updates) = (0, 0);
            }
        } else {
            self.without_data += 1;
        }
        if self.without_data > MOST_WITHOUT_DATA {
            return Err(Failure::Flood(MOST_WITHOUT_DATA));
        }
        match kind {
            kind::DATA => self.opened = data,
            kind::ALERT => self.alerted(data)?,
            kind::HANDSHAKE => self.handshake(data)?,
            kind => {
                let expected = kind::DATA;
                return Err(Failure::Type { kind, expected });
            }
        }
        Ok(true)
    }

    fn alerted(&mut self, (from, to): (usize, usize)) -> Result<(), Failure> {
        let [_, description] = self.input[from..to] else {
            return Err(Failure::Malformed("alert"));
        };
        let alert = Alert(description);
        if alert.is_closure() {
            self.peer_closed = true;
            return Ok(());
        }
        Err(Failure::Alert(alert))
    }

    /// Messages after the handshake. Each is expected in one record, as all implementations send
    /// them; tickets are dropped.
    fn handshake(&mut self, (from, to): (usize, usize)) -> Result<(), Failure> {
        let mut rest = &self.input[from..to];
        let mut updates = Vec::new();
        if rest.is_empty() {
            return Err(Failure::Malformed("handshake message"));
        }
        while let [kind, high, middle, low, after @ ..] = rest {
            let length = u32::from_be_bytes([0, *high, *middle, *low]) as usize;
            let (body, after) = after
                .split_at_checked(length)
                .ok_or(Failure::Malformed("handshake message"))?;
            rest = after;
            match (*kind, body) {
                (NEW_SESSION_TICKET, _) => {}
                // It must be the last of its record: what follows has other keys.
                (KEY_UPDATE, [asked @ (0 | 1)]) if rest.is_empty() => updates.push(*asked == 1),
                (KEY_UPDATE, _) => return Err(Failure::Malformed("KeyUpdate")),
                _ => return Err(Failure::Unexpected("a handshake message")),
            }
        }
        if !rest.is_empty() {
            return Err(Failure::Malformed("handshake message"));
        }
        for asked in updates {
            self.receive.update()?;
            self.owes_update |= asked;
            self.asked = false;
            self.takes_updates = true;
            self.counts.key_updates_received += 1;
            self.updates += 1;
            if self.updates > MOST_WITHOUT_DATA {
                return Err(Failure::Flood(MOST_WITHOUT_DATA));
            }
        }
        Ok(())
    }

    /// Encrypts data of the slices, as much as there is room for, and returns its bytes. Sends a
    /// KeyUpdate first if one is due. After [`Session::close`] it encrypts nothing.
    pub fn seal(&mut self, slices: &[IoSlice<'_>]) -> Result<usize, Failure> {
        if !self.closed {
            let asks = self.takes_updates && !self.asked && self.receive.count() >= UPDATE_DUE;
            let is_due = self.takes_updates && self.send.count() >= UPDATE_DUE;
            if self.owes_update || asks || is_due {
                self.update_keys(asks)?;
            }
        }
        let mut total = 0;
        let mut slices = slices.iter().map(|slice| &slice[..]);
        let mut rest: &[u8] = &[];
        while !self.closed && self.output.len() - self.left < OUTPUT {
            self.take_output_buffer();
            let start = self.output.len();
            self.output.resize(start + HEADER, 0);
            let at = start + HEADER;
            while self.output.len() - at < MOST_DATA {
                if rest.is_empty() {
                    match slices.next() {
                        Some(next) => rest = next,
                        None => break,
                    }
                }
                let count = rest.len().min(MOST_DATA - (self.output.len() - at));
                let (now, later) = rest.split_at(count);
                self.output.extend_from_slice(now);
                rest = later;
            }
            let bytes = self.output.len() - at;
            if bytes == 0 {
                self.output.truncate(start);
                break;
            }
            self.counts.keys_past_limit += u64::from(self.send.count() == MOST_RECORDS);
            self.send.seal(kind::DATA, &mut self.output, at)?;
            total += bytes;
        }
        Ok(total)
    }

    /// Queues a KeyUpdate; it also answers those of the peer. `asks`: the peer is to answer. Data
    /// sent later has other keys. [`Session::seal`] calls it when one is due.
    pub fn update_keys(&mut self, asks: bool) -> Result<(), Failure> {
        self.put(kind::HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, u8::from(asks)])?;
        self.owes_update = false;
        self.asked |= asks;
        self.counts.key_updates_sent += 1;
        self.send.update()
    }

    fn take_output_buffer(&mut self) {
        if self.output.capacity() == 0 {
            self.output = buffers::take_output(OUTPUT_BUFFER);
        }
    }

    /// Encrypts one record of any type.
    pub(crate) fn put(&mut self, kind: u8, message: &[u8]) -> Result<(), Failure> {
        self.take_output_buffer();
        let at = self.output.len() + HEADER;
        self.output.resize(at, 0);
        self.output.extend_from_slice(message);
        self.send.seal(kind, &mut self.output, at)
    }

    /// Ends the sending direction with an alert: close_notify, or the alert of a failure.
    pub fn close(&mut self, alert: Alert) {
        if !self.closed {
            let level = if alert.is_closure() { 1 } else { 2 };
            // If the cipher fails, the end of the connection says all.
            let _ = self.put(kind::ALERT, &[level, alert.0]);
            self.closed = true;
        }
    }

    /// Encrypted bytes that are not sent yet.
    pub fn ciphertext(&self) -> &[u8] {
        &self.output[self.left..]
    }

    /// Notes that `count` bytes of [`Session::ciphertext`] are sent.
    pub fn sent(&mut self, count: usize) {
        self.left += count;
        if self.left == self.output.len() {
            self.discard_ciphertext();
        }
    }

    /// Drops the encrypted bytes that are not sent.
    pub fn discard_ciphertext(&mut self) {
        let output = std::mem::take(&mut self.output);
        if output.capacity() > 0 {
            buffers::give_output(output);
        }
        self.left = 0;
    }

    /// Sets the number of records received and sent, for tests of the limit.
    #[cfg(test)]
    pub(crate) fn skip_to(&mut self, received: u64, sent: u64) {
        self.receive.skip_to(received);
        self.send.skip_to(sent);
    }
}
