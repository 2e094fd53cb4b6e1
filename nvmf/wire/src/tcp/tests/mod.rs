//! Tests of the PDUs: layout, valid PDUs, and properties. The module `refusals` has the invalid
//! ones.

mod refusals;

use core::mem::offset_of;

use hex_literal::hex;
use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;
use crate::sqe::Sgl;
use crate::status::StatusCode;

fn established(receiver: Side) -> Rules {
    let rules = match receiver {
        Side::Host => Rules::host(),
        Side::Controller => Rules::controller(),
    };
    Rules {
        initialized: true,
        max_data_bytes: rules.max_data_bytes.max(131_072),
        ..rules
    }
}

fn header<'a>(bytes: &'a [u8], rules: &Rules) -> (Frame, Pdu<'a>) {
    match parse_header(bytes, rules) {
        Ok(Parsed::Header(frame, pdu)) => (frame, pdu),
        other => panic!("{other:?}"),
    }
}

/// Each field is where TCP figures 22 to 35 put it.
#[test]
fn layout() {
    assert_eq!(offset_of!(CommonHeader, flags), 1);
    assert_eq!(offset_of!(CommonHeader, hlen), 2);
    assert_eq!(offset_of!(CommonHeader, pdo), 3);
    assert_eq!(offset_of!(CommonHeader, plen), 4);
    assert_eq!(offset_of!(IcReq, pfv), 8);
    assert_eq!(offset_of!(IcReq, hpda), 10);
    assert_eq!(offset_of!(IcReq, dgst), 11);
    assert_eq!(offset_of!(IcReq, maxr2t), 12);
    assert_eq!(offset_of!(IcResp, pfv), 8);
    assert_eq!(offset_of!(IcResp, cpda), 10);
    assert_eq!(offset_of!(IcResp, dgst), 11);
    assert_eq!(offset_of!(IcResp, maxh2cdata), 12);
    assert_eq!(offset_of!(TermReq, fes), 8);
    assert_eq!(offset_of!(TermReq, fei), 10);
    assert_eq!(offset_of!(CapsuleCmd, sqe), 8);
    assert_eq!(offset_of!(CapsuleResp, cqe), 8);
    assert_eq!(offset_of!(DataPdu, cccid), 8);
    assert_eq!(offset_of!(DataPdu, ttag), 10);
    assert_eq!(offset_of!(DataPdu, datao), 12);
    assert_eq!(offset_of!(DataPdu, datal), 16);
    assert_eq!(offset_of!(R2t, cccid), 8);
    assert_eq!(offset_of!(R2t, ttag), 10);
    assert_eq!(offset_of!(R2t, r2to), 12);
    assert_eq!(offset_of!(R2t, r2tl), 16);
    for pdu_type in PduType::ALL {
        assert_eq!(PduType::from_u8(pdu_type as u8), Some(pdu_type));
    }
}

/// Valid PDUs, byte for byte, each with its meaning.
#[test]
fn initialization() {
    // A Linux host: no digests, MAXR2T 0 (one R2T at a time).
    let mut bytes = [0; 128];
    bytes[..16].copy_from_slice(&hex!("00008000 80000000 0000 00 00 00000000"));
    let (frame, pdu) = header(&bytes, &Rules::controller());
    assert_eq!(
        (frame.plen, frame.data_len, frame.header_bytes()),
        (128, 0, 128)
    );
    let Pdu::IcReq(request) = pdu else {
        panic!("{pdu:?}")
    };
    assert_eq!((request.max_r2t(), request.digests()), (1, Digests::NONE));
    assert_eq!(
        IcReq::new(DataAlignment::DWORD, Digests::NONE, 1).as_bytes(),
        bytes
    );

    // An answer with both digests, 128-byte alignment and 128 KiB per H2CData.
    bytes[..16].copy_from_slice(&hex!("01008000 80000000 0000 1f 03 00000200"));
    let (_, pdu) = header(&bytes, &Rules::host());
    let Pdu::IcResp(response) = pdu else {
        panic!("{pdu:?}")
    };
    assert_eq!(response.digests(), Digests::BOTH);
    assert_eq!(response.alignment().bytes(), 128);
    assert_eq!(
        IcResp::new(DataAlignment::MAX, Digests::BOTH, 131_072).as_bytes(),
        bytes
    );
}

