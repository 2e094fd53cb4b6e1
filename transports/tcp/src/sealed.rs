//! The TLS record layer of one NVMe/TCP connection, between the socket and the state machine of its
//! PDUs (`TargetConn` or `HostConn`). [`Sealed::receive`] and [`Sealed::send`] take the place of
//! recvmsg(2) and sendmsg(2) of a connection without TLS.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nacre_nvmf::tcp::{HostConn, Slices, TargetConn};
use nacre_nvmf::tls::{Alert, SecureChannel};
use nacre_reactor::Nanos;
use nacre_transport_tls::{Failure, Outcome, Session, SessionCounts};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::socket;

/// Most system calls of one [`Sealed::receive`], so that a peer whose records have little data does
/// not keep a core from its other connections.
const RECEIVES: u32 = 4;

pub(crate) struct Sealed {
    session: Session,
    channel: Arc<SecureChannel>,
    failure: Option<Failure>,
    /// Bytes were received since the last [`Sealed::acknowledge`].
    has_received: bool,
}

/// The sending side of a connection machine.
pub(crate) trait Machine {
    fn wants_write(&self) -> bool;
    fn send_slices<'a>(&'a self, out: &mut Slices<'a>);
    fn sent(&mut self, count: usize);
}

/// A target's connection, and the time of its sends.
pub(crate) struct TargetOutput<'a> {
    pub machine: &'a mut TargetConn,
    pub now: Nanos,
}

impl Machine for TargetOutput<'_> {
    fn wants_write(&self) -> bool {
        self.machine.wants_write()
    }

    fn send_slices<'a>(&'a self, out: &mut Slices<'a>) {
        self.machine.send_slices(out);
    }

    fn sent(&mut self, count: usize) {
        self.machine.sent(count, self.now);
    }
}

impl Machine for HostConn {
    fn wants_write(&self) -> bool {
        Self::wants_write(self)
    }

    fn send_slices<'a>(&'a self, out: &mut Slices<'a>) {
        Self::send_slices(self, out);
    }

    fn sent(&mut self, count: usize) {
        Self::sent(self, count);
    }
}

/// The result of [`Sealed::send`], with its number of system calls (`sends`) and the bytes that it
/// took from the machine, before encryption (`bytes`).
pub(crate) struct Sent {
    /// `AGAIN`: the socket's send buffer is full. `PROTO`: encryption failed.
    pub result: Result<(), Errno>,
    pub sends: u64,
    pub bytes: u64,
}

impl Sealed {
    /// `key_updates`: the peer is known to support KeyUpdate ([`Session::use_key_updates`]).
    pub(crate) fn new(outcome: Outcome, key_updates: bool) -> Self {
        let mut session = outcome.session;
        if key_updates {
            session.use_key_updates();
        }
        Self {
            session,
            channel: Arc::new(SecureChannel {
                identity: outcome.identity,
                psk: outcome.psk,
                suite: outcome.suite,
                derivation: outcome.derivation,
            }),
            failure: None,
            has_received: false,
        }
    }

    pub(crate) fn channel(&self) -> &Arc<SecureChannel> {
        &self.channel
    }

    /// The TLS failure that ended the connection, if there was one.
    pub(crate) fn failure(&self) -> Option<String> {
        self.failure.as_ref().map(Failure::to_string)
    }

    /// True if [`Sealed::receive`] has work without a system call: data, a failure, the end, or a
    /// complete record that is not decrypted. Such a record can be without data (KeyUpdate).
    pub(crate) fn has_input(&self) -> bool {
        self.session.has_input()
    }

    pub(crate) fn wants_write(&self) -> bool {
        !self.session.ciphertext().is_empty()
    }

    pub(crate) fn counts(&self) -> SessionCounts {
        self.session.counts()
    }

