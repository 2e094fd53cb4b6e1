//! The discovery log page (70h, Base 5.16.1.23): the structures of its header and records.

use core::fmt;

use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::fabrics::{Nqn, NqnError};
use crate::layout::wire;

wire! {
    /// The header of the page; the entries follow at byte 1024.
    1024 bytes: pub struct DiscoveryHeader {
        /// Counts changes of the page, so that a host that reads it in pieces notices them.
        0 genctr: U64,
        8 numrec: U64,
        /// Record format; 0 is the only one.
        16 recfmt: U16,
        /// Discovery log page flags.
        18 dlpf: u8,
        19 reserved19: u8,
        /// Bytes of the whole extended page.
        20 tdlpl: U32,
        24 reserved24: [u8; 1000],
    }
}

wire! {
    /// An entry: one port of one subsystem.
    1024 bytes: pub struct DiscoveryEntry {
        0 trtype: u8,
        1 adrfam: u8,
        2 subtype: u8,
        /// Bits 1:0 secure channel; bit 2 SQ flow control can be disabled.
        3 treq: u8,
        4 portid: U16,
        /// FFFFh under the dynamic controller model.
        6 cntlid: U16,
        8 asqsz: U16,
        10 eflags: U16,
        12 reserved12: [u8; 20],
        /// ASCII, padded with spaces (Base 1.4.2); NUL is accepted, too.
        32 trsvcid: [u8; 32],
        64 reserved64: [u8; 192],
        /// NUL-terminated.
        256 subnqn: [u8; 256],
        /// Padded ASCII like `trsvcid`.
        512 traddr: [u8; 256],
        768 tsas: [u8; 256],
    }
}

/// Transport types.
pub mod trtype {
    pub const RDMA: u8 = 1;
    pub const FIBRE_CHANNEL: u8 = 2;
    pub const TCP: u8 = 3;
    pub const INTRA_HOST: u8 = 254;
}

/// Address families.
pub mod adrfam {
    pub const IPV4: u8 = 1;
    pub const IPV6: u8 = 2;
    pub const INFINIBAND: u8 = 3;
    pub const FIBRE_CHANNEL: u8 = 4;
    pub const INTRA_HOST: u8 = 254;
}

/// Subsystem types.
pub mod subtype {
    /// A discovery subsystem other than the one that returns the log (a referral).
    pub const REFERRAL: u8 = 1;
    pub const NVM: u8 = 2;
    pub const CURRENT_DISCOVERY: u8 = 3;
}

/// Transport requirements.
pub mod treq {
    pub const SECURE_CHANNEL_NOT_SPECIFIED: u8 = 0;
    pub const SECURE_CHANNEL_REQUIRED: u8 = 1;
    pub const SECURE_CHANNEL_NOT_REQUIRED: u8 = 2;
    /// The controller supports disabling SQ flow control.
    pub const SQ_FLOW_CONTROL_DISABLE: u8 = 1 << 2;
}

/// Entry flags.
pub mod eflags {
    /// Another port of the subsystem returns the same information.
    pub const DUPRETINFO: u16 = 1 << 0;
    /// Explicit persistent connections to a discovery controller are supported.
    pub const EPCSD: u16 = 1 << 1;
    /// No connectivity to a centralized discovery controller (CDC).
    pub const NCC: u16 = 1 << 2;
}

/// SECTYPE of the TCP subtype: the secure channel.
pub mod sectype {
    pub const NONE: u8 = 0;
    pub const TLS13: u8 = 2;
}

/// Transport specific address subtype of RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RdmaSubtype {
    pub qptype: u8,
    pub prtype: u8,
    pub cms: u8,
    pub pkey: u16,
}

impl RdmaSubtype {
    pub const QPTYPE_CONNECTED: u8 = 1;
    pub const PRTYPE_NONE: u8 = 1;
    pub const PRTYPE_INFINIBAND: u8 = 2;
    pub const PRTYPE_ROCE: u8 = 3;
    pub const PRTYPE_ROCE_V2: u8 = 4;
    pub const PRTYPE_IWARP: u8 = 5;
    pub const CMS_RDMA_CM: u8 = 1;
}

impl DiscoveryHeader {
    pub fn new(genctr: u64, numrec: u64) -> Self {
        let mut header = Self::zeroed();
        header.genctr = U64::new(genctr);
        header.numrec = U64::new(numrec);
        header
    }
}

/// The fields of an entry as numbers and text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveryRecord {
    pub trtype: u8,
    pub adrfam: u8,
    pub subtype: u8,
    pub treq: u8,
    pub portid: u16,
    pub cntlid: u16,
    pub asqsz: u16,
    pub eflags: u16,
    pub subnqn: Nqn,
    pub traddr: String,
    pub trsvcid: String,
}

