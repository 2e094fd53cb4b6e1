//! The file of a backup: JSON, one value a line.
//!
//! ```text
//!   {"nacre_cluster_backup":1,"cluster":"lab","id":…,"revision":…,"created":…}
//!   {"key":"meta","value":"…"}            a line per key
//!   {"keys":17,"crc64":"…"}               CRC-64/NVME of all bytes before this line
//! ```

use nacre_cluster_etcd::Prefix;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Backup, BackupError, is_transient};

/// Version of this format.
const FORMAT: u64 = 1;
/// Largest file, in bytes: ten times the keys of the largest cluster.
pub const LARGEST: u64 = 512 << 20;
/// Most bytes of a key.
const LONGEST_KEY: usize = 512;

/// A key without the cluster's prefix, and its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedKey {
    pub key: String,
    pub value: String,
}

#[derive(Serialize, Deserialize)]
struct Header {
    nacre_cluster_backup: u64,
    cluster: String,
    id: Uuid,
    revision: i64,
    created: u64,
}

/// The data by which backups of one cluster are put in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Age {
    /// The id of the cluster.
    pub cluster: Uuid,
    /// The id of the restore that wrote the keys; `None`: no restore did. Only revisions of backups
    /// with the same value compare.
    pub restored: Option<Uuid>,
    pub revision: i64,
    /// Seconds since 1970, by the clock of the machine that made it.
    pub created: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BackupEnd {
    keys: usize,
    crc64: String,
}

pub(crate) fn crc(bytes: &[u8]) -> String {
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes);
    format!("{crc:016x}")
}

fn line(text: &mut Vec<u8>, value: &impl Serialize) {
    text.extend(crate::keys::bytes(value));
    text.push(b'\n');
}

impl Backup {
    pub fn encode(&self) -> Vec<u8> {
        let mut text = Vec::new();
        let header = Header {
            nacre_cluster_backup: FORMAT,
            cluster: self.name.clone(),
            id: self.id,
            revision: self.revision,
            created: self.created,
        };
        line(&mut text, &header);
        for key in &self.keys {
            line(&mut text, key);
        }
        let end = BackupEnd {
            keys: self.keys.len(),
            crc64: crc(&text),
        };
        line(&mut text, &end);
        text
    }

    /// Parses a file. A file that was cut off or changed is refused.
    pub fn parse(text: &[u8]) -> Result<Self, BackupError> {
        if text.len() as u64 > LARGEST {
            let bytes = text.len() as u64;
            return Err(BackupError::TooLarge { bytes });
        }
        let mut lines = Lines {
            text,
            at: 0,
            number: 0,
        };
        let header = header(lines.next_line().unwrap_or_default())?;
        let mut keys = Vec::new();
        loop {
            let begin = lines.at;
            let Some(line) = lines.next_line() else {
                return Err(BackupError::Cut { keys: keys.len() });
            };
            match serde_json::from_slice::<SavedKey>(line) {
                Ok(key) => keys.push(key),
                Err(error) => match serde_json::from_slice::<BackupEnd>(line) {
                    Ok(end) => {
                        check_end(&end, keys.len(), &text[..begin])?;
                        break;
                    }
                    Err(_) if lines.at == text.len() => {
                        return Err(BackupError::Cut { keys: keys.len() });
                    }
                    Err(_) => return Err(lines.damaged(&error)),
                },
            }
        }
        if lines.at < text.len() {
            lines.number += 1;
            return Err(lines.damaged(&"it follows the last line"));
        }
        let backup = Self {
            id: header.id,
            name: header.cluster,
            revision: header.revision,
            created: header.created,
            keys,
        };
        backup.check_keys()?;
        Ok(backup)
    }

    pub fn age(&self) -> Result<Age, BackupError> {
        Ok(Age {
            cluster: self.id,
            restored: self.meta()?.restored,
            revision: self.revision,
            created: self.created,
        })
    }

    /// The keys are those of one cluster, each once.
    fn check_keys(&self) -> Result<(), BackupError> {
        let unusable = |key: &str, why: &str| super::unusable(key, &why);
        if Prefix::new(&self.name).is_none() {
            return Err(unusable("meta", "the name of the cluster is invalid"));
        }
        let mut seen = std::collections::BTreeSet::new();
        for saved in &self.keys {
            let key = saved.key.as_str();
            if key.is_empty() || key.len() > LONGEST_KEY || key.contains(char::is_control) {
                return Err(unusable(key, "it is no name of a key"));
            }
            if is_transient(key) {
                return Err(unusable(key, "it does not belong into a backup"));
            }
            if !seen.insert(key) {
                return Err(unusable(key, "it is there twice"));
            }
        }
        let meta = self.meta()?;
        if (meta.id, &meta.name) != (self.id, &self.name) {
            return Err(unusable("meta", "it is another cluster's"));
        }
        Ok(())
    }
}

