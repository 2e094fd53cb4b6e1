//! Keys, identities and digests, from libnvme's tests and from an independent computation.

use hex_literal::hex;
use nacre_nvmf_wire::Nqn;

use crate::auth::{Hash, SecretError, SystemRandom};
use crate::tls::derive::digest_of;
use crate::tls::psk::FORM;
use crate::tls::{Derivation, Identity, IdentityError, Psk, Version};

const COUNTING_32: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

fn nqn(text: &str) -> Nqn {
    Nqn::new(text).expect("a name")
}

fn names() -> (Nqn, Nqn) {
    (
        nqn("nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001"),
        nqn("nqn.2026-01.io.nacre:s1"),
    )
}

fn psk(bytes: &[u8], transform: Option<Hash>) -> Psk {
    Psk::parse(&FORM.write(transform, bytes)).expect("a PSK")
}

fn tls_psk(psk: &Psk, version: Version, derivation: Derivation) -> Option<Vec<u8>> {
    let (host, subsystem) = names();
    let identity = psk.identity(version, &host, &subsystem, derivation);
    psk.tls_psk(&identity, derivation).map(|key| key.to_vec())
}

fn counting(len: u8) -> Vec<u8> {
    (0..len).collect()
}

#[test]
fn keys_of_both_versions_and_derivations() {
    use Derivation::{Libnvme, Libnvme18, Standard};
    use Version::{One, Zero};
    let short = Psk::parse(COUNTING_32).expect("a PSK");
    let zero = hex!("d090132f396576d56f01f0ff149e118a5021924458bedc4f1f96515a3ef31471");
    let legacy = hex!("be739a49f8178b31fdcc51201bb92f7f5e34426e5c10315a656a21138da0d4e0");
    let one = hex!("2c6cb6932ec3934df33d49eb9482205c1d46cf7931a4b75c3d1cad7c924f32d5");
    assert_eq!(tls_psk(&short, Zero, Standard).unwrap(), zero);
    assert_eq!(tls_psk(&short, Zero, Libnvme).unwrap(), legacy);
    assert_eq!(tls_psk(&short, One, Standard).unwrap(), one);
    // What differs from a version that is known has no vector of its own.
    assert_eq!(tls_psk(&short, Zero, Libnvme18), None);
    assert_ne!(
        tls_psk(&short, One, Libnvme18),
        tls_psk(&short, One, Libnvme)
    );
    let long = psk(&counting(48), Some(Hash::Sha384));
    let expected = hex!(
        "43a3ba52af1d548e96315c5f8575f8c78fa73fd877612b737523fae44a772147"
        "4abf0a658d37618042f9ec5ee94e5217"
    );
    assert_eq!(tls_psk(&long, Zero, Standard).unwrap(), expected);
}

/// The digests of libnvme's own test (`test/psk.c`), for its derivation and for the standard's.
#[test]
fn digests_of_libnvme() {
    let secret = hex!("5512dbb6737d0106f65975b773dfb011ffc344bcf442e2dd6d8bc4870b5d5b03");
    let psk = psk(&secret, Some(Hash::Sha256));
    // libnvme takes names without a date.
    let (host, subsystem) = ("nqn.psk-test-host", "nqn.psk-test-subsys");
    for (derivation, digest) in [
        (
            Derivation::Standard,
            "iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU=",
        ),
        (
            Derivation::Libnvme,
            "66GuqV08TsAGII39teWUfwQwizjv06Jy8jOcX3NAAzM=",
        ),
    ] {
        let retained = psk.retained(host, derivation);
        let computed = digest_of(Hash::Sha256, &retained, host, subsystem);
        assert_eq!(computed, digest);
    }
}

