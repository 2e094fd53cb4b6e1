//! ClientHellos of OpenSSL, from the corpus of the fuzz target.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::auth::KeyError;
use crate::tls::{
    Alert, ClientHello, Derivation, HelloError, Identity, Psk, PskKey, PskSource, Refused, Suite,
};

pub(super) const IDENTITY: &str = "NVMe0R01 nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001 nqn.2026-01.io.nacre:s1";

/// The PSKs of a target, in order.
pub(super) struct Keys(pub Vec<&'static str>);

impl PskSource for Keys {
    fn psks(&self, _identity: &Identity) -> Vec<Arc<dyn PskKey>> {
        let parse = |text: &&str| Arc::new(Psk::parse(text).expect("a PSK")) as _;
        self.0.iter().map(parse).collect()
    }
}

pub(super) const RIGHT: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// The PSK of a hello of OpenSSL that was given a binder with SHA-384.
const LONG: &str =
    "NVMeTLSkey-1:02:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:";
const OTHER: &str = "NVMeTLSkey-1:01:BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwfLJNij:";

pub(super) fn message(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/tls_hello");
    std::fs::read(folder.join(name)).expect("in the corpus")[1..].to_vec()
}

#[test]
fn the_key_that_fits() {
    let both = || Keys(vec![OTHER, RIGHT]);
    for (name, suite, derivation) in [
        ("openssl_sha256", Suite::Aes128Sha256, Derivation::Standard),
        ("openssl_legacy", Suite::Aes128Sha256, Derivation::Libnvme),
        (
            "openssl_both_suites",
            Suite::Aes128Sha256,
            Derivation::Standard,
        ),
    ] {
        let bytes = message(name);
        let hello = ClientHello::parse(&bytes).expect(name);
        let chosen = hello.choose(&both()).expect(name);
        assert_eq!((chosen.suite, chosen.derivation), (suite, derivation));
        assert_eq!(chosen.offered, IDENTITY.as_bytes());
        let shown = format!("{chosen:?}");
        assert!(shown.contains("Digest(32 bytes)"), "{shown}");
    }
    let bytes = message("openssl_sha384");
    let hello = ClientHello::parse(&bytes).expect("a hello");
    let chosen = hello.choose(&Keys(vec![LONG])).expect("a key");
    assert_eq!(chosen.suite, Suite::Aes256Sha384);
}

#[test]
fn no_key_fits() {
    let refused = |name: &str, keys: Vec<&'static str>| {
        let bytes = message(name);
        let hello = ClientHello::parse(&bytes).expect(name);
        let why = hello.choose(&Keys(keys)).unwrap_err();
        (why.alert().to_string(), why)
    };
    let identity = || IDENTITY.to_owned();
    assert_eq!(
        refused("openssl_wrong_key", vec![RIGHT]),
        (
            "decrypt_error".into(),
            Refused::Binder {
                identity: identity()
            }
        )
    );
    assert_eq!(
        refused("openssl_sha256", vec![]),
        (
            "unknown_psk_identity".into(),
            Refused::Unknown {
                identity: identity()
            }
        )
    );
    let (alert, why) = refused("openssl_no_identity_of_nvme", vec![RIGHT]);
    assert_eq!(alert, "unknown_psk_identity");
    assert!(matches!(why, Refused::Identity { .. }), "{why}");
    assert_eq!(
        refused("openssl_without_psk", vec![RIGHT]),
        ("missing_extension".into(), Refused::NoPsk)
    );
}

/// Goal: every shorter message, and every one with something behind it, is an error with an alert.
#[test]
fn cut_and_extended() {
    let bytes = message("openssl_sha256");
    for end in 0..bytes.len() {
        let error = ClientHello::parse(&bytes[..end]).unwrap_err();
        assert_eq!(error.alert(), Alert::DECODE_ERROR, "{end}: {error}");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    let error = ClientHello::parse(&longer).unwrap_err();
    assert_eq!(error, HelloError::Length("message"));
    let mut other = bytes;
    other[0] = 2;
    assert_eq!(ClientHello::parse(&other), Err(HelloError::NotHello));
}

/// Goal: a change of any byte before the binders makes the binder wrong, or is found before.
#[test]
fn a_changed_hello_has_no_key() {
    let bytes = message("openssl_sha256");
    // The last 35 bytes are the binder with its lengths.
    for at in 0..bytes.len() - 35 {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        let chosen = ClientHello::parse(&changed)
            .ok()
            .and_then(|hello| hello.choose(&Keys(vec![RIGHT])).ok());
        assert!(chosen.is_none(), "byte {at}");
    }
}

/// A ClientHello of OpenSSL that offers these identities in the place of its own, with wrong
/// binders.
fn offering(identities: &[&str]) -> Vec<u8> {
    let mut bytes = message("openssl_sha256");
    // The extension pre_shared_key is the last: type, length, identities, binders.
    let of_identity = 2 + IDENTITY.len() + 4;
    let extension = 4 + 2 + of_identity + 2 + 1 + 32;
    let at = bytes.len() - extension;
    assert_eq!(bytes[at..at + 2], [0, 41]);
    let offered = identities.iter().flat_map(|identity| {
        let length = (identity.len() as u16).to_be_bytes();
        [&length, identity.as_bytes(), &[0; 4]].concat()
    });
    let offered: Vec<u8> = offered.collect();
    let binders = [&[32][..], &[7; 32]].concat().repeat(identities.len());
    let with_length = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes(), bytes].concat();
    let data = [with_length(&offered), with_length(&binders)].concat();
    bytes.truncate(at + 2);
    bytes.extend(with_length(&data));
    let grown = data.len() + 4;
    // The lengths of the message and of its extensions include the added bytes.
    let extensions = extensions_at(&bytes);
    let length = u16::from_be_bytes([bytes[extensions], bytes[extensions + 1]]) as usize;
    let length = (length - extension + grown) as u16;
    bytes[extensions..extensions + 2].copy_from_slice(&length.to_be_bytes());
    let length = (bytes.len() - 4) as u32;
    bytes[1..4].copy_from_slice(&length.to_be_bytes()[1..]);
    bytes
}

