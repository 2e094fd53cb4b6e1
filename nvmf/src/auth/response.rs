//! Computes the responses R1 and R2, which prove that a side has its key (TP8006, "Response").

use nacre_nvmf_wire::Nqn;

use super::hash::{Digest, Hash};

/// The two ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    pub host: Nqn,
    pub subsystem: Nqn,
}

/// Which end proves itself.
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
    pub names: &'a Names,
}

impl Basis<'_> {
    /// The response of `prover`, who has `key`, to a challenge with a sequence number.
    pub fn response(&self, prover: Prover, key: &[u8], challenge: &[u8], number: u32) -> Digest {
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
                // SC_C: no secure channel.
                &[0],
                role.as_bytes(),
                own.as_str().as_bytes(),
                &[0],
                other.as_str().as_bytes(),
            ],
        )
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
