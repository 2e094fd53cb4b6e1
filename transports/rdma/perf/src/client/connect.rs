//! Connects a client to the server: the control connection first, then one connection per queue
//! pair.

use std::net::SocketAddr;
use std::time::Instant;

use nacre_transport_rdma_verbs::{Access, CmOptions, ConnParams, PrivateData, Provider};

use super::{AGAIN, Client, Control};
use crate::dial::{Destination, Dial, Found};
use crate::endpoint::{End, HEAD, LaneSizes};
use crate::error::PerfError;
use crate::flow::{Flow, Load};
use crate::params::Op;
use crate::wire::{Accept, Refusal, Request, SessionParameters};

impl Client<'_> {
    /// Opens the control connection, with retries while the server is busy, and then the connection
    /// of each queue pair.
    pub(super) fn open(&mut self) -> Result<(), PerfError> {
        let give_up = Instant::now() + self.options.wait;
        loop {
            match self.open_control() {
                Err(PerfError::Refused { reject, .. })
                    if reject.refusal == Refusal::Busy && Instant::now() < give_up =>
                {
                    if self.is_stopped() {
                        return Err(PerfError::Interrupted);
                    }
                    std::thread::sleep(AGAIN);
                }
                outcome => break outcome?,
            }
        }
        self.last_reply = Instant::now();
        let sizes = LaneSizes::client(&self.terms);
        for index in 0..self.terms.queue_pairs {
            let flow = self.open_data(index, sizes)?;
            self.flows.push(flow);
        }
        Ok(())
    }

    fn open_control(&mut self) -> Result<(), PerfError> {
        let (destination, mut others) = (self.destination(), Vec::new());
        let mut dial = Dial::new(
            &mut *self.cm,
            &mut self.waiter,
            self.stop,
            &mut others,
            destination,
        );
        let found = dial.find()?;
        let outcome = (|| {
            let end = match &mut self.end {
                Some(end) => end,
                none => none.insert(make_end(
                    self.provider,
                    &found,
                    &self.terms,
                    self.options.memory,
                )?),
            };
            let lane = end.lane(dial.cm, found.id, 0, LaneSizes::CONTROL, destination.peer)?;
            let params = ConnParams {
                private_data: private_data(&Request::Control(self.terms).to_bytes()),
                retry_count: 7,
                rnr_retry_count: 7,
                ..ConnParams::default()
            };
            let answer = dial.connect(found.id, &params)?;
            let accept = accepted(&answer, destination.peer)?;
            Ok((lane, accept))
        })();
        match outcome {
            Ok((lane, accept)) => {
                let end = self.end.as_ref().expect("made above");
                self.waiter.add(end.queues.cq().fd())?;
                self.load = Some(make_load(end, self.terms, destination.peer));
                self.control = Some(Control {
                    id: found.id,
                    lane,
                    found,
                    session: accept.session,
                });
                Ok(())
            }
            Err(error) => {
                self.cm.destroy(found.id);
                self.forget_completions();
                Err(error)
            }
        }
    }

    /// Drops the completions that a destroyed queue pair has left in the completion queue, so that
    /// the queue does not overflow.
    fn forget_completions(&mut self) {
        if let Some(end) = &self.end {
            while end
                .queues
                .poll(&mut self.turns.batch, usize::MAX)
                .is_ok_and(|count| count > 0)
            {}
        }
    }

    fn open_data(&mut self, index: u16, sizes: LaneSizes) -> Result<Flow, PerfError> {
        let (destination, mut others) = (self.destination(), Vec::new());
        let control = self.control.as_ref().expect("it is open");
        let (session, device) = (control.session, control.found.device);
        let end = self.end.as_ref().expect("it is made");
        let load = self.load.as_ref().expect("it is made");
        let mut dial = Dial::new(
            &mut *self.cm,
            &mut self.waiter,
            self.stop,
            &mut others,
            destination,
        );
        let found = dial.find()?;
        let outcome = (|| {
            if found.device != device {
                let other = self.provider.device(found.device)?;
                return Err(PerfError::TwoDevices {
                    device: end.device_name(),
                    other: other.attributes().name.clone(),
                });
            }
            let lane = end.lane(
                dial.cm,
                found.id,
                u32::from(index) + 1,
                sizes,
                destination.peer,
            )?;
            let attributes = end.device.attributes();
            let reads = match self.terms.op {
                Op::Read => {
                    let depth = u8::try_from(self.terms.depth).unwrap_or(u8::MAX);
                    depth.min(attributes.max_initiator_depth)
                }
                Op::Send | Op::Write => 0,
            };
            let params = ConnParams {
                private_data: private_data(&Request::Data { session, index }.to_bytes()),
                initiator_depth: reads,
                retry_count: 7,
                rnr_retry_count: 7,
                ..ConnParams::default()
            };
            let answer = dial.connect(found.id, &params)?;
            let accept = accepted(&answer, destination.peer)?;
            let reads = answer.initiator_depth.min(reads);
            Flow::new(found.id, lane, index, accept, reads, load)
        })();
        if outcome.is_err() {
            self.cm.destroy(found.id);
        }
        let now = Instant::now();
        others.into_iter().for_each(|event| self.event(event, now));
        match self.causes.due(now) {
            Some(error) => Err(error),
            None => outcome,
        }
    }

    fn destination(&self) -> Destination {
        let options = CmOptions {
            tos: self.options.tos,
            ack_timeout: None,
        };
        Destination {
            peer: self.options.server,
            source: self.options.source,
            timeout: self.options.cm_timeout,
            options,
        }
    }
}

fn private_data(bytes: &[u8]) -> PrivateData {
    bytes.iter().copied().collect()
}

fn accepted(answer: &ConnParams, peer: SocketAddr) -> Result<Accept, PerfError> {
    Accept::parse(&answer.private_data).map_err(|source| PerfError::Foreign { peer, source })
}

fn make_end(
    provider: &dyn Provider,
    found: &Found,
    terms: &SessionParameters,
    memory: u64,
) -> Result<End, PerfError> {
    let device = provider.device(found.device)?;
    let count = u32::from(terms.queue_pairs);
    let buffers = LaneSizes::client_buffers(terms);
    End::new(
        device,
        Access::Local,
        LaneSizes::client(terms),
        count,
        buffers,
        memory,
    )
}

fn make_load(end: &End, terms: SessionParameters, peer: SocketAddr) -> Load {
    let bytes = match terms.op {
        Op::Send => terms.message_bytes.saturating_sub(HEAD),
        Op::Write => terms.message_bytes,
        Op::Read => 0,
    } as usize;
    let source = if terms.verify || bytes == 0 {
        None
    } else {
        end.pool.acquire(bytes)
    };
    Load {
        terms,
        peer,
        pool: end.pool.clone(),
        source,
    }
}