#[test]
fn texts_of_psks() {
    for (transform, len) in [
        (None, 32),
        (None, 48),
        (Some(Hash::Sha256), 32),
        (Some(Hash::Sha384), 48),
    ] {
        let one = psk(&counting(len), transform);
        let text = one.to_text();
        assert_eq!(one.hash().bytes(), usize::from(len));
        let without_colon = format!(" {}\n", &text[..text.len() - 1]);
        assert_eq!(Psk::parse(&without_colon).as_ref(), Ok(&one));
        assert_eq!(format!("{one:?}"), format!("Psk({})", one.fingerprint()));
    }
    let made = Psk::generate(&mut SystemRandom).expect("random bytes");
    assert_eq!(Psk::parse(&made.to_text()), Ok(made));

    let good = &COUNTING_32["NVMeTLSkey-1:01:".len()..COUNTING_32.len() - 1];
    let text = |hash: &str, encoded: &str| format!("NVMeTLSkey-1:{hash}:{encoded}:");
    let bad_hash = |hash: &str| SecretError::Hash {
        hash: hash.into(),
        allowed: "00 (none), 01 (SHA-256) or 02 (SHA-384)",
    };
    let bad_length = |bytes| SecretError::Length {
        bytes,
        allowed: "32 (SHA-256) or 48 (SHA-384)",
    };
    let table = [
        (String::new(), SecretError::Prefix("NVMeTLSkey-1:")),
        (
            "DHHC-1:01:AAAA:".into(),
            SecretError::Prefix("NVMeTLSkey-1:"),
        ),
        (
            "NVMeTLSkey-1:01".into(),
            SecretError::Short("NVMeTLSkey-1:"),
        ),
        (text("03", good), bad_hash("03")),
        (text("1", good), bad_hash("1")),
        (text("02", good), bad_length(32)),
        (text("01", "AAECAw=="), bad_length(0)),
        (text("01", &good[1..]), SecretError::Base64),
        (
            text("01", &good.replace("AwQF", "AwQG")),
            SecretError::Checksum,
        ),
        (text("01", &format!("{good}:x")), SecretError::Trailing),
    ];
    for (text, expected) in table {
        assert_eq!(Psk::parse(&text), Err(expected), "{text}");
    }
}

#[test]
fn identities() {
    let (host, subsystem) = names();
    let parse = |text: &str| Identity::parse(text.as_bytes());
    let zero = format!("NVMe0R02 {host} {subsystem}");
    let parsed = parse(&zero).expect("an identity");
    assert_eq!((parsed.version, parsed.hash), (Version::Zero, Hash::Sha384));
    assert_eq!(parsed.to_string(), zero);
    let table = [
        ("", IdentityError::Prefix),
        ("Client_identity", IdentityError::Prefix),
        ("NVMe2R01 nqn.a nqn.b", IdentityError::Prefix),
        ("NVMe0R03 nqn.a nqn.b", IdentityError::Prefix),
        ("NVMe0G01 nqn.a nqn.b", IdentityError::Generated),
        ("NVMe0R01 nqn.a", IdentityError::Parts(2)),
        ("NVMe0R01 nqn.a nqn.b x", IdentityError::Parts(4)),
        ("NVMe1R01 nqn.a nqn.b", IdentityError::Parts(3)),
    ];
    for (text, expected) in table {
        assert_eq!(parse(text), Err(expected), "{text}");
    }
    assert!(parse("NVMe0R01 me nqn.2026-01.io.nacre:s1").is_ok());
    let error = parse("NVMe0R01  nqn.2026-01.io.nacre:s1").unwrap_err();
    assert!(matches!(error, IdentityError::Host(_)), "{error}");
    let error = parse("NVMe0R01 me you").unwrap_err();
    assert!(matches!(error, IdentityError::Subsystem(_)), "{error}");
    assert_eq!(Identity::parse(&[0xff; 40]), Err(IdentityError::Prefix));
}

/// Goal: an identity fits the PSK that made it, and no other.
#[test]
fn an_identity_of_another_psk_has_no_key() {
    let (host, subsystem) = names();
    let (one, other) = (
        psk(&counting(32), Some(Hash::Sha256)),
        psk(&[7; 32], Some(Hash::Sha256)),
    );
    let standard = Derivation::Standard;
    let identity = one.identity(Version::One, &host, &subsystem, standard);
    assert!(one.tls_psk(&identity, standard).is_some());
    assert!(one.tls_psk(&identity, Derivation::Libnvme).is_none());
    assert!(other.tls_psk(&identity, standard).is_none());
    // Version 0 does not name the PSK.
    let identity = one.identity(Version::Zero, &host, &subsystem, standard);
    assert_ne!(
        one.tls_psk(&identity, standard).map(|key| key.to_vec()),
        other.tls_psk(&identity, standard).map(|key| key.to_vec())
    );
    // The context of version 0 has one byte of length.
    let long = nqn(&format!("nqn.2026-01.io.nacre:{}", "x".repeat(200)));
    let identity = one.identity(Version::Zero, &long, &long, standard);
    assert!(one.tls_psk(&identity, standard).is_none());
    assert_eq!(one.offer(&long, &long).version, Version::One);
    assert_eq!(one.offer(&host, &subsystem).version, Version::Zero);
    let identity = one.identity(Version::One, &long, &long, standard);
    assert!(one.tls_psk(&identity, standard).is_some());
}
