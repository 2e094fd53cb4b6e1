//! ClientHellos whose offers the target refuses, and malformed lists of extensions. Each is a hello
//! of OpenSSL with other extensions, and a binder that fits the changed bytes.

use super::hello::{IDENTITY, Keys, RIGHT, extensions_at, message};
use crate::auth::Hash;
use crate::tls::derive::binder;
use crate::tls::{Alert, ClientHello, Derivation, HelloError, Identity, Psk, Refused, Suite};

const PRE_SHARED_KEY: u16 = 41;
const SUPPORTED_VERSIONS: u16 = 43;
const PSK_MODES: u16 = 45;
/// An extension that the target does not know.
const OTHER: u16 = 0xfafa;
const BINDER: usize = 32;

/// A ClientHello in parts.
struct Hello {
    /// From the header to the random bytes and the session id.
    head: Vec<u8>,
    suites: Vec<u8>,
    compression: Vec<u8>,
    extensions: Vec<(u16, Vec<u8>)>,
}

fn with_length(bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).expect("short");
    [&length.to_be_bytes(), bytes].concat()
}

impl Hello {
    fn of_openssl() -> Self {
        let bytes = message("openssl_sha256");
        let number = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let session_id = 4 + 2 + 32;
        let suites = session_id + 1 + usize::from(bytes[session_id]);
        let compression = suites + 2 + usize::from(number(suites));
        let at = extensions_at(&bytes);
        let (mut extensions, mut next) = (Vec::new(), at + 2);
        while next < bytes.len() {
            let end = next + 4 + usize::from(number(next + 2));
            extensions.push((number(next), bytes[next + 4..end].to_vec()));
            next = end;
        }
        Self {
            head: bytes[..suites].to_vec(),
            suites: bytes[suites + 2..compression].to_vec(),
            compression: bytes[compression..at].to_vec(),
            extensions,
        }
    }

    fn extension(&mut self, kind: u16) -> &mut Vec<u8> {
        let mut found = self.extensions.iter_mut().filter(|(one, _)| *one == kind);
        &mut found.next().expect("OpenSSL sends it").1
    }

    /// The bytes of the message.
    fn bytes(&self) -> Vec<u8> {
        let extensions = self.extensions.iter().flat_map(|(kind, data)| {
            let kind = kind.to_be_bytes();
            [&kind[..], &with_length(data)].concat()
        });
        let extensions: Vec<u8> = extensions.collect();
        let mut bytes = self.head.clone();
        bytes.extend(with_length(&self.suites));
        bytes.extend(&self.compression);
        bytes.extend(with_length(&extensions));
        let length = u32::try_from(bytes.len() - 4).expect("short");
        bytes[1..4].copy_from_slice(&length.to_be_bytes()[1..]);
        bytes
    }

    /// The same with a binder of the PSK [`RIGHT`].
    fn bound(&self) -> Vec<u8> {
        let mut bytes = self.bytes();
        let identity = Identity::parse(IDENTITY.as_bytes()).expect("an identity");
        let psk = Psk::parse(RIGHT).expect("a PSK");
        let key = psk.tls_psk(&identity, Derivation::Standard);
        let key = key.expect("of this identity");
        // The list of binders is the end: its length, and one binder with its length.
        let at = bytes.len() - BINDER;
        let fitting = binder(Hash::Sha256, &key, &bytes[..at - 3]);
        bytes[at..].copy_from_slice(&fitting);
        bytes
    }

    fn refused(&self) -> Refused {
        let bytes = self.bound();
        let hello = ClientHello::parse(&bytes).expect("a hello");
        hello.choose(&Keys(vec![RIGHT])).expect_err("refused")
    }

    fn malformed(&self) -> HelloError {
        let bytes = self.bytes();
        let Err(error) = ClientHello::parse(&bytes) else {
            panic!("it is parsed");
        };
        error
    }
}

/// Goal: the parts and the binder of these tests are those of a good hello.
#[test]
fn the_unchanged_hello_is_accepted() {
    let bytes = Hello::of_openssl().bound();
    assert_eq!(bytes, message("openssl_sha256"));
    let hello = ClientHello::parse(&bytes).expect("a hello");
    let chosen = hello.choose(&Keys(vec![RIGHT])).expect("a key");
    assert_eq!(chosen.suite, Suite::Aes128Sha256);
}

