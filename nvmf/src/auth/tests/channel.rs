//! Secure channel concatenation between host and controller: both make the same PSK, and every
//! mistake has its reason code.

use std::sync::Arc;

use crate::auth::message::{Body, Message, MessageError};
use crate::auth::tests::pair::{Pair, keys, only};
use crate::auth::{
    Agreed, ChannelPolicy, Concatenation, Failed, FixedKeys, Group, Hash, KeySource, Keys, Offer,
    Progress, Reason,
};

const NEW: ChannelPolicy = ChannelPolicy {
    possible: Concatenation::New,
    required: false,
};

fn pair(wanted: Concatenation, policy: ChannelPolicy, keys: Keys, offer: Offer) -> Pair {
    Pair::new(keys.clone(), Some(keys), Offer::default(), offer).with_channel(wanted, policy)
}

/// Goal: both ends have the same PSK with SC_C 2 and 3, with every hash and group that can serve,
/// with and without the controller's proof.
#[test]
fn both_ends_make_the_same_psk() {
    for wanted in [Concatenation::New, Concatenation::Replace] {
        for hash in [Hash::Sha256, Hash::Sha384] {
            for group in [Group::Ffdhe2048, Group::Ffdhe3072] {
                for mutual in [false, true] {
                    let policy = ChannelPolicy {
                        possible: wanted,
                        required: true,
                    };
                    let keys = keys(1, mutual.then_some(2));
                    let mut pair = pair(wanted, policy, keys, only(hash, group));
                    assert!(pair.controller.take_generated().is_none());
                    let agreed = Agreed {
                        hash,
                        group,
                        mutual,
                    };
                    assert_eq!(pair.run(), Ok(agreed));
                    assert_eq!(pair.controller.progress(), Progress::Completed);
                    assert_eq!(pair.controller.channel(), wanted);
                    // Without the controller's proof there is no Success2.
                    assert_eq!(pair.messages, if mutual { 5 } else { 4 });
                    let psk = pair.host.take_generated().unwrap();
                    assert_eq!(psk.len(), hash.bytes());
                    let other = pair.controller.take_generated().unwrap();
                    assert!(psk.equals(&other));
                    assert!(pair.controller.take_generated().is_none());
                }
            }
        }
    }
}

/// Goal: during a rotation either set of keys makes the PSK, and a set without a controller key
/// serves hosts that do not ask for the controller's proof.
#[test]
fn two_sets_of_keys() {
    let set = |keys| -> Arc<dyn KeySource> { Arc::new(FixedKeys(keys)) };
    let offer = || only(Hash::Sha256, Group::Ffdhe2048);
    let pair = |host: Keys| {
        let sets = vec![set(keys(1, Some(2))), set(keys(3, None))];
        let pair = Pair::new(host, None, offer(), offer()).with_sets(sets, offer());
        pair.with_channel(Concatenation::New, NEW)
    };
    let hosts = [
        (keys(1, Some(2)), true),
        (keys(1, None), false),
        (keys(3, None), false),
    ];
    for (host, mutual) in hosts {
        let mut pair = pair(host);
        assert_eq!(pair.run().map(|agreed| agreed.mutual), Ok(mutual));
        let psk = pair.host.take_generated().unwrap();
        assert!(psk.equals(&pair.controller.take_generated().unwrap()));
    }
    // The controller key of the other set proves nothing to this host.
    for host in [keys(3, Some(2)), keys(5, None)] {
        let mut pair = pair(host);
        let failed = Err(Reason::GivenUp(Failed::Authentication));
        assert_eq!(pair.run(), failed);
        assert!(pair.controller.take_generated().is_none());
    }
}

/// Goal: neither SHA-512 nor the null group makes a PSK, however much the controller prefers them.
#[test]
fn unusable_choices_are_left_out() {
    let offer = Offer {
        hashes: vec![Hash::Sha512, Hash::Sha384],
        groups: vec![Group::Null, Group::Ffdhe2048],
    };
    let mut usual = pair(Concatenation::New, NEW, keys(1, None), offer.clone());
    let agreed = usual.run().unwrap();
    assert_eq!(
        (agreed.hash, agreed.group),
        (Hash::Sha384, Group::Ffdhe2048)
    );
    let mut without = pair(Concatenation::None, NEW, keys(1, None), offer);
    let agreed = without.run().unwrap();
    assert_eq!((agreed.hash, agreed.group), (Hash::Sha512, Group::Null));
    assert!(without.host.take_generated().is_none());
    assert!(without.controller.take_generated().is_none());
}

