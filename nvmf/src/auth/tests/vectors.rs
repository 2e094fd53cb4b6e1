//! Keys, groups and responses against values that other programs computed.

use crypto_bigint::{BoxedUint, Resize};
use hex_literal::hex;
use nacre_nvmf_wire::Nqn;

use crate::auth::group::{E, Exponent};
use crate::auth::hash::{Digest, Hash};
use crate::auth::response::{Basis, Prover};
use crate::auth::{
    Concatenation, Group, Names, NoRandom, Random, Secret, SecretError, SystemRandom,
};

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001";
const SUBSYSTEM: &str = "nqn.2026-01.io.nacre:s1";

/// Written by a Python program with `hmac` and `hashlib`:
///
/// ```python
/// def key(secret, hh, nqn):
///     return secret if hh == 0 else hmac.new(secret, nqn + b"NVMe-over-Fabrics", H[hh]).digest()
/// def response(h, key, c, s, t, role, own, other, z=None):
///     if z: c = hmac.new(hashlib.new(H[h], z).digest(), c, H[h]).digest()
///     text = c + struct.pack("<IHB", s, t, 0) + role + own + b"\0" + other
///     return hmac.new(key, text, H[h]).hexdigest()
/// ```
///
/// Each line has the hash, HH, whether there is a shared secret Z, R1 and R2. The secret and C1
/// count from 0, C2 from 20h, S1 is 1, S2 is 3, T_ID is 2, and Z is 0 and then 255 times 5Ah. The
/// SHA-256 lines with HH 01 agree with what a Linux 6.12 host and SPDK's host computed.
const RESPONSES: &str = include_str!("responses.txt");

fn names() -> Names {
    Names {
        host: Nqn::new(HOST).unwrap(),
        subsystem: Nqn::new(SUBSYSTEM).unwrap(),
    }
}

fn counting(from: usize, bytes: usize) -> Vec<u8> {
    (from..from + bytes).map(|value| value as u8).collect()
}

