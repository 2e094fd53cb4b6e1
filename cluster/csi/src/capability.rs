//! Parses and checks the fields of CSI requests: volume capabilities (access mode, file system,
//! mount flags), sizes, names, paths, ids, and the parameters of a storage class. Errors are gRPC
//! statuses with the codes of the CSI specification.

use std::collections::BTreeSet;

use tonic::Status;
use uuid::Uuid;

use crate::messages::{AccessType, CapacityRange, Mode, Texts, VolumeCapability};

pub(crate) const MIB: u64 = 1 << 20;
/// Size of a new volume if the request has none.
const DEFAULT_BYTES: u64 = 1 << 30;
/// Most bytes of a string and of a map, as in the CSI specification.
const MAX_TEXT: usize = 128;
const MAX_TEXTS: usize = 4 << 10;
/// Longest path: Linux's PATH_MAX without the final zero.
const MAX_PATH: usize = 4095;
/// Most bytes of all mount flags together, as in the CSI specification.
const MAX_FLAGS: usize = 4 << 10;

pub(crate) const FILE_SYSTEMS: [&str; 2] = ["ext4", "xfs"];
const DEFAULT_FILE_SYSTEM: &str = "ext4";

/// Prefix of parameters that Kubernetes adds (the names of the claim and so on); they are ignored.
const FOREIGN: &str = "csi.storage.k8s.io/";

/// How a pod gets the volume: as a block device, or as a mounted file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    Block,
    Mount { fs_type: String, flags: Vec<String> },
}

/// True for a parameter that Kubernetes adds.
pub(crate) fn is_foreign(key: &str) -> bool {
    key.starts_with(FOREIGN)
}

/// A volume capability that this driver supports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capability {
    pub access: Access,
    pub mode: Mode,
}

/// The reason for the refusal of a capability. The gRPC code depends on the call:
/// `invalid` or `exceeds`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    #[error("{0}")]
    Missing(&'static str),
    #[error("{0}")]
    Unsupported(String),
}

impl Unfit {
    /// INVALID_ARGUMENT.
    pub(crate) fn invalid(self) -> Status {
        Status::invalid_argument(self.to_string())
    }

    /// For calls on an existing volume: FAILED_PRECONDITION if the capability is unsupported.
    pub(crate) fn exceeds(self) -> Status {
        match self {
            Self::Missing(_) => self.invalid(),
            Self::Unsupported(_) => Status::failed_precondition(self.to_string()),
        }
    }
}

impl Capability {
    /// Parses the capability of a request. A file system is refused for several nodes at once.
    pub fn read(asked: Option<&VolumeCapability>) -> Result<Self, Unfit> {
        let asked = asked.ok_or(Unfit::Missing("volume_capability is missing"))?;
        let mode = asked.access_mode.map_or(Mode::Unknown, |mode| mode.mode());
        if mode == Mode::Unknown {
            let missing = "volume_capability.access_mode is missing or unknown";
            return Err(Unfit::Missing(missing));
        }
        let access = match &asked.access_type {
            None => return Err(Unfit::Missing("volume_capability.access_type is missing")),
            Some(AccessType::Block(_)) => Access::Block,
            Some(AccessType::Mount(mount)) => {
                let fs_type = match mount.fs_type.as_str() {
                    "" => DEFAULT_FILE_SYSTEM,
                    named => named,
                };
                if !FILE_SYSTEMS.contains(&fs_type) {
                    let known = FILE_SYSTEMS.join(", ");
                    return Err(Unfit::Unsupported(format!(
                        "file system \"{fs_type}\" is not supported: choose one of {known}"
                    )));
                }
                check_flags(&mount.mount_flags)?;
                Access::Mount {
                    fs_type: fs_type.to_owned(),
                    flags: mount.mount_flags.clone(),
                }
            }
        };
        let found = Self { access, mode };
        if found.is_shared() && found.access != Access::Block {
            return Err(Unfit::Unsupported(
                "a file system is for one node at a time: choose volumeMode Block for access from \
                 several nodes"
                    .to_owned(),
            ));
        }
        Ok(found)
    }

    /// True if the access mode allows several nodes at once.
    pub fn is_shared(&self) -> bool {
        matches!(
            self.mode,
            Mode::MultiNodeReaderOnly | Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter
        )
    }

    /// True if the access mode, or the mount flag `ro`, allows reads only.
    pub fn is_read_only(&self) -> bool {
        let flags = match &self.access {
            Access::Block => &[][..],
            Access::Mount { flags, .. } => flags,
        };
        let mut flags = flags.iter();
        matches!(
            self.mode,
            Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly
        ) || flags.any(|flag| flag == "ro")
    }
}

