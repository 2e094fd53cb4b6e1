//! Update bundles: signed archives `nacre_V.tar` with the system of version V.
//!
//! ```text
//!   SHA256SUMS            digests of RELEASE and of the files of the version
//!   SHA256SUMS.sig        Ed25519 signature of SHA256SUMS, 64 bytes
//!   RELEASE               IMAGE_ID, IMAGE_VERSION, ARCHITECTURE
//!   nacre_V_UUID.root.raw.gz, nacre_V_UUID.verity.raw.gz, nacre_V.efi
//! ```
//!
//! A bundle is read once, from its start. The signature is checked before any other entry is read,
//! and the digest of an entry before the folder of updates changes. Entries are plain files with
//! names of a fixed list: a bundle cannot name a path, a link or a device, and each part has a
//! maximum size.

mod keys;
mod release;
#[cfg(test)]
pub(crate) mod tests;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nacre_engine_values::files;
use rustix::fs::{CWD, RenameFlags, renameat_with};

pub use self::keys::{KeyError, Keys};
pub use self::release::{Part, Release};
use self::release::{RELEASE, SIGNATURE, SUMS, parse_sums};
use crate::digest::{self, Sha256};
use crate::place::{printable, remove_abandoned};
use crate::slots::{Slot, SlotState};
use crate::status::{self, SpaceError};
use crate::version::Version;

/// The machine that a bundle is for.
#[derive(Debug, Clone)]
pub struct TargetMachine {
    pub image: String,
    /// As in `ARCHITECTURE`: `x86-64` or `arm64`.
    pub architecture: String,
    /// The version that is running.
    pub running: Version,
    pub allow_older: bool,
    /// The versions on the disk.
    pub slots: Vec<Slot>,
}

