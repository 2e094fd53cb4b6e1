//! Messages between the two ends: private data of the connection manager's messages, and messages
//! of 64 bytes.
//!
//! Every message begins with the same eight bytes: magic, version, length. A reader accepts only
//! its own version, and requires at least the stated length. The connection manager pads with
//! zeros, so a message may be longer. All numbers are little-endian.

use std::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::params::{MAX_DEPTH, MAX_MESSAGE, MAX_QUEUE_PAIRS, Measure, Op};

pub const MAGIC: [u8; 4] = *b"NRPF";
pub const VERSION: u16 = 1;

/// Space for private data in a connect request with IP addresses: the connection manager uses 36 of
/// InfiniBand's 92 bytes.
pub const REQUEST_ROOM: usize = 56;

/// The largest [`SessionParameters::peer_timeout_ms`].
pub const MAX_PEER_TIMEOUT_MS: u32 = 600_000;

/// Length of every message other than measured data.
pub const MESSAGE_BYTES: usize = 64;

/// The reason why received bytes are not a valid message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("{there} bytes, at least {needed} are needed")]
    Short { there: usize, needed: usize },
    #[error("it does not begin as one of `nacre rdma perf` does")]
    Magic,
    #[error("it is of version {theirs}, this program speaks version {VERSION}")]
    Version { theirs: u16 },
    #[error("its length field says {said}, it should be {wanted}")]
    Length { said: u16, wanted: u16 },
    #[error("{field} has the value {value}")]
    Field { field: &'static str, value: u64 },
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 4],
    version: U16,
    length: U16,
}

/// A structure that begins with a head and is `LENGTH` bytes long.
trait Record: FromBytes + KnownLayout + Immutable + Unaligned + Copy {
    const LENGTH: usize = size_of::<Self>();

    fn head() -> Head {
        Head {
            magic: MAGIC,
            version: U16::new(VERSION),
            length: U16::new(Self::LENGTH as u16),
        }
    }

