//! The host NQN and host identifier with which this machine connects to targets, stable across
//! runs.
//!
//! ```text
//!   requested values  ─▶  /etc/nvme/{hostnqn,hostid}  ─▶  /etc/machine-id  ─▶  <data dir>/hostid
//! ```
//!
//! The first source that exists counts. The file in the data directory is generated if none does.
//!
//! Targets (and Linux) refuse one identifier with two NQNs. So if only one of the two is
//! configured, the other is derived from it.

use std::path::{Path, PathBuf};

use nacre_nvmf_wire::{Nqn, NqnError};
use uuid::Uuid;

use crate::identity_file;

/// Namespace for identifiers derived from a secret such as machine-id(5).
const NAMESPACE: Uuid = Uuid::from_u128(0x4e61_6372_6500_5e1f_8000_6e76_6d65_6f66);

/// A host NQN and a host identifier (HOSTID of Connect).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub nqn: Nqn,
    pub id: [u8; 16],
    pub origin: Origin,
}

/// The source of an identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Options of the command or parameters of the call.
    Given,
    /// The files of nvme-cli in `/etc/nvme`.
    Nvme,
    /// Derived from machine-id(5), which it does not reveal.
    MachineId,
    /// Generated once and kept in the data directory.
    State,
    /// Generated now and lost with the process: there is no data directory, or it cannot keep the
    /// identifier.
    Random,
}

/// Why no identity is available.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("{place}: \"{found}\" is not a host NQN: {source}")]
    Nqn {
        place: String,
        found: String,
        source: NqnError,
    },
    #[error("{place}: \"{found}\" is not a host identifier: a UUID other than zero is")]
    Id { place: String, found: String },
}

/// The names under which a program takes the two values. Errors name them.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    pub nqn: &'static str,
    pub id: &'static str,
}

impl Names {
    /// Options of the commands that connect to a target.
    pub const OPTIONS: Self = Self {
        nqn: "--hostnqn",
        id: "--hostid",
    };
}

/// The places to search.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    pub nvme: PathBuf,
    pub machine_id: PathBuf,
    pub state: Option<PathBuf>,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            nvme: "/etc/nvme".into(),
            machine_id: "/etc/machine-id".into(),
            state: crate::files::default_data_dir(),
        }
    }
}

impl Identity {
    /// The requested values; if only one is given, the other is derived from it. Without both, the
    /// identity of this machine. `names` is for errors. Fails on a requested value, or one in
    /// `/etc/nvme`, that is not valid.
    pub fn find(names: Names, nqn: Option<&str>, id: Option<&str>) -> Result<Self, IdentityError> {
        Self::find_in(&Places::default(), names, nqn, id)
    }

    pub(crate) fn find_in(
        places: &Places,
        names: Names,
        nqn: Option<&str>,
        id: Option<&str>,
    ) -> Result<Self, IdentityError> {
        let given_nqn = nqn.map(|t| parse_nqn(names.nqn, t)).transpose()?;
        let given_id = id.map(|t| parse_id(names.id, t)).transpose()?;
        if let Some(identity) = pair(given_nqn, given_id, Origin::Given) {
            return Ok(identity);
        }
        let (nqn_file, id_file) = (places.nvme.join("hostnqn"), places.nvme.join("hostid"));
        let nqn = first_line(&nqn_file).map(|t| parse_nqn(&nqn_file.display().to_string(), &t));
        let id = first_line(&id_file).map(|t| parse_id(&id_file.display().to_string(), &t));
        if let Some(identity) = pair(nqn.transpose()?, id.transpose()?, Origin::Nvme) {
            return Ok(identity);
        }
        if let Some(machine) = first_line(&places.machine_id) {
            let id = Uuid::new_v5(&NAMESPACE, machine.as_bytes());
            return Ok(from_uuid(id, Origin::MachineId));
        }
        let made = Uuid::new_v4();
        Ok(match places.state.as_deref().map(|dir| keep(dir, made)) {
            Some(Ok(kept)) => from_uuid(kept, Origin::State),
            Some(Err(error)) => {
                let option = names.nqn;
                tracing::warn!(%error, "this host's identifier cannot be kept; {option} sets one");
                from_uuid(made, Origin::Random)
            }
            None => from_uuid(made, Origin::Random),
        })
    }
}

/// An identifier of this machine, derived from machine-id(5), which it does not reveal. It differs
/// from the host identifier. `None`: the machine has no machine-id.
pub fn machine() -> Option<Uuid> {
    const OF_MACHINE: Uuid = Uuid::from_u128(0x5f0f_6c52_2a7e_4c1b_9d3e_8b6a_7c41_e2d0);
    let id = first_line(&Places::default().machine_id)?;
    Some(Uuid::new_v5(&OF_MACHINE, id.as_bytes()))
}

