//! Tests of the PDU rules, with one invalid PDU for each rule.

use hex_literal::hex;
use zerocopy::IntoBytes;

use super::*;

/// For each rule, one PDU that breaks only this rule; the refusal names the field, its offset and
/// the status.
#[test]
fn refusals() {
    use FatalErrorStatus::*;
    let controller = established(Side::Controller);
    let host = established(Side::Host);
    let digests = |header, data| Digests { header, data };
    type Case<'a> = (&'a str, &'a [u8], Rules, Field, FatalErrorStatus, u32);
    let cases: &[Case] = &[
        (
            "unknown",
            &hex!("08001800 18000000"),
            host,
            Field::PduType,
            InvalidHeaderField,
            0,
        ),
        (
            "direction",
            &hex!("07041818 18100000"),
            controller,
            Field::PduType,
            InvalidHeaderField,
            0,
        ),
        (
            "direction",
            &hex!("04004800 48000000"),
            host,
            Field::PduType,
            InvalidHeaderField,
            0,
        ),
        (
            "early",
            &hex!("04004800 48000000"),
            Rules::controller(),
            Field::PduType,
            SequenceError,
            0,
        ),
        (
            "late",
            &hex!("00008000 80000000"),
            controller,
            Field::PduType,
            SequenceError,
            0,
        ),
        (
            "reserved flag",
            &hex!("04104800 48000000"),
            controller,
            Field::Flags,
            InvalidHeaderField,
            1,
        ),
        (
            "last flag",
            &hex!("04044800 48000000"),
            controller,
            Field::Flags,
            InvalidHeaderField,
            1,
        ),
        (
            "success flag",
            &hex!("06081818 18100000"),
            controller,
            Field::Flags,
            InvalidHeaderField,
            1,
        ),
        (
            "digest in IC",
            &hex!("00018000 80000000"),
            Rules::controller(),
            Field::Flags,
            InvalidHeaderField,
            1,
        ),
        (
            "hlen",
            &hex!("04004000 48000000"),
            controller,
            Field::Hlen,
            InvalidHeaderField,
            2,
        ),
        (
            "hlen",
            &hex!("00004000 80000000"),
            Rules::controller(),
            Field::Hlen,
            InvalidHeaderField,
            2,
        ),
        (
            "digest off",
            &hex!("04014800 4c000000"),
            controller,
            Field::Flags,
            InvalidHeaderField,
            1,
        ),
        (
            "digest on",
            &hex!("04004800 48000000"),
            Rules {
                digests: digests(true, false),
                ..controller
            },
            Field::Flags,
            InvalidHeaderField,
            1,
        ),
        (
            "data digest on",
            &hex!("04004848 48020000"),
            Rules {
                digests: digests(false, true),
                ..controller
            },
            Field::Flags,
            InvalidHeaderField,
            1,
        ),
        (
            "data digest off",
            &hex!("04024848 4c020000"),
            controller,
            Field::Flags,
            InvalidHeaderField,
            1,
        ),
        (
            "short",
            &hex!("04004800 47000000"),
            controller,
            Field::Plen,
            InvalidHeaderField,
            4,
        ),
        (
            "zero",
            &hex!("06041818 00000000"),
            controller,
            Field::Plen,
            InvalidHeaderField,
            4,
        ),
        (
            "no data",
            &hex!("06041818 18000000"),
            controller,
            Field::Plen,
            InvalidHeaderField,
            4,
        ),
        (
            "only a digest",
            &hex!("06061818 1c000000"),
            Rules {
                digests: digests(false, true),
                ..controller
            },
            Field::Plen,
            InvalidHeaderField,
            4,
        ),
        (
            "long response",
            &hex!("05001800 19000000"),
            host,
            Field::Plen,
            InvalidHeaderField,
            4,
        ),
        (
            "pdo for nothing",
            &hex!("04004808 48000000"),
            controller,
            Field::Pdo,
            InvalidHeaderField,
            3,
        ),
        (
            "pdo in header",
            &hex!("04004844 48020000"),
            controller,
            Field::Pdo,
            InvalidHeaderField,
            3,
        ),
        (
            "pdo zero",
            &hex!("06041800 18100000"),
            controller,
            Field::Pdo,
            InvalidHeaderField,
            3,
        ),
        (
            "pdo beyond",
            &hex!("060418fc 18000000"),
            controller,
            Field::Plen,
            InvalidHeaderField,
            4,
        ),
        (
            "pdo odd",
            &hex!("04004849 49020000"),
            controller,
            Field::Pdo,
            InvalidHeaderField,
            3,
        ),
        (
            "pdo unaligned",
            &hex!("04004848 48020000"),
            Rules {
                alignment: DataAlignment::MAX,
                ..controller
            },
            Field::Pdo,
            InvalidHeaderField,
            3,
        ),
        (
            "in-capsule",
            &hex!("04004848 49200000"),
            controller,
            Field::Plen,
            InvalidHeaderField,
            4,
        ),
        (
            "MAXH2CDATA",
            &hex!("06041818 1c100000"),
            Rules {
                max_data_bytes: 4096,
                ..controller
            },
            Field::Plen,
            LimitExceeded,
            0,
        ),
        (
            "term short",
            &hex!("02001800 17000000"),
            controller,
            Field::Plen,
            InvalidHeaderField,
            4,
        ),
        (
            "term long",
            &hex!("02001800 99000000"),
            controller,
            Field::Plen,
            InvalidHeaderField,
            4,
        ),
        (
            "datal",
            &hex!("06041818 18100000 0700 0900 00000000 04100000 00000000"),
            controller,
            Field::Datal,
            InvalidHeaderField,
            16,
        ),
        (
            "datao",
            &hex!("06041818 18100000 0700 0900 00f8ffff 00100000 00000000"),
            controller,
            Field::Datao,
            DataOutOfRange,
            0,
        ),
        (
            "success",
            &hex!("07081818 18100000 0700 0000 00000000 00100000 00000000"),
            host,
            Field::Flags,
            InvalidHeaderField,
            1,
        ),
        (
            "r2tl",
            &hex!("09001800 18000000 0700 0900 00000000 00000000 00000000"),
            host,
            Field::R2tl,
            InvalidHeaderField,
            16,
        ),
        (
            "r2to",
            &hex!("09001800 18000000 0700 0900 00000080 00000080 00000000"),
            host,
            Field::R2to,
            DataOutOfRange,
            0,
        ),
    ];
    for (name, bytes, rules, field, status, fei) in cases {
        let error = parse_header(bytes, rules).expect_err(name);
        assert_eq!(
            (error.field, error.status, error.fei()),
            (*field, *status, *fei),
            "{name}"
        );
        assert!(error.to_string().starts_with(field.name()), "{error}");
    }
}

