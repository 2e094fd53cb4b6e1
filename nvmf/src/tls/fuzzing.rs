//! The body of the fuzz target `tls_hello`. It is here, not in the target, so that an ordinary test
//! replays its corpus.
//!
//! ```text
//!   byte 0   modulo 3: 0 a ClientHello, 1 an identity, 2 the text of a PSK
//!   then     its bytes
//! ```
//!
//! It proves: no panic; accepted identities and PSKs survive writing and reading; no ClientHello
//! chooses a key that its binder does not prove.

use std::sync::Arc;

use super::{ClientHello, Identity, Psk, PskKey, PskSource, binder};

/// A PSK that every identity of its hash function may use.
struct Any(Vec<Arc<dyn PskKey>>);

impl PskSource for Any {
    fn psks(&self, _identity: &Identity) -> Vec<Arc<dyn PskKey>> {
        self.0.clone()
    }
}

pub fn tls_hello(input: &[u8]) {
    let [choice, rest @ ..] = input else { return };
    match choice % 3 {
        0 => hello(rest),
        1 => {
            let _ = Identity::parse(rest).map(|identity| {
                let text = identity.to_string();
                assert_eq!(
                    text.as_bytes(),
                    rest,
                    "an identity is written as it was read"
                );
            });
        }
        _ => {
            let text = String::from_utf8_lossy(rest);
            let _ = Psk::parse(&text).map(|psk| {
                assert_eq!(Psk::parse(&psk.to_text()), Ok(psk));
            });
        }
    }
}

fn hello(message: &[u8]) {
    let Ok(hello) = ClientHello::parse(message) else {
        return;
    };
    let psk = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    let key = Psk::parse(psk).map(|psk| Arc::new(psk) as Arc<dyn PskKey>);
    let keys = Any(key.into_iter().collect());
    let Ok(chosen) = hello.choose(&keys) else {
        return;
    };
    let of_chosen = |(identity, _): &&(&[u8], &[u8])| *identity == chosen.offered;
    let (_, theirs) = hello
        .offered()
        .iter()
        .find(of_chosen)
        .expect("it was offered");
    // All of the message but the binders, the lengths of each and of their list.
    let binders: usize = hello
        .offered()
        .iter()
        .map(|(_, binder)| 1 + binder.len())
        .sum();
    let truncated = &message[..message.len() - 2 - binders];
    let expected = binder(chosen.suite.hash(), &chosen.key, truncated);
    assert!(expected.equals(theirs), "a binder proves the chosen key");
}