fn header(line: &[u8]) -> Result<Header, BackupError> {
    let foreign = |error: serde_json::Error| BackupError::Foreign {
        why: error.to_string(),
    };
    let value: serde_json::Value = serde_json::from_slice(line).map_err(foreign)?;
    if let Some(found) = value["nacre_cluster_backup"]
        .as_u64()
        .filter(|of| *of > FORMAT)
    {
        let known = FORMAT;
        return Err(BackupError::Newer { found, known });
    }
    serde_json::from_value(value).map_err(foreign)
}

fn check_end(end: &BackupEnd, keys: usize, before: &[u8]) -> Result<(), BackupError> {
    let found = crc(before);
    if found != end.crc64 {
        let expected = end.crc64.clone();
        return Err(BackupError::Checksum { found, expected });
    }
    if end.keys != keys {
        return Err(BackupError::Cut { keys });
    }
    Ok(())
}

struct Lines<'a> {
    text: &'a [u8],
    at: usize,
    number: usize,
}

impl<'a> Lines<'a> {
    /// `None`: the end, or no end of the line.
    fn next_line(&mut self) -> Option<&'a [u8]> {
        let rest = &self.text[self.at..];
        let length = rest.iter().position(|byte| *byte == b'\n')?;
        self.at += length + 1;
        self.number += 1;
        Some(&rest[..length])
    }

    fn damaged(&self, why: &impl ToString) -> BackupError {
        BackupError::Damaged {
            line: self.number,
            why: why.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use nacre_random::Random;
    use serde_json::json;

    use super::*;

    pub(crate) fn backup() -> Backup {
        let id = Uuid::from_u128(7);
        let meta = json!({ "v": 1, "id": id, "name": "lab", "lease_ms": 2000 });
        let key = |key: &str, value: String| SavedKey {
            key: key.to_owned(),
            value,
        };
        Backup {
            id,
            name: "lab".to_owned(),
            revision: 99,
            created: 1_800_000_000,
            keys: vec![
                key("meta", meta.to_string()),
                key("name/ä\"x", "\u{1F600}\n{".to_owned()),
                key("node/n", "{}".to_owned()),
            ],
        }
    }

    /// Goal: a written backup is read back, and no damage passes. Method: every cut, every changed
    /// byte, and random damage.
    #[test]
    fn damaged_files_are_refused() {
        let text = backup().encode();
        assert_eq!(Backup::parse(&text), Ok(backup()));
        for end in 0..text.len() {
            assert!(Backup::parse(&text[..end]).is_err(), "cut at {end}");
        }
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut damaged = text.clone();
                damaged[at] ^= 1 << bit;
                assert!(Backup::parse(&damaged).is_err(), "bit {bit} of byte {at}");
            }
        }
        let mut rng = Random::new(1);
        for round in 0..2_000 {
            let mut damaged = text.clone();
            for _ in 0..=rng.below(4) {
                let at = rng.below(damaged.len() as u64) as usize;
                match rng.below(3) {
                    0 => drop(damaged.remove(at)),
                    1 => damaged.insert(at, rng.below(256) as u8),
                    _ => {
                        let line: Vec<u8> = damaged[at..].to_vec();
                        damaged.extend(line);
                    }
                }
            }
            if damaged != text {
                assert!(Backup::parse(&damaged).is_err(), "round {round}");
            }
        }
    }

    /// Goal: the reason names the part that is wrong. Method: files with a right checksum.
    #[test]
    fn unusable_files_have_a_reason() {
        let change = |change: &dyn Fn(&mut Backup)| {
            let mut backup = backup();
            change(&mut backup);
            Backup::parse(&backup.encode())
                .expect_err("unusable")
                .to_string()
        };
        let push = |key: &str| {
            let key = key.to_owned();
            move |backup: &mut Backup| {
                let value = "{}".to_owned();
                let key = key.clone();
                backup.keys.push(SavedKey { key, value });
            }
        };
        for (said, part) in [
            (change(&push("node/n")), "twice"),
            (change(&push("lease/n")), "does not belong"),
            (change(&push("restoring")), "does not belong"),
            (change(&push("")), "no name of a key"),
            (change(&push("a\nb")), "no name of a key"),
            (
                change(&|backup| drop(backup.keys.remove(0))),
                "it is missing",
            ),
            (
                change(&|backup| backup.id = Uuid::from_u128(8)),
                "another cluster",
            ),
            (
                change(&|backup| backup.name = "a/b".to_owned()),
                "name of the cluster",
            ),
            (change(&|backup| backup.keys[0].value.clear()), "EOF"),
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let text = String::from_utf8(backup().encode()).expect("text");
        let newer = text.replacen("backup\":1", "backup\":2", 1);
        let said = Backup::parse(newer.as_bytes())
            .expect_err("newer")
            .to_string();
        assert!(
            said.contains("format 2") && said.contains("newer program"),
            "{said}"
        );
        for foreign in ["", "\n", "{}\n", "[1]\n", "nothing"] {
            let said = Backup::parse(foreign.as_bytes()).expect_err("foreign");
            assert!(matches!(said, BackupError::Foreign { .. }), "{said}");
        }
    }
}