    fn read(bytes: &[u8]) -> Result<Self, WireError> {
        let short = |needed| WireError::Short {
            there: bytes.len(),
            needed,
        };
        let (head, _) = Head::read_from_prefix(bytes).map_err(|_| short(size_of::<Head>()))?;
        if head.magic != MAGIC {
            return Err(WireError::Magic);
        }
        if head.version.get() != VERSION {
            return Err(WireError::Version {
                theirs: head.version.get(),
            });
        }
        let (said, wanted) = (head.length.get(), Self::LENGTH as u16);
        if said != wanted {
            return Err(WireError::Length { said, wanted });
        }
        let (record, _) = Self::read_from_prefix(bytes).map_err(|_| short(Self::LENGTH))?;
        Ok(record)
    }
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RequestData {
    head: Head,
    kind: u8,
    op: u8,
    measure: u8,
    flags: u8,
    queue_pairs: U16,
    index: U16,
    depth: U16,
    reserved: U16,
    session: U32,
    message_bytes: U32,
    seed: U32,
    peer_timeout_ms: U32,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct AcceptData {
    head: Head,
    session: U32,
    rkey: U32,
    address: U64,
    bytes: U64,
    receives: U16,
    slots: U16,
    reserved: U32,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RejectData {
    head: Head,
    code: U16,
    reserved: U16,
    reserved2: U32,
    needed: U64,
    limit: U64,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct MessageData {
    head: Head,
    kind: u8,
    status: u8,
    expected: u8,
    found: u8,
    slot: U16,
    reserved: U16,
    a: U64,
    b: U64,
    c: U64,
    reserved2: [u8; 24],
}

const _: () = assert!(size_of::<RequestData>() <= REQUEST_ROOM);
const _: () = assert!(size_of::<MessageData>() == MESSAGE_BYTES);

impl Record for RequestData {}
impl Record for AcceptData {}
impl Record for RejectData {}
impl Record for MessageData {}

/// The parameters that the queue pairs and the memory of a session depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionParameters {
    pub op: Op,
    pub measure: Measure,
    pub verify: bool,
    pub queue_pairs: u16,
    pub depth: u16,
    /// Length of the largest message of the test.
    pub message_bytes: u32,
    pub seed: u32,
    /// Time without a message from the other end after which either end closes the session.
    pub peer_timeout_ms: u32,
}

/// Private data of a connect request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Begins a session.
    Control(SessionParameters),
    /// Adds a queue pair to a session; the index is in `0..queue_pairs`.
    Data { session: u32, index: u16 },
}

const CONTROL: u8 = 1;
const DATA: u8 = 2;
const VERIFY: u8 = 1;

impl Request {
    pub fn to_bytes(self) -> Vec<u8> {
        let mut data = RequestData {
            head: RequestData::head(),
            kind: CONTROL,
            op: 0,
            measure: 0,
            flags: 0,
            queue_pairs: U16::new(0),
            index: U16::new(0),
            depth: U16::new(0),
            reserved: U16::new(0),
            session: U32::new(0),
            message_bytes: U32::new(0),
            seed: U32::new(0),
            peer_timeout_ms: U32::new(0),
        };
        match self {
            Self::Control(terms) => {
                data.op = match terms.op {
                    Op::Send => 1,
                    Op::Write => 2,
                    Op::Read => 3,
                };
                data.measure = match terms.measure {
                    Measure::Bandwidth => 1,
                    Measure::Latency => 2,
                };
                data.flags = if terms.verify { VERIFY } else { 0 };
                data.queue_pairs.set(terms.queue_pairs);
                data.depth.set(terms.depth);
                data.message_bytes.set(terms.message_bytes);
                data.seed.set(terms.seed);
                data.peer_timeout_ms.set(terms.peer_timeout_ms);
            }
            Self::Data { session, index } => {
                data.kind = DATA;
                data.session.set(session);
                data.index.set(index);
            }
        }
        data.as_bytes().to_vec()
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let data = RequestData::read(bytes)?;
        let field = |field, value: u64| WireError::Field { field, value };
        match data.kind {
            CONTROL => {}
            DATA => {
                return Ok(Self::Data {
                    session: data.session.get(),
                    index: data.index.get(),
                });
            }
            kind => return Err(field("kind", kind.into())),
        }
        let op = match data.op {
            1 => Op::Send,
            2 => Op::Write,
            3 => Op::Read,
            op => return Err(field("operation", op.into())),
        };
        let measure = match data.measure {
            1 => Measure::Bandwidth,
            2 => Measure::Latency,
            measure => return Err(field("measure", measure.into())),
        };
        if data.flags & !VERIFY != 0 {
            return Err(field("flags", data.flags.into()));
        }
        let (queue_pairs, depth) = (data.queue_pairs.get(), data.depth.get());
        if !(1..=MAX_QUEUE_PAIRS).contains(&queue_pairs) {
            return Err(field("queue pairs", queue_pairs.into()));
        }
        if !(1..=MAX_DEPTH).contains(&depth) {
            return Err(field("depth", depth.into()));
        }
        let message_bytes = data.message_bytes.get();
        if !(1..=MAX_MESSAGE).contains(&message_bytes) {
            return Err(field("message bytes", message_bytes.into()));
        }
        let peer_timeout_ms = data.peer_timeout_ms.get();
        if !(1..=MAX_PEER_TIMEOUT_MS).contains(&peer_timeout_ms) {
            return Err(field("peer timeout", peer_timeout_ms.into()));
        }
        Ok(Self::Control(SessionParameters {
            op,
            measure,
            verify: data.flags & VERIFY != 0,
            queue_pairs,
            depth,
            message_bytes,
            seed: data.seed.get(),
            peer_timeout_ms,
        }))
    }
}

/// Private data of an acceptance. A control connection uses only the session number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Accept {
    pub session: u32,
    /// R_Key, address and length of the memory that the client may write to or read from.
    pub rkey: u32,
    pub address: u64,
    pub bytes: u64,
    /// Messages that may be sent before the first credit.
    pub receives: u16,
    /// Number of message slots in that memory.
    pub slots: u16,
}

impl Accept {
    pub fn to_bytes(self) -> Vec<u8> {
        let data = AcceptData {
            head: AcceptData::head(),
            session: U32::new(self.session),
            rkey: U32::new(self.rkey),
            address: U64::new(self.address),
            bytes: U64::new(self.bytes),
            receives: U16::new(self.receives),
            slots: U16::new(self.slots),
            reserved: U32::new(0),
        };
        data.as_bytes().to_vec()
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let data = AcceptData::read(bytes)?;
        Ok(Self {
            session: data.session.get(),
            rkey: data.rkey.get(),
            address: data.address.get(),
            bytes: data.bytes.get(),
            receives: data.receives.get(),
            slots: data.slots.get(),
        })
    }
}

macro_rules! codes {
    ($(#[$doc:meta])* pub enum $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $number:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            const fn code(self) -> u16 {
                match self { $($name::$variant => $number,)* }
            }

            const fn from_code(code: u16) -> Option<$name> {
                match code {
                    $($number => Some($name::$variant),)*
                    _ => None,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($name::$variant => $text,)* })
            }
        }
    };
}

