//! NVMe/RDMA: the private data of connection manager messages (NVMe/RDMA Transport Specification
//! 1.0, section 3.4.1).
//!
//! ```text
//!   host                              controller
//!    │ ── REQ  {recfmt qid hrqsize hsqsize cntlid} ──▶ │
//!    │ ◀── REP  {recfmt crqsize} ───────────────────── │   accepted
//!    │ ◀── REJ  {recfmt sts} ───────────────────────── │   refused
//! ```

use core::fmt;

use zerocopy::FromBytes;
use zerocopy::little_endian::U16;

use crate::layout::wire;

/// The only record format there is.
pub const RECORD_FORMAT: u16 = 0;

wire! {
    /// The private data of a host's connection request.
    32 bytes: pub struct RequestData {
        0 recfmt: U16,
        /// 0: the admin queue.
        2 qid: U16,
        /// Entries of the host's receive queue: responses that it accepts (1-based).
        4 hrqsize: U16,
        /// Entries of the host's send queue: commands that it sends (0-based).
        6 hsqsize: U16,
        /// The controller that an I/O queue is for; reserved before version 1.
        8 cntlid: U16,
        10 reserved: [u8; 22],
    }
}

wire! {
    /// The private data of a controller's acceptance.
    32 bytes: pub struct AcceptData {
        0 recfmt: U16,
        /// Entries of the controller's receive queue: commands that it accepts (1-based).
        2 crqsize: U16,
        4 reserved: [u8; 28],
    }
}

wire! {
    /// The private data of a controller's rejection.
    4 bytes: pub struct RejectData {
        0 recfmt: U16,
        2 sts: U16,
    }
}

/// A parsed connection request, with valid values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    pub qid: u16,
    /// Responses that the host takes.
    pub host_receive_entries: u16,
    /// Commands that the host sends, 2 to 65536.
    pub host_send_entries: u32,
    pub cntlid: u16,
}

macro_rules! reject {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        /// Why a connection request was refused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u16)]
        pub enum RejectStatus {
            $($name = $number,)*
        }

        impl RejectStatus {
            pub const ALL: &'static [RejectStatus] = &[$(RejectStatus::$name,)*];

            pub const fn from_field(field: u16) -> Option<RejectStatus> {
                match field {
                    $($number => Some(RejectStatus::$name),)*
                    _ => None,
                }
            }

            pub const fn name(self) -> &'static str {
                match self { $(RejectStatus::$name => $text,)* }
            }
        }
    };
}

reject! {
    InvalidLength = 1, "invalid private data length";
    InvalidRecordFormat = 2, "invalid private data format";
    InvalidQueueId = 3, "invalid queue identifier";
    InvalidHostSendSize = 4, "invalid host send queue size";
    InvalidHostReceiveSize = 5, "invalid host receive queue size";
    NoResources = 6, "no resources";
    InvalidResponderResources = 7, "invalid RDMA READ responder resources (IRD)";
    InvalidInitiatorDepth = 8, "invalid RDMA READ initiator depth (ORD)";
    InvalidControllerId = 9, "invalid controller identifier";
}

impl fmt::Display for RejectStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Request {
    /// Creates the request for a queue of `entries` commands and as many responses.
    pub fn new(qid: u16, entries: u16, cntlid: u16) -> Self {
        Self {
            qid,
            host_receive_entries: entries,
            host_send_entries: entries.into(),
            cntlid,
        }
    }

    /// Parses private data as it arrived; bytes after the structure are padding.
    pub fn parse(private_data: &[u8]) -> Result<Self, RejectStatus> {
        let Ok((data, _)) = RequestData::ref_from_prefix(private_data) else {
            return Err(RejectStatus::InvalidLength);
        };
        if data.recfmt.get() != RECORD_FORMAT {
            return Err(RejectStatus::InvalidRecordFormat);
        }
        // A queue of one entry could never hold a command (Base 3.3.1.4).
        if data.hsqsize.get() == 0 {
            return Err(RejectStatus::InvalidHostSendSize);
        }
        if data.hrqsize.get() == 0 {
            return Err(RejectStatus::InvalidHostReceiveSize);
        }
        Ok(Self {
            qid: data.qid.get(),
            host_receive_entries: data.hrqsize.get(),
            host_send_entries: u32::from(data.hsqsize.get()) + 1,
            cntlid: data.cntlid.get(),
        })
    }

