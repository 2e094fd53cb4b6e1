//! The manifest of a backup: the file that lists the objects with its contents. Two lines of JSON.
//!
//! ```text
//!   {"format": "nacre-backup", "version": 1, "sha256": of the header, "backup": the header}
//!   {"sources": [ids], "objects": [[index, source, bytes, digest], …]}
//! ```
//!
//! The [`Header`] describes the backup; a list of backups needs no more. It has the length and the
//! SHA-256 of the second line. `bytes` is the size of an object in the store, `digest` the SHA-256
//! of its uncompressed data in hex. `source` is an index in `sources`, the ids of the backups that
//! wrote the objects.
//!
//! Names and numbers are checked against their ranges, because others may have changed the store.
//! `new_bytes` is only for display, and is not checked.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::Damage;
use crate::object::{Digest, HEADER, LARGEST, OBJECT_BYTES, ObjectName};

const FORMAT: &str = "nacre-backup";
const VERSION: u32 = 1;
/// Most bytes of a volume's name.
const LONGEST_NAME: usize = 255;
/// Most bytes of the first line.
pub(crate) const LONGEST_HEADER: usize = 8192;
/// Most objects of a backup.
pub(crate) const MOST_OBJECTS: usize = 1 << 20;
/// Most bytes of a manifest.
pub(crate) const LONGEST_MANIFEST: usize = 128 << 20;
/// Most bytes of a volume: 1 PiB.
const MOST_BYTES: u64 = 1 << 50;
/// Latest time of a backup, in seconds since 1970: the end of the year 9999.
pub(crate) const LATEST: u64 = 253_402_300_799;

/// The description of a backup, without its objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    pub id: Uuid,
    /// Seconds since 1970.
    pub created: u64,
    pub volume: Volume,
    /// The snapshot that was backed up.
    pub snapshot: Volume,
    /// Size of the volume: a multiple of 512.
    pub size_bytes: u64,
    /// Bytes of the volume per object, uncompressed.
    pub object_bytes: u64,
    /// The earlier backup whose unchanged objects this one refers to; `None`: a full backup.
    pub base: Option<Uuid>,
    /// Number of objects that the backup refers to.
    pub objects: u64,
    /// Size of these objects in the store (compressed).
    pub stored_bytes: u64,
    /// Size in the store of the objects that this backup wrote.
    pub new_bytes: u64,
    list_bytes: u64,
    list_sha256: String,
}

/// The id and name of a volume or snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Volume {
    pub id: Uuid,
    pub name: String,
}

/// A parsed manifest, or the contents of a new one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Manifest {
    pub(crate) header: Header,
    /// In ascending order of their indices.
    pub(crate) objects: Vec<Entry>,
}

/// An object of a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: ObjectName,
    /// Size in the store, in bytes.
    pub(crate) stored: u32,
    /// SHA-256 of its uncompressed contents.
    pub(crate) digest: Digest,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FirstLine<'a> {
    format: &'a str,
    version: u32,
    sha256: &'a str,
    #[serde(borrow)]
    backup: &'a RawValue,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    sources: Vec<Uuid>,
    objects: Vec<(u32, u32, u32, String)>,
}

/// The part of a [`Header`] that is known before the objects are written.
pub(crate) struct Facts {
    pub(crate) id: Uuid,
    pub(crate) created: u64,
    pub(crate) volume: Volume,
    pub(crate) snapshot: Volume,
    pub(crate) size_bytes: u64,
    pub(crate) base: Option<Uuid>,
}

impl Manifest {
    pub(crate) fn new(facts: Facts, objects: Vec<Entry>) -> Self {
        let stored = |entry: &Entry| u64::from(entry.stored);
        let own = objects.iter().filter(|entry| entry.name.source == facts.id);
        let header = Header {
            id: facts.id,
            created: facts.created,
            volume: facts.volume,
            snapshot: facts.snapshot,
            size_bytes: facts.size_bytes,
            object_bytes: OBJECT_BYTES as u64,
            base: facts.base,
            objects: objects.len() as u64,
            stored_bytes: objects.iter().map(stored).sum(),
            new_bytes: own.map(stored).sum(),
            list_bytes: 0,
            list_sha256: String::new(),
        };
        Self { header, objects }
    }

    /// Serializes the manifest. Sets the size and digest of the list in the header.
    pub(crate) fn write(&mut self) -> serde_json::Result<Vec<u8>> {
        let mut sources: Vec<Uuid> = self.objects.iter().map(|entry| entry.name.source).collect();
        sources.sort_unstable();
        sources.dedup();
        let entries = self.objects.iter().map(|entry| {
            let source = sources
                .binary_search(&entry.name.source)
                .unwrap_or_default();
            let digest = entry.digest.to_hex();
            (entry.name.index, source as u32, entry.stored, digest)
        });
        let objects = entries.collect();
        let mut list = serde_json::to_vec(&List { sources, objects })?;
        list.push(b'\n');
        self.header.list_bytes = list.len() as u64;
        self.header.list_sha256 = Digest::of(&list).to_hex();
        let backup = serde_json::value::to_raw_value(&self.header)?;
        let line = FirstLine {
            format: FORMAT,
            version: VERSION,
            sha256: &Digest::of(backup.get().as_bytes()).to_hex(),
            backup: &backup,
        };
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        text.append(&mut list);
        Ok(text)
    }
}