fn text(hh: u8, encoded: &str) -> String {
    format!("DHHC-1:{hh:02}:{encoded}:")
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// base64 of bytes that count from 0 and of their CRC-32, from Python's `base64` and `zlib`.
const SECRETS: [(usize, &str); 3] = [
    (32, "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR"),
    (
        48,
        "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==",
    ),
    (
        64,
        "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0+P4zODhA=",
    ),
];

#[test]
fn responses() {
    let (names, mut lines) = (names(), 0);
    let z = [&[0][..], &[0x5a; 255]].concat();
    for line in RESPONSES.lines() {
        lines += 1;
        let [hash, hh, shared, r1, r2] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let hash = Hash::from_id(hash.parse().unwrap()).unwrap();
        let encoded = SECRETS.iter().find(|(n, _)| *n == hash.bytes()).unwrap().1;
        let secret = Secret::parse(&text(hh.parse().unwrap(), encoded)).unwrap();
        let basis = Basis {
            hash,
            shared: (shared == "z").then_some(&z[..]),
            transaction: 2,
            channel: Concatenation::None,
            names: &names,
        };
        let (c1, c2) = (counting(0, hash.bytes()), counting(0x20, hash.bytes()));
        let of_host = basis.response(Prover::Host, &secret.key(&names.host), &c1, 1);
        let key = secret.key(&names.subsystem);
        let of_controller = basis.response(Prover::Controller, &key, &c2, 3);
        assert_eq!(hexadecimal(&of_host), r1, "{line}");
        assert_eq!(hexadecimal(&of_controller), r2, "{line}");
    }
    assert_eq!(lines, 24);
}

/// The vectors of a transaction with SC_C 2: R1, PSKg, its digest and the PSK of TLS. Written by a
/// Python program like the one above, with the same values.
#[test]
fn secure_channel() {
    use crate::tls::{Derivation, Psk, Version};
    let names = names();
    let z = [&[0][..], &[0x5a; 255]].concat();
    let basis = Basis {
        hash: Hash::Sha256,
        shared: Some(&z),
        transaction: 2,
        channel: Concatenation::New,
        names: &names,
    };
    let secret = Secret::parse(&text(1, SECRETS[0].1)).unwrap();
    let (c1, c2) = (counting(0, 32), counting(0x20, 32));
    let r1 = basis.response(Prover::Host, &secret.key(&names.host), &c1, 1);
    assert_eq!(
        hexadecimal(&r1),
        "c0140ebc07e85d627608efab4fb522379c842b7eb6373f68574a05bc2ac1c362"
    );
    let generated = basis.generated(&c1, &c2).unwrap();
    assert_eq!(
        hexadecimal(&generated),
        "ba29faa844ec676a8fe6d6eac35a1c9fcaddaa8952ba22d26b1c4819c3f74476"
    );
    let psk = Psk::generated(&generated);
    let identity = psk.offer(&names.host, &names.subsystem);
    let expected =
        format!("NVMe1G01 {HOST} {SUBSYSTEM} +My1G7h4l1IzXCzvLXbXjMF60kmsTzqjWmXZ6JtH2TQ=");
    assert_eq!(identity.to_string(), expected);
    assert_eq!(
        crate::tls::Identity::parse(expected.as_bytes()),
        Ok(identity.clone())
    );
    let key = psk.tls_psk(&identity, Derivation::Standard).unwrap();
    assert_eq!(
        hexadecimal(&key),
        "353fb4866ccd5a8cfaf7c2bdb2373bb97e31aa3b030bbfa93ca12327cb4a206b"
    );
    // Neither the other derivations nor version 0 exist for it, nor is it a configured PSK.
    for derivation in [Derivation::Libnvme, Derivation::Libnvme18] {
        assert!(psk.tls_psk(&identity, derivation).is_none());
    }
    let zero = psk.identity(
        Version::Zero,
        &names.host,
        &names.subsystem,
        Derivation::Standard,
    );
    assert!(psk.tls_psk(&zero, Derivation::Standard).is_none());
    let mut retained = identity;
    retained.is_generated = false;
    assert!(psk.tls_psk(&retained, Derivation::Standard).is_none());
}

/// Goal: secrets of all lengths and hashes are read and written, with what hosts tolerate.
#[test]
fn secrets() {
    for (bytes, encoded) in SECRETS {
        for hh in 0..=3 {
            let text = text(hh, encoded);
            let secret = Secret::parse(&text).unwrap();
            assert_eq!(secret.transform().map_or(0, Hash::id), hh);
            assert_eq!(*secret.to_text(), text);
            assert!(text.len() < Secret::MAX_TEXT);
            if hh == 0 {
                assert_eq!(secret.key(&names().host)[..], counting(0, bytes));
            }
            let without_colon = format!("  {}\n", &text[..text.len() - 1]);
            assert_eq!(Secret::parse(&without_colon), Ok(secret));
        }
    }
    for hash in [
        None,
        Some(Hash::Sha256),
        Some(Hash::Sha384),
        Some(Hash::Sha512),
    ] {
        let one = Secret::generate(hash, &mut SystemRandom).unwrap();
        let other = Secret::generate(hash, &mut SystemRandom).unwrap();
        assert_eq!(Secret::parse(&one.to_text()).as_ref(), Ok(&one));
        assert_ne!(one, other);
        assert_ne!(one.fingerprint(), other.fingerprint());
        assert_eq!(one.fingerprint().len(), 8);
    }
}

#[test]
fn texts_that_are_no_secrets() {
    let (_, good) = SECRETS[0];
    let bad_length = |bytes| SecretError::Length {
        bytes,
        allowed: "32, 48 or 64",
    };
    let bad_hash = |hash: &str| SecretError::Hash {
        hash: hash.into(),
        allowed: "00 (none), 01 (SHA-256), 02 (SHA-384) or 03 (SHA-512)",
    };
    // The last has 33 bytes and their true checksum.
    let table = [
        (String::new(), SecretError::Prefix("DHHC-1:")),
        (
            "NVMeTLSkey-1:01:AAAA:".into(),
            SecretError::Prefix("DHHC-1:"),
        ),
        ("DHHC-1:01".into(), SecretError::Short("DHHC-1:")),
        (format!("DHHC-1:{good}:"), SecretError::Short("DHHC-1:")),
        (text(4, good), bad_hash("04")),
        (format!("DHHC-1:1:{good}:"), bad_hash("1")),
        (text(1, &good[1..]), SecretError::Base64),
        (text(1, &good.replace('A', "!")), SecretError::Base64),
        (
            text(1, &good.replace("AwQF", "AwQG")),
            SecretError::Checksum,
        ),
        (text(1, "AAECAw=="), bad_length(0)),
        (text(1, &good[..44]), bad_length(29)),
        (text(1, &format!("{good}:x")), SecretError::Trailing),
    ];
    for (text, expected) in table {
        assert_eq!(Secret::parse(&text), Err(expected), "{text}");
    }
}

/// Goal: no way to print a value shows a secret.
#[test]
fn debug_shows_no_secret() {
    let secret = Secret::generate(Some(Hash::Sha256), &mut SystemRandom).unwrap();
    let key = secret.key(&names().host);
    let exponent = Group::Ffdhe2048.exponent(&mut SystemRandom).unwrap();
    let shown = format!("{secret:?} {key:?} {exponent:?}");
    let text = secret.to_text();
    assert!(!shown.contains(&text[10..30]), "{shown}");
    assert_eq!(
        shown,
        format!(
            "Secret({}) Digest(32 bytes) Exponent(29 bytes)",
            secret.fingerprint()
        )
    );
}

/// Goal: the table is what RFC 7919 defines. Method: e from its series, with numbers of 8192 bits.
#[test]
fn the_digits_of_e() {
    // 1/0! + 1/1! + 1/2! .., times 2^8126: 64 bits more than the table has, for the rounding.
    let precision = 8192;
    let one = BoxedUint::one_with_precision(precision);
    let mut term = one.shl(8126);
    let mut sum = BoxedUint::zero_with_precision(precision);
    let mut n = 1u64;
    while !bool::from(term.is_zero()) {
        sum = sum.wrapping_add(&term);
        let divisor = BoxedUint::from_be_slice(&n.to_be_bytes(), 64).unwrap();
        let divisor = divisor.resize(precision).into_nz();
        term = term.wrapping_div_vartime(&Option::from(divisor).unwrap());
        n += 1;
    }
    // 8128 bits: the upper 8064 are the table.
    let bytes = sum.to_be_bytes();
    assert_eq!(bytes[8..][..E.len()], E);
}

/// Bytes that repeat, as the random generator of a test.
struct RepeatedByte(u8);

impl Random for RepeatedByte {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), NoRandom> {
        bytes.fill(self.0);
        Ok(())
    }
}