/// The error of an invalid entry, or of values that do not fit one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    #[error("SUBNQN of the discovery log entry: {0}")]
    SubsystemNqn(#[from] NqnError),
    #[error("{field} of the discovery log entry is not printable ASCII")]
    NotAscii { field: &'static str },
    #[error("the discovery log is {length} bytes long and announces {numrec} entries")]
    Truncated { length: usize, numrec: u64 },
    #[error("the discovery log has record format {recfmt}; only 0 is known")]
    RecordFormat { recfmt: u16 },
    #[error("{field} is {length} bytes long; the entry has room for {room}")]
    TooLong {
        field: &'static str,
        length: usize,
        room: usize,
    },
}

impl DiscoveryEntry {
    /// CNTLID in the entries of dynamic controllers.
    pub const CNTLID_DYNAMIC: u16 = 0xffff;

    pub fn new(record: &DiscoveryRecord) -> Result<Self, DiscoveryError> {
        let mut entry = Self::zeroed();
        entry.trtype = record.trtype;
        entry.adrfam = record.adrfam;
        entry.subtype = record.subtype;
        entry.treq = record.treq;
        entry.portid = U16::new(record.portid);
        entry.cntlid = U16::new(record.cntlid);
        entry.asqsz = U16::new(record.asqsz);
        entry.eflags = U16::new(record.eflags);
        entry.subnqn = record.subnqn.to_field();
        write_text("TRSVCID", &record.trsvcid, &mut entry.trsvcid)?;
        write_text("TRADDR", &record.traddr, &mut entry.traddr)?;
        Ok(entry)
    }

    pub fn parse(&self) -> Result<DiscoveryRecord, DiscoveryError> {
        Ok(DiscoveryRecord {
            trtype: self.trtype,
            adrfam: self.adrfam,
            subtype: self.subtype,
            treq: self.treq,
            portid: self.portid.get(),
            cntlid: self.cntlid.get(),
            asqsz: self.asqsz.get(),
            eflags: self.eflags.get(),
            subnqn: Nqn::from_field(&self.subnqn)?,
            traddr: read_text("TRADDR", &self.traddr)?,
            trsvcid: read_text("TRSVCID", &self.trsvcid)?,
        })
    }

    pub fn set_tcp_subtype(&mut self, sectype: u8) {
        self.tsas[0] = sectype;
    }

    pub fn set_rdma_subtype(&mut self, subtype: RdmaSubtype) {
        self.tsas[..3].copy_from_slice(&[subtype.qptype, subtype.prtype, subtype.cms]);
        self.tsas[8..10].copy_from_slice(&subtype.pkey.to_le_bytes());
    }

    pub fn tcp_sectype(&self) -> u8 {
        self.tsas[0]
    }

    pub fn rdma_subtype(&self) -> RdmaSubtype {
        let [qptype, prtype, cms, _, _, _, _, _, pkey0, pkey1, ..] = self.tsas;
        RdmaSubtype {
            qptype,
            prtype,
            cms,
            pkey: u16::from_le_bytes([pkey0, pkey1]),
        }
    }
}

/// The header and the entries of a completely read page.
pub fn parse_page(page: &[u8]) -> Result<(&DiscoveryHeader, &[DiscoveryEntry]), DiscoveryError> {
    let truncated = |numrec| DiscoveryError::Truncated {
        length: page.len(),
        numrec,
    };
    let (header, rest) = DiscoveryHeader::ref_from_prefix(page).map_err(|_| truncated(0))?;
    if header.recfmt.get() != 0 {
        return Err(DiscoveryError::RecordFormat {
            recfmt: header.recfmt.get(),
        });
    }
    let numrec = header.numrec.get();
    let entries = usize::try_from(numrec)
        .ok()
        .and_then(|count| <[DiscoveryEntry]>::ref_from_prefix_with_elems(rest, count).ok());
    match entries {
        Some((entries, _)) => Ok((header, entries)),
        None => Err(truncated(numrec)),
    }
}

/// Space padded, as ASCII strings are. (Linux pads with NULs and trims spaces; both read this.)
fn write_text(field: &'static str, text: &str, out: &mut [u8]) -> Result<(), DiscoveryError> {
    if text.len() > out.len() {
        return Err(DiscoveryError::TooLong {
            field,
            length: text.len(),
            room: out.len(),
        });
    }
    if !is_printable(text.as_bytes()) {
        return Err(DiscoveryError::NotAscii { field });
    }
    out.fill(b' ');
    out[..text.len()].copy_from_slice(text.as_bytes());
    Ok(())
}

fn read_text(field: &'static str, bytes: &[u8]) -> Result<String, DiscoveryError> {
    let end = bytes
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(bytes.len());
    let text = bytes[..end].trim_ascii_end();
    if is_printable(text) {
        Ok(text.iter().map(|&byte| char::from(byte)).collect())
    } else {
        Err(DiscoveryError::NotAscii { field })
    }
}

fn is_printable(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| matches!(byte, b' '..=b'~'))
}

