//! The identity of this host to targets: host NQN and host identifier. The NQN is also the node's
//! id.
//!
//! The driver stores the first identity that it finds in its state directory, and keeps it.
//! `/etc/nvme` may change later, and connections with a new NQN would be those of another host.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use nacre_engine_values::files;
use nacre_engine_values::host_identity::{Identity, IdentityError, Names};
use uuid::Uuid;

use super::MAX_NODE_ID;
use super::context::is_option;
use super::fabrics;
use super::host::Host;
use super::records::Records;

/// Options of `nacre csi`.
const NAMES: Names = Names {
    nqn: "--node-id",
    id: "--host-id",
};
const FILE: &str = "host";
/// Largest identity that is read.
const MOST: u64 = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostId {
    pub nqn: String,
    pub id: Uuid,
}

/// Why this host has no identity.
#[derive(Debug, thiserror::Error)]
pub enum HostIdError {
    #[error(transparent)]
    Found(#[from] IdentityError),
    #[error("\"{0}\" is no NQN of at most {MAX_NODE_ID} bytes: give --node-id")]
    Unfit(String),
    #[error(
        "--node-id, --host-id: volumes are staged here, and their connections have the NQN {kept} \
         and another identity: unstage them first, or leave out the options"
    )]
    Staged { kept: String },
    #[error(
        "volumes are staged here, and their connections have the NQN {kept}, not {found}: give \
         --node-id {kept} with its --host-id, or detach the volumes first"
    )]
    Connected { kept: String, found: String },
    #[error("{}: {source}", path.display())]
    State {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "{}: the first line \"{line}\" is not NQN and UUID of this host: write them there, or remove \
         the file once no volume is staged here",
        path.display()
    )]
    Damaged { path: PathBuf, line: String },
}

impl HostIdError {
    /// True if other options, or another identity of the machine, are the remedy. False: the state
    /// directory has failed.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Found(_) | Self::Unfit(_) | Self::Staged { .. } | Self::Connected { .. } => true,
            Self::State { .. } | Self::Damaged { .. } => false,
        }
    }
}

impl HostId {
    /// The given values, else the kept ones, else those of this machine. Stores them in the
    /// directory `state`. Refuses another identity than the kept one while volumes are staged.
    pub fn find(
        host: &dyn Host,
        state: &Path,
        nqn: Option<&str>,
        id: Option<Uuid>,
    ) -> Result<Self, HostIdError> {
        let path = state.join(FILE);
        let failed = |source| HostIdError::State {
            path: path.clone(),
            source,
        };
        let boot_id = host.boot_id().map_err(failed)?;
        let records = Records::open(state, &boot_id).map_err(failed)?;
        let kept = Self::stored(&path)?;
        let is_given = nqn.is_some() || id.is_some();
        let found = match &kept {
            Some(kept) if !is_given => return Ok(kept.clone()),
            _ => {
                let id = id.map(|id| id.to_string());
                let found = Identity::find(NAMES, nqn, id.as_deref())?;
                Self {
                    nqn: found.nqn.as_str().to_owned(),
                    id: Uuid::from_bytes(found.id),
                }
            }
        };
        if found.nqn.len() > MAX_NODE_ID || !is_option(&found.nqn) {
            return Err(HostIdError::Unfit(found.nqn));
        }
        if kept.as_ref() == Some(&found) {
            return Ok(found);
        }
        if kept.is_none()
            && let Some(kept) = connected(host, &records, &found.nqn)
        {
            let found = found.nqn;
            return Err(HostIdError::Connected { kept, found });
        }
        if let Some(kept) = kept
            && !records.volumes().map_err(failed)?.is_empty()
        {
            return Err(HostIdError::Staged { kept: kept.nqn });
        }
        let line = format!("{} {}\n", found.nqn, found.id);
        files::replace_private(&path, line.as_bytes()).map_err(failed)?;
        Ok(found)
    }

    /// `None`: there is no file. A file that cannot be read is not replaced: NodeUnstageVolume
    /// would look for connections of another NQN, and leave those of the former one.
    fn stored(path: &Path) -> Result<Option<Self>, HostIdError> {
        let read = || {
            let mut text = String::new();
            File::open(path)?.take(MOST).read_to_string(&mut text)?;
            std::io::Result::Ok(text)
        };
        let text = match read() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|source| HostIdError::State {
                path: path.to_owned(),
                source,
            })?,
        };
        let line = text.lines().next().unwrap_or_default().trim();
        let kept = Self::read(line).map(Some);
        kept.ok_or_else(|| HostIdError::Damaged {
            path: path.to_owned(),
            line: line.to_owned(),
        })
    }

    fn read(line: &str) -> Option<Self> {
        let (nqn, id) = line.split_once(' ')?;
        Some(Self {
            nqn: Some(nqn).filter(|nqn| is_option(nqn))?.to_owned(),
            id: id.parse().ok()?,
        })
    }
}