/// A bundle whose files are in the folder of updates.
#[derive(Debug, PartialEq, Eq)]
pub struct Unpacked {
    pub version: Version,
    /// The name of the key that signed it.
    pub key: String,
    pub bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    #[error("the bundle: {0}")]
    Read(#[source] io::Error),
    #[error("the bundle: {found} instead of {wanted}; it is damaged, or no update bundle")]
    Entry { wanted: String, found: String },
    #[error("{name}: {bytes} bytes; at most {most} are allowed")]
    TooLarge { name: String, bytes: u64, most: u64 },
    #[error(
        "{SIGNATURE}: made by none of the keys of this appliance ({known}); the bundle is not from their owner, or {SUMS} was changed"
    )]
    NotSigned { known: String },
    #[error("{name}: {cause}")]
    Malformed { name: &'static str, cause: String },
    #[error("{name}: its SHA-256 is {actual}, not {expected}: the bundle is damaged")]
    Digest {
        name: String,
        expected: Sha256,
        actual: Sha256,
    },
    #[error("{RELEASE}: {field} is {actual:?}; this appliance needs {expected:?}")]
    OtherMachine {
        field: &'static str,
        expected: String,
        actual: String,
    },
    #[error("version {version} runs already")]
    Runs { version: Version },
    #[error(
        "version {version} is in the other slot already ({state}); `nacre appliance rollback` boots it, with --force after failed tries",
        state = state.text()
    )]
    Installed { version: Version, state: SlotState },
    #[error(
        "version {version} is older than {running}, which runs; --allow-older installs it all the same"
    )]
    Older { version: Version, running: Version },
    #[error(transparent)]
    Space(#[from] SpaceError),
    #[error("{path}: {source}", path = path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// Checks a bundle and makes its files the contents of `updates`. An error leaves `updates` as it
/// was, except that the sync of its parent folder may fail after the change.
pub fn unpack(
    bundle: impl Read,
    keys: &Keys,
    wanted: &TargetMachine,
    updates: &Path,
) -> Result<Unpacked, BundleError> {
    let mut archive = tar::Archive::new(bundle);
    // Raw: no extensions for long names and sparse files, which would read without a bound.
    let mut entries = archive.entries().map_err(unreadable)?.raw(true);
    let sums_text = next(&mut entries, Some(Part::Sums))?.text()?;
    let signature = next(&mut entries, Some(Part::Signature))?.text()?;
    let key = keys
        .signer(&sums_text, &signature)
        .ok_or_else(|| BundleError::NotSigned {
            known: keys.names().collect::<Vec<_>>().join(", "),
        })?;
    let mut sums =
        parse_sums(&sums_text).map_err(|cause| BundleError::Malformed { name: SUMS, cause })?;
    let release_text = next(&mut entries, Some(Part::Release))?.text()?;
    check_digest(take(&mut sums, RELEASE)?, Sha256::of(&release_text))?;
    let release = Release::parse(&release_text).map_err(|cause| BundleError::Malformed {
        name: RELEASE,
        cause,
    })?;
    check_release(&release, wanted)?;
    for (name, _) in &sums {
        let version = Part::of_name(name).and_then(|(_, version)| version);
        if version.as_ref() != Some(&release.version) {
            let cause = format!("{name} is not of version {}", release.version);
            return Err(BundleError::Malformed { name: SUMS, cause });
        }
    }

    let staging = Staging::beside(updates)?;
    let mut bytes = 0;
    for _ in 0..sums.len() {
        let entry = next(&mut entries, None)?;
        let sum = take(&mut sums, &entry.name)?;
        bytes += staging.write(entry, sum)?;
    }
    staging.publish(updates)?;
    Ok(Unpacked {
        version: release.version,
        key: key.to_owned(),
        bytes,
    })
}

/// Removes an unpacked bundle.
pub fn discard(updates: &Path) -> io::Result<()> {
    match fs::remove_dir_all(updates) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn check_release(release: &Release, wanted: &TargetMachine) -> Result<(), BundleError> {
    for (field, expected, actual) in [
        ("IMAGE_ID", &wanted.image, &release.image),
        ("ARCHITECTURE", &wanted.architecture, &release.architecture),
    ] {
        if expected != actual {
            return Err(BundleError::OtherMachine {
                field,
                expected: expected.clone(),
                actual: actual.clone(),
            });
        }
    }
    let version = release.version.clone();
    let running = wanted.running.clone();
    if version == running {
        return Err(BundleError::Runs { version });
    }
    // systemd-sysupdate leaves such a version as it is, without new tries.
    let slot = wanted.slots.iter().find(|slot| slot.version == version);
    if let Some(state) = slot.map(|slot| slot.state)
        && state != SlotState::Incomplete
    {
        return Err(BundleError::Installed { version, state });
    }
    if version < running && !wanted.allow_older {
        return Err(BundleError::Older { version, running });
    }
    Ok(())
}

fn take(sums: &mut Vec<(String, Sha256)>, name: &str) -> Result<(String, Sha256), BundleError> {
    match sums.iter().position(|(listed, _)| listed == name) {
        Some(at) => Ok(sums.swap_remove(at)),
        None => Err(BundleError::Entry {
            wanted: sums
                .first()
                .map_or_else(String::new, |(name, _)| name.clone()),
            found: name.to_owned(),
        }),
    }
}

fn check_digest((name, expected): (String, Sha256), actual: Sha256) -> Result<(), BundleError> {
    if expected == actual {
        return Ok(());
    }
    Err(BundleError::Digest {
        name,
        expected,
        actual,
    })
}

/// A file of the bundle, with a name and a size that are allowed.
struct BundleFile<'a, R: Read> {
    name: String,
    size: u64,
    data: tar::Entry<'a, R>,
}

/// The next entry, which must be this part, or any file of a version.
fn next<'a, R: Read>(
    entries: &mut tar::Entries<'a, R>,
    wanted: Option<Part>,
) -> Result<BundleFile<'a, R>, BundleError> {
    let wanted_name = wanted
        .and_then(Part::fixed_name)
        .unwrap_or("a file of a version");
    let refuse = |found: &str| BundleError::Entry {
        wanted: wanted_name.to_owned(),
        found: found.to_owned(),
    };
    let data = match entries.next() {
        Some(entry) => entry.map_err(unreadable)?,
        None => return Err(refuse("the end")),
    };
    let name = String::from_utf8_lossy(&data.path_bytes()).into_owned();
    if data.header().entry_type() != tar::EntryType::Regular {
        return Err(refuse(&format!("{name:?}, which is no file")));
    }
    let is_wanted = |part: Part| match wanted {
        Some(wanted) => part == wanted,
        None => part.fixed_name().is_none(),
    };
    let part = match Part::of_name(&name) {
        Some((part, _)) if is_wanted(part) => part,
        _ => return Err(refuse(&format!("{name:?}"))),
    };
    let size = data.header().size().map_err(unreadable)?;
    let most = part.most_bytes();
    if size > most {
        return Err(BundleError::TooLarge {
            name,
            bytes: size,
            most,
        });
    }
    Ok(BundleFile { name, size, data })
}

