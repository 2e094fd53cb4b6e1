//! Computes the responses R1 and R2, which prove that a side has its key (TP8006, "Response"), and
//! the PSK of a secure channel (TP8018).

use nacre_nvmf_wire::Nqn;

use super::Concatenation;
use super::hash::{Digest, Hash};

/// The NQNs of the two ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    pub host: Nqn,
    pub subsystem: Nqn,
}

/// The end that computes a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prover {
    Host,
    Controller,
}

/// The values of a transaction that both responses depend on.
#[derive(Debug)]
pub(super) struct Basis<'a> {
    pub hash: Hash,
    /// The shared secret of the group; `None` with the null group.
    pub shared: Option<&'a [u8]>,
    pub transaction: u16,
    pub channel: Concatenation,
    pub names: &'a Names,
}

impl Basis<'_> {
    /// The response of `prover`, whose key is `key`, to a challenge with a sequence number.
    pub(super) fn response(
        &self,
        prover: Prover,
        key: &[u8],
        challenge: &[u8],
        number: u32,
    ) -> Digest {
        let names = (&self.names.host, &self.names.subsystem);
        let (role, (own, other)) = match prover {
            Prover::Host => ("HostHost", names),
            Prover::Controller => ("Controller", (names.1, names.0)),
        };
        let augmented = self.augmented(challenge);
        self.hash.hmac(
            key,
            &[
                &augmented,
                &number.to_le_bytes(),
                &self.transaction.to_le_bytes(),
                &[self.channel.code()],
                role.as_bytes(),
                own.as_str().as_bytes(),
                &[0],
                other.as_str().as_bytes(),
            ],
        )
    }

    /// The generated PSK (PSKg), from both challenges, C1 first. `None` without a Diffie-Hellman
    /// secret.
    pub(super) fn generated(&self, of_controller: &[u8], of_host: &[u8]) -> Option<Digest> {
        let session = self.hash.digest(self.shared?);
        Some(self.hash.hmac(&session, &[of_controller, of_host]))
    }

    /// The challenge, bound to the Diffie-Hellman exchange if there was one.
    fn augmented(&self, challenge: &[u8]) -> Digest {
        match self.shared {
            None => Digest::new(challenge),
            Some(shared) => {
                let session = self.hash.digest(shared);
                self.hash.hmac(&session, &[challenge])
            }
        }
    }
}