#[test]
fn capsules() {
    let sqe = Sqe::new(1, 7).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 512,
    });
    // No digests: the data follows the header at once.
    let plain = CapsuleCmd::new(sqe, 512, Digests::NONE, DataAlignment::DWORD);
    assert_eq!(plain.as_bytes()[..8], hex!("04004848 48020000"));
    let (frame, pdu) = header(plain.as_bytes(), &established(Side::Controller));
    assert_eq!(pdu, Pdu::CapsuleCmd(&sqe));
    assert_eq!(
        (frame.data_offset, frame.data_len, frame.padding_bytes()),
        (72, 512, 0)
    );

    // Both digests and 32-byte alignment: 72 + 4 are padded to 96.
    let align = DataAlignment::from_field(7).unwrap();
    let full = CapsuleCmd::new(sqe, 512, Digests::BOTH, align);
    assert_eq!(full.as_bytes()[..8], hex!("04034860 64020000"));
    let rules = Rules {
        digests: Digests::BOTH,
        alignment: align,
        ..established(Side::Controller)
    };
    let mut bytes = [0; 76];
    bytes[..72].copy_from_slice(full.as_bytes());
    assert_eq!(parse_header(&bytes[..72], &rules), Ok(Parsed::Need(76)));
    let (frame, _) = header(&bytes, &rules);
    assert_eq!(
        (frame.data_offset, frame.data_len, frame.padding_bytes()),
        (96, 512, 20)
    );
    assert!(frame.header_digest && frame.data_digest);

    // Without data there is no data digest, whatever was negotiated.
    let empty = CapsuleCmd::new(sqe, 0, Digests::BOTH, align);
    assert_eq!(empty.as_bytes()[..8], hex!("04014800 4c000000"));

    let cqe = Cqe::new(7, StatusCode::SUCCESS);
    let response = CapsuleResp::new(cqe, Digests::NONE);
    assert_eq!(response.as_bytes()[..8], hex!("05001800 18000000"));
    let (_, pdu) = header(response.as_bytes(), &established(Side::Host));
    assert_eq!(pdu, Pdu::CapsuleResp(&cqe));
}

#[test]
fn data_and_r2t() {
    let align = DataAlignment::DWORD;
    let data = DataPdu::h2c(7, 9, 4096, 8192, true, Digests::NONE, align);
    assert_eq!(
        data.as_bytes(),
        hex!("06041818 18200000 0700 0900 00100000 00200000 00000000")
    );
    let (frame, pdu) = header(data.as_bytes(), &established(Side::Controller));
    assert_eq!(pdu, Pdu::H2cData(&data));
    assert_eq!((frame.data_offset, frame.data_len), (24, 8192));

    let flags = PduFlags::LAST_PDU | PduFlags::SUCCESS;
    let data = DataPdu::c2h(
        7,
        0,
        4096,
        flags,
        Digests {
            header: false,
            data: true,
        },
        align,
    );
    assert_eq!(
        data.as_bytes(),
        hex!("070e1818 1c100000 0700 0000 00000000 00100000 00000000")
    );
    let digests = Digests {
        header: false,
        data: true,
    };
    let (_, pdu) = header(
        data.as_bytes(),
        &Rules {
            digests,
            ..established(Side::Host)
        },
    );
    assert_eq!(pdu, Pdu::C2hData(&data));
    assert!(data.is_success() && data.is_last());

    let r2t = R2t::new(7, 9, 4096, 8192, Digests::NONE);
    assert_eq!(
        r2t.as_bytes(),
        hex!("09001800 18000000 0700 0900 00100000 00200000 00000000")
    );
    assert_eq!(
        header(r2t.as_bytes(), &established(Side::Host)).1,
        Pdu::R2t(&r2t)
    );
}

/// A termination request quotes no more than 128 bytes, and the field at fault.
#[test]
fn termination() {
    let bad = [0xffu8; 200];
    let error = parse_header(&bad, &Rules::controller()).unwrap_err();
    let term = TermPdu::for_error(Side::Controller, &error, &bad);
    assert_eq!(term.bytes().len(), 152);
    assert_eq!(
        term.bytes()[..24],
        hex!("03001800 98000000 0100 00000000 00000000000000000000")
    );
    let (frame, pdu) = header(term.bytes(), &Rules::host());
    assert_eq!((frame.data_offset, frame.data_len), (24, 128));
    let Pdu::C2hTermReq(request) = pdu else {
        panic!("{pdu:?}")
    };
    assert_eq!(request.status(), Ok(FatalErrorStatus::InvalidHeaderField));

    let error = PduError::header_digest(1, 0x1234_5678);
    let term = TermPdu::for_error(Side::Host, &error, &bad[..8]);
    assert_eq!(term.bytes()[..14], hex!("02001800 20000000 0300 78563412"));
    let (frame, _) = header(term.bytes(), &established(Side::Controller));
    assert_eq!(frame.data_len, 8);
}

/// A header that arrives in pieces: every prefix asks for more bytes or is refused; none passes for
/// a whole header.
#[test]
fn prefixes() {
    let data = DataPdu::h2c(7, 9, 0, 8192, true, Digests::NONE, DataAlignment::DWORD);
    let rules = established(Side::Controller);
    for length in 0..8 {
        assert_eq!(
            parse_header(&data.as_bytes()[..length], &rules),
            Ok(Parsed::Need(8))
        );
    }
    for length in 8..24 {
        assert_eq!(
            parse_header(&data.as_bytes()[..length], &rules),
            Ok(Parsed::Need(24))
        );
    }
    let frame = header(data.as_bytes(), &rules).0;
    let error = Pdu::parse(&frame, &data.as_bytes()[..23]).unwrap_err();
    assert_eq!(
        error.reason,
        Reason::Truncated {
            expected: 24,
            actual: 23
        }
    );
}

