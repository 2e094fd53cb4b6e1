//! A TLS 1.3 handshake with a pre-shared key, without I/O: takes the peer's bytes, returns bytes
//! for the peer, and ends in a [`Session`]. s2n-tls (the library) performs it.
//!
//! A target parses the ClientHello itself to choose the PSK by the identities that the host offers.
//! Then s2n-tls gets the same bytes, and only that PSK.

use std::sync::{Arc, OnceLock};

use nacre_nvmf::auth::{Digest, SystemRandom};
use nacre_nvmf::tls::{
    ChosenPsk, ClientHello, Derivation, Identity, Psk, PskKey, PskSource, Suite, Version,
};
use nacre_nvmf_wire::Nqn;
use s2n_tls::enums::Mode;

use crate::error::Failure;
use crate::library::Library;
use crate::records::{HEADER, MOST_DATA, header, kind, plain};
use crate::session::Session;

/// Most bytes of a ClientHello with its record headers.
const MOST_HELLO: usize = 16 << 10;
/// Most bytes that a handshake receives.
const MOST_BYTES: usize = 64 << 10;

/// The role of this end in a handshake, and its keys.
pub enum Role {
    /// A target (TLS server), which looks up the PSK identities that the host offers.
    Target(Arc<dyn PskSource>),
    /// A host (TLS client), which offers one PSK identity. `derivation`: how the TLS PSK is derived
    /// from the configured PSK.
    Host {
        identity: Identity,
        psk: Psk,
        derivation: Derivation,
    },
}

enum State {
    /// Waits for the rest of the ClientHello.
    Hello(Arc<dyn PskSource>, Vec<u8>),
    Running(Library, Box<ChosenPsk>),
    Over,
}

/// One handshake in progress.
pub struct Handshake {
    state: State,
    is_target: bool,
    output: Vec<u8>,
    /// The library has sent a message. An alert after it must be encrypted with the library's keys.
    has_spoken: bool,
    /// Bytes received.
    count: usize,
}

/// The result of a handshake.
pub struct Outcome {
    pub session: Session,
    /// The PSK identity that both ends agreed on.
    pub identity: Identity,
    /// The PSK of that identity.
    pub psk: Arc<dyn PskKey>,
    pub suite: Suite,
    pub derivation: Derivation,
}

impl Handshake {
    /// Begins a handshake. For a host, [`Handshake::take_output`] then has the ClientHello.
    pub fn new(role: Role) -> Result<Self, Failure> {
        let mut handshake = Self {
            state: State::Over,
            is_target: matches!(role, Role::Target(_)),
            output: Vec::new(),
            has_spoken: false,
            count: 0,
        };
        match role {
            Role::Target(keys) => handshake.state = State::Hello(keys, Vec::new()),
            Role::Host {
                identity,
                psk,
                derivation,
            } => {
                let key = psk.tls_psk(&identity, derivation);
                let suite = Suite::of(identity.hash);
                let (Some(key), Some(suite)) = (key, suite) else {
                    return Err(Failure::Library("the PSK has no such identity".into()));
                };
                let chosen = ChosenPsk {
                    offered: identity.to_string().into_bytes(),
                    identity,
                    suite,
                    derivation,
                    psk: Arc::new(psk),
                    key,
                };
                handshake.begin(Mode::Client, chosen, &[])?;
            }
        }
        Ok(handshake)
    }

    /// Processes bytes of the peer. `Ok(None)`: the handshake needs more bytes. After an error,
    /// [`Handshake::take_output`] may have an alert for the peer.
    pub fn received(&mut self, bytes: &[u8]) -> Result<Option<Outcome>, Failure> {
        let result = self.advance(bytes);
        if let Err(failure) = &result {
            if let Some(alert) = failure.alert().filter(|_| !self.has_spoken) {
                self.output.extend(plain(kind::ALERT, &[2, alert.0]));
            }
            self.state = State::Over;
        }
        result
    }