    pub fn to_data(self) -> RequestData {
        RequestData {
            qid: self.qid.into(),
            hrqsize: self.host_receive_entries.into(),
            hsqsize: (self.host_send_entries.saturating_sub(1) as u16).into(),
            cntlid: self.cntlid.into(),
            ..RequestData::zeroed()
        }
    }
}

impl AcceptData {
    pub fn new(crqsize: u16) -> Self {
        Self {
            crqsize: crqsize.into(),
            ..Self::zeroed()
        }
    }

    /// Entries of the controller's receive queue; `None`: not an acceptance of NVMe/RDMA.
    pub fn parse(private_data: &[u8]) -> Option<u16> {
        let (data, _) = Self::ref_from_prefix(private_data).ok()?;
        (data.recfmt.get() == RECORD_FORMAT).then_some(data.crqsize.get())
    }
}

impl RejectData {
    pub fn new(status: RejectStatus) -> Self {
        Self {
            recfmt: RECORD_FORMAT.into(),
            sts: (status as u16).into(),
        }
    }

    /// `None`: not a refusal of NVMe/RDMA, or of an unknown kind.
    pub fn parse(private_data: &[u8]) -> Option<RejectStatus> {
        let (data, _) = Self::ref_from_prefix(private_data).ok()?;
        match data.recfmt.get() {
            RECORD_FORMAT => RejectStatus::from_field(data.sts.get()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use hex_literal::hex;
    use zerocopy::IntoBytes;

    use super::*;

    /// Do these bytes mean this? As a Linux host sends them, and as they come padded.
    #[test]
    fn requests() {
        let admin = hex!("0000 0000 2000 1f00 0000 00000000000000000000000000000000000000000000");
        let request = Request::new(0, 32, 0);
        assert_eq!(Request::parse(&admin), Ok(request));
        assert_eq!(request.to_data().as_bytes(), admin);
        let io = hex!("0000 0300 8000 7f00 0700 00000000000000000000000000000000000000000000");
        assert_eq!(Request::parse(&io), Ok(Request::new(3, 128, 7)));
        let mut padded = [0u8; 56];
        padded[..32].copy_from_slice(&io);
        assert_eq!(Request::parse(&padded), Ok(Request::new(3, 128, 7)));
        let largest = hex!("0000 0100 ffff ffff 0000 00000000000000000000000000000000000000000000");
        let request = Request::parse(&largest).unwrap();
        assert_eq!(
            (request.host_send_entries, request.host_receive_entries),
            (65_536, 65_535)
        );
        assert_eq!(request.to_data().as_bytes(), largest);
    }

    #[test]
    fn refused_requests() {
        let bad: [(&[u8], RejectStatus); 5] = [
            (&[], RejectStatus::InvalidLength),
            (&[0; 31], RejectStatus::InvalidLength),
            (
                &hex!("0100 0000 2000 1f00 0000 00000000000000000000000000000000000000000000"),
                RejectStatus::InvalidRecordFormat,
            ),
            (
                &hex!("0000 0000 2000 0000 0000 00000000000000000000000000000000000000000000"),
                RejectStatus::InvalidHostSendSize,
            ),
            (
                &hex!("0000 0000 0000 1f00 0000 00000000000000000000000000000000000000000000"),
                RejectStatus::InvalidHostReceiveSize,
            ),
        ];
        for (bytes, status) in bad {
            assert_eq!(Request::parse(bytes), Err(status), "{bytes:02x?}");
        }
    }

    #[test]
    fn answers() {
        let accepted = AcceptData::new(128);
        assert_eq!(accepted.as_bytes()[..6], hex!("0000 8000 0000"));
        assert_eq!(AcceptData::parse(accepted.as_bytes()), Some(128));
        assert_eq!(AcceptData::parse(&accepted.as_bytes()[..31]), None);
        let numbers = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        assert_eq!(RejectStatus::ALL.len(), numbers.len());
        for (number, status) in (1u16..).zip(RejectStatus::ALL) {
            let bytes = [0, 0, number as u8, 0];
            assert_eq!(RejectData::new(*status).as_bytes(), bytes);
            assert_eq!(RejectData::parse(&bytes), Some(*status));
        }
        for other in [hex!("0000 0000"), hex!("0000 0a00"), hex!("0100 0600")] {
            assert_eq!(RejectData::parse(&other), None, "{other:02x?}");
        }
    }
}
