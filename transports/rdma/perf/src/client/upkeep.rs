//! The client's periodic work: completions, connection events, keep-alives.

use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::{CmEvent, CmEventKind, Completion};

use super::{Client, Progress, SIGNS, Stage, TELL, TICK};
use crate::completion::{Rank, failed};
use crate::endpoint::End;
use crate::error::PerfError;
use crate::wire::{Ending, MESSAGE_BYTES, Message};

impl Client<'_> {
    /// Polls completions, and at intervals everything else.
    pub(super) fn turn(&mut self, mut stage: Option<&mut Stage>) -> Result<Instant, PerfError> {
        let queues = self.end.as_ref().expect("it is made").queues.clone();
        let taken = self.turns.take(&queues, &mut self.waiter);
        let now = Instant::now();
        let slept = match taken {
            Ok(slept) => slept,
            Err(error @ PerfError::Queue { .. }) => {
                // The connection manager reports a device that disappears.
                self.causes.add(Rank::Ended, error, now);
                self.waiter.wait(TICK)?;
                true
            }
            Err(error) => return Err(error),
        };
        while let Some(done) = self.turns.batch.next() {
            match done.lane() {
                Some(0) => self.controlled(&done, now)?,
                Some(lane) => self.completed(lane as usize - 1, &done, stage.as_deref_mut(), now),
                None => {}
            }
        }
        if slept || now >= self.looked + TICK {
            self.looked = now;
            self.check_connection(now)?;
            if let Some(stage) = &mut stage
                && now >= self.last_report + TELL
            {
                self.last_report = now;
                (self.on_progress)(Progress {
                    size: stage.size,
                    messages: stage.done,
                    elapsed: now.saturating_duration_since(stage.started),
                    recent_p99_ns: stage.recent.summary().p99,
                });
                stage.recent.clear();
            }
        }
        match self.causes.due(now) {
            Some(error) => Err(error),
            None => Ok(now),
        }
    }

    fn completed(&mut self, at: usize, done: &Completion, stage: Option<&mut Stage>, now: Instant) {
        let (Some(flow), Some(load)) = (self.flows.get_mut(at), self.load.as_ref()) else {
            return;
        };
        let size = stage.as_ref().map_or(0, |stage| stage.size);
        match flow.completed(load, done, size, now) {
            Ok(outcome) => {
                if outcome.from_server {
                    self.last_reply = now;
                }
                if let (Some(time), Some(stage)) = (outcome.measured, stage) {
                    stage.latencies.record(time);
                    stage.recent.record(time);
                    stage.done += 1;
                    stage.last = now;
                }
            }
            Err(PerfError::Completion(failed)) => self.causes.failed(failed, now),
            Err(error) => self.causes.add(Rank::Seen, error, now),
        }
    }

    /// Handles a completion of the control connection.
    fn controlled(&mut self, done: &Completion, now: Instant) -> Result<(), PerfError> {
        let peer = self.peer();
        let Some(control) = &mut self.control else {
            return Ok(());
        };
        let wc = done.wc();
        if wc.qp != control.lane.number() {
            return Ok(());
        }
        if !wc.status.is_success() {
            // After its last message the server may close the connection at any time.
            if !self.ended {
                let opcode = if done.is_recv() { "RECV" } else { "SEND" };
                self.causes.failed(failed(wc, opcode, peer), now);
            }
            return Ok(());
        }
        if !done.is_recv() {
            control.lane.sent(done);
            return Ok(());
        }
        self.last_reply = now;
        let Some(received) = control.lane.received(done) else {
            return Ok(());
        };
        let mut bytes = [0; MESSAGE_BYTES];
        bytes.copy_from_slice(received.header());
        drop(received);
        let length = bytes.len().min(wc.byte_len as usize);
        match Message::parse(&bytes[..length]) {
            Ok(Message::StillAlive) => {}
            Ok(Message::End {
                ending: Ending::Done,
                ..
            }) => self.ended = true,
            Ok(Message::End { ending, status, .. }) => {
                let error = PerfError::peer_ended(peer, ending, status);
                self.causes.add(Rank::Seen, error, now);
            }
            Ok(_) => {
                let what = "a message that the control connection does not have";
                self.causes
                    .add(Rank::Seen, PerfError::Confused { peer, what }, now);
            }
            Err(source) => self
                .causes
                .add(Rank::Seen, PerfError::Foreign { peer, source }, now),
        }
        let posted = control.lane.post_recv(None);
        posted
            .map(drop)
            .map_err(|source| PerfError::Post { peer, source })
    }

    /// Handles connection events, sends keep-alives, and checks the peer timeout.
    pub(super) fn check_connection(&mut self, now: Instant) -> Result<(), PerfError> {
        while let Some(event) = self.cm.next_event()? {
            self.event(event, now);
        }
        let peer = self.peer();
        let timeout = Duration::from_millis(self.terms.peer_timeout_ms.into());
        if now >= self.signed + timeout / SIGNS {
            self.signed = now;
            if let Err(error) = self.send_control(Message::Alive) {
                self.causes.add(Rank::Ended, error, now);
            }
        }
        if now >= self.last_reply + timeout {
            let silent = PerfError::Silent {
                peer,
                after: timeout,
                during: self.during,
            };
            self.causes.add(Rank::Seen, silent, now);
        }
        if self
            .flows
            .iter()
            .any(|flow| flow.is_stuck(&self.terms, now, timeout))
        {
            let stuck = PerfError::Stuck {
                peer,
                after: timeout,
            };
            self.causes.add(Rank::Seen, stuck, now);
        }
        Ok(())
    }

    pub(super) fn event(&mut self, event: CmEvent, now: Instant) {
        let ours = self.control.iter().any(|control| control.id == event.id)
            || self.flows.iter().any(|flow| flow.id == event.id);
        let (peer, during) = (self.peer(), self.during);
        if !ours {
            return;
        }
        match event.kind {
            CmEventKind::Disconnected if !self.ended => {
                self.causes
                    .add(Rank::Ended, PerfError::Disconnected { peer, during }, now);
            }
            CmEventKind::DeviceRemoval => {
                let device = self.end.as_ref().map(End::device_name).unwrap_or_default();
                self.causes
                    .add(Rank::Seen, PerfError::DeviceRemoved { device, during }, now);
            }
            CmEventKind::AddressChange => {
                self.causes
                    .add(Rank::Seen, PerfError::AddressMoved { during }, now);
            }
            _ => {}
        }
    }

    /// Sends on the control connection. Drops the message if the queue is full, because the server
    /// receives no messages then.
    pub(super) fn send_control(&mut self, message: Message) -> Result<(), PerfError> {
        let peer = self.peer();
        let Some(control) = &mut self.control else {
            return Ok(());
        };
        if control.lane.room() == 0 {
            return Ok(());
        }
        control.lane.send(&message.to_bytes(), None);
        control.lane.signal_last();
        let posted = control.lane.post();
        posted
            .map(drop)
            .map_err(|source| PerfError::Post { peer, source })
    }
}