fn any_digests() -> impl Strategy<Value = Digests> {
    (0u8..4).prop_map(Digests::from_bits)
}

fn any_alignment() -> impl Strategy<Value = DataAlignment> {
    (0u8..32).prop_map(|field| DataAlignment::from_field(field).unwrap())
}

fn any_rules() -> impl Strategy<Value = Rules> {
    (
        any::<bool>(),
        any::<bool>(),
        any_digests(),
        any_alignment(),
        any::<u32>(),
        any::<u32>(),
    )
        .prop_map(
            |(host, initialized, digests, alignment, max_in_capsule_bytes, max_data_bytes)| Rules {
                receiver: if host { Side::Host } else { Side::Controller },
                initialized,
                digests,
                alignment,
                max_in_capsule_bytes,
                max_data_bytes,
            },
        )
}

proptest! {
    /// No bytes and no rules make it panic, and a frame that is accepted adds up.
    #[test]
    fn any_bytes(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..160),
        pdu_type in 0u8..12,
        plausible in any::<bool>(),
        rules in any_rules(),
    ) {
        if plausible && bytes.len() >= 8 {
            bytes[0] = pdu_type;
            bytes[1] &= 0x0f;
            if let Some(pdu_type) = PduType::from_u8(pdu_type) {
                bytes[2] = pdu_type.hlen();
            }
            bytes[6] = 0;
            bytes[7] = 0;
        }
        match parse_header(&bytes, &rules) {
            Ok(Parsed::Need(need)) => prop_assert!(bytes.len() < need as usize),
            Ok(Parsed::Header(frame, _)) => {
                let digest = if frame.data_digest { DIGEST_BYTES } else { 0 };
                prop_assert!(frame.header_bytes() <= frame.data_offset);
                prop_assert_eq!(frame.data_offset + frame.data_len + digest, frame.plen);
            }
            Err(error) => prop_assert!(error.fei() < 24),
        }
    }

    /// The parser reads every PDU that the builders build, under any agreement.
    #[test]
    fn build_then_parse(
        digests in any_digests(),
        alignment in any_alignment(),
        (cccid, ttag) in any::<(u16, u16)>(),
        offset in 0u32..1 << 31,
        length in 1u32..1 << 24,
        last in any::<bool>(),
    ) {
        let controller = Rules {
            digests,
            alignment,
            max_in_capsule_bytes: u32::MAX,
            max_data_bytes: u32::MAX,
            ..established(Side::Controller)
        };
        let host = Rules { receiver: Side::Host, ..controller };
        let flags = if last { PduFlags::LAST_PDU } else { PduFlags::empty() };
        let sqe = Sqe::new(ttag as u8, cccid);
        let cqe = Cqe::success(cccid).with_result(u64::from(offset));
        let capsule = CapsuleCmd::new(sqe, length, digests, alignment);
        let empty = CapsuleCmd::new(sqe, 0, digests, alignment);
        let response = CapsuleResp::new(cqe, digests);
        let h2c = DataPdu::h2c(cccid, ttag, offset, length, last, digests, alignment);
        let c2h = DataPdu::c2h(cccid, offset, length, flags, digests, alignment);
        let r2t = R2t::new(cccid, ttag, offset, length, digests);
        for (bytes, rules, expected, data) in [
            (capsule.as_bytes(), controller, Pdu::CapsuleCmd(&sqe), length),
            (empty.as_bytes(), controller, Pdu::CapsuleCmd(&sqe), 0),
            (response.as_bytes(), host, Pdu::CapsuleResp(&cqe), 0),
            (h2c.as_bytes(), controller, Pdu::H2cData(&h2c), length),
            (c2h.as_bytes(), host, Pdu::C2hData(&c2h), length),
            (r2t.as_bytes(), host, Pdu::R2t(&r2t), 0),
        ] {
            let mut padded = [0; 80];
            padded[..bytes.len()].copy_from_slice(bytes);
            let Ok(Parsed::Header(frame, pdu)) = parse_header(&padded, &rules) else {
                return Err(TestCaseError::fail(format!("{:?}", parse_header(&padded, &rules))));
            };
            prop_assert_eq!(pdu, expected);
            prop_assert_eq!(frame.data_len, data);
            prop_assert_eq!(frame.header_bytes(), bytes.len() as u32 + digests.header_bytes());
            if data != 0 {
                prop_assert_eq!(frame.data_offset % alignment.bytes(), 0);
                prop_assert_eq!(frame.data_digest, digests.data);
            }
        }
    }
}