/// Goal: a host that takes a PSK only without a key exchange (psk_ke) is refused, because a
/// recorded connection could be read with the PSK later.
#[test]
fn a_psk_without_key_exchange() {
    let mut hello = Hello::of_openssl();
    *hello.extension(PSK_MODES) = vec![1, 0];
    let refused = hello.refused();
    assert_eq!(refused, Refused::Mode);
    assert_eq!(refused.alert(), Alert::HANDSHAKE_FAILURE);
    assert_eq!(refused.names(), None);
    // With both modes the target uses the one with a key exchange.
    *hello.extension(PSK_MODES) = vec![2, 0, 1];
    let bytes = hello.bound();
    let hello = ClientHello::parse(&bytes).expect("a hello");
    assert!(hello.choose(&Keys(vec![RIGHT])).is_ok());
}

/// Goal: a host without the cipher suite of its identity's hash function is refused with alert 40
/// (handshake_failure), and the log names the suite. Method: the binder fits, so that only the
/// suite is wrong.
#[test]
fn no_common_cipher_suite() {
    let mut hello = Hello::of_openssl();
    let other = Suite::Aes256Sha384.id().to_be_bytes();
    hello.suites = [&other[..], &[0x13, 0x03]].concat();
    let refused = hello.refused();
    let expected = Refused::Suite {
        identity: IDENTITY.to_owned(),
        suite: "TLS_AES_128_GCM_SHA256",
    };
    assert_eq!(refused, expected);
    assert_eq!(refused.alert(), Alert::HANDSHAKE_FAILURE);
    assert_eq!(refused.alert(), Alert(40));
    let (host, subsystem) = refused.names().expect("of the identity");
    assert_eq!(format!("NVMe0R01 {host} {subsystem}"), IDENTITY);
}

/// Goal: a host that offers only TLS 1.2 is refused with alert 70 (protocol_version).
#[test]
fn an_older_version() {
    let mut without = Hello::of_openssl();
    without
        .extensions
        .retain(|(kind, _)| *kind != SUPPORTED_VERSIONS);
    let mut older = Hello::of_openssl();
    *older.extension(SUPPORTED_VERSIONS) = vec![2, 3, 3];
    // The version of the header is 1.2 in every hello of TLS 1.3.
    let mut header = Hello::of_openssl();
    header.head[5] = 1;
    for hello in [without, older, header] {
        let refused = hello.refused();
        assert_eq!(refused, Refused::Version);
        assert_eq!(refused.alert(), Alert::PROTOCOL_VERSION);
        assert_eq!(refused.alert(), Alert(70));
    }
}

/// Goal: lists of extensions that RFC 8446 forbids are errors with alert 47 (illegal_parameter).
#[test]
fn malformed_lists_of_extensions() {
    let mut twice = Hello::of_openssl();
    let first = twice.extensions[0].clone();
    twice.extensions.insert(1, first);
    assert_eq!(twice.malformed(), HelloError::Twice);

    // A second pre_shared_key is an extension twice, too.
    let mut twice = Hello::of_openssl();
    let last = twice.extensions.last().expect("some").clone();
    assert_eq!(last.0, PRE_SHARED_KEY);
    twice.extensions.push(last);
    assert_eq!(twice.malformed(), HelloError::Twice);

    let mut early = Hello::of_openssl();
    early.extensions.push((OTHER, Vec::new()));
    assert_eq!(early.malformed(), HelloError::NotLast);
    early.extensions.retain(|(kind, _)| *kind != PRE_SHARED_KEY);
    assert!(ClientHello::parse(&early.bytes()).is_ok());

    let identity = [with_length(IDENTITY.as_bytes()), vec![0; 4]].concat();
    let one = [&[BINDER as u8][..], &[7; BINDER]].concat();
    for (identities, binders) in [(1, 0), (2, 1), (1, 2), (0, 0), (0, 1)] {
        let mut hello = Hello::of_openssl();
        *hello.extension(PRE_SHARED_KEY) = [
            with_length(&identity.repeat(identities)),
            with_length(&one.repeat(binders)),
        ]
        .concat();
        let expected = HelloError::Binders {
            identities,
            binders,
        };
        assert_eq!(hello.malformed(), expected);
    }
    for error in [HelloError::Twice, HelloError::NotLast] {
        assert_eq!(error.alert(), Alert::ILLEGAL_PARAMETER);
    }
    let binders = HelloError::Binders {
        identities: 1,
        binders: 0,
    };
    assert_eq!(binders.alert(), Alert(47));
}
