//! What this node has staged, one file per volume: kept over a restart of the driver, so that the
//! guardian knows the addresses, and that an interrupted format is finished.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tonic::Status;
use uuid::Uuid;

use super::context::{Context, Portal};
use crate::capability::Access;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Staged {
    pub nqn: String,
    pub uuid: Uuid,
    pub portals: Vec<String>,
    pub staging: PathBuf,
    /// `None`: a block volume.
    pub fs_type: Option<String>,
    #[serde(default)]
    pub flags: Vec<String>,
    /// A format has begun and has not ended: the device is not blank, and holds no data.
    #[serde(default)]
    pub is_formatting: bool,
}

impl Staged {
    pub(crate) fn new(context: &Context, staging: &Path, access: &Access) -> Self {
        let (fs_type, flags) = match access {
            Access::Block => (None, Vec::new()),
            Access::Mount { fs_type, flags } => (Some(fs_type.clone()), flags.clone()),
        };
        Self {
            nqn: context.nqn.clone(),
            uuid: context.uuid,
            portals: context.portals.iter().map(ToString::to_string).collect(),
            staging: staging.to_owned(),
            fs_type,
            flags,
            is_formatting: false,
        }
    }

    pub(crate) fn portals(&self) -> Vec<Portal> {
        let read = self.portals.iter().filter_map(|text| Portal::read(text));
        read.collect()
    }

    /// The same volume at the same place in the same way; addresses may differ.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        let of = |one: &Self| (one.staging.clone(), one.fs_type.clone(), one.flags.clone());
        of(self) == of(other)
    }
}

#[derive(Debug)]
pub(crate) struct Records(PathBuf);

const END: &str = "json";

impl Records {
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        Ok(Self(dir.to_owned()))
    }

    fn path(&self, volume: Uuid) -> PathBuf {
        self.0.join(format!("{volume}.{END}"))
    }

    pub(crate) fn read(&self, volume: Uuid) -> Result<Option<Staged>, Status> {
        let path = self.path(volume);
        let failed = |why: String| {
            Status::internal(format!(
                "{}: {why}; remove the file if it is damaged",
                path.display()
            ))
        };
        match std::fs::read(&path) {
            Ok(bytes) => {
                let read = serde_json::from_slice(&bytes);
                read.map(Some).map_err(|error| failed(error.to_string()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// Durable when it returns.
    pub(crate) fn write(&self, volume: Uuid, staged: &Staged) -> Result<(), Status> {
        let path = self.path(volume);
        let write = || {
            let fresh = path.with_extension("new");
            let mut file = File::create(&fresh)?;
            file.write_all(&serde_json::to_vec(staged)?)?;
            file.sync_all()?;
            std::fs::rename(&fresh, &path)?;
            File::open(&self.0)?.sync_all()
        };
        write().map_err(|error: io::Error| {
            Status::internal(format!("cannot write {}: {error}", path.display()))
        })
    }

    pub(crate) fn remove(&self, volume: Uuid) -> Result<(), Status> {
        let path = self.path(volume);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Status::internal(
                format!("cannot remove {}: {error}", path.display()),
            )),
            _ => Ok(()),
        }
    }

    /// The volumes with a record.
    pub(crate) fn volumes(&self) -> Vec<Uuid> {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        let id = |entry: std::fs::DirEntry| {
            let path = entry.path();
            let is_record = path.extension().is_some_and(|end| end == END);
            let stem = path.file_stem()?.to_str()?;
            Uuid::parse_str(stem).ok().filter(|_| is_record)
        };
        entries.filter_map(id).collect()
    }
}
