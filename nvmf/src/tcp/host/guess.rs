//! Guesses the controller's next PDUs: C2HData of the oldest reads, in order. The next receive is
//! scattered accordingly, see [`crate::tcp::rx`].

use nacre_nvmf_wire::tcp::{DataPdu, Pdu};

use super::HostConn;
use crate::tcp::frame::Violation;
use crate::tcp::rx::{Guess, RxBuffers};

/// Reads of fewer bytes are not worth an entry of the I/O vector.
pub(super) const GUESS_BYTES: usize = 2048;

/// Whether to guess the next PDUs (see `tcp::rx`).
///
/// Guessing begins once the controller ended reads by the SUCCESS flag: responses between the
/// data would spoil every guess. Each wrong guess pauses guessing for twice as many receives as
/// the previous one.
#[derive(Debug, Default)]
pub(super) struct Guessing {
    pub(super) success_seen: bool,
    /// Receives to go until the next guess.
    pub(super) pause: u32,
    /// The last pause.
    paused: u32,
    hits: u32,
}

impl Guessing {
    pub(super) fn is_on(&self) -> bool {
        self.success_seen && self.pause == 0
    }

    #[inline]
    fn hit(&mut self) {
        self.hits += 1;
        // Well guessed for a while: the next miss is forgiven soon.
        if self.hits == 1024 {
            self.paused = 0;
        }
    }

    fn miss(&mut self) {
        self.paused = (self.paused * 2).clamp(16, 4096);
        self.pause = self.paused;
        self.hits = 0;
    }
}

impl HostConn {
    /// Says which data the next receive will probably bring.
    #[inline]
    pub(super) fn guess(&mut self, buffers: &RxBuffers) {
        if self.reads.is_empty() || !self.rx.may_guess() || !self.is_open() {
            return;
        }
        // Leftovers of commands that ended another way must not pile up.
        if self.reads.len() > 4 * self.commands.len() {
            return self.reads.clear();
        }
        let on = self.guessing.is_on();
        let header = self
            .reader
            .rules()
            .alignment
            .align(DataPdu::SIZE as u32 + self.reader.rules().digests.header_bytes())
            as usize;
        while let Some(&(cid, serial)) = self.reads.front() {
            let command = &mut self.commands[usize::from(cid)];
            let fresh = command.outstanding
                && command.serial == serial
                && command.received == 0
                && !command.last;
            if fresh && !on {
                // The first of those to begin with after the pause.
                return;
            }
            if let Some(buf) = command.read.take_if(|_| fresh) {
                let guess = Guess {
                    id: cid,
                    len: buf.len(),
                    buf,
                };
                if let Err(back) = self.rx.guess(buffers, header, guess) {
                    command.read = Some(back.buf);
                    return;
                }
            }
            self.reads.pop_front();
        }
    }

    /// Checks a guess: its data is in place, or must be put back in order.
    #[inline]
    pub(super) fn judge_guess(&mut self) -> Result<(), Violation> {
        let Some((cid, header, length)) = self.rx.guessed() else {
            return Ok(());
        };
        if let Some((frame, Pdu::C2hData(&pdu))) = self.reader.read(self.rx.unread())?
            && pdu.cccid.get() == cid
            && pdu.datao.get() == 0
            && pdu.datal.get() as usize == length
            && frame.data_offset as usize == header
        {
            self.rx.hit();
            self.guessing.hit();
            self.pdus_received += 1;
            self.receiving = Some((cid, pdu));
        } else {
            self.guessed_wrong(header);
        }
        Ok(())
    }

    #[cold]
    fn guessed_wrong(&mut self, header: usize) {
        // A header cut in two is no wrong guess.
        if self.rx.unread().len() >= header {
            self.guessing.miss();
        }
        self.rx.miss();
        while let Some(Guess { id, buf, .. }) = self.rx.take_guess() {
            let command = &mut self.commands[usize::from(id)];
            command.read = Some(buf);
            self.reads.push_front((id, command.serial));
        }
    }
}