/// Completes the pair; one of the two suffices.
fn pair(nqn: Option<Nqn>, id: Option<Uuid>, origin: Origin) -> Option<Identity> {
    let (nqn, id) = match (nqn, id) {
        (None, None) => return None,
        (Some(nqn), Some(id)) => (nqn, id),
        (Some(nqn), None) => {
            let id = nqn
                .uuid()
                .filter(|id| !id.is_nil())
                .unwrap_or_else(|| Uuid::new_v5(&NAMESPACE, nqn.as_str().as_bytes()));
            (nqn, id)
        }
        (None, Some(id)) => (Nqn::from_uuid(id), id),
    };
    let id = *id.as_bytes();
    Some(Identity { nqn, id, origin })
}

fn from_uuid(id: Uuid, origin: Origin) -> Identity {
    Identity {
        nqn: Nqn::from_uuid(id),
        id: *id.as_bytes(),
        origin,
    }
}

fn parse_nqn(place: &str, text: &str) -> Result<Nqn, IdentityError> {
    Nqn::foreign(text).map_err(|source| IdentityError::Nqn {
        place: place.to_owned(),
        found: text.to_owned(),
        source,
    })
}

fn parse_id(place: &str, text: &str) -> Result<Uuid, IdentityError> {
    match text.parse::<Uuid>() {
        Ok(id) if !id.is_nil() => Ok(id),
        _ => Err(IdentityError::Id {
            place: place.to_owned(),
            found: text.to_owned(),
        }),
    }
}

/// `None`: the file is missing, unreadable or empty (nvme-cli leaves such files when it cannot
/// generate an identifier), or its line is `uninitialized`, as in machine-id(5).
fn first_line(path: &Path) -> Option<String> {
    identity_file::first_line(path).filter(|line| line != "uninitialized")
}

/// The identifier stored in `dir`; if there is none, `made` is stored.
fn keep(dir: &Path, made: Uuid) -> std::io::Result<Uuid> {
    let line = identity_file::read_or_create(dir, "hostid", &made.to_string())?;
    line.parse().map_err(|_| {
        std::io::Error::other(format!("{} holds no UUID", dir.join("hostid").display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "f81d4fae-7dec-11d0-a765-00a0c91e6bf6";

    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn places(&self) -> Places {
            Places {
                nvme: self.0.path().join("nvme"),
                machine_id: self.0.path().join("machine-id"),
                state: Some(self.0.path().join("state")),
            }
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.0.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        fn find(&self) -> Result<Identity, IdentityError> {
            Identity::find_in(&self.places(), Names::OPTIONS, None, None)
        }
    }

    /// Goal: each place counts only if the earlier ones have nothing.
    #[test]
    fn order_of_places() {
        let machine = Machine::new();
        let made = machine.find().unwrap();
        assert_eq!(made.origin, Origin::State);
        assert_eq!(machine.find().unwrap(), made, "kept");

        machine.write("machine-id", "0123456789abcdef0123456789abcdef\n");
        let derived = machine.find().unwrap();
        assert_eq!(derived.origin, Origin::MachineId);
        assert_eq!(machine.find().unwrap(), derived);
        assert_ne!(derived.id, made.id);

        machine.write(
            "nvme/hostnqn",
            &format!("nqn.2014-08.org.nvmexpress:uuid:{UUID}\n"),
        );
        let nvme = machine.find().unwrap();
        assert_eq!(nvme.origin, Origin::Nvme);
        assert_eq!(Uuid::from_bytes(nvme.id).to_string(), UUID);
        let other = "11111111-2222-3333-4444-555555555555";
        machine.write("nvme/hostid", &format!("{other}\n"));
        assert_eq!(
            Uuid::from_bytes(machine.find().unwrap().id).to_string(),
            other
        );

        let nqn = "nqn.2025-01.io.nacre:host";
        let given = Identity::find_in(&machine.places(), Names::OPTIONS, Some(nqn), None).unwrap();
        assert_eq!((given.nqn.as_str(), given.origin), (nqn, Origin::Given));
        assert_ne!(
            Uuid::from_bytes(given.id).to_string(),
            other,
            "another name's identifier"
        );
    }

    #[test]
    fn without_a_place_to_keep_it() {
        let machine = Machine::new();
        let places = Places {
            state: None,
            ..machine.places()
        };
        let found = Identity::find_in(&places, Names::OPTIONS, None, None).unwrap();
        assert_eq!(found.origin, Origin::Random);
    }

    #[test]
    fn refusals() {
        let machine = Machine::new();
        let find =
            |nqn, id| Identity::find_in(&machine.places(), Names::OPTIONS, nqn, id).unwrap_err();
        assert!(matches!(find(Some(""), None), IdentityError::Nqn { .. }));
        assert!(matches!(find(None, Some("1")), IdentityError::Id { .. }));
        let nil = "00000000-0000-0000-0000-000000000000";
        assert!(matches!(find(None, Some(nil)), IdentityError::Id { .. }));
        // Like nvme-cli: any name is a valid NQN.
        machine.write("nvme/hostnqn", "testhost\n");
        assert_eq!(machine.find().unwrap().nqn.as_str(), "testhost");
        machine.write("nvme/hostnqn", &"x".repeat(224));
        let error = machine.find().unwrap_err();
        assert!(error.to_string().contains("hostnqn"), "{error}");
    }
}
