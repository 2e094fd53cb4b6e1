//! An NVMe/TCP target that does almost no work per I/O. The throughput that a host reaches with it
//! is the upper limit for targets on one core under that host.
//!
//! ```text
//! host ──admin queue──▶ limit target ──relayed──▶ a real target, which has the subsystem
//!      ──I/O queues───▶ limit target: one thread answers from the headers alone
//! ```
//!
//! I/O queues have no device, and check only lengths and ranges. All of them send the data of reads
//! from one buffer of the namespace's size, which never changes. They receive the data of writes
//! and drop it. The responses to all PDUs of one receive leave in one send, or in a few if they are
//! many. So a host that is not faster with this target than with a real one is itself the
//! bottleneck. SQ flow control is always off, and there are no digests.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use crate::pin;

/// Most bytes per receive.
const BATCH: usize = 512 * 1024;
/// Most PDUs of one send: below half of the kernel's limit of 1024 slices, because a PDU has two.
const PARTS: usize = 500;
/// Bytes of a response capsule, an R2T, and the header of C2HData and H2CData.
const HEADER: usize = 24;
/// Bytes of a command capsule without its data.
const COMMAND: usize = 72;
/// Bytes of ICReq and ICResp.
const INITIALISE: usize = 128;
/// Bytes of a Connect command with its data.
const CONNECT: usize = COMMAND + 1024;
const IC_RESP: u8 = 1;
const CAPSULE_CMD: u8 = 4;
const CAPSULE_RESP: u8 = 5;
const H2C_DATA: u8 = 6;
const C2H_DATA: u8 = 7;
const R2T: u8 = 9;
/// Flags of C2HData: LAST_PDU and SUCCESS.
const LAST_AND_SUCCESS: u8 = 0x0C;
const WRITE: u8 = 1;
const READ: u8 = 2;

/// The geometry of the namespace, as the real target reports it. Memory of this size is allocated.
#[derive(Debug, Clone, Copy)]
pub struct Disk {
    pub block_bytes: usize,
    pub blocks: usize,
}

/// What the thread of the I/O queues does while no queue has bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// Polls the queues. Best where the thread has a core for itself.
    Poll,
    /// Sleeps until bytes arrive. Best where the host needs the same core.
    Sleep,
}

/// How long a sleep may delay the first turn of a new queue.
const SLEEP: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

/// Accepts connections until `accept` fails. Relays admin queues to `behind`; one thread on `core`
/// serves I/O queues.
pub fn serve(
    listener: &TcpListener,
    behind: SocketAddr,
    core: usize,
    disk: Disk,
    idle: Idle,
) -> Result<()> {
    let (queues, new_queues) = mpsc::channel();
    thread::spawn(move || -> Result<()> {
        pin(core)?;
        serve_queues(&new_queues, disk, idle)
    });
    for stream in listener.incoming() {
        let stream = stream.context("accepting")?;
        let queues = queues.clone();
        thread::spawn(move || match begin(stream, behind) {
            Ok(Some(queue)) => drop(queues.send(queue)),
            Ok(None) => {}
            Err(error) => eprintln!("a connection ended: {error:#}"),
        });
    }
    Ok(())
}

/// Initialises a connection. Returns it if it is an I/O queue; relays an admin queue until it ends.
fn begin(mut host: TcpStream, behind: SocketAddr) -> Result<Option<TcpStream>> {
    host.set_nodelay(true)?;
    let mut request = [0; INITIALISE];
    if host.read_exact(&mut request).is_err() {
        // The client only tested whether the port is open.
        return Ok(None);
    }
    let mut response = [0; INITIALISE];
    response[0] = IC_RESP;
    response[2] = INITIALISE as u8;
    response[4..8].copy_from_slice(&(INITIALISE as u32).to_le_bytes());
    // MAXH2CDATA
    response[12..16].copy_from_slice(&(1u32 << 20).to_le_bytes());
    host.write_all(&response)?;

    let mut connect = [0; CONNECT];
    host.read_exact(&mut connect).context("Connect")?;
    let (command, data) = (&connect[8..COMMAND], &connect[COMMAND..]);
    let is_admin = command[42..44] == [0, 0];
    if is_admin {
        relay(host, &request, &connect, behind)?;
        return Ok(None);
    }
    let mut answer = capsule_response(u16::from_le_bytes([command[2], command[3]]));
    // The controller's id, and SQHD FFFFh: no SQ flow control.
    answer[8..10].copy_from_slice(&data[16..18]);
    answer[16..18].copy_from_slice(&[0xFF, 0xFF]);
    host.write_all(&answer)?;
    // Without pacing timers on loopback, like the targets that are compared.
    sockopt::set_tcp_congestion(&host, "reno").context("choosing a congestion control")?;
    host.set_nonblocking(true)?;
    Ok(Some(host))
}

