//! The identity of this host to targets. Its NQN is also the node's id.
//!
//! The first identity that is found is kept in the driver's state directory: `/etc/nvme` may change
//! later, and connections with a new NQN would be those of another host.

use std::path::{Path, PathBuf};

use nacre_engine_values::host_identity::{Identity, IdentityError};
use nacre_engine_values::{files, identity_file};
use uuid::Uuid;

use super::MAX_NODE_ID;
use super::context::is_option;
use super::host::Host;
use super::records::Records;

const FILE: &str = "host";

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
    #[error("{}: {source}", path.display())]
    State {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{}: \"{line}\" is no host: write NQN and UUID, or remove the file", path.display())]
    Damaged { path: PathBuf, line: String },
}

impl HostId {
    /// The given values, else the kept ones, else those of this machine.
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
        let kept = match identity_file::first_line(&path) {
            Some(line) => {
                let kept = Self::read(&line);
                Some(kept.ok_or_else(|| HostIdError::Damaged {
                    path: path.clone(),
                    line,
                })?)
            }
            None => None,
        };
        let is_given = nqn.is_some() || id.is_some();
        let found = match &kept {
            Some(kept) if !is_given => return Ok(kept.clone()),
            _ => {
                let id = id.map(|id| id.to_string());
                let found = Identity::find(nqn, id.as_deref())?;
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
        if let Some(kept) = kept.filter(|_| !records.volumes().is_empty()) {
            return Err(HostIdError::Staged { kept: kept.nqn });
        }
        let line = format!("{} {}\n", found.nqn, found.id);
        files::replace_private(&path, line.as_bytes()).map_err(failed)?;
        Ok(found)
    }

    fn read(line: &str) -> Option<Self> {
        let (nqn, id) = line.split_once(' ')?;
        Some(Self {
            nqn: Some(nqn).filter(|nqn| is_option(nqn))?.to_owned(),
            id: id.parse().ok()?,
        })
    }
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
        let first = find(Some(one), None).expect("it is given");
        assert_eq!(first.nqn, one);
        assert_eq!(find(None, None).expect("kept"), first);
        assert_eq!(find(Some(one), None).expect("the same"), first);
        let second = find(Some(two), Some(Uuid::from_u128(2))).expect("nothing is staged");
        assert_eq!(find(None, None).expect("kept"), second);
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
        assert_eq!(find(None, None).expect("kept"), second);
        let long = format!("nqn.{}", "x".repeat(200));
        for bad in ["h", "nqn.a,b", &long] {
            assert!(find(Some(bad), None).is_err(), "{bad}");
        }
        std::fs::write(state.path().join(FILE), "host").expect("written");
        let refused = find(None, None);
        assert!(matches!(refused, Err(HostIdError::Damaged { .. })));
    }

    #[test]
    fn a_machine_has_an_identity() {
        let state = tempfile::tempdir().expect("a directory");
        let find = || HostId::find(&Machine::default(), state.path(), None, None);
        let found = find().expect("of this machine");
        assert_eq!(find().expect("kept"), found);
    }
}