impl<R: Read> BundleFile<'_, R> {
    /// The whole contents of a small file.
    fn text(mut self) -> Result<Vec<u8>, BundleError> {
        let mut text = Vec::with_capacity(usize::try_from(self.size).unwrap_or_default());
        self.data.read_to_end(&mut text).map_err(unreadable)?;
        whole(&self.name, self.size, text.len() as u64)?;
        Ok(text)
    }
}

/// Makes an archive's error printable: it quotes names of an archive that is not verified yet.
fn unreadable(error: io::Error) -> BundleError {
    BundleError::Read(io::Error::new(error.kind(), printable(&error.to_string())))
}

fn whole(name: &str, size: u64, read: u64) -> Result<(), BundleError> {
    if size == read {
        return Ok(());
    }
    Err(BundleError::Entry {
        wanted: format!("{size} bytes of {name}"),
        found: format!("{read} bytes"),
    })
}

/// A new folder beside the folder of updates. Without [`Staging::publish`] it is removed.
struct Staging(tempfile::TempDir);

impl Staging {
    fn beside(updates: &Path) -> Result<Self, BundleError> {
        let parent = updates.parent().unwrap_or_else(|| Path::new("/"));
        let create = || {
            fs::create_dir_all(parent)?;
            remove_abandoned(parent, STAGING)?;
            tempfile::Builder::new().prefix(STAGING).tempdir_in(parent)
        };
        create().map(Self).map_err(|source| failed(parent, source))
    }

    fn write<R: Read>(
        &self,
        entry: BundleFile<'_, R>,
        sum: (String, Sha256),
    ) -> Result<u64, BundleError> {
        let folder = self.0.path();
        status::check_space(folder, entry.size)?;
        let path = folder.join(&entry.name);
        let failed = |source| failed(&path, source);
        let mut file = File::create_new(&path).map_err(failed)?;
        let (read, digest) = digest::copy(entry.data, &mut file).map_err(failed)?;
        whole(&entry.name, entry.size, read)?;
        check_digest(sum, digest)?;
        file.sync_all().map_err(failed)?;
        Ok(read)
    }

    fn publish(self, updates: &Path) -> Result<(), BundleError> {
        let failed = |source| failed(updates, source);
        let folder = self.0.path();
        File::open(folder)
            .and_then(|f| f.sync_all())
            .map_err(failed)?;
        if updates.exists() {
            renameat_with(CWD, folder, CWD, updates, RenameFlags::EXCHANGE)
                .map_err(|error| failed(error.into()))?;
            // Now the former contents, which the drop removes.
        } else {
            fs::rename(folder, updates).map_err(failed)?;
        }
        files::sync_folder(updates).map_err(failed)
    }
}

const STAGING: &str = ".update-";

fn failed(path: &Path, source: io::Error) -> BundleError {
    BundleError::Write {
        path: path.to_owned(),
        source,
    }
}