fn relay(host: TcpStream, request: &[u8], connect: &[u8], behind: SocketAddr) -> Result<()> {
    let mut target = TcpStream::connect(behind).context("the target behind")?;
    target.set_nodelay(true)?;
    target.write_all(request)?;
    target.read_exact(&mut [0; INITIALISE])?;
    target.write_all(connect)?;
    let (mut from_host, mut to_target) = (host.try_clone()?, target.try_clone()?);
    let upwards = thread::spawn(move || {
        let end = io::copy(&mut from_host, &mut to_target);
        drop(to_target.shutdown(Shutdown::Both));
        end
    });
    let (mut from_target, mut to_host) = (target, host);
    let end = io::copy(&mut from_target, &mut to_host);
    drop(to_host.shutdown(Shutdown::Both));
    drop(upwards.join());
    end.map(drop).context("relaying")
}

fn capsule_response(command_id: u16) -> [u8; HEADER] {
    let mut pdu = [0; HEADER];
    (pdu[0], pdu[2], pdu[4]) = (CAPSULE_RESP, HEADER as u8, HEADER as u8);
    pdu[20..22].copy_from_slice(&command_id.to_le_bytes());
    pdu
}

/// A C2HData PDU's header, or an R2T, for all `length` bytes of a command.
fn transfer(kind: u8, command_id: u16, length: u32) -> [u8; HEADER] {
    let mut pdu = [0; HEADER];
    (pdu[0], pdu[2]) = (kind, HEADER as u8);
    let mut whole = HEADER as u32;
    if kind == C2H_DATA {
        (pdu[1], pdu[3]) = (LAST_AND_SUCCESS, HEADER as u8);
        whole += length;
    }
    pdu[4..8].copy_from_slice(&whole.to_le_bytes());
    pdu[8..10].copy_from_slice(&command_id.to_le_bytes());
    pdu[16..20].copy_from_slice(&length.to_le_bytes());
    pdu
}