/// Bytes of a volume of `size_bytes` that object `index` has: fewer for the last object, 0 past the
/// end.
pub(crate) fn bytes_of(size_bytes: u64, index: u32) -> usize {
    let first = u64::from(index) * OBJECT_BYTES as u64;
    size_bytes.saturating_sub(first).min(OBJECT_BYTES as u64) as usize
}

impl Header {
    pub(crate) fn bytes_of(&self, index: u32) -> usize {
        bytes_of(self.size_bytes, index)
    }

    /// Fails unless this is the manifest of that backup of that volume: it may have been copied.
    pub(crate) fn check_place(&self, volume: Uuid, backup: Uuid) -> Result<(), Damage> {
        if (self.volume.id, self.id) == (volume, backup) {
            return Ok(());
        }
        malformed("it is the manifest of another backup")
    }

    fn check(&self) -> Result<(), Damage> {
        let is_name = |name: &str| name.len() <= LONGEST_NAME && !name.contains(char::is_control);
        let most = self.size_bytes.div_ceil(OBJECT_BYTES as u64);
        if !is_name(&self.volume.name) || !is_name(&self.snapshot.name) {
            return malformed("a name is too long, or has control characters");
        }
        if self.created > LATEST {
            return malformed("its time is impossible");
        }
        if self.object_bytes != OBJECT_BYTES as u64 {
            return malformed("objects have another size");
        }
        if self.size_bytes == 0
            || self.size_bytes > MOST_BYTES
            || !self.size_bytes.is_multiple_of(512)
        {
            return malformed("the size of the volume is impossible");
        }
        if self.objects > most.min(MOST_OBJECTS as u64) {
            return malformed("it has more objects than the volume");
        }
        if self.new_bytes > self.stored_bytes {
            return malformed("more bytes are new than are stored");
        }
        if self.list_bytes > LONGEST_MANIFEST as u64 {
            return malformed("its list is too long");
        }
        Ok(())
    }
}

fn malformed<T>(why: &str) -> Result<T, Damage> {
    Err(Damage::Malformed(why.to_owned()))
}

/// Parses and checks the first line. Returns the header, and the number of bytes of the line.
/// `start` may end anywhere after the first line.
pub(crate) fn parse_header(start: &[u8]) -> Result<(Header, usize), Damage> {
    let within = &start[..start.len().min(LONGEST_HEADER)];
    let Some(end) = within.iter().position(|byte| *byte == b'\n') else {
        return Err(Damage::Magic);
    };
    #[derive(Deserialize)]
    struct Kind<'a> {
        format: &'a str,
        version: u32,
    }
    let kind: Kind = serde_json::from_slice(&start[..end]).map_err(|_| Damage::Magic)?;
    if kind.format != FORMAT {
        return Err(Damage::Magic);
    }
    if kind.version != VERSION {
        return Err(Damage::Version(kind.version));
    }
    let broken =
        |error: serde_json::Error| Damage::Malformed(crate::failure::printable(&error.to_string()));
    let line: FirstLine = serde_json::from_slice(&start[..end]).map_err(broken)?;
    let text = line.backup.get();
    if Digest::of_hex(line.sha256) != Some(Digest::of(text.as_bytes())) {
        return Err(Damage::Checksum);
    }
    let header: Header = serde_json::from_str(text).map_err(broken)?;
    header.check()?;
    Ok((header, end + 1))
}

/// Parses and checks a whole manifest.
pub(crate) fn parse(bytes: &[u8]) -> Result<Manifest, Damage> {
    let (header, first) = parse_header(bytes)?;
    let list = &bytes[first..];
    if list.len() as u64 != header.list_bytes {
        return Err(Damage::Size {
            found: list.len() as u64,
            expected: header.list_bytes,
        });
    }
    if Digest::of_hex(&header.list_sha256) != Some(Digest::of(list)) {
        return Err(Damage::Checksum);
    }
    let list: List = serde_json::from_slice(list)
        .map_err(|error| Damage::Malformed(crate::failure::printable(&error.to_string())))?;
    if list.objects.len() as u64 != header.objects {
        return malformed("the list has another number of objects");
    }
    let mut objects: Vec<Entry> = Vec::with_capacity(list.objects.len());
    for (index, source, stored, digest) in list.objects {
        let Some(source) = list.sources.get(source as usize).copied() else {
            return malformed("an object is of an unknown backup");
        };
        let Some(digest) = Digest::of_hex(&digest) else {
            return malformed("an object has no digest");
        };
        if header.bytes_of(index) == 0 {
            return malformed("an object is beyond the end of the volume");
        }
        if objects.last().is_some_and(|last| last.name.index >= index) {
            return malformed("the objects are not in order");
        }
        if !(HEADER..=LARGEST).contains(&(stored as usize)) {
            return malformed("the size of an object is impossible");
        }
        objects.push(Entry {
            name: ObjectName { source, index },
            stored,
            digest,
        });
    }
    let stored: u64 = objects.iter().map(|entry| u64::from(entry.stored)).sum();
    if stored != header.stored_bytes {
        return malformed("the objects have another total size");
    }
    Ok(Manifest { header, objects })
}