/// The parameters of the handshake.
#[test]
fn initialization_refusals() {
    use FatalErrorStatus::*;
    let request = IcReq::new(DataAlignment::DWORD, Digests::NONE, 1);
    let response = IcResp::new(DataAlignment::DWORD, Digests::NONE, 8192);
    for (offset, value, field, status) in [
        (8, 1, Field::Pfv, UnsupportedParameter),
        (10, 32, Field::DataAlignment, InvalidHeaderField),
        (11, 4, Field::Dgst, UnsupportedParameter),
    ] {
        for (rules, pdu) in [
            (Rules::controller(), request.as_bytes()),
            (Rules::host(), response.as_bytes()),
        ] {
            let mut bytes = pdu.to_vec();
            bytes[offset] = value;
            let error = parse_header(&bytes, &rules).unwrap_err();
            assert_eq!((error.field, error.status), (field, status));
            assert_eq!(error.fei(), offset as u32);
        }
    }
    for (maxh2cdata, ok) in [(4095, false), (4096, true), (4098, false), (0, false)] {
        let mut response = response;
        response.maxh2cdata = U32::new(maxh2cdata);
        let verdict = parse_header(response.as_bytes(), &Rules::host());
        assert_eq!(verdict.is_ok(), ok, "{maxh2cdata}");
        if let Err(error) = verdict {
            assert_eq!((error.field, error.fei()), (Field::Maxh2cdata, 12));
        }
    }
}
