//! The two slots of the appliance's disk: the versions in them, and their boot entries.
//!
//! systemd-boot counts tries in the name of an entry: `nacre_V+L-D.efi` has L tries left and
//! failed D times, `nacre_V.efi` has booted successfully. The boot menu lists entries without tries
//! last.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::place::Places;
use crate::version::Version;

/// Most entries of a folder that are read.
const MOST: usize = 256;
/// Tries of a version that is not known to be good, as in its transfer file.
const TRIES: u32 = 3;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BootEntry {
    pub version: Version,
    /// `None`: the version has booted successfully, and its tries are not counted.
    pub tries: Option<Tries>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Tries {
    pub left: u32,
    pub failed: u32,
}

impl BootEntry {
    /// Parses a file name; `None`: it is no name of an entry.
    pub fn parse(name: &str) -> Option<Self> {
        let name = name.strip_prefix("nacre_")?.strip_suffix(".efi")?;
        let Some((version, tries)) = name.split_once('+') else {
            return Some(Self {
                version: name.parse().ok()?,
                tries: None,
            });
        };
        let (left, failed) = tries.split_once('-').unwrap_or((tries, "0"));
        Some(Self {
            version: version.parse().ok()?,
            tries: Some(Tries {
                left: count(left)?,
                failed: count(failed)?,
            }),
        })
    }

    pub fn name(&self) -> String {
        match self.tries {
            None => format!("nacre_{}.efi", self.version),
            Some(Tries { left, failed }) => format!("nacre_{}+{left}-{failed}.efi", self.version),
        }
    }

    fn is_exhausted(&self) -> bool {
        self.tries.is_some_and(|tries| tries.left == 0)
    }
}

fn count(text: &str) -> Option<u32> {
    let is_number = (1..=6).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| text.parse().ok())?
}

/// A version on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Slot {
    pub version: Version,
    pub state: SlotState,
    /// The file name of its boot entry; `None`: the version cannot boot.
    pub entry: Option<String>,
    pub tries: Option<Tries>,
    /// True if the partitions of its root file system and its verity data exist.
    pub complete: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SlotState {
    /// It is running.
    Running,
    /// It has booted successfully before.
    Good,
    /// It has not booted successfully yet, and has tries left.
    Untried,
    /// No tries are left: it failed to boot, or a rollback marked it so.
    Failed,
    /// A partition or its boot entry is missing.
    Incomplete,
}

impl SlotState {
    pub fn text(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Good => "good",
            Self::Untried => "untried",
            Self::Failed => "failed",
            Self::Incomplete => "incomplete",
        }
    }
}

/// The versions on the disk, newest first.
pub fn slots(places: &Places, running: &Version) -> io::Result<Vec<Slot>> {
    let entries = entries(&places.entries())?;
    let labels = names(&places.labels())?;
    let mut versions: BTreeMap<Version, Option<BootEntry>> = BTreeMap::new();
    for label in &labels {
        let version = label.strip_prefix("nacre_").map(str::parse);
        if let Some(Ok(version)) = version {
            versions.insert(version, None);
        }
    }
    for (entry, _) in entries {
        let known = versions.entry(entry.version.clone()).or_default();
        // With two names of one version the better one counts, as in the boot menu.
        if known.as_ref().is_none_or(BootEntry::is_exhausted) {
            *known = Some(entry);
        }
    }
    let slot = |(version, entry): (Version, Option<BootEntry>)| {
        let has = |label: String| labels.contains(&label);
        let complete = has(format!("nacre_{version}")) && has(format!("nacre_{version}_verity"));
        let state = match &entry {
            _ if version == *running => SlotState::Running,
            Some(entry) if complete => match entry.tries {
                None => SlotState::Good,
                Some(Tries { left: 0, .. }) => SlotState::Failed,
                Some(_) => SlotState::Untried,
            },
            _ => SlotState::Incomplete,
        };
        Slot {
            version,
            state,
            tries: entry.as_ref().and_then(|entry| entry.tries),
            entry: entry.map(|entry| entry.name()),
            complete,
        }
    };
    Ok(versions.into_iter().rev().map(slot).collect())
}

#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    #[error("no other version is on this disk")]
    NoOther,
    #[error("version {version}: its partition or its boot entry is missing")]
    Incomplete { version: Version },
    #[error("version {version}: no boot was good within its tries; --force tries it again")]
    Failed { version: Version },
    #[error("version {version}, which runs, has no boot entry in {path}", path = path.display())]
    NoEntry { version: Version, path: PathBuf },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// Makes the next boot start the version that is not running; returns that version. `force`: also
