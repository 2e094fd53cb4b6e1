//! The signed texts of a bundle: `SHA256SUMS`, as sha256sum(1) prints it, and `RELEASE`, the
//! version and its machine as `NAME=value` lines.

use crate::digest::Sha256;
use crate::version::Version;

/// The files of a bundle, in the order of the archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Sums,
    Signature,
    Release,
    Root,
    Verity,
    Kernel,
}

pub(super) const SUMS: &str = "SHA256SUMS";
pub(super) const SIGNATURE: &str = "SHA256SUMS.sig";
pub(super) const RELEASE: &str = "RELEASE";

pub(super) const PARTS: [Part; 6] = [
    Part::Sums,
    Part::Signature,
    Part::Release,
    Part::Root,
    Part::Verity,
    Part::Kernel,
];

const MIB: u64 = 1024 * 1024;

impl Part {
    /// The most bytes of a part. The system disk's partitions for the root file system and its
    /// verity data have 1 GiB and 128 MiB.
    pub(super) fn most_bytes(self) -> u64 {
        match self {
            Self::Sums | Self::Release => 4096,
            Self::Signature => super::keys::SIGNATURE_BYTES as u64,
            Self::Root => 1024 * MIB,
            Self::Verity => 128 * MIB,
            Self::Kernel => 192 * MIB,
        }
    }

    /// The name of a part without a version.
    pub(super) fn fixed_name(self) -> Option<&'static str> {
        match self {
            Self::Sums => Some(SUMS),
            Self::Signature => Some(SIGNATURE),
            Self::Release => Some(RELEASE),
            Self::Root | Self::Verity | Self::Kernel => None,
        }
    }

    /// The part and, for the files of a version, the version in a file's name. `None`: a bundle has
    /// no such file, and neither folders nor links.
    pub(super) fn of_name(name: &str) -> Option<(Self, Option<Version>)> {
        match name {
            SUMS => return Some((Self::Sums, None)),
            SIGNATURE => return Some((Self::Signature, None)),
            RELEASE => return Some((Self::Release, None)),
            _ => {}
        }
        let name = name.strip_prefix("nacre_")?;
        if let Some(version) = name.strip_suffix(".efi") {
            return Some((Self::Kernel, Some(version.parse().ok()?)));
        }
        let (version, rest) = name.split_once('_')?;
        let (identifier, kind) = rest.split_once('.')?;
        let part = match kind {
            "root.raw.gz" => Self::Root,
            "verity.raw.gz" => Self::Verity,
            _ => return None,
        };
        is_uuid(identifier).then_some(())?;
        Some((part, Some(version.parse().ok()?)))
    }
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
        })
}

/// The names and digests of `SHA256SUMS`: every part but the two that sign.
pub(super) fn parse_sums(text: &[u8]) -> Result<Vec<(String, Sha256)>, String> {
    let text = std::str::from_utf8(text).map_err(|_| "not text".to_owned())?;
    let mut sums: Vec<(String, Sha256)> = Vec::new();
    for line in text.lines() {
        let (digest, name) = line
            .split_once("  ")
            .ok_or_else(|| "a line is not a digest, two spaces and a name".to_owned())?;
        let digest = digest.parse()?;
        let part = Part::of_name(name).map(|(part, _)| part);
        if !part.is_some_and(|part| PARTS[2..].contains(&part)) {
            return Err(format!("{name:?} has no place in a bundle"));
        }
        if sums.iter().any(|(other, _)| other == name) {
            return Err(format!("{name} stands in it twice"));
        }
        sums.push((name.to_owned(), digest));
    }
    for part in &PARTS[2..] {
        let count = sums
            .iter()
            .filter(|(name, _)| Part::of_name(name).is_some_and(|(of, _)| of == *part))
            .count();
        if count != 1 {
            return Err(format!(
                "{count} files for the part {part:?} instead of one"
            ));
        }
    }
    Ok(sums)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    pub image: String,
    pub version: Version,
    pub architecture: String,
}

impl Release {
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(text).map_err(|_| "not text".to_owned())?;
        let (mut image, mut version, mut architecture) = (None, None, None);
        for line in text.lines() {
            let (name, value) = line
                .split_once('=')
                .ok_or_else(|| "a line is not NAME=value".to_owned())?;
            let field = match name {
                "IMAGE_ID" => &mut image,
                "IMAGE_VERSION" => &mut version,
                "ARCHITECTURE" => &mut architecture,
                // A later version may say more.
                _ => continue,
            };
            if field.replace(value).is_some() {
                return Err(format!("{name} stands in it twice"));
            }
        }
        let need = |field: Option<&str>, name: &str| {
            field
                .map(str::to_owned)
                .ok_or_else(|| format!("{name} is missing"))
        };
        let version = need(version, "IMAGE_VERSION")?;
        Ok(Self {
            image: need(image, "IMAGE_ID")?,
            version: version.parse().map_err(|error| format!("{error}"))?,
            architecture: need(architecture, "ARCHITECTURE")?,
        })
    }
}