#[test]
fn every_refusal_has_its_reason_code() {
    let all = Offer::default;
    let required = ChannelPolicy {
        required: true,
        ..NEW
    };
    let replace = ChannelPolicy {
        possible: Concatenation::Replace,
        required: false,
    };
    let cases = [
        // SC_C that the queue does not have.
        (
            Concatenation::New,
            ChannelPolicy::default(),
            all(),
            Failed::ConcatenationMismatch,
        ),
        (
            Concatenation::New,
            replace,
            all(),
            Failed::ConcatenationMismatch,
        ),
        (
            Concatenation::Replace,
            NEW,
            all(),
            Failed::ConcatenationMismatch,
        ),
        // SC_C 0 where the entry requires it.
        (
            Concatenation::None,
            required,
            all(),
            Failed::ConcatenationMismatch,
        ),
        // The host leaves these out of its offer.
        (
            Concatenation::New,
            NEW,
            only(Hash::Sha512, Group::Ffdhe2048),
            Failed::HashUnusable,
        ),
        (
            Concatenation::New,
            NEW,
            only(Hash::Sha256, Group::Null),
            Failed::GroupUnusable,
        ),
    ];
    for (wanted, policy, offer, failed) in cases {
        let mut pair = pair(wanted, policy, keys(1, None), offer);
        assert_eq!(pair.run(), Err(Reason::GivenUp(failed)), "{wanted:?}");
        let reason = pair.controller.take_failure().unwrap();
        assert_eq!(reason.failed(), failed);
        assert!(!reason.is_guess());
    }
}

/// Goal: a host that offers only the null group, SC_C 1, or no C2 fails with the right code.
/// Method: its messages are changed on the way.
#[test]
fn hosts_that_break_the_rules() {
    /// SC_C of Negotiate.
    const CHANNEL_AT: usize = 6;
    /// The number of groups of the first descriptor, and the first group.
    const GROUPS_AT: (usize, usize) = (8 + 3, 8 + 34);
    /// CVALID and S2 of Reply.
    const VALID_AT: usize = 8;
    const NUMBER_AT: usize = 12;
    type Change = fn(usize, &mut Vec<u8>);
    let cases: [(Change, Failed); 4] = [
        (
            |number, bytes| {
                if number == 0 {
                    bytes[CHANNEL_AT] = 1;
                }
            },
            Failed::ConcatenationMismatch,
        ),
        (
            |number, bytes| {
                if number == 0 {
                    bytes[GROUPS_AT.0] = 1;
                    bytes[GROUPS_AT.1] = 0;
                }
            },
            Failed::ConcatenationMismatch,
        ),
        (
            |number, bytes| {
                if number == 2 {
                    bytes[VALID_AT] = 0;
                }
            },
            Failed::IncorrectPayload,
        ),
        // S2 takes part in R2 only: without it there is none, and the host does not expect it.
        (
            |number, bytes| {
                if number == 2 {
                    bytes[NUMBER_AT] = 9;
                }
            },
            Failed::Authentication,
        ),
    ];
    for (change, failed) in cases {
        let pair = pair(Concatenation::New, NEW, keys(1, None), Offer::default());
        let mut pair = pair.meddling(change);
        assert_eq!(pair.run(), Err(Reason::GivenUp(failed)));
        assert!(pair.controller.take_generated().is_none());
        assert!(pair.host.take_generated().is_none());
    }
    // Without concatenation, S2 = 0 with CVALID 1 is a mistake.
    let keys = keys(1, Some(2));
    let pair = pair(Concatenation::None, NEW, keys, Offer::default());
    let mut pair = pair.meddling(|number, bytes| {
        if number == 2 {
            bytes[NUMBER_AT..][..4].fill(0);
        }
    });
    let failed = Failed::IncorrectPayload;
    assert_eq!(pair.run(), Err(Reason::GivenUp(failed)));
    assert_eq!(
        pair.controller.take_failure(),
        Some(Reason::Malformed(MessageError::Field {
            message: "Reply",
            field: "the sequence number",
            value: 0,
        }))
    );
}

/// Goal: R1 depends on SC_C, so an attacker on the way cannot remove the request for a secure
/// channel.
#[test]
fn an_attacker_cannot_remove_the_secure_channel() {
    let pair = pair(Concatenation::New, NEW, keys(1, None), Offer::default());
    let mut pair = pair.meddling(|number, bytes| {
        if number == 0 {
            let message = Message::parse(bytes).unwrap();
            assert!(matches!(message.body, Body::Negotiate(_)));
            bytes[6] = 0;
        }
    });
    assert!(pair.run().is_err());
    assert!(pair.host.take_generated().is_none());
}