/// Goal: primes, public values and shared secrets are those of other programs. Method: SHA-256 of
/// the primes that `openssl genpkey -genparam -pkeyopt group:ffdhe2048` has, and of Python's
/// `pow(2, x, p)`, where x repeats A5h on this side and 5Ah on the other.
#[test]
fn groups() {
    let table = [
        (
            Group::Ffdhe2048,
            hex!("9cd3b7f336872f46c09428d1bbc19877a4d440512cda8d1c1cf0cd6e33698966"),
            hex!("e49dd29e942c0e3f2b646f6a718fd74694055c72101c58641bf5517ca5ff303e"),
            hex!("fdaa55f8c026ab3fd4b7a4d3b3ea26273e4c51afbd4c3d31f3cf1b862435e613"),
        ),
        (
            Group::Ffdhe3072,
            hex!("0eaf67db3a839156d5013494a5318a772b5697d270d721f37f092efc69ea5a17"),
            hex!("cb0f0a339cd98539ada51c2eceec4b82ba8fd135351f03f60a260f42ca2e6830"),
            hex!("8b63e5b49fe6be1a41c29fca82a98c01e1cb79d346ffc7247b78e783adbeeaf6"),
        ),
        (
            Group::Ffdhe4096,
            hex!("4648414224ac881b3d0dc59b466f96d06a558278776807797ecf1f66ff397b3e"),
            hex!("3b1f7be91c56a052efcfa535449619dad9da5366089312e4dc7728765151b1aa"),
            hex!("d8ebb6c84d29a2d5fe0e5f9207ade946e3df544d5a7ce38bdbdb5cbed83181ea"),
        ),
        (
            Group::Ffdhe6144,
            hex!("227ac9066b3ddd9e193670cda2388fa884f65ba0cf98b742d1fe77a6687c79c7"),
            hex!("2135fc1b6ae5758ef4f417d5a07de5a5c509c7bfdfad9cea10eae76d960d5289"),
            hex!("50a3e21aad3758fb58afb31bf1f89a791de2c81aa2102bc7021fdc2b71666910"),
        ),
        (
            Group::Ffdhe8192,
            hex!("770b14efaf6f049929c523113b3fa99a8d11dab1b18af3609590122075d19833"),
            hex!("122581b1a1a94dc7d681cf4dc51f899de9f4d7105f3e73c0114a19e6440fa2c5"),
            hex!("668331b569d876e36acc0be2b03df77b3b5b9881f98c4fa9665e7a6a86ec30d8"),
        ),
    ];
    let sha256 = |bytes: &[u8]| Hash::Sha256.digest(bytes);
    let is = |digest: Digest, expected: [u8; 32]| assert_eq!(digest[..], expected);
    for (group, prime, public, shared) in table {
        let own: Exponent = group.exponent(&mut RepeatedByte(0xa5)).unwrap();
        let other = group.exponent(&mut RepeatedByte(0x5a)).unwrap();
        is(sha256(&group.prime()), prime);
        is(sha256(&group.public(&own)), public);
        is(sha256(&group.shared(&group.public(&other), &own)), shared);
        let same = group.shared(&group.public(&own), &other);
        is(sha256(&same), shared);
        assert_eq!(same.len(), group.bytes());
    }
}

/// Goal: values that make the shared secret known are refused: 0, 1, p - 1, p and above.
#[test]
fn public_values() {
    assert!(Group::Null.has(&[]));
    assert!(!Group::Null.has(&[2]));
    for group in Group::ALL.into_iter().skip(1) {
        let bytes = group.bytes();
        let small = |value: u8| {
            let mut public = vec![0; bytes];
            public[bytes - 1] = value;
            public
        };
        let below_prime = |less: u8| {
            let mut public = group.prime();
            public[bytes - 1] -= less;
            public
        };
        for bad in [small(0), small(1), below_prime(1), below_prime(0)] {
            assert!(!group.has(&bad));
        }
        assert!(!group.has(&vec![0xff; bytes]));
        assert!(!group.has(&vec![3; bytes - 1]));
        assert!(!group.has(&vec![3; bytes + 1]));
        for good in [small(2), below_prime(2), vec![3; bytes]] {
            assert!(group.has(&good), "{group}");
        }
    }
}
