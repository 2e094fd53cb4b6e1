//! The audit log: one JSON line for each call of a client that may change something.
//!
//! ```text
//!   call ─▶ AuditRecord ─▶ (a secret call: "started", or the call is refused) ─▶ the method runs
//!              └────▶ line with the result ─▶ log, file ─▶ the client's answer
//! ```
//!
//! The line of a call is in the file before the client has its answer. A call that outlives its
//! deadline gets its line when it ends. If the file takes no line, secret calls are refused; others
//! go on, with a warning. Lines have no secrets: see [`redact`].

pub mod file;
pub mod redact;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::Mutex;
use tracing::{info, warn};

use crate::rpc::access::Caller;
use crate::rpc::{Class, MethodEntry, Role, RpcError};
use file::AuditFile;

/// How long the file's disk may take for one line.
const PATIENCE: Duration = Duration::from_secs(5);
/// Groups of a client in a line.
const MAX_GROUPS: usize = 32;

/// Parameters that name the object of a call; the first one present counts.
const OBJECTS: [&str; 9] = [
    "name",
    "nqn",
    "volume",
    "bdev_name",
    "bdev",
    "raid_bdev",
    "base_bdev",
    "key",
    "ctrlr_name",
];

/// Where the lines go.
#[derive(Debug, Default)]
pub struct AuditLog {
    file: Option<Arc<Mutex<AuditFile>>>,
    path: Option<PathBuf>,
    /// Lines that the file has not taken since it last took one.
    lost: Cell<u64>,
}

/// A call of a client, from its arrival to its result.
#[derive(Debug)]
pub struct AuditRecord {
    line: Line,
    begun: Instant,
    progress: Cell<Progress>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Waiting,
    /// A task runs the method and writes the result.
    Running,
    Written,
}

/// A line of the file.
#[derive(Debug, Clone, Serialize)]
struct Line {
    time: String,
    uid: u32,
    gids: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    program: String,
    role: &'static str,
    class: &'static str,
    method: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<String>,
    params: Value,
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Refused>,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_ms: Option<f64>,
}

#[derive(Debug, Clone, Serialize)]
struct Refused {
    code: i32,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<String>,
}

impl AuditRecord {
    pub fn new<C: 'static>(
        caller: &Caller,
        role: Role,
        entry: &MethodEntry<C>,
        params: Option<&RawValue>,
    ) -> AuditRecord {
        let credentials = &caller.credentials;
        let others = credentials.groups.iter().copied();
        let others = others.filter(|group| *group != credentials.gid);
        let params = redact::params(&Value::from((entry.params_schema)()), params);
        let named = OBJECTS.iter().find_map(|name| params.get(name)?.as_str());
        AuditRecord {
            line: Line {
                time: humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
                uid: credentials.uid,
                gids: std::iter::once(credentials.gid)
                    .chain(others)
                    .take(MAX_GROUPS)
                    .collect(),
                pid: credentials.pid,
                program: caller.program.clone(),
                role: role.word(),
                class: entry.class.word(),
                method: entry.name,
                object: named.map(str::to_owned),
                params,
                result: "started",
                error: None,
                duration_ms: None,
            },
            begun: Instant::now(),
            progress: Cell::new(Progress::Waiting),
        }
    }

    /// From now on, the task that runs the method writes the result.
    pub fn hand_over(&self) {
        self.progress.set(Progress::Running);
    }

    fn is_secret(&self) -> bool {
        self.line.class == Class::Secret.word()
    }

    fn finished<T>(&self, outcome: &Result<T, RpcError>) -> Line {
        let mut line = self.line.clone();
        // To a microsecond.
        line.duration_ms = Some(self.begun.elapsed().as_micros() as f64 / 1000.0);
        line.result = "done";
        if let Err(error) = outcome {
            line.result = "refused";
            let facts = error.data.as_ref();
            line.error = Some(Refused {
                code: error.code,
                message: redact::text(&error.message),
                cause: facts.map(|facts| redact::text(&facts.cause)),
            });
        }
        line
    }
}

impl AuditLog {
    /// Lines go to this file, which is created with the first line, and to the log.
    pub fn to_file(file: AuditFile) -> AuditLog {
        AuditLog {
            path: Some(file.path().to_owned()),
            file: Some(Arc::new(Mutex::new(file))),
            lost: Cell::default(),
        }
    }

    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The file, for reading; `None`: lines only go to the log.
    pub fn file(&self) -> Option<Arc<Mutex<AuditFile>>> {
        self.file.clone()
    }

    /// Writes that a secret call begins. Refuses the call if the file does not take the line.
    pub async fn begin(&self, record: &AuditRecord) -> Result<(), RpcError> {
        if !record.is_secret() {
            return Ok(());
        }
        self.write(&record.line, true).await.map_err(|error| {
            let path = self.path().unwrap_or(Path::new("")).display();
            RpcError::io(
                "the audit log takes no line, and calls about keys need one",
                &error,
            )
            .remedy(format!(
                "make room for {path}, or set another [rpc.audit] file"
            ))
        })
    }

    /// Writes the result, once.
    pub async fn end<T>(&self, record: &AuditRecord, outcome: &Result<T, RpcError>) {
        let before = record.progress.replace(Progress::Written);
        if before != Progress::Written {
            // A call that did not run waits for no disk: clients without the role could make many.
            let sync = record.is_secret() && before == Progress::Running;
            // A failure was reported.
            let _ = self.write(&record.finished(outcome), sync).await;
        }
    }

    /// As [`AuditLog::end`], for a call that was refused before its method ran, or whose task ended
    /// without a result. A call that outlived its deadline writes its own result later.
    pub async fn close<T>(&self, record: &Rc<AuditRecord>, outcome: &Result<T, RpcError>) {
        use crate::rpc::error::{Errno, INTERNAL_ERROR};
        let runs_on = record.progress.get() == Progress::Running
            && matches!(outcome, Err(error) if error.code == -(Errno::ETIMEDOUT as i32));
        let is_lost = matches!(outcome, Err(error) if error.code == INTERNAL_ERROR);
        if record.progress.get() == Progress::Waiting || (is_lost && !runs_on) {
            self.end(record, outcome).await;
        }
    }

    async fn write(&self, line: &Line, sync: bool) -> std::io::Result<()> {
        let line = serde_json::to_string(line).map_err(std::io::Error::other)?;
        info!("{line}");
        let Some(file) = &self.file else {
            return Ok(());
        };
        let written = append(Arc::clone(file), line, sync).await;
        let lost = self.lost.get();
        match &written {
            Ok(()) if lost > 0 => {
                self.lost.set(0);
                warn!(lost, "the audit log takes lines again");
            }
            Ok(()) => {}
            Err(error) => {
                self.lost.set(lost + 1);
                if lost == 0 {
                    let path = self.path().unwrap_or(Path::new("")).display();
                    warn!(%path, %error, "the audit log takes no line; calls go on, except those about keys");
                }
            }
        }
        written
    }
}

/// Off the management thread, and one line at a time: a disk that does not respond holds one helper
/// thread, not all.
async fn append(file: Arc<Mutex<AuditFile>>, line: String, sync: bool) -> std::io::Result<()> {
    let work = async {
        let mut file = file.lock_owned().await;
        let written = tokio::task::spawn_blocking(move || file.append(&line, sync));
        written.await.map_err(std::io::Error::other)?
    };
    let late = || std::io::Error::from(std::io::ErrorKind::TimedOut);
    tokio::time::timeout(PATIENCE, work)
        .await
        .map_err(|_| late())?
}

#[cfg(test)]
mod tests;
