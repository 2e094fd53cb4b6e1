//! Tables of bytes, good and bad, written by hand from the layouts in TP8006.

use hex_literal::hex;

use super::*;

/// 64 bytes of a protocol descriptor: three hash functions and six groups, as Linux sends them.
fn descriptor() -> Vec<u8> {
    let mut bytes = hex!("01000306 010203").to_vec();
    bytes.resize(34, 0);
    bytes.extend(hex!("000102030405"));
    bytes.resize(64, 0);
    bytes
}

fn negotiate(secure_channel: u8, descriptors: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = hex!("0000 0000 0700").to_vec();
    bytes.extend([secure_channel, descriptors.len() as u8]);
    bytes.extend(descriptors.concat());
    bytes
}

fn filled(start: &[u8], parts: &[(u8, usize)]) -> Vec<u8> {
    let mut bytes = start.to_vec();
    for (byte, count) in parts {
        bytes.extend(vec![*byte; *count]);
    }
    bytes
}

/// Goal: each message is read as what it is and written as the same bytes.
#[test]
fn good_messages() {
    let hashes = [1, 2, 3];
    let groups = [0, 1, 2, 3, 4, 5];
    let table: [(Vec<u8>, Body<'_>); 10] = [
        (
            negotiate(0, &[descriptor()]),
            Body::Negotiate(Negotiate {
                secure_channel: 0,
                offer: Some((&hashes, &groups)),
            }),
        ),
        (
            filled(
                &hex!("0101 0000 0700 20 00 01 00 0000 05000000"),
                &[(0xc1, 32)],
            ),
            Body::Challenge(Challenge {
                hash: 1,
                group: 0,
                number: 5,
                challenge: &[0xc1; 32],
                public: &[],
            }),
        ),
        (
            filled(
                &hex!("0101 0000 0700 40 00 03 01 0001 04030201"),
                &[(0xc1, 64), (0xdd, 256)],
            ),
            Body::Challenge(Challenge {
                hash: 3,
                group: 1,
                number: 0x0102_0304,
                challenge: &[0xc1; 64],
                public: &[0xdd; 256],
            }),
        ),
        (
            filled(
                &hex!("0102 0000 0700 30 00 01 00 8001 09000000"),
                &[(0xa1, 48), (0xc2, 48), (0xee, 384)],
            ),
            Body::Reply(Reply {
                response: &[0xa1; 48],
                challenge: Some((&[0xc2; 48], 9)),
                public: &[0xee; 384],
            }),
        ),
        (
            filled(
                &hex!("0102 0000 0700 20 00 00 00 0000 00000000"),
                &[(0xa1, 32), (0, 32)],
            ),
            Body::Reply(Reply {
                response: &[0xa1; 32],
                challenge: None,
                public: &[],
            }),
        ),
        (
            filled(&hex!("0103 0000 0700 20 00 00 00000000000000"), &[(0, 32)]),
            Body::Success1 {
                hash_bytes: 32,
                response: None,
            },
        ),
        (
            filled(
                &hex!("0103 0000 0700 20 00 01 00000000000000"),
                &[(0xa2, 32)],
            ),
            Body::Success1 {
                hash_bytes: 32,
                response: Some(&[0xa2; 32]),
            },
        ),
        (
            hex!("0104 0000 0700 00000000000000000000").to_vec(),
            Body::Success2,
        ),
        (
            hex!("00f0 0000 0700 01 01").to_vec(),
            Body::Failure2(Failed::Authentication),
        ),
        (
            hex!("00f1 0000 0700 01 09").to_vec(),
            Body::Failure1(Failed::Other(9)),
        ),
    ];
    for (bytes, body) in table {
        let message = Message {
            transaction: 7,
            body,
        };
        assert_eq!(message.to_bytes(), bytes, "{message:?}");
        assert_eq!(Message::parse(&bytes), Ok(message.clone()));
        let longer = [&bytes[..], &[0xff; 20]].concat();
        assert_eq!(Message::parse(&longer), Ok(message), "in a larger buffer");
        for len in 0..bytes.len() {
            let short = Message::parse(&bytes[..len]);
            // Success1 without R2 is complete without the zeroes that follow.
            let may_lack = bytes[..2] == [1, 3] && bytes[8] == 0 && len >= 16;
            let is_refused = matches!(short, Err(MessageError::Short { .. }));
            assert!(is_refused || may_lack, "{len} of {bytes:02x?}: {short:?}");
        }
    }
}

/// Goal: what a host may leave open does not hide its DH-HMAC-CHAP offer. Method: other protocols,
/// unknown identifiers, reserved bytes.
#[test]
fn offers_with_unknown_parts() {
    let mut other = descriptor();
    other[0] = 9;
    other[2] = 0xff;
    let mut unknown = descriptor();
    unknown[1] = 0xee;
    unknown[4] = 0x77;
    unknown[34] = 0x10;
    let bytes = negotiate(2, &[other.clone(), unknown]);
    let Ok(Message {
        body: Body::Negotiate(negotiate_body),
        ..
    }) = Message::parse(&bytes)
    else {
        panic!("refused");
    };
    assert_eq!(negotiate_body.secure_channel, 2);
    let (hashes, groups) = negotiate_body.offer.unwrap();
    assert_eq!((hashes[0], groups[0]), (0x77, 0x10));
    let none = negotiate(0, &[other]);
    let Ok(message) = Message::parse(&none) else {
        panic!("refused");
    };
    let body = Body::Negotiate(Negotiate {
        secure_channel: 0,
        offer: None,
    });
    assert_eq!(message.body, body);
    assert_eq!(Message::parse(&message.to_bytes()).as_ref(), Ok(&message));
}

/// Goal: every rule of the layout has a refusal that names the field.
#[test]
fn bad_messages() {
    let with = |bytes: &[u8], at: usize, value: u8| {
        let mut bytes = bytes.to_vec();
        bytes[at] = value;
        bytes
    };
    let good = negotiate(0, &[descriptor()]);
    let challenge = filled(
        &hex!("0101 0000 0700 20 00 01 00 0000 05000000"),
        &[(1, 32)],
    );
    let reply = filled(
        &hex!("0102 0000 0700 20 00 01 00 0000 05000000"),
        &[(1, 64)],
    );
    let success = filled(&hex!("0103 0000 0700 20 00 01 00000000000000"), &[(1, 32)]);
    let table = [
        (with(&good, 0, 2), "message type 0x02"),
        (with(&good, 1, 5), "identifier 0x05"),
        (with(&good, 7, 0), "the number of protocols is 0"),
        (with(&good, 7, 2), "72 bytes are too short for Negotiate"),
        (with(&good, 8 + 2, 31), "the number of hash functions is 31"),
        (with(&good, 8 + 2, 0), "the number of hash functions is 0"),
        (with(&good, 8 + 3, 31), "the number of groups is 31"),
        (with(&challenge, 6, 33), "the length of the hash is 33"),
        (with(&challenge, 12, 0), "the sequence number is 0"),
        (with(&challenge, 11, 0xff), "too short for Challenge"),
        (with(&reply, 6, 0), "the length of the hash is 0"),
        (with(&reply, 8, 2), "CVALID is 2"),
        (with(&reply, 11, 0xff), "too short for Reply"),
        (with(&success, 8, 3), "RVALID is 3"),
        (with(&success, 6, 16), "the length of the hash is 16"),
    ];
    for (bytes, expected) in table {
        let error = Message::parse(&bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
    }
}

#[test]
fn reason_codes() {
    for code in 0..=u8::MAX {
        assert_eq!(Failed::from_code(code).code(), code);
    }
    assert_eq!(Failed::from_code(6), Failed::IncorrectPayload);
}