/// Checks the flags for `mount -o`: none is empty, begins with a dash, or has white space or
/// control characters. All flags together have at most [`MAX_FLAGS`] bytes.
fn check_flags(flags: &[String]) -> Result<(), Unfit> {
    if flags.iter().map(String::len).sum::<usize>() > MAX_FLAGS {
        let text = format!("mount_flags are longer than {MAX_FLAGS} bytes");
        return Err(Unfit::Unsupported(text));
    }
    let is_bad = |flag: &&String| {
        flag.is_empty()
            || flag.starts_with('-')
            || flag.chars().any(|c| c.is_whitespace() || c.is_control())
    };
    match flags.iter().find(is_bad) {
        Some(flag) => Err(Unfit::Unsupported(format!(
            "mount_flags: {flag:?} is no mount option"
        ))),
        None => Ok(()),
    }
}

/// Checks a required string: not empty, and at most [`MAX_TEXT`] bytes.
pub(crate) fn required<'a>(field: &str, text: &'a str) -> Result<&'a str, Status> {
    if text.is_empty() {
        return Err(Status::invalid_argument(format!("{field} is missing")));
    }
    bounded(field, text, MAX_TEXT)
}

pub(crate) fn bounded<'a>(field: &str, text: &'a str, most: usize) -> Result<&'a str, Status> {
    if text.len() <= most {
        return Ok(text);
    }
    let text = format!("{field} is longer than {most} bytes");
    Err(Status::invalid_argument(text))
}

/// Checks a required path: absolute, without `..` and zero bytes, at most [`MAX_PATH`] bytes.
pub(crate) fn required_path<'a>(field: &str, text: &'a str) -> Result<&'a str, Status> {
    if text.is_empty() {
        return Err(Status::invalid_argument(format!("{field} is missing")));
    }
    let path = std::path::Path::new(text);
    let is_plain = !path
        .components()
        .any(|part| part == std::path::Component::ParentDir);
    if path.is_absolute() && is_plain && text.len() <= MAX_PATH && !text.contains('\0') {
        return Ok(text);
    }
    let text = format!("{field}: {text:?} is not an absolute path without \"..\"");
    Err(Status::invalid_argument(text))
}

pub(crate) fn bounded_texts(field: &str, texts: &Texts) -> Result<(), Status> {
    let size: usize = texts
        .iter()
        .map(|(key, value)| key.len() + value.len())
        .sum();
    if size <= MAX_TEXTS {
        return Ok(());
    }
    let text = format!("{field} are longer than {MAX_TEXTS} bytes");
    Err(Status::invalid_argument(text))
}

/// Checks the name of a new volume or snapshot: not empty, at most [`MAX_TEXT`] bytes, and no
/// control characters other than tab and line ends.
pub(crate) fn checked_name(name: &str) -> Result<&str, Status> {
    let name = required("name", name)?;
    let is_banned = |c: char| c.is_control() && !matches!(c, '\t' | '\n' | '\r');
    if name.chars().any(is_banned) {
        let text = "name contains control characters";
        return Err(Status::invalid_argument(text));
    }
    Ok(name)
}

/// Parses a volume id, a UUID in lower case. `None` for another text: no volume can have it. Fails
/// if it is empty or too long.
pub(crate) fn volume_id(text: &str) -> Result<Option<Uuid>, Status> {
    required("volume_id", text)?;
    let id = Uuid::parse_str(text).ok();
    Ok(id.filter(|id| id.to_string() == text))
}

/// The size range of a request, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub least: u64,
    /// `None`: no limit.
    pub most: Option<u64>,
}

impl Sizes {
    pub(crate) fn read(range: Option<&CapacityRange>) -> Result<Self, Status> {
        let range = range.copied().unwrap_or_default();
        let negative = |_| {
            Status::out_of_range("capacity_range has a negative size: give 0 for no requirement")
        };
        let least = u64::try_from(range.required_bytes).map_err(negative)?;
        let most = u64::try_from(range.limit_bytes).map_err(negative)?;
        let most = Some(most).filter(|most| *most > 0);
        if most.is_some_and(|most| most < least) {
            let text = "capacity_range: limit_bytes is less than required_bytes";
            return Err(Status::out_of_range(text));
        }
        Ok(Self { least, most })
    }

    /// The range for a clone or restore, whose source has `bytes`: no smaller size.
    pub(crate) fn with_least(self, bytes: u64) -> Result<Self, Status> {
        // The source's size, unless the request wants more.
        let least = if self.least == 0 { bytes } else { self.least };
        if least < bytes || self.most.is_some_and(|most| most < bytes) {
            return Err(Status::out_of_range(format!(
                "capacity_range: the source has {bytes} bytes, and a volume of it has no less"
            )));
        }
        Ok(Self { least, ..self })
    }

