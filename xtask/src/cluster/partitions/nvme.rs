//! A small NVMe/TCP host: one controller with one I/O queue, one command at a time.
//!
//! It shares no code with the product, chooses no path, and repeats nothing: each command has one
//! outcome. NVMe over TCP 1.0, sections 3.3 and 3.6; NVMe over Fabrics 1.1, section 3.3.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

pub(super) const BLOCK: usize = 4096;

const CONNECT_LIMIT: Duration = Duration::from_millis(500);
/// A path whose Keep Alive has no answer for this long is dead.
const SILENCE: Duration = Duration::from_millis(1500);
const KEEP_ALIVE: Duration = Duration::from_millis(300);
const KEEP_ALIVE_TIMEOUT_MS: u32 = 2000;
const TICK: Duration = Duration::from_millis(20);

const IC_REQ: u8 = 0;
const COMMAND: u8 = 4;
const RESPONSE: u8 = 5;
const DATA: u8 = 7;
/// Flag of C2HData: a success, without a response.
const SUCCESS: u8 = 8;

const WRITE: u8 = 1;
const READ: u8 = 2;
const KEEP_ALIVE_COMMAND: u8 = 0x18;
const FABRICS: u8 = 0x7f;

/// Types of status, and a bit of the status field.
const GENERIC: u16 = 0;
const PATH_RELATED: u16 = 3;
const DO_NOT_RETRY: u16 = 0x4000;
/// A generic status.
const INTERNAL_ERROR: u16 = 6;

#[derive(Debug)]
pub(super) enum Failed {
    /// The connection ended, or is silent.
    Lost(io::Error),
    /// The status field without the phase: code, type and flags.
    Status(u16),
}

impl Failed {
    /// True for errors of the path: another path may succeed, or this one later.
    pub(super) fn is_of_path(&self) -> bool {
        match self {
            Self::Lost(_) => true,
            Self::Status(status) => match status >> 8 & 7 {
                GENERIC => status & DO_NOT_RETRY == 0 && status & 0xff != INTERNAL_ERROR,
                PATH_RELATED => true,
                // A volume without its replicas waits, or refuses the path. An error of media says
                // that a block is lost, also without DNR.
                _ => false,
            },
        }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(error) => write!(f, "{error}"),
            Self::Status(status) => write!(f, "status {status:#x}"),
        }
    }
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

fn protocol(what: &str) -> Failed {
    Failed::Lost(io::Error::new(ErrorKind::InvalidData, what.to_owned()))
}

/// The end of a command.
struct Outcome {
    result: u64,
    status: u16,
}

struct Queue {
    stream: TcpStream,
    received: Vec<u8>,
    next_cid: u16,
}

impl Queue {
    fn open(address: SocketAddr) -> Result<Self, Failed> {
        let stream = TcpStream::connect_timeout(&address, CONNECT_LIMIT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(SILENCE))?;
        let mut queue = Self {
            stream,
            received: Vec::new(),
            next_cid: 0,
        };
        let mut request = [0; 128];
        (request[0], request[2], request[4]) = (IC_REQ, 128, 128);
        queue.stream.write_all(&request)?;
        let start = Instant::now();
        while queue.pdu()?.is_none() {
            if start.elapsed() > SILENCE {
                return Err(protocol("no answer to ICReq"));
            }
        }
        Ok(queue)
    }

    /// Sends a command with data in its capsule.
    fn send(&mut self, mut sqe: [u8; 64], data: &[u8]) -> Result<u16, Failed> {
        self.next_cid = self.next_cid.wrapping_add(1) & 0x7fff;
        sqe[2..4].copy_from_slice(&self.next_cid.to_le_bytes());
        let mut capsule = vec![COMMAND, 0, 72, if data.is_empty() { 0 } else { 72 }];
        capsule.extend_from_slice(&(72 + data.len() as u32).to_le_bytes());
        capsule.extend_from_slice(&sqe);
        capsule.extend_from_slice(data);
        self.stream.write_all(&capsule)?;
        Ok(self.next_cid)
    }

