//! Executes the posted work requests of simulated devices: moves bytes, checks keys and bounds, and
//! creates completions.

use super::{PostedSend, QpState, State, Target};
use crate::types::*;

/// Attempts that a sender makes per retry when its receiver is not ready.
const RNR_ATTEMPTS: u32 = 4;

impl State {
    /// Executes all posted requests that can be executed, of all queue pairs.
    pub(super) fn progress_all(&mut self) {
        let mut round = std::mem::take(&mut self.round);
        loop {
            let mut moved = false;
            round.clear();
            round.extend(self.qps.keys());
            round.sort_unstable();
            for number in &round {
                while self.step(*number) {
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        self.round = round;
    }

    /// Executes the oldest request of a queue pair. `false`: there is none, or it must wait.
    fn step(&mut self, number: u32) -> bool {
        let Some(qp) = self.qps.get_mut(&number) else {
            return false;
        };
        if qp.state == QpState::Error {
            let any = !qp.sq.is_empty() || !qp.rq.is_empty();
            if any {
                self.flush(number);
            }
            return any;
        }
        let down = self
            .devices
            .iter()
            .any(|device| device.id == qp.device && device.port != PortState::Active);
        if qp.paused || down || qp.sq.is_empty() {
            return false;
        }
        let target = match qp.sq[0].wr.op {
            SendOp::Send | SendOp::SendWithInvalidate { .. } => Target::Send,
            SendOp::Write { .. } => Target::Write,
            SendOp::Read { .. } => Target::Read,
        };
        let (peer, rnr) = (qp.peer, qp.rnr_retry);
        // Only requests that are ready to go consume an injected fault.
        let ready = target != Target::Send
            || peer
                .and_then(|peer| self.qps.get(&peer))
                .is_none_or(|peer| {
                    peer.state == QpState::Error
                        || match peer.srq {
                            Some(srq) => self
                                .srqs
                                .get(&srq)
                                .is_some_and(|srq| !srq.posted.is_empty()),
                            None => !peer.rq.is_empty(),
                        }
                });
        if !ready
            && self.qps[&number]
                .injected
                .iter()
                .all(|i| i.target != target)
        {
            let qp = self.qps.get_mut(&number).expect("there");
            qp.rnr_attempts += 1;
            if rnr == 7 || qp.rnr_attempts <= u32::from(rnr) * RNR_ATTEMPTS {
                return false;
            }
            self.finish(number, WcStatus::RnrRetryExceeded, 0);
            return true;
        }
        if let Some(status) = self.injected(number, target) {
            self.finish(number, status, 0);
            return true;
        }
        if !ready {
            return false;
        }
        let qp = self.qps.get_mut(&number).expect("there");
        qp.rnr_attempts = 0;
        if let Some(status) = qp.sq[0].refused {
            self.finish(number, status, 0);
            return true;
        }
        let Some(peer) = peer.filter(|peer| {
            self.qps
                .get(peer)
                .is_some_and(|peer| peer.state != QpState::Error)
        }) else {
            self.finish(number, WcStatus::RetryExceeded, 0);
            return true;
        };
        let request = self
            .qps
            .get_mut(&number)
            .expect("there")
            .sq
            .pop_front()
            .expect("one");
        let outcome = self.execute(number, peer, &request);
        self.qps
            .get_mut(&number)
            .expect("there")
            .sq
            .push_front(request);
        match outcome {
            Ok(bytes) => self.finish(number, WcStatus::Success, bytes),
            Err(status) => self.finish(number, status, 0),
        }
        true
    }

    fn injected(&mut self, number: u32, target: Target) -> Option<WcStatus> {
        let qp = self.qps.get_mut(&number)?;
        let at = qp.injected.iter().position(|i| i.target == target)?;
        match qp.injected[at].skip.checked_sub(1) {
            Some(skip) => {
                qp.injected[at].skip = skip;
                None
            }
            None => Some(qp.injected.remove(at).status),
        }
    }

    fn execute(&mut self, number: u32, peer: u32, request: &PostedSend) -> Result<u32, WcStatus> {
        let domain = self.qps[&number].domain;
        let length: u32 = request.sges.iter().map(|sge| sge.length).sum();
        if !request.wr.inline {
            self.check_local(domain, &request.sges)
                .map_err(|_| WcStatus::LocalProtection)?;
        }
        match request.wr.op {
            SendOp::Send => self.deliver(peer, request, length, None),
            SendOp::SendWithInvalidate { rkey } => {
                let domain = self.qps[&peer].domain;
                if self
                    .regions
                    .get(&rkey)
                    .is_none_or(|region| region.domain != domain)
                {
                    return self.refused_by(peer);
                }
                self.regions.remove(&rkey);
                self.deliver(peer, request, length, Some(rkey))
            }
            SendOp::Write { address, rkey } => {
                if length > 0 && !self.allows(peer, address, length, rkey) {
                    return self.refused_by(peer);
                }
                gather(request, &mut self.moving);
                copy_to(address, &self.moving);
                Ok(length)
            }
            SendOp::Read { address, rkey } => {
                if length > 0 && !self.allows(peer, address, length, rkey) {
                    return self.refused_by(peer);
                }
                let mut from = address;
                for sge in &request.sges {
                    self.moving.clear();
                    take_from(from, sge.length, &mut self.moving);
                    copy_to(sge.address, &self.moving);
                    from += u64::from(sge.length);
                }
                Ok(length)
            }
        }
    }

    /// The peer's device refuses access to its memory, and gives its queue pair up as well.
    fn refused_by(&mut self, peer: u32) -> Result<u32, WcStatus> {
        let qp = &self.qps[&peer];
        self.device_event(qp.device, AsyncEvent::QpAccessError { qp: qp.number });
        self.flush(peer);
        Err(WcStatus::RemoteAccess)
    }

    fn allows(&self, peer: u32, address: u64, length: u32, rkey: u32) -> bool {
        let domain = self.qps[&peer].domain;
        self.regions.get(&rkey).is_some_and(|region| {
            let end = address.checked_add(length.into());
            region.domain == domain
                && region.remote
                && address >= region.address
                && end.is_some_and(|end| end <= region.address + region.len)
        })
    }

    fn check_local(&self, domain: u32, sges: &[Sge]) -> Result<(), ()> {
        let inside = |sge: &Sge| {
            let end = sge.address.checked_add(sge.length.into());
            self.regions.values().any(|region| {
                region.domain == domain
                    && region.lkey == sge.lkey
                    && sge.address >= region.address
                    && end.is_some_and(|end| end <= region.address + region.len)
            })
        };
        sges.iter().all(inside).then_some(()).ok_or(())
    }

    fn deliver(
        &mut self,
        peer: u32,
        request: &PostedSend,
        length: u32,
        invalidated: Option<u32>,
    ) -> Result<u32, WcStatus> {
        let (srq, recv_cq, domain, number) = {
            let qp = &self.qps[&peer];
            (qp.srq, qp.recv_cq, qp.domain, qp.number)
        };
        let taken = match srq {
            None => self.qps.get_mut(&peer).and_then(|qp| qp.rq.pop_front()),
            Some(srq) => self
                .srqs
                .get_mut(&srq)
                .and_then(|srq| srq.posted.pop_front()),
        };
        let Some(recv) = taken else {
            return Err(WcStatus::RnrRetryExceeded);
        };
        if let Some(srq) = srq.and_then(|srq| self.srqs.get_mut(&srq))
            && srq.posted.len() < srq.limit as usize
        {
            srq.limit = 0;
            let device = srq.device;
            self.device_event(device, AsyncEvent::SrqLimitReached);
        }
        let mut completion = WorkCompletion {
            wr_id: recv.wr_id,
            opcode: WcOpcode::Recv,
            byte_len: length,
            qp: number,
            invalidated,
            ..WorkCompletion::EMPTY
        };
        let room: u32 = recv.sges.iter().map(|sge| sge.length).sum();
        let failed = if let Some(status) = self.injected(peer, Target::Recv) {
            Some((status, WcStatus::RemoteOperation))
        } else if self.check_local(domain, &recv.sges).is_err() {
            Some((WcStatus::LocalProtection, WcStatus::RemoteOperation))
        } else if length > room {
            Some((WcStatus::LocalLength, WcStatus::RemoteInvalidRequest))
        } else {
            None
        };
        if let Some((here, there)) = failed {
            completion.status = here;
            self.complete(recv_cq, completion);
            self.flush(peer);
            return Err(there);
        }
        gather(request, &mut self.moving);
        let mut rest = &self.moving[..];
        for sge in &recv.sges {
            let (now, later) = rest.split_at(rest.len().min(sge.length as usize));
            copy_to(sge.address, now);
            rest = later;
        }
        self.complete(recv_cq, completion);
        Ok(length)
    }

    /// Completes the oldest request of a queue pair.
    fn finish(&mut self, number: u32, status: WcStatus, bytes: u32) {
        let Some(qp) = self.qps.get_mut(&number) else {
            return;
        };
        // Requests that were flushed meanwhile are done already.
        let Some(request) = qp.sq.pop_front() else {
            return;
        };
        let wr = request.wr;
        let completion = WorkCompletion {
            wr_id: wr.wr_id,
            status,
            opcode: match wr.op {
                // Hardware leaves the previous value there.
                _ if !status.is_success() => WcOpcode::Other(u32::MAX),
                SendOp::Send | SendOp::SendWithInvalidate { .. } => WcOpcode::Send,
                SendOp::Write { .. } => WcOpcode::Write,
                SendOp::Read { .. } => WcOpcode::Read,
            },
            byte_len: bytes,
            qp: qp.number,
            vendor_error: if status.is_success() { 0 } else { 0x5e },
            invalidated: None,
        };
        let cq = qp.send_cq;
        if status.is_success() && !wr.signaled {
            return;
        }
        // A completion speaks for all requests before it.
        qp.outstanding = qp.sq.len() as u32;
        self.complete(cq, completion);
        if !status.is_success() {
            self.flush(number);
        }
    }

    fn complete(&mut self, cq: u32, completion: WorkCompletion) {
        let Some(queue) = self.cqs.get_mut(&cq) else {
            return;
        };
        if queue.dead {
            return;
        }
        if queue.entries.len() >= queue.capacity as usize {
            // Lost completions cannot be identified any longer: the queue is dead.
            return self.break_cq(cq, false);
        }
        queue.entries.push_back(completion);
        if queue.armed {
            queue.armed = false;
            queue.signal.set();
        }
    }

    /// Completes the receive of [`super::Fabric::begin_message`], the last one of its queue pair,
    /// which has ended.
    pub(super) fn finish_message(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(&number) else {
            return;
        };
        let (cq, device, qp_number) = (qp.recv_cq, qp.device, qp.number);
        let Some(recv) = qp.begun.take() else {
            return;
        };
        let completion = WorkCompletion {
            wr_id: recv.wr_id,
            status: WcStatus::WorkRequestFlushed,
            opcode: WcOpcode::Other(u32::MAX),
            qp: qp_number,
            ..WorkCompletion::EMPTY
        };
        self.complete(cq, completion);
        self.device_event(device, AsyncEvent::LastWqeReached { qp: qp_number });
    }

    /// Makes a completion queue fail: its entries are lost, and its device raises an event.
    /// `silent`: polls find nothing instead of failing.
    pub(super) fn break_cq(&mut self, number: u32, silent: bool) {
        let Some(queue) = self.cqs.get_mut(&number).filter(|queue| !queue.dead) else {
            return;
        };
        (queue.dead, queue.silent) = (true, silent);
        queue.entries.clear();
        if !silent {
            queue.signal.set();
        }
        let device = queue.device;
        self.device_event(device, AsyncEvent::CqError { cq: number });
    }

    /// Moves a queue pair to the error state: all posted requests complete as flushed, in order.
    pub(super) fn flush(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(&number) else {
            return;
        };
        let first = qp.state != QpState::Error;
        qp.state = QpState::Error;
        let (sends, recvs) = (std::mem::take(&mut qp.sq), std::mem::take(&mut qp.rq));
        qp.outstanding = 0;
        let (send_cq, recv_cq, device) = (qp.send_cq, qp.recv_cq, qp.device);
        let (with_srq, qp_number) = (qp.srq.is_some() && qp.begun.is_none(), qp.number);
        let flushed = |wr_id| WorkCompletion {
            wr_id,
            status: WcStatus::WorkRequestFlushed,
            opcode: WcOpcode::Other(u32::MAX),
            qp: qp_number,
            vendor_error: 0xf1,
            ..WorkCompletion::EMPTY
        };
        for send in sends {
            self.complete(send_cq, flushed(send.wr.wr_id));
        }
        for recv in recvs {
            self.complete(recv_cq, flushed(recv.wr_id));
        }
        if first && with_srq {
            self.device_event(device, AsyncEvent::LastWqeReached { qp: qp_number });
        }
    }
}

fn gather(request: &PostedSend, into: &mut Vec<u8>) {
    into.clear();
    if request.wr.inline {
        return into.extend_from_slice(&request.inline);
    }
    for sge in &request.sges {
        take_from(sge.address, sge.length, into);
    }
}

/// A copy of memory that was checked to be registered.
fn take_from(address: u64, length: u32, into: &mut Vec<u8>) {
    let from = std::ptr::with_exposed_provenance::<u8>(address as usize);
    let start = into.len();
    into.resize(start + length as usize, 0);
    let bytes = &mut into[start..];
    // SAFETY: the range lies in a region that is registered now: the caller checked, and holds the
    // lock of the fabric, which unregistering takes. It is mapped memory, whose bytes no code
    // writes while a request on it is posted (the contract of posting).
    unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
}

/// Writes to memory that was checked to be registered.
fn copy_to(address: u64, bytes: &[u8]) {
    let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: as in `take_from`. The code that posted the request, or that gave the peer the key,
    // keeps all readers away from these bytes until completion.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}
