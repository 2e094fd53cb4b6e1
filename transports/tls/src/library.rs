//! s2n-tls on two buffers in memory: its callbacks, the owner of their state, and a safe interface.
//!
//! s2n-tls receives, sends and logs keys through C callbacks with a pointer to our state. No safe
//! interface of its bindings gives access to the traffic secrets or works without a socket.
//!
//! ```text
//!   Library ──owns──▶ Connection ──context──▶ Wires      callbacks run inside `step` only
//!      └─────────────────owns──────────────────▶┘
//! ```

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::task::Poll;

use nacre_nvmf::auth::{Digest, Hash};
use nacre_nvmf::tls::Suite;
use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, Mode, PskHmac};
use s2n_tls::ffi::s2n_connection;
use s2n_tls::psk::Psk;
use s2n_tls::security::Policy;
use zeroize::Zeroize;

use crate::error::Failure;

/// TLS 1.3 only, X25519, P-256 and P-384, AES-128-GCM, AES-256-GCM and ChaCha20. NVMe/TCP does not
/// use the last: the caller checks the suite.
const POLICY: &str = "CloudFront-TLS-1-3-2025-no-pq";

/// The data that the callbacks of a connection read and write.
#[derive(Default)]
struct Wires {
    input: Vec<u8>,
    /// Bytes of `input` that s2n-tls has read.
    taken: usize,
    output: Vec<u8>,
    client: Option<Digest>,
    server: Option<Digest>,
}

/// The application traffic secrets of a finished handshake (RFC 8446, 7.1: generation 0), by the
/// end that sends with them.
pub(crate) struct Secrets {
    pub client: Digest,
    pub server: Digest,
}

/// One handshake, performed by s2n-tls.
pub(crate) struct Library {
    /// Dropped before `wires`, which its callbacks use.
    connection: Option<Connection>,
    wires: NonNull<Wires>,
}

// SAFETY: `wires` is owned like a box. Only `Library` and the callbacks use it; the latter run
// inside `poll_negotiate`, on the thread that has `&mut Library`. `Connection` is `Send` itself.
unsafe impl Send for Library {}

impl Drop for Library {
    fn drop(&mut self) {
        self.connection = None;
        // SAFETY: it comes from `Box::into_raw` in `new`, is freed here only, and the connection
        // whose callbacks used it is gone.
        drop(unsafe { Box::from_raw(self.wires.as_ptr()) });
    }
}

impl Library {
    /// Prepares a handshake as the client or the server (`mode`). `identity`, `key` and `hash` are
    /// those of the PSK; [`Library::step`] begins the handshake.
    pub(crate) fn new(
        mode: Mode,
        identity: &[u8],
        key: &[u8],
        hash: Hash,
    ) -> Result<Self, Failure> {
        let wires = Box::into_raw(Box::<Wires>::default());
        let mut library = Self {
            connection: None,
            wires: NonNull::new(wires).ok_or(Failure::Crypto)?,
        };
        library.prepare(mode, identity, key, hash).map_err(failed)?;
        Ok(library)
    }

    fn prepare(
        &mut self,
        mode: Mode,
        identity: &[u8],
        key: &[u8],
        hash: Hash,
    ) -> Result<(), s2n_tls::error::Error> {
        let context = self.wires.as_ptr().cast::<c_void>();
        let mut config = Config::builder();
        config.with_system_certs(false)?;
        config.set_security_policy(&Policy::from_version(POLICY)?)?;
        // SAFETY: the context outlives the config: the connection holds the config, and `drop`
        // ends the connection before the context.
        unsafe { config.set_key_log_callback(Some(log_key), context)? };
        let mut psk = Psk::builder()?;
        psk.set_identity(identity)?;
        psk.set_secret(key)?;
        psk.set_hmac(match hash {
            Hash::Sha384 => PskHmac::SHA384,
            _ => PskHmac::SHA256,
        })?;
        let mut connection = Connection::new(mode);
        connection.set_config(config.build()?)?;
        // Without it the library sleeps after an error; a handshake here says nothing about a key
        // that the binder has not said.
        connection.set_blinding(Blinding::SelfService)?;
        connection.set_receive_callback(Some(receive))?;
        connection.set_send_callback(Some(send))?;
        // SAFETY: `drop` ends the connection before the context.
        unsafe {
            connection.set_receive_context(context)?;
            connection.set_send_context(context)?;
        }
        connection.append_psk(&psk.build()?)?;
        self.connection = Some(connection);
        Ok(())
    }

    fn wires(&mut self) -> &mut Wires {
        // SAFETY: it lives until `drop`. The callbacks, which use it as well, do not run while
        // this borrow of `self` lasts: they run inside `poll_negotiate`, which borrows `self`.
        unsafe { self.wires.as_mut() }
    }

    /// Continues the handshake with bytes of the peer. Returns the secrets when it is finished, and
    /// `None` while it needs more bytes.
    pub(crate) fn step(&mut self, input: &[u8]) -> Result<Option<Secrets>, Failure> {
        self.wires().input.extend_from_slice(input);
        let Some(connection) = &mut self.connection else {
            return Err(Failure::Crypto);
        };
        match connection.poll_negotiate() {
            Poll::Pending => return Ok(None),
            Poll::Ready(Ok(_)) => {}
            Poll::Ready(Err(error)) => {
                let alert = connection.alert().map(nacre_nvmf::tls::Alert);
                return Err(alert.map_or_else(|| failed(error), Failure::Alert));
            }
        }
        let wires = self.wires();
        match (wires.client.take(), wires.server.take()) {
            (Some(client), Some(server)) => Ok(Some(Secrets { client, server })),
            _ => Err(Failure::Library("no traffic secrets in the key log".into())),
        }
    }