    /// The size of the new volume in bytes: the smallest multiple of 1 MiB in the range, or 1 GiB
    /// (less if the limit is lower) if the request has no lower bound. `OUT_OF_RANGE` if there is
    /// none.
    pub(crate) fn chosen(self) -> Result<u64, Status> {
        let wanted = match (self.least, self.most) {
            (0, Some(most)) => DEFAULT_BYTES.min(most / MIB * MIB),
            (0, None) => DEFAULT_BYTES,
            (least, _) => least.checked_next_multiple_of(MIB).unwrap_or(u64::MAX),
        };
        if wanted > 0 && i64::try_from(wanted).is_ok() && self.admits(wanted) {
            return Ok(wanted);
        }
        Err(Status::out_of_range(
            "capacity_range: volumes are whole MiB, and no such size is in the range",
        ))
    }

    pub(crate) fn admits(self, bytes: u64) -> bool {
        bytes >= self.least && self.most.is_none_or(|most| bytes <= most)
    }
}

/// The parameters of a storage class.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Parameters {
    pub replicas: Option<usize>,
    /// Thin provisioning.
    pub is_thin: bool,
    /// Outside a cluster: the pool of each replica.
    pub pools: Vec<String>,
    /// In a cluster: only pools of this class.
    pub class: Option<String>,
    /// In a cluster: replicas are on nodes with different values of these labels.
    pub spread: Vec<String>,
    /// In a cluster: fail if `spread` is impossible.
    pub is_strict: bool,
    /// In a cluster: only these nodes.
    pub nodes: Vec<String>,
}

const KNOWN: &str = "replicas, thin, pool, class, spread, strictSpread, nodes";
const MAX_REPLICAS: usize = 5;

impl Parameters {
    pub(crate) fn read(texts: &Texts) -> Result<Self, Status> {
        bounded_texts("parameters", texts)?;
        let mut read = Self::default();
        for (key, value) in texts {
            let wrong = |wants: &str| {
                Status::invalid_argument(format!("parameter {key}: \"{value}\" is not {wants}"))
            };
            match key.as_str() {
                "replicas" => {
                    let count = value
                        .parse()
                        .ok()
                        .filter(|n| (1..=MAX_REPLICAS).contains(n));
                    read.replicas = Some(count.ok_or_else(|| wrong("a number from 1 to 5"))?);
                }
                "thin" => read.is_thin = boolean(value).ok_or_else(|| wrong("true or false"))?,
                "strictSpread" => {
                    read.is_strict = boolean(value).ok_or_else(|| wrong("true or false"))?;
                }
                "pool" => read.pools = list(value).ok_or_else(|| wrong("a list of pools"))?,
                "spread" => read.spread = list(value).ok_or_else(|| wrong("a list of labels"))?,
                "nodes" => read.nodes = list(value).ok_or_else(|| wrong("a list of nodes"))?,
                "class" if !value.is_empty() => read.class = Some(value.clone()),
                "class" => return Err(wrong("a class of pools")),
                foreign if foreign.starts_with(FOREIGN) => {}
                _ => {
                    let text = format!("parameter {key} is unknown: this driver knows {KNOWN}");
                    return Err(Status::invalid_argument(text));
                }
            }
        }
        let pools = read.pools.len();
        if pools > 0 && read.replicas.is_some_and(|replicas| replicas != pools) {
            return Err(Status::invalid_argument(format!(
                "parameter replicas is {}, and pool names {pools}: each replica has its own pool",
                read.replicas.unwrap_or_default()
            )));
        }
        Ok(read)
    }

    /// Fails if a parameter has no effect: `pool` in a cluster, or placement outside a cluster.
    pub(crate) fn refuse_ignored(&self, is_in_cluster: bool) -> Result<(), Status> {
        let given = |is_given: bool, key: &'static str| is_given.then_some(key);
        let (ignored, why) = if is_in_cluster {
            let pool = given(!self.pools.is_empty(), "pool");
            (pool, "the cluster chooses the pools: give class or nodes")
        } else {
            let ignored = [
                given(self.class.is_some(), "class"),
                given(!self.spread.is_empty(), "spread"),
                given(self.is_strict, "strictSpread"),
                given(!self.nodes.is_empty(), "nodes"),
            ];
            let text = "it is for a cluster, and the daemon is in none: leave it out";
            (ignored.into_iter().flatten().next(), text)
        };
        match ignored {
            Some(key) => Err(Status::invalid_argument(format!("parameter {key}: {why}"))),
            None => Ok(()),
        }
    }

    /// A text that is equal for equal parameters.
    pub(crate) fn canonical(&self) -> String {
        format!("{self:?}")
    }

    pub(crate) fn replica_count(&self) -> usize {
        self.replicas.unwrap_or_else(|| self.pools.len().max(1))
    }
}