    /// Takes the bytes to send to the peer; possibly none.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    fn advance(&mut self, bytes: &[u8]) -> Result<Option<Outcome>, Failure> {
        self.count += bytes.len();
        if self.count > MOST_BYTES {
            return Err(Failure::LongHandshake(MOST_BYTES));
        }
        match &mut self.state {
            State::Hello(keys, received) => {
                received.extend_from_slice(bytes);
                let Some(message) = client_hello(received)? else {
                    return Ok(None);
                };
                let chosen = ClientHello::parse(&message)?.choose(&**keys)?;
                let received = std::mem::take(received);
                self.begin(Mode::Server, chosen, &received)
            }
            State::Running(..) => self.step(bytes),
            State::Over => Err(Failure::Unexpected("bytes after the handshake")),
        }
    }

    fn begin(
        &mut self,
        mode: Mode,
        chosen: ChosenPsk,
        bytes: &[u8],
    ) -> Result<Option<Outcome>, Failure> {
        let hash = chosen.suite.hash();
        let library = Library::new(mode, &chosen.offered, &chosen.key, hash)?;
        self.state = State::Running(library, Box::new(chosen));
        self.step(bytes)
    }

    fn step(&mut self, bytes: &[u8]) -> Result<Option<Outcome>, Failure> {
        let State::Running(library, chosen) = &mut self.state else {
            return Ok(None);
        };
        let step = library.step(bytes);
        let output = library.take_output();
        self.has_spoken |= !output.is_empty();
        self.output.extend(output);
        let Some(secrets) = step? else {
            return Ok(None);
        };
        library.check(chosen.suite)?;
        library.check_identity(&chosen.offered)?;
        let (receive, send): (Digest, Digest) = if self.is_target {
            (secrets.client, secrets.server)
        } else {
            (secrets.server, secrets.client)
        };
        let session = Session::new(chosen.suite, receive, send, library.rest())?;
        let outcome = Outcome {
            session,
            identity: chosen.identity.clone(),
            psk: Arc::clone(&chosen.psk),
            suite: chosen.suite,
            derivation: chosen.derivation,
        };
        self.state = State::Over;
        Ok(Some(outcome))
    }
}

/// Performs one handshake between a host and a target in memory. The first handshake of a process
/// takes 60 ms longer, because s2n-tls prepares its random generator. Further calls return the
/// result of the first.
pub fn warm_up() -> Result<(), Failure> {
    static DONE: OnceLock<Result<(), Failure>> = OnceLock::new();
    DONE.get_or_init(shake_hands).clone()
}

fn shake_hands() -> Result<(), Failure> {
    struct One(Arc<dyn PskKey>);
    impl PskSource for One {
        fn psks(&self, _identity: &Identity) -> Vec<Arc<dyn PskKey>> {
            vec![Arc::clone(&self.0)]
        }
    }
    let psk = Psk::generate(&mut SystemRandom).map_err(|_| Failure::Crypto)?;
    let name = Nqn::new("nqn.2026-01.io.nacre:itself").map_err(|_| Failure::Crypto)?;
    let derivation = Derivation::Standard;
    let mut host = Handshake::new(Role::Host {
        identity: psk.identity(Version::One, &name, &name, derivation),
        psk: psk.clone(),
        derivation,
    })?;
    let mut target = Handshake::new(Role::Target(Arc::new(One(Arc::new(psk)))))?;
    target.received(&host.take_output())?;
    host.received(&target.take_output())?;
    let outcome = target.received(&host.take_output())?;
    outcome.map(drop).ok_or(Failure::Unexpected("a pause"))
}

/// The first handshake message, without record headers. `None`: it is not complete.
fn client_hello(mut bytes: &[u8]) -> Result<Option<Vec<u8>>, Failure> {
    let mut message = Vec::new();
    if bytes.len() > MOST_HELLO {
        return Err(Failure::LongHandshake(MOST_HELLO));
    }
    if bytes.first().is_some_and(|kind| *kind != kind::HANDSHAKE) {
        return Err(Failure::Type {
            kind: bytes[0],
            expected: kind::HANDSHAKE,
        });
    }
    while let Some((kind, length)) = header(bytes) {
        if kind != kind::HANDSHAKE {
            let expected = kind::HANDSHAKE;
            return Err(Failure::Type { kind, expected });
        }
        if length == 0 || length > MOST_DATA {
            let most = MOST_DATA;
            return Err(Failure::Long {
                bytes: length,
                most,
            });
        }
        let Some(record) = bytes.get(HEADER..HEADER + length) else {
            return Ok(None);
        };
        message.extend_from_slice(record);
        bytes = &bytes[HEADER + length..];
        if let [_, high, middle, low, body @ ..] = &message[..] {
            let length = u32::from_be_bytes([0, *high, *middle, *low]) as usize;
            if length > MOST_HELLO {
                return Err(Failure::LongHandshake(MOST_HELLO));
            }
            if body.len() == length {
                return Ok(Some(message));
            }
            if body.len() > length {
                return Err(Failure::Malformed("ClientHello"));
            }
        }
    }
    Ok(None)
}
