//! Tests of the structures of connect requests and messages: valid ones, and the error of each
//! invalid one.

use proptest::prelude::*;

use crate::wire::*;
use crate::{Measure, Op};

fn terms() -> SessionParameters {
    SessionParameters {
        op: Op::Write,
        measure: Measure::Latency,
        verify: true,
        queue_pairs: 3,
        depth: 77,
        message_bytes: 65_537,
        seed: 0xdead_beef,
        peer_timeout_ms: 10_000,
    }
}

/// Goal: the bytes are those of version 1 forever. Method: written out.
#[test]
fn the_bytes_of_a_request() {
    let bytes = Request::Control(terms()).to_bytes();
    let wanted = [
        b'N', b'R', b'P', b'F', 1, 0, 36, 0, // magic, version, length
        1, 2, 2, 1, // control, write, latency, verify
        3, 0, 0, 0, 77, 0, 0, 0, // queue pairs, index, depth, reserved
        0, 0, 0, 0, // session
        1, 0, 1, 0, // bytes of a message
        0xef, 0xbe, 0xad, 0xde, // seed
        0x10, 0x27, 0, 0, // peer timeout
    ];
    assert_eq!(bytes, wanted);
    let bytes = Request::Data {
        session: 5,
        index: 2,
    }
    .to_bytes();
    assert_eq!((bytes[8], bytes[14], bytes[20], bytes.len()), (2, 2, 5, 36));
}

/// Goal: written messages parse, also with the connection manager's padding.
#[test]
fn messages_round_trip() {
    for request in [
        Request::Control(terms()),
        Request::Data {
            session: 9,
            index: 250,
        },
    ] {
        let mut bytes = request.to_bytes();
        assert!(bytes.len() <= REQUEST_ROOM);
        assert_eq!(Request::parse(&bytes), Ok(request));
        bytes.resize(REQUEST_ROOM, 0);
        assert_eq!(Request::parse(&bytes), Ok(request));
    }
    let accept = Accept {
        session: 1,
        rkey: 2,
        address: 3 << 40,
        bytes: 4 << 33,
        receives: 5,
        slots: 6,
    };
    assert_eq!(Accept::parse(&accept.to_bytes()), Ok(accept));
    for &refusal in Refusal::ALL {
        let reject = Reject {
            refusal,
            needed: 7 << 35,
            limit: 8,
        };
        assert_eq!(Reject::parse(&reject.to_bytes()), Ok(reject));
        assert!(
            reject
                .to_string()
                .ends_with("(240518168576 asked, 8 allowed)")
        );
    }
    let wrong = Some(Wrong {
        number: 1 << 40,
        offset: 2 << 33,
        expected: 3,
        found: 4,
    });
    for message in [
        Message::Alive,
        Message::StillAlive,
        Message::Check {
            slot: 1,
            number: 2 << 40,
            bytes: 3,
        },
        Message::Checked {
            slot: 4,
            wrong: None,
        },
        Message::Checked { slot: 4, wrong },
        Message::Credit {
            received: 5,
            allowed: 6,
            wrong: None,
        },
        Message::Credit {
            received: 0,
            allowed: 0,
            wrong,
        },
    ] {
        assert_eq!(Message::parse(&message.to_bytes()), Ok(message));
    }
    for &ending in Ending::ALL {
        let message = Message::End {
            ending,
            status: 12,
            messages: 1 << 50,
            bytes: 1 << 60,
        };
        assert_eq!(Message::parse(&message.to_bytes()), Ok(message));
    }
}

/// Goal: every way in which a request can be bad has its own error. Method: one byte of a good one
/// is changed.
#[test]
fn bad_requests() {
    let with = |at: usize, value: u8| {
        let mut bytes = Request::Control(terms()).to_bytes();
        bytes[at] = value;
        Request::parse(&bytes).unwrap_err()
    };
    let field = |field, value| WireError::Field { field, value };
    assert_eq!(with(0, b'X'), WireError::Magic);
    assert_eq!(with(4, 2), WireError::Version { theirs: 2 });
    assert_eq!(
        with(6, 35),
        WireError::Length {
            said: 35,
            wanted: 36
        }
    );
    assert_eq!(
        with(7, 1),
        WireError::Length {
            said: 292,
            wanted: 36
        }
    );
    assert_eq!(with(8, 3), field("kind", 3));
    assert_eq!(with(9, 0), field("operation", 0));
    assert_eq!(with(10, 3), field("measure", 3));
    assert_eq!(with(11, 3), field("flags", 3));
    assert_eq!(with(12, 0), field("queue pairs", 0));
    assert_eq!(with(13, 2), field("queue pairs", 515));
    assert_eq!(with(17, 0x40), field("depth", 16_461));
    assert_eq!(with(27, 0x80), field("message bytes", 0x8001_0001));
    assert_eq!(with(35, 1), field("peer timeout", 16_787_216));
    let bytes = Request::Control(terms()).to_bytes();
    for len in 0..bytes.len() {
        let needed = if len < 8 { 8 } else { 36 };
        assert_eq!(
            Request::parse(&bytes[..len]),
            Err(WireError::Short { there: len, needed })
        );
    }
}

/// Goal: bad answers and messages are errors, not guesses.
#[test]
fn bad_answers() {
    let accept = Accept::default().to_bytes();
    assert!(matches!(
        Accept::parse(&accept[..39]),
        Err(WireError::Short {
            there: 39,
            needed: 40
        })
    ));
    // One kind is not taken for another: their lengths differ.
    assert!(matches!(
        Reject::parse(&accept),
        Err(WireError::Length { .. })
    ));
    let mut reject = Reject::new(Refusal::Busy).to_bytes();
    reject[8] = 99;
    assert_eq!(
        Reject::parse(&reject),
        Err(WireError::Field {
            field: "refusal",
            value: 99
        })
    );
    let mut message = Message::Alive.to_bytes();
    message[8] = 9;
    assert_eq!(
        Message::parse(&message),
        Err(WireError::Field {
            field: "message",
            value: 9
        })
    );
    let mut checked = Message::Checked {
        slot: 1,
        wrong: None,
    }
    .to_bytes();
    checked[9] = 2;
    assert_eq!(
        Message::parse(&checked),
        Err(WireError::Field {
            field: "outcome",
            value: 2
        })
    );
    let end = Message::End {
        ending: Ending::Done,
        status: 0,
        messages: 0,
        bytes: 0,
    };
    let mut end = end.to_bytes();
    end[12] = 0;
    assert_eq!(
        Message::parse(&end),
        Err(WireError::Field {
            field: "ending",
            value: 0
        })
    );
}

proptest! {
    /// Goal: any input parses without a panic, and accepted values are within bounds.
    #[test]
    fn random_input_never_panics(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), head in any::<bool>()) {
        if head && bytes.len() >= 8 {
            let length = [36, 40, 32, 64][usize::from(bytes[7]) % 4];
            bytes[..8].copy_from_slice(&[b'N', b'R', b'P', b'F', 1, 0, length, 0]);
        }
        if let Ok(Request::Control(terms)) = Request::parse(&bytes) {
            prop_assert!((1..=crate::MAX_DEPTH).contains(&terms.depth));
            prop_assert!((1..=crate::MAX_QUEUE_PAIRS).contains(&terms.queue_pairs));
            prop_assert!((1..=crate::MAX_MESSAGE).contains(&terms.message_bytes));
        }
        let _ = Accept::parse(&bytes);
        let _ = Reject::parse(&bytes);
        let _ = Message::parse(&bytes);
    }
}
