//! `POST /api/upload`: a file for the machine, which an admin sends, such as an update bundle.
//!
//! One upload runs at a time. The bytes go to a new file, which replaces the last upload when all
//! have arrived. If the disk has no room for both, the last upload is removed first. The file is
//! only stored: an RPC method of the engine checks and uses it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Bytes, Incoming};
use nacre_engine_rpc::RpcError;
use nacre_engine_rpc::error::Errno;
use tokio::sync::mpsc;

/// Most parts of a body that wait to be written.
const QUEUE: usize = 16;
/// Most bytes that are read and dropped of an upload to a machine that takes none.
const MOST_IGNORED: u64 = 1 << 30;
/// Bytes of the file system that stay free, for the daemon's state.
const RESERVE: u64 = 256 * 1024 * 1024;

/// The place of uploaded files, and their limits.
#[derive(Debug, Clone)]
pub struct UploadPlace {
    /// Path of the uploaded file. The first upload creates the folder.
    pub file: PathBuf,
    /// Most bytes of an upload.
    pub most: u64,
    /// Returns the free bytes of a folder's file system.
    pub free_bytes: fn(&Path) -> io::Result<u64>,
}

/// The place of uploads, and whether one runs.
#[derive(Debug)]
pub(crate) struct Uploads {
    place: Option<UploadPlace>,
    busy: Arc<AtomicBool>,
}

/// Marks an upload as running. The writer thread holds it, and may run a moment longer than the
/// client's request.
struct UploadTurn(Arc<AtomicBool>);

impl Drop for UploadTurn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Uploads {
    pub(crate) fn new(place: Option<UploadPlace>) -> Self {
        Self {
            place,
            busy: Arc::default(),
        }
    }

    /// Stores a body of `length` bytes. After an error the last upload is unchanged, unless it was
    /// removed to make room. `patience`: longest wait for the next bytes. `goes_on` is called for
    /// each part; false ends the upload, because the client may not upload any more.
    pub(crate) async fn store(
        &self,
        mut body: Incoming,
        length: u64,
        patience: Duration,
        goes_on: impl Fn() -> bool,
    ) -> Result<PathBuf, RpcError> {
        let stored = self.receive(&mut body, length, patience, goes_on).await;
        if stored.is_err() {
            // A browser that still sends reads no answer: it reports the end of the connection.
            let most = self.place.as_ref().map_or(MOST_IGNORED, |place| place.most);
            ignore(&mut body, most, patience).await;
        }
        stored
    }

    async fn receive(
        &self,
        body: &mut Incoming,
        length: u64,
        patience: Duration,
        goes_on: impl Fn() -> bool,
    ) -> Result<PathBuf, RpcError> {
        let Some(place) = self.place.clone() else {
            return Err(RpcError::errno(
                Errno::ENOTSUP,
                "this machine takes no uploads: it does not run from the image of the appliance",
            ));
        };
        if length > place.most {
            let cause = format!(
                "the file has {length} bytes; at most {} are taken",
                place.most
            );
            return Err(RpcError::errno(Errno::EFBIG, cause));
        }
        if self.busy.swap(true, Ordering::Acquire) {
            let cause = "another upload is running";
            return Err(RpcError::errno(Errno::EBUSY, cause).remedy("wait for its end"));
        }
        let turn = UploadTurn(Arc::clone(&self.busy));
        let file = place.file.clone();
        let (parts, queue) = mpsc::channel(QUEUE);
        let writer = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            write(&place, length, queue)
        });
        let read = async {
            loop {
                match tokio::time::timeout(patience, body.frame()).await {
                    Ok(None) => return Ok(()),
                    Ok(Some(Ok(_))) if !goes_on() => return Ok(()),
                    Ok(Some(Ok(frame))) => {
                        if let Ok(data) = frame.into_data()
                            && parts.send(Some(data)).await.is_err()
                        {
                            // The writer has failed: its error counts.
                            return Ok(());
                        }
                    }
                    Ok(Some(Err(_))) => return Err("the upload ended early"),
                    Err(_) => return Err("the upload is too slow"),
                }
            }
        };
        let read = read.await;
        let may_end = goes_on();
        if read.is_ok() && may_end {
            // A writer that is gone has failed: its error counts.
            let _ = parts.send(None).await;
        }
        drop(parts);
        let written = match writer.await {
            Ok(written) => written,
            Err(panic) => return Err(RpcError::internal(panic.to_string())),
        };
        if let Err(cause) = read {
            return Err(RpcError::invalid_request(cause.to_owned()).remedy("send it again"));
        }
        if !may_end {
            let cause = "the session or API token has ended during the upload";
            return Err(RpcError::errno(Errno::EACCES, cause));
        }
        written?;
        Ok(file)
    }
}