/// if it has no tries left.
///
/// The other version gets new tries. The boot menu has the newer of two versions first, and those
/// without tries last. So a running version that is newer is marked as out of tries, which makes it
/// the last choice. A running version that is older keeps its entry. With the mark, the machine
/// would not return to it, since the newer one comes first if neither has tries.
pub fn roll_back(
    places: &Places,
    running: &Version,
    force: bool,
) -> Result<Version, RollbackError> {
    let folder = places.entries();
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| RollbackError::Io { path, source }
    };
    let slots = slots(places, running).map_err(failed(&folder))?;
    let other = slots.iter().find(|slot| slot.state != SlotState::Running);
    let other = other.ok_or(RollbackError::NoOther)?;
    let version = other.version.clone();
    match other.state {
        SlotState::Incomplete => return Err(RollbackError::Incomplete { version }),
        SlotState::Failed if !force => return Err(RollbackError::Failed { version }),
        _ => {}
    }
    let entries = entries(&folder).map_err(failed(&folder))?;
    if !entries.iter().any(|(entry, _)| entry.version == *running) {
        return Err(RollbackError::NoEntry {
            version: running.clone(),
            path: folder,
        });
    }
    // The other version first: with a power failure between the two, both can boot.
    let newer = (*running > version).then_some(running);
    for chosen in [Some(&version), newer].into_iter().flatten() {
        let tries = if chosen == running {
            // Not a count of the boot menu: its last try has failed all of them.
            Tries { left: 0, failed: 1 }
        } else {
            Tries {
                left: TRIES,
                failed: 0,
            }
        };
        for (entry, path) in entries.iter().filter(|(entry, _)| entry.version == *chosen) {
            let name = BootEntry {
                tries: Some(tries),
                ..entry.clone()
            }
            .name();
            let target = folder.join(name);
            fs::rename(path, &target).map_err(failed(path))?;
            // FAT has no journal, and gives a new name no contents until the file is written.
            fs::File::open(&target)
                .and_then(|file| file.sync_all())
                .map_err(failed(&target))?;
        }
        fs::File::open(&folder)
            .and_then(|folder| folder.sync_all())
            .map_err(failed(&folder))?;
    }
    Ok(version)
}

/// The entries that can boot: those with contents. A power failure can leave an empty one.
fn entries(folder: &Path) -> io::Result<Vec<(BootEntry, PathBuf)>> {
    let mut entries = Vec::new();
    for name in names(folder)? {
        let path = folder.join(&name);
        if let Some(entry) = BootEntry::parse(&name)
            && !is_empty(&path)?
        {
            entries.push((entry, path));
        }
    }
    Ok(entries)
}

fn is_empty(path: &Path) -> io::Result<bool> {
    Ok(fs::metadata(path)?.len() == 0)
}

