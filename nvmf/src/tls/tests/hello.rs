//! ClientHellos of OpenSSL, from the corpus of the fuzz target.

use std::path::Path;

use crate::tls::{
    Alert, ClientHello, Derivation, HelloError, Identity, Psk, PskSource, Refused, Suite,
};

const IDENTITY: &str = "NVMe0R01 nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001 nqn.2026-01.io.nacre:s1";

/// The PSKs of a target, in order.
struct Keys(Vec<&'static str>);

impl PskSource for Keys {
    fn psks(&self, _identity: &Identity) -> Vec<Psk> {
        let parse = |text: &&str| Psk::parse(text).expect("a PSK");
        self.0.iter().map(parse).collect()
    }
}

const RIGHT: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// The PSK of a hello of OpenSSL that was given a binder with SHA-384.
const LONG: &str =
    "NVMeTLSkey-1:02:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:";
const OTHER: &str = "NVMeTLSkey-1:01:BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwfLJNij:";

fn message(name: &str) -> Vec<u8> {
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