fn boolean(text: &str) -> Option<bool> {
    match text {
        "true" => Some(true),
        "false" => Some(false),
        _ => None,
    }
}

/// Parses words separated by commas. `None` if one is empty or repeated.
fn list(text: &str) -> Option<Vec<String>> {
    let words: Vec<String> = text.split(',').map(|word| word.trim().to_owned()).collect();
    let distinct: BTreeSet<&String> = words.iter().collect();
    let is_good = distinct.len() == words.len() && words.iter().all(|word| !word.is_empty());
    is_good.then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{AccessMode, MountVolume, Nothing};

    fn mount(fs_type: &str, flags: &[&str], mode: Mode) -> VolumeCapability {
        VolumeCapability {
            access_type: Some(AccessType::Mount(MountVolume {
                fs_type: fs_type.to_owned(),
                mount_flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
                volume_mount_group: String::new(),
            })),
            access_mode: Some(AccessMode { mode: mode.into() }),
        }
    }

    #[test]
    fn a_file_system_is_for_one_node() {
        let good = Capability::read(Some(&mount("", &["noatime"], Mode::SingleNodeWriter)));
        let expected = Access::Mount {
            fs_type: "ext4".to_owned(),
            flags: vec!["noatime".to_owned()],
        };
        assert_eq!(good.map(|good| good.access), Ok(expected));
        for bad in [
            mount("", &[], Mode::MultiNodeMultiWriter),
            mount("ntfs", &[], Mode::SingleNodeWriter),
            mount("", &["--bind"], Mode::SingleNodeWriter),
            mount("", &["ro suid"], Mode::SingleNodeWriter),
            mount("", &[""], Mode::SingleNodeWriter),
        ] {
            let refused = Capability::read(Some(&bad));
            assert!(matches!(refused, Err(Unfit::Unsupported(_))), "{bad:?}");
        }
        let block = VolumeCapability {
            access_type: Some(AccessType::Block(Nothing {})),
            ..mount("", &[], Mode::MultiNodeMultiWriter)
        };
        assert!(Capability::read(Some(&block)).is_ok_and(|block| block.is_shared()));
        for missing in [
            None,
            Some(VolumeCapability::default()),
            Some(mount("", &[], Mode::Unknown)),
        ] {
            let refused = Capability::read(missing.as_ref());
            assert!(matches!(refused, Err(Unfit::Missing(_))), "{missing:?}");
        }
    }

    #[test]
    fn sizes_are_whole_mebibytes_within_the_range() {
        let chosen = |required_bytes, limit_bytes| {
            let range = CapacityRange {
                required_bytes,
                limit_bytes,
            };
            Sizes::read(Some(&range)).and_then(Sizes::chosen).ok()
        };
        assert_eq!(
            Sizes::read(None).and_then(Sizes::chosen).ok(),
            Some(1 << 30)
        );
        assert_eq!(chosen(1, 0), Some(MIB));
        assert_eq!(chosen(5 << 20, 5 << 20), Some(5 << 20));
        assert_eq!(chosen(0, (3 << 20) + 7), Some(3 << 20));
        for (least, most) in [(1, 5), (-1, 0), (0, -1), (9, 8), (i64::MAX, 0), (0, 7)] {
            assert_eq!(chosen(least, most), None, "{least} to {most}");
        }
    }

    #[test]
    fn parameters_are_read_and_refused() {
        let read = |pairs: &[(&str, &str)]| {
            let pairs = pairs
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            Parameters::read(&pairs.collect())
        };
        let good = read(&[
            ("replicas", "3"),
            ("thin", "true"),
            ("spread", "zone, rack"),
            ("csi.storage.k8s.io/pvc/name", "data"),
        ]);
        let good = good.expect("they are known");
        assert_eq!((good.replica_count(), good.is_thin), (3, true));
        assert_eq!(good.spread, ["zone", "rack"]);
        assert_eq!(read(&[("pool", "a,b")]).expect("good").replica_count(), 2);
        for bad in [
            [("replicas", "0"), ("thin", "true")],
            [("replicas", "six"), ("thin", "true")],
            [("replicas", "2"), ("thin", "yes")],
            [("replicas", "2"), ("pool", "a")],
            [("pool", "a,a"), ("thin", "true")],
            [("spread", ""), ("thin", "true")],
            [("class", ""), ("thin", "true")],
            [("Replicas", "2"), ("thin", "true")],
        ] {
            let refused = read(&bad).expect_err("it is refused");
            assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{bad:?}");
        }
    }

    #[test]
    fn paths_are_absolute_and_go_down() {
        assert!(required_path("path", "/var/lib/kubelet/x").is_ok());
        for bad in ["", "x", "/a/../b", "/a\0b"] {
            assert!(required_path("path", bad).is_err(), "{bad}");
        }
    }
}
