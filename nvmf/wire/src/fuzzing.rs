//! The bodies of the fuzz targets, here so that the corpora in `fuzz/corpus` are replayed by an
//! ordinary test (`tests/corpus.rs`). A target accepts any bytes, and panics only on a bug in the
//! parsers or builders.

use zerocopy::{FromBytes, IntoBytes};

use crate::commands::{AdminCommand, IoCommand};
use crate::fabrics::{ConnectData, FabricsCommand, Nqn};
use crate::identify::descriptors;
use crate::log::{ana, discovery};
use crate::sqe::{Sgl, SglDescriptor, Sqe};
use crate::tcp::{
    DataAlignment, Digests, Field, Parsed, PduType, Rules, Side, TermPdu, parse_header,
};

/// A target: takes any bytes.
pub type Target = fn(&[u8]);

/// Each target by its name, which is that of its corpus folder and of its binary.
pub const TARGETS: &[(&str, Target)] = &[
    ("tcp_pdu", tcp_pdu),
    ("command", command),
    ("connect_data", connect_data),
    ("lists", lists),
];

/// A stream of PDUs. Byte 0 chooses the rules (bit 0 host, bit 1 initialized, bits 2 and 3 header
/// and data digest), byte 1 the alignment; the remaining bytes come from the peer.
pub fn tcp_pdu(input: &[u8]) {
    let [choice, alignment, stream @ ..] = input else {
        return;
    };
    let mut rules = if choice & 1 != 0 {
        Rules::host()
    } else {
        Rules::controller()
    };
    rules.initialized = choice & 2 != 0;
    rules.digests = Digests::from_bits(choice >> 2 & 0b11);
    rules.alignment =
        DataAlignment::from_field(alignment & 31).expect("five bits are an alignment");

    let mut rest = stream;
    loop {
        match parse_header(rest, &rules) {
            Ok(Parsed::Need(need)) => {
                assert!(rest.len() < need as usize, "asks for bytes that it has");
                assert!(need <= 132, "no header is longer than ICReq and a digest");
                return;
            }
            Ok(Parsed::Header(frame, pdu)) => {
                let digest = if frame.data_digest { 4 } else { 0 };
                assert!(frame.header_bytes() <= frame.data_offset);
                assert_eq!(frame.data_offset + frame.data_len + digest, frame.plen);
                assert_eq!(frame.pdu_type.receiver(), rules.receiver);
                assert_eq!(crate::tcp::Pdu::parse(&frame, rest), Ok(pdu));
                rules.initialized |= matches!(frame.pdu_type, PduType::IcReq | PduType::IcResp);
                rest = rest.get(frame.plen as usize..).unwrap_or(&[]);
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                if let Some(offset) = error.field.offset() {
                    assert!(offset < 24 && error.field != Field::HeaderDigest);
                }
                // The peer must be able to understand the complaint.
                let term = TermPdu::for_error(rules.receiver, &error, rest);
                let mut peer = rules;
                peer.receiver = match rules.receiver {
                    Side::Host => Side::Controller,
                    Side::Controller => Side::Host,
                };
                let read = parse_header(term.bytes(), &peer);
                assert!(matches!(read, Ok(Parsed::Header(..))), "{read:?}");
                return;
            }
        }
    }
}

/// A submission queue entry, and data that comes with it.
pub fn command(input: &[u8]) {
    let Ok((sqe, data)) = Sqe::read_from_prefix(input) else {
        return;
    };
    let _ = format!("{sqe:?}");
    if let Ok(sgl) = sqe.sgl() {
        let again = SglDescriptor::from(sgl);
        assert_eq!(again.parse(), Ok(sgl));
    }
    if sqe.is_fabrics() {
        match FabricsCommand::parse(&sqe) {
            Ok(command) => fabrics_round_trip(command),
            Err(error) => assert!(!error.status().is_success()),
        }
        return;
    }
    if let Ok(IoCommand::Copy(copy)) = IoCommand::parse(&sqe) {
        assert!(copy.sources(data).count() <= usize::from(copy.ranges));
        assert_eq!(
            IoCommand::parse(&copy.to_sqe(1, 1)),
            Ok(IoCommand::Copy(copy))
        );
    }
    if let Ok(IoCommand::Read(read)) = IoCommand::parse(&sqe) {
        let again = IoCommand::parse(&read.to_sqe(sqe.opcode, 1, 1));
        assert_eq!(again, Ok(IoCommand::Read(read)));
    }
    reservation_round_trip(&sqe);
    if let Ok(AdminCommand::GetLogPage(log)) = AdminCommand::parse(&sqe) {
        let again = AdminCommand::parse(&log.to_sqe(1, 0));
        assert_eq!(again, Ok(AdminCommand::GetLogPage(log)));
    }
    let ranges = crate::commands::io::DsmRange::list(data);
    assert_eq!(ranges.len(), data.len() / 16);
}