/// `tcp 192.0.2.1:4420 nqn...`, as a log line shows it.
impl fmt::Display for DiscoveryRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transport = match self.trtype {
            trtype::RDMA => "rdma",
            trtype::FIBRE_CHANNEL => "fc",
            trtype::TCP => "tcp",
            trtype::INTRA_HOST => "loopback",
            _ => "unknown",
        };
        match self.adrfam {
            adrfam::IPV6 => write!(f, "{transport} [{}]:{}", self.traddr, self.trsvcid)?,
            _ => write!(f, "{transport} {}:{}", self.traddr, self.trsvcid)?,
        }
        write!(f, " {}", self.subnqn)
    }
}

#[cfg(test)]
mod tests {
    use hex_literal::hex;
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    use super::*;

    fn record() -> DiscoveryRecord {
        DiscoveryRecord {
            trtype: trtype::TCP,
            adrfam: adrfam::IPV4,
            subtype: subtype::NVM,
            treq: treq::SQ_FLOW_CONTROL_DISABLE,
            portid: 1,
            cntlid: DiscoveryEntry::CNTLID_DYNAMIC,
            asqsz: 32,
            eflags: 0,
            subnqn: Nqn::new("nqn.2025-01.io.nacre:s").unwrap(),
            traddr: "192.0.2.1".to_owned(),
            trsvcid: "4420".to_owned(),
        }
    }

    #[test]
    fn an_entry() {
        let mut entry = DiscoveryEntry::new(&record()).unwrap();
        assert_eq!(entry.as_bytes()[..12], hex!("03010204 0100 ffff 2000 0000"));
        assert_eq!(entry.as_bytes()[32..37], *b"4420 ");
        assert_eq!(entry.as_bytes()[512..522], *b"192.0.2.1 ");
        assert_eq!(entry.parse(), Ok(record()));
        assert_eq!(
            record().to_string(),
            "tcp 192.0.2.1:4420 nqn.2025-01.io.nacre:s"
        );

        // A target that pads with NULs.
        entry.trsvcid[4..].fill(0);
        assert_eq!(entry.parse(), Ok(record()));
        entry.traddr[3] = 0x80;
        assert_eq!(
            entry.parse(),
            Err(DiscoveryError::NotAscii { field: "TRADDR" })
        );
        entry.subnqn.fill(0);
        assert_eq!(
            entry.parse(),
            Err(DiscoveryError::SubsystemNqn(NqnError::Empty))
        );

        let long = DiscoveryRecord {
            trsvcid: "1".repeat(33),
            ..record()
        };
        let error = DiscoveryError::TooLong {
            field: "TRSVCID",
            length: 33,
            room: 32,
        };
        assert_eq!(DiscoveryEntry::new(&long), Err(error));
    }

    #[test]
    fn subtypes() {
        let mut entry = DiscoveryEntry::zeroed();
        let subtype = RdmaSubtype {
            qptype: RdmaSubtype::QPTYPE_CONNECTED,
            prtype: RdmaSubtype::PRTYPE_ROCE_V2,
            cms: RdmaSubtype::CMS_RDMA_CM,
            pkey: 0x1234,
        };
        entry.set_rdma_subtype(subtype);
        assert_eq!(entry.as_bytes()[768..778], hex!("01040100000000003412"));
        assert_eq!(entry.rdma_subtype(), subtype);
        entry.set_tcp_subtype(sectype::TLS13);
        assert_eq!(entry.tcp_sectype(), sectype::TLS13);
    }

    #[test]
    fn pages() {
        let mut page = DiscoveryHeader::new(5, 2).as_bytes().to_vec();
        for _ in 0..2 {
            page.extend_from_slice(DiscoveryEntry::new(&record()).unwrap().as_bytes());
        }
        let (header, entries) = parse_page(&page).unwrap();
        assert_eq!((header.genctr.get(), entries.len()), (5, 2));
        for length in [0, 1023, 1024, page.len() - 1] {
            let error = parse_page(&page[..length]).unwrap_err();
            assert!(matches!(error, DiscoveryError::Truncated { .. }));
        }
        page[8..16].fill(0xff);
        let error = DiscoveryError::Truncated {
            length: 3072,
            numrec: u64::MAX,
        };
        assert_eq!(parse_page(&page), Err(error));
        page[16] = 1;
        assert_eq!(
            parse_page(&page),
            Err(DiscoveryError::RecordFormat { recfmt: 1 })
        );
    }

    proptest! {
        /// No entry panics, and a parsed entry builds and parses again without a change.
        #[test]
        fn any_entry(bytes in proptest::collection::vec(any::<u8>(), 1024), text in "[ -~]{0,32}") {
            let mut entry = DiscoveryEntry::read_from_bytes(&bytes).unwrap();
            let _ = entry.parse();
            entry.subnqn = Nqn::discovery().to_field();
            entry.trsvcid.fill(0);
            entry.trsvcid[..text.len()].copy_from_slice(text.as_bytes());
            entry.traddr.fill(b' ');
            let record = entry.parse().unwrap();
            prop_assert_eq!(&record.trsvcid, text.trim_end_matches(' '));
            prop_assert_eq!(DiscoveryEntry::new(&record).unwrap().parse(), Ok(record));
        }
    }
}