codes! {
    /// The reason why a server refuses a connection.
    pub enum Refusal {
        /// `needed` is the client's version, `limit` the server's.
        Version = 1, "it speaks another version";
        Malformed = 2, "it does not understand the request";
        Busy = 3, "it serves another client now; try again, or wait longer with --wait";
        /// `needed` is the number of bytes, `limit` the server's maximum.
        Memory = 4, "the test needs more memory than it gives (--memory there); use smaller messages, less depth or fewer queue pairs";
        QueuePairs = 5, "more queue pairs than it allows";
        Depth = 6, "a greater depth than it allows";
        NoSession = 7, "the session of this queue pair is not there";
        /// The server's log names the missing resource.
        Resources = 8, "it lacks resources of the test; its own output names them";
        Stopping = 9, "it is being stopped";
        /// The index is used already, or not below the session's number of queue pairs.
        Index = 10, "it does not expect a queue pair of this number";
    }
}

/// Private data of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reject {
    pub refusal: Refusal,
    pub needed: u64,
    pub limit: u64,
}

impl Reject {
    pub fn new(refusal: Refusal) -> Self {
        Self {
            refusal,
            needed: 0,
            limit: 0,
        }
    }

    pub fn limit(refusal: Refusal, needed: u64, limit: u64) -> Self {
        Self {
            refusal,
            needed,
            limit,
        }
    }

    pub fn to_bytes(self) -> Vec<u8> {
        let data = RejectData {
            head: RejectData::head(),
            code: U16::new(self.refusal.code()),
            reserved: U16::new(0),
            reserved2: U32::new(0),
            needed: U64::new(self.needed),
            limit: U64::new(self.limit),
        };
        data.as_bytes().to_vec()
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let data = RejectData::read(bytes)?;
        let code = data.code.get();
        let refusal = Refusal::from_code(code).ok_or_else(|| WireError::Field {
            field: "refusal",
            value: code.into(),
        })?;
        Ok(Self {
            refusal,
            needed: data.needed.get(),
            limit: data.limit.get(),
        })
    }
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.refusal.fmt(f)?;
        match self.limit {
            0 => Ok(()),
            limit => write!(f, " ({} asked, {limit} allowed)", self.needed),
        }
    }
}

codes! {
    /// The reason why one end closes a session.
    pub enum Ending {
        Done = 1, "it is done";
        Interrupted = 2, "it was stopped";
        /// The message carries the status of the completion.
        Completion = 3, "a request of its own failed";
        Mismatch = 4, "data differed from the expected data";
        /// No message arrived for `peer_timeout_ms`.
        Silence = 5, "it heard nothing for too long";
        Confused = 6, "it got something that it did not expect";
        Resources = 7, "it lacks something; its own output says what";
    }
}

/// The first byte that was wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wrong {
    /// Number of the message on its queue pair.
    pub number: u64,
    pub offset: u64,
    pub expected: u8,
    pub found: u8,
}

