//! The volumes that this node has staged, one file for each. A restart of the driver keeps the
//! files: the reconnector needs the addresses, and an interrupted format is finished by its mark.
//!
//! A record is valid for one boot of the machine. Connections and mounts are gone after it, and
//! another node may have used the volume.

use std::fs::{DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nacre_engine_values::files;
use serde::{Deserialize, Serialize};
use tonic::Status;
use uuid::Uuid;

use super::context::{Address, Context};
use crate::capability::{Access, Capability};

/// The version of the records that this driver writes. A field with a default needs no new one.
const VERSION: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Staged {
    /// [`VERSION`]. The first release wrote none, which is version 0.
    #[serde(default)]
    v: u32,
    /// The boot id of the kernel when the volume was staged. The first release wrote none.
    #[serde(default)]
    pub boot_id: String,
    pub nqn: String,
    pub uuid: Uuid,
    /// The first release wrote `portals`.
    #[serde(default, alias = "portals")]
    pub addresses: Vec<String>,
    /// Addresses of earlier requests: paths to them may be left.
    #[serde(default)]
    pub former: Vec<String>,
    pub staging: PathBuf,
    /// `None`: a block volume.
    pub fs_type: Option<String>,
    #[serde(default)]
    pub flags: Vec<String>,
    #[serde(default)]
    /// `None`: the first release did not write it.
    pub is_read_only: Option<bool>,
    /// A format has begun and has not ended: the device is not blank, and holds no data.
    #[serde(default)]
    pub is_formatting: bool,
    /// Target paths that are published for reading. A writable mount at one of them is an
    /// unfinished publication: the remount for reading is missing.
    #[serde(default)]
    pub read_only_targets: Vec<PathBuf>,
}

impl Staged {
    pub(crate) fn new(
        boot_id: &str,
        context: &Context,
        staging: &Path,
        capability: &Capability,
    ) -> Self {
        let (fs_type, flags) = match &capability.access {
            Access::Block => (None, Vec::new()),
            Access::Mount { fs_type, flags } => (Some(fs_type.clone()), flags.clone()),
        };
        Self {
            v: VERSION,
            boot_id: boot_id.to_owned(),
            nqn: context.nqn.clone(),
            uuid: context.uuid,
            addresses: context.addresses.iter().map(ToString::to_string).collect(),
            former: Vec::new(),
            staging: staging.to_owned(),
            is_read_only: Some(capability.is_read_only()),
            fs_type,
            flags,
            is_formatting: false,
            read_only_targets: Vec::new(),
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.is_read_only.unwrap_or_default()
    }

    pub(crate) fn addresses(&self) -> Vec<Address> {
        let read = self.addresses.iter();
        read.filter_map(|text| Address::read(text)).collect()
    }

    /// True if paths to this address are those of the volume.
    pub(crate) fn has(&self, address: &Address) -> bool {
        let text = address.to_string();
        self.addresses.contains(&text) || self.former.contains(&text)
    }

    /// True for the same volume at the same place in the same way; addresses may differ.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        let of = |one: &Self| {
            let place = (one.nqn.clone(), one.staging.clone(), one.fs_type.clone());
            (place, one.flags.clone())
        };
        // Of a file system, the mount itself is compared later.
        let uses = self.is_read_only.zip(other.is_read_only);
        of(self) == of(other) && uses.is_none_or(|(one, two)| one == two)
    }

    /// Takes over the parts of an earlier record of the volume that still count.
    pub(crate) fn follow(&mut self, before: Self) {
        if before.nqn != self.nqn {
            return;
        }
        self.is_formatting = before.is_formatting;
        self.read_only_targets = before.read_only_targets;
        for address in before.addresses.into_iter().chain(before.former) {
            let is_known = self.addresses.contains(&address) || self.former.contains(&address);
            if !is_known && self.former.len() < MAX_FORMER {
                self.former.push(address);
            }
        }
    }
}

/// Most addresses of earlier requests.
const MAX_FORMER: usize = 256;
/// Largest record that is read.
const MOST: u64 = 256 << 10;

#[derive(Deserialize)]
struct Version {
    #[serde(default)]
    v: u32,
}

#[derive(Debug)]
pub(crate) struct Records(PathBuf);

const END: &str = "json";

impl Records {
    /// Opens the directory, and removes the records of earlier boots. Records of the first release
    /// do not name their boot: they count as of this one, and `is_formatting` becomes false.
    pub(crate) fn open(dir: &Path, boot_id: &str) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let records = Self(dir.to_owned());
        for volume in records.volumes()? {
            // A record that cannot be read stays: the calls for its volume report it.
            let Ok(Some(mut staged)) = records.read(volume) else {
                continue;
            };
            if staged.boot_id.is_empty() {
                // Another node may have made a file system since the format began.
                staged.is_formatting = false;
                boot_id.clone_into(&mut staged.boot_id);
                let written = records.write(volume, &staged);
                written.map_err(|error| io::Error::other(error.message().to_owned()))?;
            } else if staged.boot_id != boot_id {
                std::fs::remove_file(records.path(volume))?;
            }
        }
        Ok(records)
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
        let later = |v: u32| {
            Status::internal(format!(
                "{}: the record has version {v}, and this driver reads versions up to {VERSION}: \
                 run the later driver again, or unmount and disconnect the volume by hand and \
                 remove the file",
                path.display()
            ))
        };
        let read = || {
            let mut bytes = Vec::new();
            File::open(&path)?.take(MOST).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        match read() {
            Ok(bytes) => {
                // Fields of a later version may be others, or mean something else.
                match serde_json::from_slice(&bytes) {
                    Ok(Version { v }) if v > VERSION => return Err(later(v)),
                    _ => {}
                }
                let read = serde_json::from_slice(&bytes);
                read.map(Some).map_err(|error| failed(error.to_string()))
            }
            Err(error) if io::Error::kind(&error) == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// Writes the record, which is durable when this returns.
    pub(crate) fn write(&self, volume: Uuid, staged: &Staged) -> Result<(), Status> {
        let path = self.path(volume);
        let bytes = serde_json::to_vec(staged);
        let written = bytes
            .map_err(io::Error::from)
            .and_then(|bytes| files::replace_private(&path, &bytes));
        written
            .map_err(|error| Status::internal(format!("cannot write {}: {error}", path.display())))
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

    /// The volumes with a record. Without the directory there are none.
    pub(crate) fn volumes(&self) -> io::Result<Vec<Uuid>> {
        let entries = match std::fs::read_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            found => found?,
        };
        let id = |path: PathBuf| {
            let is_record = path.extension().is_some_and(|end| end == END);
            let stem = path.file_stem()?.to_str()?;
            Uuid::parse_str(stem).ok().filter(|_| is_record)
        };
        let id = |entry: io::Result<std::fs::DirEntry>| {
            let volume = entry.map(|entry| id(entry.path()));
            volume.transpose()
        };
        entries.filter_map(id).collect()
    }
}