/// Reads the rest of a refused body: at most `most` bytes, waiting at most `patience` for each
/// part.
async fn ignore(body: &mut Incoming, most: u64, patience: Duration) {
    let mut read = 0;
    while let Ok(Some(Ok(frame))) = tokio::time::timeout(patience, body.frame()).await {
        read += frame.data_ref().map_or(0, |data| data.len() as u64);
        if read > most {
            return;
        }
    }
}

fn write(
    place: &UploadPlace,
    length: u64,
    mut parts: mpsc::Receiver<Option<Bytes>>,
) -> Result<(), RpcError> {
    let path = &place.file;
    let part = path.with_extension("part");
    let failed = |error: io::Error| RpcError::io(&part.display().to_string(), &error);
    let folder = path.parent().unwrap_or(path);
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder.create(folder).map_err(failed)?;
    // An upload that a power failure ended takes room.
    remove(&part).map_err(failed)?;
    let needed = length.saturating_add(RESERVE);
    let mut free = (place.free_bytes)(folder).map_err(failed)?;
    // A small disk has room for one bundle, and the machine has no login to remove a refused one.
    if free < needed
        && let Ok(last) = fs::metadata(path)
        && free.saturating_add(last.len()) >= needed
    {
        remove(path).map_err(failed)?;
        free = (place.free_bytes)(folder).map_err(failed)?;
    }
    if free < needed {
        let cause = format!("{free} bytes are free; the upload needs {length} and a reserve");
        return Err(RpcError::errno(Errno::ENOSPC, cause).remedy("remove files of this machine"));
    }
    let done = receive(&part, length, &mut parts).and_then(|()| {
        fs::rename(&part, path)?;
        File::open(folder)?.sync_all()
    });
    done.map_err(|error| {
        // The next upload removes it, if this one cannot.
        let _ = fs::remove_file(&part);
        failed(error)
    })
}

fn receive(part: &Path, length: u64, parts: &mut mpsc::Receiver<Option<Bytes>>) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(part)?;
    let mut written = 0;
    let mut is_whole = false;
    while let Some(part) = parts.blocking_recv() {
        let Some(bytes) = part else {
            is_whole = true;
            continue;
        };
        file.write_all(&bytes)?;
        written += bytes.len() as u64;
    }
    // The end without its mark: the client has gone, or may not upload any more.
    if written != length || !is_whole {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    }
    file.sync_all()
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an upload takes the room of the last one where there is room for one only, and no
    /// other. Method: a file system whose files take from a few bytes beside the reserve.
    #[test]
    fn a_small_disk_has_room_for_one() {
        fn free_bytes(folder: &Path) -> io::Result<u64> {
            let files = fs::read_dir(folder)?.map(|file| Ok(file?.metadata()?.len()));
            let used: u64 = files.sum::<io::Result<u64>>()?;
            Ok(RESERVE + 10 - used)
        }
        let folder = tempfile::tempdir().unwrap();
        let place = UploadPlace {
            file: folder.path().join("bundle.tar"),
            most: 100,
            free_bytes,
        };
        let upload = |text: &'static str| {
            let (parts, queue) = mpsc::channel(QUEUE);
            for part in [Some(Bytes::from(text)), None] {
                parts.try_send(part).unwrap();
            }
            drop(parts);
            write(&place, text.len() as u64, queue)
        };
        for text in ["one", "seven..", "12345678"] {
            upload(text).unwrap();
            assert_eq!(fs::read_to_string(&place.file).unwrap(), text);
        }
        assert!(upload("more than ten").is_err());
        assert_eq!(fs::read_to_string(&place.file).unwrap(), "12345678");
    }
}