    /// The next PDU, unless none comes within a moment.
    fn pdu(&mut self) -> Result<Option<Vec<u8>>, Failed> {
        loop {
            if let Some(header) = self.received.get(4..8) {
                let bytes = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
                if !(8..=1 << 20).contains(&bytes) {
                    return Err(protocol("a PDU of a wrong length"));
                }
                if self.received.len() >= bytes as usize {
                    let rest = self.received.split_off(bytes as usize);
                    return Ok(Some(std::mem::replace(&mut self.received, rest)));
                }
            }
            let mut chunk = [0; 8192];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(Failed::Lost(ErrorKind::UnexpectedEof.into())),
                Ok(bytes) => self.received.extend_from_slice(&chunk[..bytes]),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => return Ok(None),
                    ErrorKind::Interrupted => {}
                    _ => return Err(error.into()),
                },
            }
        }
    }

    /// One step towards the end of the command. Puts data that arrives into `data`.
    fn step(&mut self, cid: u16, data: &mut [u8]) -> Result<Option<Outcome>, Failed> {
        let Some(pdu) = self.pdu()? else {
            return Ok(None);
        };
        let word = |at: usize| u32::from_le_bytes([pdu[at], pdu[at + 1], pdu[at + 2], pdu[at + 3]]);
        match pdu[0] {
            RESPONSE if pdu.len() >= 24 && word(20) as u16 == cid => Ok(Some(Outcome {
                result: u64::from(word(8)) | u64::from(word(12)) << 32,
                status: (word(20) >> 17) as u16,
            })),
            DATA if pdu.len() >= 24 && word(8) as u16 == cid => {
                let (to, bytes, from) = (word(12) as usize, word(16) as usize, pdu[3] as usize);
                let source = pdu.get(from..from + bytes);
                let target = data.get_mut(to..to + bytes);
                let (Some(source), Some(target)) = (source, target) else {
                    return Err(protocol("data outside of the buffer"));
                };
                target.copy_from_slice(source);
                let is_over = pdu[1] & SUCCESS != 0;
                Ok(is_over.then_some(Outcome {
                    result: 0,
                    status: 0,
                }))
            }
            kind => Err(protocol(&format!("an unexpected PDU of type {kind}"))),
        }
    }

    /// A command of the admin queue.
    fn execute(&mut self, sqe: [u8; 64], data: &[u8]) -> Result<u64, Failed> {
        let cid = self.send(sqe, data)?;
        let start = Instant::now();
        loop {
            match self.step(cid, &mut [])? {
                Some(Outcome { status: 0, result }) => return Ok(result),
                Some(Outcome { status, .. }) => return Err(Failed::Status(status)),
                None if start.elapsed() > SILENCE => {
                    return Err(Failed::Lost(ErrorKind::TimedOut.into()));
                }
                None => {}
            }
        }
    }

    fn connect(&mut self, qid: u16, cntlid: u16, names: &Names) -> Result<u64, Failed> {
        let mut sqe = command(FABRICS, 1024, 0x01);
        sqe[4] = 0x01;
        sqe[42..44].copy_from_slice(&qid.to_le_bytes());
        sqe[44..46].copy_from_slice(&31u16.to_le_bytes());
        if qid == 0 {
            sqe[48..52].copy_from_slice(&KEEP_ALIVE_TIMEOUT_MS.to_le_bytes());
        }
        let mut data = [0; 1024];
        data[..16].copy_from_slice(&names.host_id);
        data[16..18].copy_from_slice(&cntlid.to_le_bytes());
        data[256..256 + names.subsystem.len()].copy_from_slice(names.subsystem.as_bytes());
        data[512..512 + names.host.len()].copy_from_slice(names.host.as_bytes());
        self.execute(sqe, &data)
    }
}

/// An entry of a submission queue. `descriptor`: 0x01 for data in the capsule, 0x5a for data that
/// the controller sends.
fn command(opcode: u8, bytes: u32, descriptor: u8) -> [u8; 64] {
    let mut sqe = [0; 64];
    (sqe[0], sqe[1]) = (opcode, 0x40);
    sqe[32..36].copy_from_slice(&bytes.to_le_bytes());
    sqe[39] = descriptor;
    sqe
}