/// Where the length of the extensions is.
pub(super) fn extensions_at(bytes: &[u8]) -> usize {
    let session_id = 4 + 2 + 32;
    let suites = session_id + 1 + usize::from(bytes[session_id]);
    let compression =
        suites + 2 + usize::from(u16::from_be_bytes([bytes[suites], bytes[suites + 1]]));
    compression + 1 + usize::from(bytes[compression])
}

/// Counts how often its keys are asked for.
struct Counting(AtomicUsize);

impl PskSource for Counting {
    fn psks(&self, _identity: &Identity) -> Vec<Arc<dyn PskKey>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        vec![Arc::new(Psk::parse(RIGHT).expect("a PSK"))]
    }
}

/// Goal: the keys of an identity are tried once, and those of at most eight.
#[test]
fn identities_are_tried_once() {
    let tried = |identities: &[&str]| {
        let bytes = offering(identities);
        let counting = Counting(AtomicUsize::new(0));
        let hello = ClientHello::parse(&bytes).expect("a hello");
        let refused = hello.choose(&counting).unwrap_err();
        assert!(matches!(refused, Refused::Binder { .. }), "{refused}");
        counting.0.into_inner()
    };
    assert_eq!(tried(&[IDENTITY]), 1);
    assert_eq!(tried(&[IDENTITY; 40]), 1);
    let others: Vec<String> = (0..20).map(|n| format!("{IDENTITY}{n}")).collect();
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    assert_eq!(tried(&others), 8);
    let twice: Vec<&str> = others[..3].iter().flat_map(|one| [*one, *one]).collect();
    assert_eq!(tried(&twice), 3);
}

#[test]
fn identities_have_a_bound() {
    let bytes = offering(&[IDENTITY; 64]);
    assert!(ClientHello::parse(&bytes).is_ok());
    let bytes = offering(&[IDENTITY; 65]);
    let error = ClientHello::parse(&bytes).unwrap_err();
    assert_eq!(error, HelloError::Identities);
    assert_eq!(error.alert(), Alert::ILLEGAL_PARAMETER);
}

/// A key whose file is away.
#[derive(Debug)]
struct Away;

impl PskKey for Away {
    fn psk(&self) -> Result<Psk, KeyError> {
        Err(KeyError::None)
    }
}

/// That key, and others.
struct Partly(Vec<&'static str>);

impl PskSource for Partly {
    fn psks(&self, identity: &Identity) -> Vec<Arc<dyn PskKey>> {
        let mut psks = Keys(self.0.clone()).psks(identity);
        psks.insert(0, Arc::new(Away));
        psks
    }
}

#[test]
fn a_key_that_cannot_be_read() {
    let bytes = message("openssl_sha256");
    let hello = ClientHello::parse(&bytes).expect("a hello");
    let refused = hello.choose(&Partly(vec![])).unwrap_err();
    assert_eq!(refused.alert(), Alert::INTERNAL_ERROR);
    let (host, subsystem) = refused.names().expect("names of the identity");
    let expected = format!("NVMe0R01 {host} {subsystem}");
    assert_eq!(expected, IDENTITY);
    assert!(matches!(refused, Refused::Unreadable { .. }), "{refused}");
    // The unreadable key may be the one that fits.
    let refused = hello.choose(&Partly(vec![OTHER])).unwrap_err();
    assert!(matches!(refused, Refused::Unreadable { .. }), "{refused}");
    assert!(hello.choose(&Partly(vec![OTHER, RIGHT])).is_ok());
}