    /// Receives and decrypts records until the slices are full, the socket is empty, or
    /// [`RECEIVES`] is reached. Returns the bytes of data; 0: the peer has closed its direction, by
    /// FIN or close_notify. Errors: `AGAIN` without data, `PROTO` for a TLS failure.
    pub(crate) fn receive(
        &mut self,
        from: BorrowedFd<'_>,
        slices: &mut [IoSliceMut<'_>],
    ) -> rustix::io::Result<usize> {
        let result = self.receive_records(from, slices);
        self.session.return_input();
        result
    }

    fn receive_records(
        &mut self,
        from: BorrowedFd<'_>,
        mut slices: &mut [IoSliceMut<'_>],
    ) -> rustix::io::Result<usize> {
        let room: usize = slices.iter().map(|slice| slice.len()).sum();
        let mut total = 0;
        let mut is_empty = false;
        let mut receives = 0;
        loop {
            match self.session.read(slices) {
                Ok(count) => {
                    total += count;
                    IoSliceMut::advance_slices(&mut slices, count);
                }
                Err(failure) => return Err(self.fail(from, failure)),
            }
            if self.session.has_input() && total > 0 {
                // A failure after this data, or the end.
                return Ok(total);
            }
            let is_over = is_empty || receives == RECEIVES;
            if total == room || is_over || self.session.is_peer_closed() {
                return match total {
                    0 if !self.session.is_peer_closed() => Err(Errno::AGAIN),
                    _ => Ok(total),
                };
            }
            receives += 1;
            let place = self.session.room();
            let most = place.len();
            match rustix::net::recv(from, place, RecvFlags::DONTWAIT) {
                // The end, which the next receive finds again.
                Ok((_, 0)) => return Ok(total),
                Ok((_, count)) => {
                    self.session.received(count);
                    self.has_received = true;
                    is_empty = count < most;
                }
                // An end of the connection shows again at the next receive.
                Err(_) if total > 0 => return Ok(total),
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Makes the kernel acknowledge the received bytes without delay (TCP_QUICKACK). Call it when
    /// the rest of a command's data is missing. SPDK's send buffer for TLS has 4 KiB, so SPDK sends
    /// no further record before the acknowledgement. The kernel delays that acknowledgement by 40
    /// ms.
    pub(crate) fn acknowledge(&mut self, socket: BorrowedFd<'_>) {
        if std::mem::take(&mut self.has_received) {
            let _ = rustix::net::sockopt::set_tcp_quickack(socket, true);
        }
    }

    /// Sends the alert of the failure, and ends the connection.
    fn fail(&mut self, socket: BorrowedFd<'_>, failure: Failure) -> Errno {
        if let Some(alert) = failure.alert() {
            self.session.close(alert);
            let _ = socket::send(socket, &[IoSlice::new(self.session.ciphertext())]);
        }
        self.session.discard_ciphertext();
        self.failure = Some(failure);
        Errno::PROTO
    }

    /// Sends `close_notify`. The caller has sent all encrypted bytes before.
    pub(crate) fn close(&mut self, socket: BorrowedFd<'_>) {
        self.session.close(Alert::CLOSE_NOTIFY);
        let _ = socket::send(socket, &[IoSlice::new(self.session.ciphertext())]);
        self.session.discard_ciphertext();
    }

    /// Encrypts and sends the queued bytes of the machine. `blocked`: the socket's send buffer is
    /// known to be full, so nothing is encrypted or sent.
    pub(crate) fn send(
        &mut self,
        to: BorrowedFd<'_>,
        machine: &mut impl Machine,
        blocked: bool,
    ) -> Sent {
        let (mut sends, mut bytes) = (0, 0);
        let result = loop {
            if blocked {
                break Err(Errno::AGAIN);
            }
            let waiting = self.session.ciphertext();
            if !waiting.is_empty() {
                let most = waiting.len();
                sends += 1;
                match socket::send(to, &[IoSlice::new(waiting)]) {
                    Ok(count) => {
                        self.session.sent(count);
                        if count < most {
                            break Err(Errno::AGAIN);
                        }
                    }
                    Err(Errno::INTR) => {}
                    Err(errno) => break Err(errno),
                }
                continue;
            }
            if machine.wants_write() {
                let mut slices = Slices::new();
                machine.send_slices(&mut slices);
                let sealed = self.session.seal(&slices);
                drop(slices);
                match sealed {
                    // The machine's buffers are free: the sealed bytes are a copy.
                    Ok(count) if count > 0 => {
                        bytes += count as u64;
                        machine.sent(count);
                    }
                    _ => break Err(Errno::PROTO),
                }
            } else {
                break Ok(());
            }
        };
        Sent {
            result,
            sends,
            bytes,
        }
    }
}