/// A message of [`MESSAGE_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// Keep-alive message to the server.
    Alive,
    /// The server's reply to [`Message::Alive`].
    StillAlive,
    /// Requests the server to compare the data in this slot.
    Check { slot: u16, number: u64, bytes: u64 },
    /// The server's reply to [`Message::Check`].
    Checked { slot: u16, wrong: Option<Wrong> },
    /// Reports to the client how many messages arrived on this queue pair, and how many it may send
    /// in total.
    Credit {
        received: u64,
        allowed: u64,
        wrong: Option<Wrong>,
    },
    /// The last message of either end. `status`: the number of the `WcStatus` if `ending` is
    /// [`Ending::Completion`]. `messages` and `bytes`: the client's totals.
    End {
        ending: Ending,
        status: u8,
        messages: u64,
        bytes: u64,
    },
}

impl Message {
    pub fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        let mut data = MessageData {
            head: MessageData::head(),
            kind: 0,
            status: 0,
            expected: 0,
            found: 0,
            slot: U16::new(0),
            reserved: U16::new(0),
            a: U64::new(0),
            b: U64::new(0),
            c: U64::new(0),
            reserved2: [0; 24],
        };
        match self {
            Self::Alive => data.kind = 1,
            Self::StillAlive => data.kind = 2,
            Self::Check {
                slot,
                number,
                bytes,
            } => {
                data.kind = 3;
                data.slot.set(slot);
                data.a.set(number);
                data.b.set(bytes);
            }
            Self::Checked { slot, wrong } => {
                data.kind = 4;
                data.slot.set(slot);
                data.set_wrong(wrong);
            }
            Self::Credit {
                received,
                allowed,
                wrong,
            } => {
                // A mismatch ends the session, so the numbers are not needed.
                data.kind = 5;
                data.set_wrong(wrong);
                if wrong.is_none() {
                    data.a.set(received);
                    data.b.set(allowed);
                }
            }
            Self::End {
                ending,
                status,
                messages,
                bytes,
            } => {
                data.kind = 6;
                data.status = status;
                data.slot.set(ending.code());
                data.a.set(messages);
                data.b.set(bytes);
            }
        }
        let mut bytes = [0; MESSAGE_BYTES];
        bytes.copy_from_slice(data.as_bytes());
        bytes
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let data = MessageData::read(bytes)?;
        Ok(match data.kind {
            1 => Self::Alive,
            2 => Self::StillAlive,
            3 => Self::Check {
                slot: data.slot.get(),
                number: data.a.get(),
                bytes: data.b.get(),
            },
            4 => Self::Checked {
                slot: data.slot.get(),
                wrong: data.wrong()?,
            },
            5 => match data.wrong()? {
                None => Self::Credit {
                    received: data.a.get(),
                    allowed: data.b.get(),
                    wrong: None,
                },
                wrong => Self::Credit {
                    received: 0,
                    allowed: 0,
                    wrong,
                },
            },
            6 => Self::End {
                ending: Ending::from_code(data.slot.get()).ok_or_else(|| WireError::Field {
                    field: "ending",
                    value: data.slot.get().into(),
                })?,
                status: data.status,
                messages: data.a.get(),
                bytes: data.b.get(),
            },
            kind => {
                return Err(WireError::Field {
                    field: "message",
                    value: kind.into(),
                });
            }
        })
    }
}

impl MessageData {
    fn set_wrong(&mut self, wrong: Option<Wrong>) {
        let Some(wrong) = wrong else { return };
        self.status = 1;
        (self.expected, self.found) = (wrong.expected, wrong.found);
        self.a.set(wrong.number);
        self.c.set(wrong.offset);
    }

    fn wrong(&self) -> Result<Option<Wrong>, WireError> {
        match self.status {
            0 => Ok(None),
            1 => Ok(Some(Wrong {
                number: self.a.get(),
                offset: self.c.get(),
                expected: self.expected,
                found: self.found,
            })),
            status => Err(WireError::Field {
                field: "outcome",
                value: status.into(),
            }),
        }
    }
}