/// Removes entries without contents: their versions would count as installed.
pub(crate) fn remove_empty(folder: &Path) -> io::Result<()> {
    for name in names(folder)? {
        let path = folder.join(&name);
        if BootEntry::parse(&name).is_some() && is_empty(&path)? {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// The names in a folder; a missing folder has none.
pub(crate) fn names(folder: &Path) -> io::Result<Vec<String>> {
    let read = match fs::read_dir(folder) {
        Ok(read) => read,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for entry in read.take(MOST) {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A disk with these boot entries, and both partitions of these versions.
    pub(crate) fn disk(entries: &[&str], versions: &[&str]) -> (tempfile::TempDir, Places) {
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        fs::create_dir_all(places.entries()).unwrap();
        fs::create_dir_all(places.labels()).unwrap();
        for entry in entries {
            fs::write(places.entries().join(entry), entry).unwrap();
        }
        for version in versions {
            for label in [
                format!("nacre_{version}"),
                format!("nacre_{version}_verity"),
            ] {
                fs::write(places.labels().join(label), "").unwrap();
            }
        }
        (root, places)
    }

    fn version(text: &str) -> Version {
        text.parse().unwrap()
    }

    #[test]
    fn names_of_entries_read_back() {
        for (name, left_and_failed) in [
            ("nacre_0.1.0.efi", None),
            ("nacre_0.1.0+3-0.efi", Some((3, 0))),
            ("nacre_0.1.0+0-3.efi", Some((0, 3))),
        ] {
            let entry = BootEntry::parse(name).unwrap();
            assert_eq!(entry.name(), name);
            assert_eq!(entry.tries.map(|t| (t.left, t.failed)), left_and_failed);
        }
        assert_eq!(
            BootEntry::parse("nacre_0.1.0+3.efi").unwrap().name(),
            "nacre_0.1.0+3-0.efi"
        );
        for bad in [
            "nacre_0.1.0",
            "nacre_.efi",
            "nacre_0.1.0+.efi",
            "nacre_0.1.0+1-.efi",
            "nacre_0.1.0+-1.efi",
            "nacre_0.1.0+a.efi",
            "nacre_0.1.0+1-2-3.efi",
            "other_0.1.0.efi",
            "nacre_0.1.0+9999999.efi",
        ] {
            assert_eq!(BootEntry::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn slots_have_a_state() {
        let states = |entries: &[&str], versions: &[&str]| -> Vec<(String, &str)> {
            let (_root, places) = disk(entries, versions);
            slots(&places, &version("0.2.0"))
                .unwrap()
                .into_iter()
                .map(|slot| (slot.version.to_string(), slot.state.text()))
                .collect()
        };
        let pair = |a: &str, b: &'static str| (a.to_owned(), b);
        assert_eq!(
            states(&["nacre_0.2.0+3-0.efi"], &["0.2.0"]),
            [pair("0.2.0", "running")]
        );
        for (entry, state) in [
            ("nacre_0.10.0.efi", "good"),
            ("nacre_0.10.0+2-1.efi", "untried"),
            ("nacre_0.10.0+0-3.efi", "failed"),
            ("other.efi", "incomplete"),
        ] {
            let found = states(&["nacre_0.2.0.efi", entry], &["0.2.0", "0.10.0"]);
            assert_eq!(found, [pair("0.10.0", state), pair("0.2.0", "running")]);
        }
        let found = states(&["nacre_0.1.0.efi", "nacre_0.2.0.efi"], &["0.2.0"]);
        assert_eq!(
            found,
            [pair("0.2.0", "running"), pair("0.1.0", "incomplete")]
        );
        assert_eq!(states(&[], &[]), []);
    }

    #[test]
    fn a_rollback_orders_the_entries_anew() {
        let rolled = |entries: &[&str], force| {
            let (_root, places) = disk(entries, &["0.1.0", "0.2.0"]);
            let rolled = roll_back(&places, &version("0.2.0"), force);
            let names = names(&places.entries()).unwrap();
            for name in &names {
                let bytes = fs::read_to_string(places.entries().join(name)).unwrap();
                assert_eq!(
                    BootEntry::parse(&bytes).unwrap().version,
                    BootEntry::parse(name).unwrap().version
                );
            }
            (
                rolled.map(|v| v.to_string()).map_err(|e| e.to_string()),
                names,
            )
        };
        let after = ["nacre_0.1.0+3-0.efi", "nacre_0.2.0+0-1.efi"]
            .map(str::to_owned)
            .to_vec();
        assert_eq!(
            rolled(&["nacre_0.1.0.efi", "nacre_0.2.0.efi"], false),
            (Ok("0.1.0".into()), after.clone())
        );
        assert_eq!(
            rolled(&["nacre_0.1.0+2-1.efi", "nacre_0.2.0+2-1.efi"], false),
            (Ok("0.1.0".into()), after.clone())
        );
        // Power failures between the two renames, and behind both.
        for left in ["nacre_0.2.0.efi", "nacre_0.2.0+0-1.efi"] {
            assert_eq!(
                rolled(&["nacre_0.1.0+3-0.efi", left], false),
                (Ok("0.1.0".into()), after.clone())
            );
        }
        let (refused, names) = rolled(&["nacre_0.1.0+0-3.efi", "nacre_0.2.0.efi"], false);
        assert!(refused.unwrap_err().contains("--force"));
        assert_eq!(names, ["nacre_0.1.0+0-3.efi", "nacre_0.2.0.efi"]);
        assert_eq!(
            rolled(&["nacre_0.1.0+0-3.efi", "nacre_0.2.0.efi"], true),
            (Ok("0.1.0".into()), after)
        );
        // To a newer version: this one starts again when the newer one has used its tries.
        let (_root, places) = disk(
            &["nacre_0.1.0.efi", "nacre_0.2.0+0-3.efi"],
            &["0.1.0", "0.2.0"],
        );
        roll_back(&places, &version("0.1.0"), true).unwrap();
        assert_eq!(
            super::names(&places.entries()).unwrap(),
            ["nacre_0.1.0.efi", "nacre_0.2.0+3-0.efi"]
        );
        // A power failure left an entry without contents.
        let (_root, places) = disk(&["nacre_0.2.0.efi"], &["0.1.0", "0.2.0"]);
        fs::write(places.entries().join("nacre_0.1.0+3-0.efi"), "").unwrap();
        assert!(matches!(
            roll_back(&places, &version("0.2.0"), true),
            Err(RollbackError::Incomplete { .. })
        ));
        let (refused, names) = rolled(&["nacre_0.2.0.efi"], true);
        assert!(refused.unwrap_err().contains("missing"));
        assert_eq!(names, ["nacre_0.2.0.efi"]);
        let (refused, names) = rolled(&["nacre_0.1.0.efi"], false);
        assert!(refused.unwrap_err().contains("has no boot entry"));
        assert_eq!(names, ["nacre_0.1.0.efi"]);
        let (_root, places) = disk(&["nacre_0.2.0.efi"], &["0.2.0"]);
        assert!(matches!(
            roll_back(&places, &version("0.2.0"), true),
            Err(RollbackError::NoOther)
        ));
    }
}