    /// An error unless the handshake has agreed on this suite.
    pub(crate) fn check(&self, suite: Suite) -> Result<(), Failure> {
        let name = self.connection.as_ref().map(|c| c.cipher_suite());
        match name {
            Some(Ok(name)) if name == suite.name() => Ok(()),
            Some(Ok(name)) => Err(Failure::Suite(name.to_owned())),
            _ => Err(Failure::Crypto),
        }
    }

    /// Fails with [`Failure::Identity`] unless the handshake has used the PSK of this identity.
    pub(crate) fn check_identity(&self, identity: &[u8]) -> Result<(), Failure> {
        let connection = self.connection.as_ref().ok_or(Failure::Crypto)?;
        let length = connection.negotiated_psk_identity_length();
        let mut used = vec![0; length.map_err(failed)?];
        if !used.is_empty() {
            connection
                .negotiated_psk_identity(&mut used)
                .map_err(failed)?;
        }
        if used == identity {
            Ok(())
        } else {
            Err(Failure::Identity)
        }
    }

    /// Takes the bytes to send to the peer.
    pub(crate) fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.wires().output)
    }

    /// The received bytes that follow the handshake.
    pub(crate) fn rest(&mut self) -> &[u8] {
        let wires = self.wires();
        &wires.input[wires.taken..]
    }
}

fn failed(error: s2n_tls::error::Error) -> Failure {
    Failure::Library(format!("{} ({})", error.message(), error.name()))
}

unsafe extern "C" fn receive(context: *mut c_void, buffer: *mut u8, length: u32) -> c_int {
    // SAFETY: the context is that of `prepare`; see `Library::wires` for its other users.
    let wires = unsafe { &mut *context.cast::<Wires>() };
    let waiting = &wires.input[wires.taken..];
    let count = waiting.len().min(length as usize);
    if count == 0 {
        return would_block();
    }
    // SAFETY: the library's buffer has `length` bytes, `count` is not more, and it is not ours.
    unsafe { std::ptr::copy_nonoverlapping(waiting.as_ptr(), buffer, count) };
    wires.taken += count;
    count as c_int
}

unsafe extern "C" fn send(context: *mut c_void, bytes: *const u8, length: u32) -> c_int {
    // SAFETY: as in `receive`.
    let wires = unsafe { &mut *context.cast::<Wires>() };
    // SAFETY: the library gives `length` readable bytes for this call.
    let bytes = unsafe { std::slice::from_raw_parts(bytes, length as usize) };
    wires.output.extend_from_slice(bytes);
    length as c_int
}

unsafe extern "C" fn log_key(
    context: *mut c_void,
    _connection: *mut s2n_connection,
    line: *mut u8,
    length: usize,
) -> c_int {
    // SAFETY: as in `receive`.
    let wires = unsafe { &mut *context.cast::<Wires>() };
    // SAFETY: the library gives `length` bytes for this call, and writes to them later only.
    let line = unsafe { std::slice::from_raw_parts(line, length) };
    if let Some(secret) = secret_of(line, b"CLIENT_TRAFFIC_SECRET_0 ") {
        wires.client = Some(secret);
    } else if let Some(secret) = secret_of(line, b"SERVER_TRAFFIC_SECRET_0 ") {
        wires.server = Some(secret);
    }
    0
}

/// The secret of a line `LABEL RANDOM SECRET`, in hexadecimal digits.
fn secret_of(line: &[u8], label: &[u8]) -> Option<Digest> {
    let rest = line.strip_prefix(label)?;
    let digits = rest.split(|byte| *byte == b' ').nth(1)?;
    let nibble = |digit: u8| char::from(digit).to_digit(16).map(|n| n as u8);
    let mut bytes = [0; 64];
    let pairs = digits.as_chunks::<2>().0;
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = nibble(*high)? << 4 | nibble(*low)?;
    }
    let secret = matches!(pairs.len(), 32 | 48).then(|| Digest::new(&bytes[..pairs.len()]));
    bytes.zeroize();
    secret
}

fn would_block() -> c_int {
    // SAFETY: the address of this thread's errno is valid for the life of the thread.
    unsafe { *libc::__errno_location() = libc::EAGAIN };
    -1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the PSK of a handshake is that of the identity which the caller has chosen. Method:
    /// two ends, which are asked for their identity and for another one.
    #[test]
    fn the_identity_of_a_handshake() {
        let new = |mode| Library::new(mode, b"chosen", &[7; 32], Hash::Sha256).expect("an end");
        let mut ends = [new(Mode::Client), new(Mode::Server)];
        assert_ne!(ends[0].check_identity(b"chosen"), Ok(()), "not finished");
        let mut finished = [false, false];
        let mut input = Vec::new();
        for turn in 0..4 {
            let end = turn % 2;
            finished[end] |= ends[end].step(&input).expect("a step").is_some();
            input = ends[end].take_output();
        }
        assert_eq!(finished, [true, true]);
        for end in &ends {
            assert_eq!(end.check_identity(b"chosen"), Ok(()));
            assert_eq!(end.check_identity(b"another"), Err(Failure::Identity));
            assert_eq!(end.check_identity(b""), Err(Failure::Identity));
        }
    }
}