pub(super) struct Names {
    pub(super) subsystem: String,
    pub(super) host: String,
    pub(super) host_id: [u8; 16],
}

/// A connected controller.
pub(super) struct Controller {
    admin: Queue,
    io: Queue,
    kept_alive: Instant,
}

impl Controller {
    pub(super) fn connect(address: SocketAddr, names: &Names) -> Result<Self, Failed> {
        let mut admin = Queue::open(address)?;
        let cntlid = admin.connect(0, 0xffff, names)? as u16;
        // CC: enabled, entries of 64 and 16 bytes.
        let mut enable = command(FABRICS, 0, 0x5a);
        enable[44..48].copy_from_slice(&0x14u32.to_le_bytes());
        enable[48..56].copy_from_slice(&0x46_0001u64.to_le_bytes());
        admin.execute(enable, &[])?;
        let start = Instant::now();
        loop {
            let mut status = command(FABRICS, 0, 0x5a);
            status[4] = 0x04;
            status[44..48].copy_from_slice(&0x1cu32.to_le_bytes());
            if admin.execute(status, &[])? & 1 == 1 {
                break;
            }
            if start.elapsed() > SILENCE {
                return Err(protocol("the controller is never ready"));
            }
        }
        let mut io = Queue::open(address)?;
        io.connect(1, cntlid, names)?;
        Ok(Self {
            admin,
            io,
            kept_alive: Instant::now(),
        })
    }

    pub(super) fn write(&mut self, lba: u64, data: &[u8; BLOCK]) -> Result<(), Failed> {
        self.execute(WRITE, 0x01, lba, data, &mut [])
    }

    pub(super) fn read(&mut self, lba: u64, data: &mut [u8; BLOCK]) -> Result<(), Failed> {
        self.execute(READ, 0x5a, lba, &[], data)
    }

    /// Waits for as long as the controller answers Keep Alive: a volume may make its hosts wait.
    fn execute(
        &mut self,
        opcode: u8,
        descriptor: u8,
        lba: u64,
        out: &[u8],
        back: &mut [u8],
    ) -> Result<(), Failed> {
        let mut sqe = command(opcode, BLOCK as u32, descriptor);
        sqe[4] = 1;
        sqe[40..48].copy_from_slice(&lba.to_le_bytes());
        let cid = self.io.send(sqe, out)?;
        loop {
            match self.io.step(cid, back)? {
                Some(Outcome { status: 0, .. }) => return Ok(()),
                Some(Outcome { status, .. }) => return Err(Failed::Status(status)),
                None => self.keep_alive()?,
            }
        }
    }

    /// Between commands too, at least twice in the timeout.
    pub(super) fn keep_alive(&mut self) -> Result<(), Failed> {
        if self.kept_alive.elapsed() > KEEP_ALIVE {
            self.admin
                .execute(command(KEEP_ALIVE_COMMAND, 0, 0x5a), &[])?;
            self.kept_alive = Instant::now();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: lost blocks are no errors of a path, also if the host may repeat the command. Method:
    /// refusals in a partition, and errors of media and devices with and without DNR.
    #[test]
    fn errors_of_media_are_not_of_the_path() {
        let is_of_path = |status| Failed::Status(status).is_of_path();
        // Abort Requested, Namespace Not Ready, ANA Inaccessible, ANA Transition.
        for status in [0x007, 0x082, 0x302, 0x303, 0x4302] {
            assert!(is_of_path(status), "{status:#x}");
        }
        // Internal Error, Write Fault, Unrecovered Read Error, Guard Check, LBA Out of Range.
        for status in [0x006, 0x280, 0x281, 0x282, 0x4281, 0x4080] {
            assert!(!is_of_path(status), "{status:#x}");
        }
        assert!(Failed::from(io::Error::from(ErrorKind::TimedOut)).is_of_path());
    }
}
