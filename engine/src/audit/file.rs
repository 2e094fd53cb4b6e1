//! The file of the audit log: appends lines, and renames a full file to `.1`, `.2` and so on, up to
//! a number of files.

use std::fs::{File, OpenOptions};
use std::io::{Error, Result, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::values::files::{Inode, kind};

/// The file, which is opened when a line needs it.
#[derive(Debug)]
pub struct AuditFile {
    path: PathBuf,
    /// Most bytes of one file.
    max_bytes: u64,
    /// Number of files, the present one included; at least 2.
    files: u32,
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    file: File,
    inode: Inode,
    bytes: u64,
}

impl AuditFile {
    pub fn new(path: PathBuf, max_bytes: u64, files: u32) -> Self {
        Self {
            path,
            max_bytes,
            files,
            open: None,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The same files without the open one, for [`AuditFile::last`].
    pub fn reader(&self) -> Self {
        Self::new(self.path.clone(), self.max_bytes, self.files)
    }

    /// Appends a line. After an error the file has no part of it. `sync`: makes the line durable.
    pub fn append(&mut self, line: &str, sync: bool) -> Result<()> {
        let bytes = line.len() as u64 + 1;
        let mut open = self.current()?;
        if open.bytes > 0 && open.bytes + bytes > self.max_bytes {
            drop(open);
            self.rotate()?;
            open = self.current()?;
        }
        let mut text = Vec::with_capacity(line.len() + 1);
        text.extend_from_slice(line.as_bytes());
        text.push(b'\n');
        let mut written = open.file.write_all(&text);
        if sync && written.is_ok() {
            written = open.file.sync_data();
        }
        match &written {
            Ok(()) => open.bytes += bytes,
            // Part of the line may be there.
            Err(_) => open.file.set_len(open.bytes)?,
        }
        self.open = Some(open);
        written
    }

    /// The open file, or a new one if another program has moved or removed it.
    fn current(&mut self) -> Result<Open> {
        if let Some(mut open) = self.open.take()
            && Inode::at(&self.path)? == Some(open.inode)
        {
            // Another program may have appended to it or truncated it.
            open.bytes = open.file.metadata()?.len();
            return Ok(open);
        }
        let mut options = OpenOptions::new();
        options.append(true).create(true).mode(0o600);
        let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOFOLLOW;
        options.custom_flags(flags.bits().cast_signed());
        let file = options.open(&self.path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            let cause = format!("it is {}, not a regular file", kind(&metadata));
            return Err(Error::other(cause));
        }
        Ok(Open {
            inode: Inode::of(&metadata),
            bytes: metadata.len(),
            file,
        })
    }

    /// Renames the files by one number; the oldest is replaced.
    fn rotate(&self) -> Result<()> {
        for number in (0..self.files - 1).rev() {
            match std::fs::rename(self.nth(number), self.nth(number + 1)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// The path of the present file (0), or of an older one.
    fn nth(&self, number: u32) -> PathBuf {
        match number {
            0 => self.path.clone(),
            number => crate::rpc::socket::with_suffix(&self.path, &format!(".{number}")),
        }
    }

    /// The last `limit` lines that `wanted` selects, the oldest first.
    pub fn last(&self, limit: usize, wanted: impl Fn(&Value) -> bool) -> Result<Vec<Value>> {
        let mut found = Vec::new();
        for number in 0..self.files {
            let text = match std::fs::read(self.nth(number)) {
                Ok(text) => text,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            // Other programs may have written to the file: skip lines in other forms.
            let lines = text.rsplit(|byte| *byte == b'\n');
            let lines = lines.filter_map(|line| serde_json::from_slice::<Value>(line).ok());
            let room = limit - found.len();
            found.extend(
                lines
                    .filter(|line| line.is_object() && wanted(line))
                    .take(room),
            );
            if found.len() == limit {
                break;
            }
        }
        found.reverse();
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    //! Goal: the files are bounded, and no line is lost or torn. Method: real files.

    use serde_json::json;

    use super::*;

    fn numbers(file: &AuditFile, limit: usize) -> Vec<u64> {
        let lines = file.last(limit, |_| true).unwrap();
        lines
            .iter()
            .map(|line| line["n"].as_u64().unwrap())
            .collect()
    }

    #[test]
    fn full_files_are_renamed_and_the_oldest_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        // Ten lines per file.
        let mut file = AuditFile::new(path.clone(), 90, 3);
        for n in 10..45 {
            file.append(&json!({ "n": n }).to_string(), n % 2 == 0)
                .unwrap();
        }
        let mut names: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["audit.log", "audit.log.1", "audit.log.2"]);
        assert_eq!(numbers(&file, 100), (20..45).collect::<Vec<_>>());
        assert_eq!(numbers(&file, 7), (38..45).collect::<Vec<_>>());
        let even = file.last(3, |line| line["n"].as_u64().unwrap() % 2 == 0);
        assert_eq!(even.unwrap(), [40, 42, 44].map(|n| json!({ "n": n })));
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn moved_files_and_foreign_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        let mut file = AuditFile::new(path.clone(), 1000, 2);
        assert!(numbers(&file, 5).is_empty());
        file.append(r#"{"n":1}"#, false).unwrap();
        // As logrotate does.
        std::fs::rename(&path, dir.path().join("moved")).unwrap();
        file.append(r#"{"n":2}"#, false).unwrap();
        OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(b"not ours\n7\n")
            .unwrap();
        file.append(r#"{"n":3}"#, false).unwrap();
        assert_eq!(numbers(&file, 5), [2, 3]);
        // A link or a pipe at the path is not written to.
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(AuditFile::new(link, 1000, 2).append("{}", false).is_err());
        assert!(
            AuditFile::new(dir.path().to_owned(), 1000, 2)
                .append("{}", false)
                .is_err()
        );
        let nowhere = dir.path().join("none/audit.log");
        let mut file = AuditFile::new(nowhere, 1000, 2);
        assert!(file.append("{}", false).is_err());
        std::fs::create_dir(dir.path().join("none")).unwrap();
        file.append("{}", false).unwrap();
    }
}