/// Serves all queues in turn.
fn serve_queues(new_queues: &Receiver<TcpStream>, disk: Disk, idle: Idle) -> Result<()> {
    let data = vec![0x5a; disk.block_bytes * disk.blocks];
    let mut queues: Vec<IoQueue> = Vec::new();
    loop {
        if queues.is_empty() {
            let Ok(stream) = new_queues.recv() else {
                return Ok(());
            };
            queues.push(IoQueue::new(stream, disk));
        }
        match new_queues.try_recv() {
            Ok(stream) => queues.push(IoQueue::new(stream, disk)),
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => {}
        }
        let mut busy = false;
        queues.retain_mut(|queue| match queue.turn(&data) {
            Ok(Turn::Closed) => false,
            Ok(turn) => {
                busy |= turn == Turn::Received;
                true
            }
            Err(error) => {
                eprintln!("an I/O queue ended: {error:#}");
                false
            }
        });
        if idle == Idle::Sleep && !busy {
            let mut waits: Vec<PollFd> = queues.iter().map(IoQueue::wait).collect();
            poll(&mut waits, Some(&SLEEP)).context("waiting for bytes")?;
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Received,
    NoBytes,
    Closed,
}

/// A PDU to send: its header, and the data of the disk that follow.
struct Part {
    header: [u8; HEADER],
    data: Range<usize>,
}

impl Part {
    fn without_data(header: [u8; HEADER]) -> Self {
        Self { header, data: 0..0 }
    }
}

/// The I/O queue of a connection.
struct IoQueue {
    stream: TcpStream,
    disk: Disk,
    received: Vec<u8>,
    filled: usize,
    /// Data bytes of the current PDU that have not arrived, and the response that is due then.
    left: usize,
    due: Option<[u8; HEADER]>,
    /// Bytes that a write command still expects, by command identifier.
    expected: Vec<usize>,
    unsent: VecDeque<Part>,
    /// Bytes of the first part that have been sent.
    sent: usize,
}

impl IoQueue {
    fn new(stream: TcpStream, disk: Disk) -> Self {
        Self {
            stream,
            disk,
            received: vec![0; BATCH],
            filled: 0,
            left: 0,
            due: None,
            expected: vec![0; 1 << 16],
            unsent: VecDeque::new(),
            sent: 0,
        }
    }

    /// Receives the available bytes and answers them.
    fn turn(&mut self, data: &[u8]) -> Result<Turn> {
        let turn = match self.stream.read(&mut self.received[self.filled..]) {
            Ok(0) => return Ok(Turn::Closed),
            Ok(bytes) => {
                self.filled += bytes;
                self.parse()?;
                Turn::Received
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Turn::NoBytes,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(Turn::Closed),
            Err(error) => return Err(error).context("receiving"),
        };
        Ok(if self.send(data)? { turn } else { Turn::Closed })
    }

    /// The events that end the sleep of the thread: input, or room in the socket for unsent PDUs.
    fn wait(&self) -> PollFd<'_> {
        let mut events = PollFlags::IN;
        if !self.unsent.is_empty() {
            events |= PollFlags::OUT;
        }
        PollFd::new(&self.stream, events)
    }

    fn parse(&mut self) -> Result<()> {
        let mut at = 0;
        loop {
            let skipped = self.left.min(self.filled - at);
            (at, self.left) = (at + skipped, self.left - skipped);
            if self.left > 0 {
                break;
            }
            if let Some(header) = self.due.take() {
                self.unsent.push_back(Part::without_data(header));
            }
            let pdu = &self.received[at..self.filled];
            let Some(header) = pdu.first_chunk::<HEADER>() else {
                break;
            };
            let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|n| pdu[at + n]));
            let size = word(4) as usize;
            match header[0] {
                CAPSULE_CMD if pdu.len() < COMMAND => break,
                CAPSULE_CMD => {
                    let command_id = u16::from_le_bytes([pdu[10], pdu[11]]);
                    let length = (usize::from(word(56) as u16) + 1) * self.disk.block_bytes;
                    let place = word(48) as usize % self.disk.blocks * self.disk.block_bytes;
                    let data = place..place + length;
                    let end = self.disk.blocks * self.disk.block_bytes;
                    ensure!(size >= COMMAND && data.end <= end, "a PDU of {size} bytes");
                    match pdu[8] {
                        READ => self.unsent.push_back(Part {
                            header: transfer(C2H_DATA, command_id, length as u32),
                            data,
                        }),
                        WRITE if size == COMMAND => {
                            self.expected[usize::from(command_id)] = length;
                            let header = transfer(R2T, command_id, length as u32);
                            self.unsent.push_back(Part::without_data(header));
                        }
                        _ => self.due = Some(capsule_response(command_id)),
                    }
                    (at, self.left) = (at + COMMAND, size - COMMAND);
                }
                H2C_DATA => {
                    let command_id = u16::from_le_bytes([pdu[8], pdu[9]]);
                    let length = word(16) as usize;
                    let expected = &mut self.expected[usize::from(command_id)];
                    ensure!(length <= *expected, "{length} of {expected} bytes");
                    *expected -= length;
                    if *expected == 0 {
                        self.due = Some(capsule_response(command_id));
                    }
                    (at, self.left) = (at + HEADER, length);
                }
                other => anyhow::bail!("an unexpected PDU of type {other}"),
            }
        }
        self.received.copy_within(at..self.filled, 0);
        self.filled -= at;
        Ok(())
    }

    /// Sends until the socket takes no more. False once the host closed the connection.
    fn send(&mut self, data: &[u8]) -> Result<bool> {
        while !self.unsent.is_empty() {
            let mut slices = Vec::with_capacity(2 * PARTS);
            let mut skip = self.sent;
            for part in self.unsent.iter().take(PARTS) {
                for piece in [&part.header[..], &data[part.data.clone()]] {
                    let skipped = skip.min(piece.len());
                    skip -= skipped;
                    if skipped < piece.len() {
                        slices.push(IoSlice::new(&piece[skipped..]));
                    }
                }
            }
            match self.stream.write_vectored(&slices) {
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
                    ) =>
                {
                    return Ok(false);
                }
                Err(error) => return Err(error).context("sending"),
            }
            while let Some(part) = self.unsent.front() {
                let whole = HEADER + part.data.len();
                if self.sent < whole {
                    break;
                }
                self.sent -= whole;
                self.unsent.pop_front();
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 512;

    /// A host's I/O queue on a limit target that has no target behind.
    fn connected(idle: Idle) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let cores = rustix::thread::sched_getaffinity(None).expect("our own affinity");
        let core = (0..rustix::thread::CpuSet::MAX_CPU).find(|&core| cores.is_set(core));
        let core = core.expect("a core");
        let disk = Disk {
            block_bytes: BLOCK,
            blocks: 8,
        };
        thread::spawn(move || serve(&listener, address, core, disk, idle));
        let mut host = TcpStream::connect(address).expect("it listens");
        host.write_all(&[0; INITIALISE]).expect("ICReq");
        host.read_exact(&mut [0; INITIALISE]).expect("ICResp");
        let mut connect = [0; CONNECT];
        connect[8 + 42] = 1;
        (connect[COMMAND + 16], connect[8 + 2]) = (7, 3);
        host.write_all(&connect).expect("Connect");
        let answer = header(&mut host);
        assert_eq!((answer[8], &answer[16..18]), (7, &[0xFF, 0xFF][..]));
        assert_eq!(answer[20], 3);
        host
    }

    fn header(host: &mut TcpStream) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        host.read_exact(&mut header).expect("a PDU");
        header
    }

    fn command(opcode: u8, id: u8, blocks: u8, in_capsule: usize) -> Vec<u8> {
        let mut pdu = vec![0; COMMAND + in_capsule];
        pdu[0] = CAPSULE_CMD;
        let size = pdu.len() as u32;
        pdu[4..8].copy_from_slice(&size.to_le_bytes());
        (pdu[8], pdu[10], pdu[56]) = (opcode, id, blocks - 1);
        pdu
    }

    #[test]
    fn reads_and_writes_are_answered() {
        for idle in [Idle::Poll, Idle::Sleep] {
            reads_and_writes(connected(idle));
        }
    }

    fn reads_and_writes(mut host: TcpStream) {
        let two = [command(READ, 5, 8, 0), command(READ, 6, 1, 0)].concat();
        host.write_all(&two).expect("two commands");
        for (id, length) in [(5, 8 * BLOCK), (6, BLOCK)] {
            let pdu = header(&mut host);
            assert_eq!((pdu[0], pdu[1], pdu[8]), (C2H_DATA, LAST_AND_SUCCESS, id));
            let mut data = vec![0; length];
            host.read_exact(&mut data).expect("data");
        }

        host.write_all(&command(WRITE, 7, 8, 8 * BLOCK))
            .expect("in-capsule data");
        let pdu = header(&mut host);
        assert_eq!((pdu[0], pdu[20]), (CAPSULE_RESP, 7));

        host.write_all(&command(WRITE, 9, 8, 0)).expect("a command");
        let pdu = header(&mut host);
        assert_eq!((pdu[0], pdu[8]), (R2T, 9));
        for half in 0..2 {
            let mut data = vec![0; HEADER + 4 * BLOCK];
            (data[0], data[8]) = (H2C_DATA, 9);
            data[16..20].copy_from_slice(&(4 * BLOCK as u32).to_le_bytes());
            data[12..16].copy_from_slice(&(half * 4 * BLOCK as u32).to_le_bytes());
            host.write_all(&data).expect("H2CData");
        }
        let pdu = header(&mut host);
        assert_eq!((pdu[0], pdu[20]), (CAPSULE_RESP, 9));
    }
}
