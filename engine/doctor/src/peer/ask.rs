//! The requesting end of `nacre doctor --peer`: fetches the Ethernet settings of the other machine
//! (the responder), and sends it a burst of UDP probes per DSCP.

use std::collections::BTreeMap;
use std::io::{self, BufReader};
use std::net::{TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nacre_transport_rdma_link::dcb::Priorities;
use nacre_transport_rdma_verbs::netdev::receive_with_tos;

use super::wire::{self, PROBE, ProbePacket, Reply, Request, Timed};
use super::{Answer, AskError, Burst, Bytes, ProbeClass, Question, grown};
use crate::session::VERSION;

/// Time limit for the TCP connection, and for each write.
const CONNECT: Duration = Duration::from_secs(2);
/// Time limit for the whole session.
const SESSION: Duration = Duration::from_secs(30);
/// Probes of each class, sent in groups, each of which fits every receive buffer.
const PROBES: u32 = 256;
const GROUP: u32 = 16;
/// Wait for the echoes of a group, and at the end for late ones.
const ECHO: Duration = Duration::from_millis(20);
const LATE: Duration = Duration::from_millis(300);
/// Some drivers fetch counters from the card about once a second.
const COUNTER_TRIES: u32 = 6;
const COUNTER_WAIT: Duration = Duration::from_millis(250);

/// Runs a session with the responder at [`Question::at`], for about 30 seconds at most. `count`
/// reads this end's byte counters per priority.
pub fn ask(question: &Question, count: &dyn Fn() -> Bytes) -> Result<Answer, AskError> {
    let stream =
        TcpStream::connect_timeout(&question.at, CONNECT).map_err(AskError::NoResponder)?;
    stream.set_write_timeout(Some(CONNECT))?;
    let mut local = stream.local_addr()?;
    local.set_port(0);
    let socket = wire::probe_socket(local, question.at)?;
    let timed = Timed {
        stream: &stream,
        until: Instant::now() + SESSION,
    };
    let mut session = Session {
        replies: BufReader::new(timed),
        stream: &stream,
        socket,
        token: 0,
        count,
    };
    let hello = Request::Hello {
        version: VERSION,
        port: session.socket.local_addr()?.port(),
    };
    let theirs = match session.request(&hello)? {
        Reply::Hello { version, .. } if version != VERSION => {
            return Err(AskError::Version { theirs: version });
        }
        Reply::Hello { token, end, .. } => {
            session.token = token;
            if !end.is_printable() {
                return Err(AskError::Malformed("description of its interface"));
            }
            *end
        }
        Reply::Counts { .. } => return Err(AskError::Malformed("hello")),
    };
    let classes = question.classes.iter();
    let bursts: Result<Vec<Burst>, AskError> = classes.map(|class| session.burst(class)).collect();
    let bursts = bursts?;
    // The answers are complete: a failure here changes nothing.
    let _ = wire::write(&mut &stream, &Request::Bye);
    Ok(Answer { theirs, bursts })
}

struct Session<'a> {
    replies: BufReader<Timed<'a>>,
    stream: &'a TcpStream,
    socket: UdpSocket,
    token: u64,
    count: &'a dyn Fn() -> Bytes,
}

impl Session<'_> {
    fn request(&mut self, request: &Request) -> Result<Reply, AskError> {
        let mut stream = self.stream;
        wire::write(&mut stream, request)?;
        wire::read(&mut self.replies).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => AskError::Malformed("reply"),
            _ => AskError::Io(error),
        })
    }

    /// The peer's byte counts, and its arrivals of probes with `dscp`.
    fn counts(&mut self, dscp: u8) -> Result<(Bytes, BTreeMap<u8, u64>), AskError> {
        let Reply::Counts { bytes, arrived } = self.request(&Request::Counts)? else {
            return Err(AskError::Malformed("counts"));
        };
        let arrived = arrived.into_iter().filter(|of| of.sent == dscp);
        let arrived = arrived.filter(|of| of.count <= u64::from(u32::MAX));
        Ok((*bytes, arrived.map(|of| (of.arrived, of.count)).collect()))
    }

    fn burst(&mut self, class: &ProbeClass) -> Result<Burst, AskError> {
        let (theirs_before, _) = self.counts(class.dscp)?;
        let ours_before = (self.count)();
        wire::mark(&self.socket, class.dscp, class.priority)?;
        let mut burst = Burst {
            class: class.clone(),
            sent: 0,
            arrived: BTreeMap::new(),
            returned: BTreeMap::new(),
            ours: Bytes::default(),
            theirs: Bytes::default(),
        };
        for sequence in 0..PROBES {
            let probe = ProbePacket {
                token: self.token,
                echo: None,
                sent: class.dscp,
                priority: class.priority,
                sequence,
            };
            // A full queue, or an ICMP error about an earlier probe: this one was not sent.
            if self.socket.send(&probe.to_bytes()).is_ok() {
                burst.sent += 1;
            }
            if sequence % GROUP == GROUP - 1 {
                self.receive(&mut burst, ECHO);
            }
        }
        self.receive(&mut burst, LATE);
        for attempt in 1..=COUNTER_TRIES {
            burst.ours = (self.count)().since(&ours_before);
            let (theirs, arrived) = self.counts(class.dscp)?;
            burst.theirs = theirs.since(&theirs_before);
            burst.arrived = arrived;
            if burst.is_counted() || attempt == COUNTER_TRIES {
                break;
            }
            std::thread::sleep(COUNTER_WAIT);
        }
        Ok(burst)
    }

    /// Receives echoes until all have returned, or for this time.
    fn receive(&self, burst: &mut Burst, patience: Duration) {
        let until = Instant::now() + patience;
        let mut buffer = [0; PROBE + 1];
        while burst.returned.values().sum::<u64>() < burst.sent && Instant::now() < until {
            // Timeouts and ICMP errors end with `until`.
            let Ok((length, Some(tos))) = receive_with_tos(self.socket.as_fd(), &mut buffer) else {
                continue;
            };
            let echo = ProbePacket::parse(&buffer[..length]);
            let is_ours = |of: &ProbePacket| {
                of.token == self.token && of.echo.is_some() && of.sent == burst.class.dscp
            };
            if echo.as_ref().is_some_and(is_ours) {
                *burst.returned.entry(tos >> 2).or_default() += 1;
            }
        }
    }
}

impl Burst {
    pub(super) fn arrivals(&self) -> u64 {
        self.arrived.values().sum()
    }

    pub(super) fn returns(&self) -> u64 {
        self.returned.values().sum()
    }

    /// The priorities on which this end sent the burst. `None`: it counts none.
    pub(super) fn sent_on(&self) -> Option<Priorities> {
        grown(&self.ours.tx, self.sent * PROBE as u64)
    }

    /// The priorities on which the peer received the burst. `None`: it counts none.
    pub(super) fn received_on(&self) -> Option<Priorities> {
        grown(&self.theirs.rx, self.arrivals() * PROBE as u64)
    }

    /// True if both ends count the burst, or cannot.
    fn is_counted(&self) -> bool {
        let is_counted = |on: Option<Priorities>| on.is_none_or(|on| !on.is_empty());
        is_counted(self.sent_on()) && is_counted(self.received_on())
    }
}