/// A parsed reservation command builds an entry that parses to the same command.
fn reservation_round_trip(sqe: &Sqe) {
    let Ok(command) = IoCommand::parse(sqe) else {
        return;
    };
    let again = match command {
        IoCommand::ReservationRegister(register) => register.to_sqe(1, 1),
        IoCommand::ReservationAcquire(acquire) => acquire.to_sqe(1, 1),
        IoCommand::ReservationRelease(release) => release.to_sqe(1, 1),
        IoCommand::ReservationReport(report) => report.to_sqe(1, 1),
        _ => return,
    };
    assert_eq!(IoCommand::parse(&again), Ok(command));
}

fn fabrics_round_trip(command: FabricsCommand) {
    let sgl = Sgl::Transport { length: 0 };
    let again = match command {
        FabricsCommand::Connect(connect) => connect.to_sqe(1, sgl),
        FabricsCommand::PropertyGet(get) => get.to_sqe(1),
        FabricsCommand::PropertySet(set) => set.to_sqe(1),
        FabricsCommand::AuthenticationSend(auth) => auth.to_send(1, sgl),
        FabricsCommand::AuthenticationReceive(auth) => auth.to_receive(1, sgl),
        FabricsCommand::Disconnect => crate::fabrics::disconnect(1),
    };
    assert_eq!(FabricsCommand::parse(&again), Ok(command));
}

/// The data of a Connect; short input is padded with zeroes. Input that is text is also read as one
/// name.
pub fn connect_data(input: &[u8]) {
    if let Ok(text) = core::str::from_utf8(input)
        && let Ok(nqn) = Nqn::new(text)
    {
        assert_eq!(nqn, *text);
        assert!(text.len() <= Nqn::MAX_BYTES);
        assert_eq!(Nqn::from_field(&nqn.to_field()), Ok(nqn));
    }
    let mut bytes = [0; ConnectData::SIZE];
    let length = input.len().min(bytes.len());
    bytes[..length].copy_from_slice(&input[..length]);
    let data = ConnectData::ref_from_bytes(&bytes).expect("1024 bytes are Connect data");
    let _ = format!("{data:?}");
    if let (Ok(subnqn), Ok(hostnqn)) = (data.subsystem_nqn(), data.host_nqn()) {
        let again = ConnectData::new(data.hostid, data.cntlid.get(), &subnqn, &hostnqn);
        assert_eq!(again.subsystem_nqn(), Ok(subnqn));
        assert_eq!(again.host_nqn(), Ok(hostnqn));
    }
}

/// Pages that a host reads from a controller. Byte 0, modulo 3, chooses: 0 the discovery log, 1 the
/// namespace identification descriptors, 2 the ANA log.
pub fn lists(input: &[u8]) {
    let [kind, page @ ..] = input else { return };
    match kind % 3 {
        0 => discovery_log(page),
        1 => {
            let names: Vec<_> = descriptors::iter(page)
                .take_while(Result::is_ok)
                .flatten()
                .collect();
            let mut again = vec![0; page.len() + 4];
            let length = descriptors::write(&names, &mut again).expect("the parsed structure fits");
            assert!(length <= page.len());
            assert!(descriptors::iter(&again).eq(names.into_iter().map(Ok)));
        }
        _ => assert!(ana::groups(page).count() <= page.len() / 32 + 1),
    }
}

fn discovery_log(page: &[u8]) {
    let Ok((header, entries)) = discovery::parse_page(page) else {
        return;
    };
    assert_eq!(header.numrec.get(), entries.len() as u64);
    for entry in entries {
        if let Ok(record) = entry.parse() {
            let again = discovery::DiscoveryEntry::new(&record).expect("the parsed structure fits");
            assert_eq!(again.as_bytes().len(), 1024);
            assert_eq!(again.parse(), Ok(record));
        }
    }
}