/// The other NQN with which staged volumes are connected. The first release did not keep its NQN:
/// calls with a new one would leave these connections without an end.
fn connected(host: &dyn Host, records: &Records, nqn: &str) -> Option<String> {
    let volumes = records.volumes().unwrap_or_default().into_iter();
    let staged = volumes.filter_map(|volume| records.read(volume).ok().flatten());
    let mut nqns = staged.flat_map(|staged| fabrics::host_nqns(host, &staged.nqn));
    nqns.find_map(|all| all.into_iter().find(|one| one != nqn))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::Machine;

    /// Goal: a host keeps its identity as long as volumes are connected with it.
    #[test]
    fn the_first_identity_is_kept() {
        let state = tempfile::tempdir().expect("a directory");
        let host = Machine::default();
        let find = |nqn, id| HostId::find(&host, state.path(), nqn, id);
        let (one, two) = ("nqn.2025-01.io.example:one", "nqn.2025-01.io.example:two");
        let first = find(Some(one), None).expect("the given identity");
        assert_eq!(first.nqn, one);
        assert_eq!(find(None, None).expect("the stored identity"), first);
        assert_eq!(find(Some(one), None).expect("the same"), first);
        let second = find(Some(two), Some(Uuid::from_u128(2))).expect("nothing is staged");
        assert_eq!(find(None, None).expect("the stored identity"), second);
        assert_ne!(second.id, first.id);
        let record = state.path().join(format!("{}.json", Uuid::from_u128(7)));
        let boot_id = host.boot_id().expect("a machine");
        let line = |boot_id: &str| {
            let uuid = Uuid::nil();
            format!(r#"{{"boot_id":"{boot_id}","nqn":"nqn.v","uuid":"{uuid}","staging":"/s"}}"#)
        };
        std::fs::write(&record, line("an earlier one")).expect("written");
        find(Some(one), None).expect("the machine has started anew");
        assert!(!record.exists());
        find(Some(two), Some(Uuid::from_u128(2))).expect("nothing is staged");
        std::fs::write(&record, line(&boot_id)).expect("written");
        let refused = find(Some(one), None);
        assert!(matches!(refused, Err(HostIdError::Staged { .. })));
        assert_eq!(find(None, None).expect("the stored identity"), second);
        let long = format!("nqn.{}", "x".repeat(200));
        for bad in ["h", "nqn.a,b", &long] {
            assert!(find(Some(bad), None).is_err(), "{bad}");
        }
    }

    /// Goal: a refused identity names the option of this driver, and no other program's. Method: an
    /// NQN that is too long, and the identifier zero.
    #[test]
    fn a_refusal_names_the_option() {
        let state = tempfile::tempdir().expect("a directory");
        let find = |nqn, id| HostId::find(&Machine::default(), state.path(), nqn, id);
        let long = format!("nqn.{}", "x".repeat(230));
        for (nqn, id, option) in [
            (Some(&*long), None, "--node-id: "),
            (None, Some(Uuid::nil()), "--host-id: "),
        ] {
            let refused = find(nqn, id).expect_err(option);
            assert!(refused.is_usage());
            assert!(refused.to_string().starts_with(option), "{refused}");
        }
    }

    /// Goal: an identity that cannot be read is named, and no other one replaces it: connections
    /// of the former NQN would stay.
    #[test]
    fn an_unreadable_identity_is_not_replaced() {
        let state = tempfile::tempdir().expect("a directory");
        let (host, path) = (Machine::default(), state.path().join(FILE));
        let find = |nqn| HostId::find(&host, state.path(), nqn, None);
        let nqn = "nqn.2025-01.io.example:one";
        for contents in [&b""[..], b"\n", b"host", b"\xff\xfe", b"nqn.a 7"] {
            std::fs::write(&path, contents).expect("written");
            for nqn in [None, Some(nqn)] {
                let refused = find(nqn).expect_err("it is not readable");
                assert!(!refused.is_usage(), "{refused}");
                let named = path.display().to_string();
                assert!(refused.to_string().contains(&named), "{refused}");
            }
            assert_eq!(std::fs::read(&path).expect("it stays"), contents);
        }
        std::fs::remove_file(&path).expect("removed");
        std::fs::create_dir(&path).expect("made");
        let refused = find(Some(nqn));
        assert!(matches!(refused, Err(HostIdError::State { .. })));
        std::fs::remove_dir(&path).expect("removed");
        find(Some(nqn)).expect("it is new");
    }

    #[test]
    fn a_machine_has_an_identity() {
        let state = tempfile::tempdir().expect("a directory");
        let find = || HostId::find(&Machine::default(), state.path(), None, None);
        let found = find().expect("of this machine");
        assert_eq!(find().expect("the stored identity"), found);
    }
}
