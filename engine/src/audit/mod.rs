//! The audit log: one JSON line for each audited call of a client, and for each act on the
//! administration page. A call is audited if it is of an audited class or may change something.
//!
//! ```text
//!   call ─▶ AuditRecord ─▶ (a secret call: "started", or the call is refused) ─▶ the method runs
//!              └────▶ line with the result ─▶ log, file ─▶ the client's reply
//! ```
//!
//! The line is in the file before the client has its reply. A call that outlives its deadline gets
//! its line when it ends; a call that ends the daemon has a line before it begins. If the file
//! cannot be written, calls of class `secret` are refused, and other calls go on with a warning.
//! Lines have no secrets: see [`redact`]. The number of lines about refused calls is limited: see
//! [`refusals`].

pub mod file;
pub mod redact;
pub mod refusals;

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use nacre_engine_web::acts::Act;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::Mutex;
use tracing::{info, warn};

use crate::rpc::access::{Caller, Identity};
use crate::rpc::{Class, MethodEntry, Role, RpcError};
use file::AuditFile;
use refusals::Refusals;

/// Time limit for writing one line to the file.
const PATIENCE: Duration = Duration::from_secs(5);
/// Target of the log lines. The log writes them at every level.
pub const TARGET: &str = "nacre_audit";
/// A method that may end the process before its result is written.
const ENDS_DAEMON: &str = "spdk_kill_instance";
/// Most bytes of the parameters in a line whose number is limited.
const MAX_REFUSED_BYTES: usize = 512;
/// Most groups of a client in a line.
const MAX_GROUPS: usize = 32;

/// Parameters that name the object of a call; the first one that is present counts.
const OBJECTS: [&str; 25] = [
    "name",
    "nqn",
    "volume",
    "bdev_name",
    "bdev",
    "raid_bdev",
    "base_bdev",
    "key",
    "ctrlr_name",
    "lvol",
    "lvol_name",
    "snapshot_name",
    "src_lvol_name",
    "pool",
    "lvs_name",
    "old_name",
    "base_name",
    "delay_bdev_name",
    "disk",
    "node",
    "backup",
    "subnqn",
    "uuid",
    "snapshot",
    "serial",
];

/// The audit log of a daemon: its file, and the limits of lines.
#[derive(Debug, Default)]
pub struct AuditLog {
    file: Option<Arc<Mutex<AuditFile>>>,
    path: Option<PathBuf>,
    /// Lines that could not be written to the file since the last success.
    lost: Cell<u64>,
    refusals: RefCell<Refusals>,
}

/// A call of a client, from its arrival to its result.
#[derive(Debug)]
pub struct AuditRecord {
    line: AuditLine,
    begun: Instant,
    progress: Cell<CallProgress>,
    /// A viewer's call of a method for viewers, which one of its parameters makes a change. The
    /// number of its lines is limited.
    is_limited: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallProgress {
    Waiting,
    /// The client's role does not allow the method.
    Forbidden,
    /// A task runs the method, and will write the result.
    Running,
    Written,
}

/// A line of the file, as JSON.
#[derive(Debug, Clone, Serialize)]
struct AuditLine {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gids: Vec<u32>,
    /// Subject of the certificate of a client over TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    certificate: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    /// Account of a user of the administration page.
    #[serde(skip_serializing_if = "Option::is_none")]
    account: Option<String>,
    /// Name of the API token of a program that uses the page's listener.
    #[serde(skip_serializing_if = "Option::is_none")]
    api_token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    #[serde(skip_serializing_if = "String::is_empty")]
    program: String,
    role: &'static str,
    class: &'static str,
    method: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<String>,
    params: Value,
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<RefusedCall>,
    /// Number of calls or acts of the same client that have no lines of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_ms: Option<f64>,
}

#[derive(Debug, Clone, Serialize)]
struct RefusedCall {
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
    ) -> Self {
        let params = redact::params(&Value::from((entry.params_schema)()), params);
        let named = OBJECTS.iter().find_map(|name| params.get(name)?.as_str());
        let mut line = AuditLine {
            program: caller.program.clone(),
            role: role.word(),
            class: entry.class.word(),
            method: entry.name,
            object: named.map(str::to_owned),
            params,
            ..AuditLine::now()
        };
        match &caller.identity {
            Identity::Local(of) => {
                let others = of.groups.iter().filter(|group| **group != of.gid);
                let gids = std::iter::once(of.gid).chain(others.copied());
                line.uid = Some(of.uid);
                line.gids = gids.take(MAX_GROUPS).collect();
                line.pid = of.pid;
            }
            Identity::Certificate { subject, address } => {
                line.certificate = Some(subject.to_string());
                line.address = Some(address.to_string());
            }
            Identity::Account { name, address, .. } => {
                line.account = Some(name.clone());
                line.address = Some(address.to_string());
            }
            Identity::ApiToken { name, address, .. } => {
                line.api_token = Some(name.clone());
                line.address = Some(address.to_string());
            }
        }
        Self {
            line,
            begun: Instant::now(),
            progress: Cell::new(CallProgress::Waiting),
            is_limited: role == Role::Viewer && !entry.class.is_audited(),
        }
    }

    /// Leaves writing the result to the task that runs the method.
    pub fn hand_over(&self) {
        self.progress.set(CallProgress::Running);
    }

    /// Marks the call as refused by the client's role, so that the number of lines is limited.
    pub fn forbid(&self) {
        self.progress.set(CallProgress::Forbidden);
    }

    fn is_secret(&self) -> bool {
        self.line.class == Class::Secret.word()
    }

    fn finished<T>(&self, outcome: &Result<T, RpcError>) -> AuditLine {
        let mut line = self.line.clone();
        // To a microsecond.
        line.duration_ms = Some(self.begun.elapsed().as_micros() as f64 / 1000.0);
        line.result = "done";
        if let Err(error) = outcome {
            line.result = "refused";
            line.error = Some(RefusedCall::of(error));
        }
        line
    }
}

impl RefusedCall {
    fn of(error: &RpcError) -> Self {
        let facts = error.data.as_ref();
        Self {
            code: error.code,
            message: redact::text(&error.message),
            cause: facts.map(|facts| redact::text(&facts.cause)),
        }
    }
}

impl AuditLine {
    fn now() -> Self {
        Self {
            time: humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
            uid: None,
            gids: Vec::new(),
            certificate: None,
            address: None,
            account: None,
            api_token: None,
            pid: None,
            program: String::new(),
            role: "",
            class: "",
            method: "",
            object: None,
            params: Value::Null,
            result: "started",
            error: None,
            left_out: None,
            duration_ms: None,
        }
    }

    /// The identity of the client, for the limit of lines.
    fn who(&self) -> String {
        if let Some(subject) = &self.certificate {
            return subject.clone();
        }
        match (&self.account, &self.api_token) {
            (Some(account), _) => format!("account:{account}"),
            (None, Some(token)) => format!("token:{token}"),
            (None, None) => format!("uid:{}", self.uid.unwrap_or_default()),
        }
    }

    /// Replaces parameters of more than [`MAX_REFUSED_BYTES`] by their length, and removes the
    /// object.
    fn shorten(&mut self) {
        let bytes = self.params.to_string().len();
        if bytes > MAX_REFUSED_BYTES {
            self.params = Value::from(format!("{bytes} bytes, left out"));
            self.object = None;
        }
    }
}

impl AuditLog {
    /// Writes lines to this file, which the first line creates, and to the log.
    pub fn to_file(file: AuditFile) -> Self {
        Self {
            path: Some(file.path().to_owned()),
            file: Some(Arc::new(Mutex::new(file))),
            lost: Cell::default(),
            refusals: RefCell::default(),
        }
    }

    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The file, for reading. `None`: lines go to the log only.
    pub fn file(&self) -> Option<Arc<Mutex<AuditFile>>> {
        self.file.clone()
    }

    /// Writes a line before a call of class `secret`, or one that ends the daemon. Refuses a secret
    /// call if that fails.
    pub async fn begin(&self, record: &AuditRecord) -> Result<(), RpcError> {
        if record.line.method == ENDS_DAEMON {
            // A failure was reported.
            let _ = self.write(&record.line, true).await;
            return Ok(());
        }
        if !record.is_secret() {
            return Ok(());
        }
        self.write(&record.line, true).await.map_err(|error| {
            let path = self.path().unwrap_or_else(|| Path::new("")).display();
            RpcError::io(
                "the audit log takes no line, and calls about keys need one",
                &error,
            )
            .remedy(format!(
                "make room for {path}, or set another [rpc.audit] file"
            ))
        })
    }

    /// Writes the line with the result, once.
    pub async fn end<T>(&self, record: &AuditRecord, outcome: &Result<T, RpcError>) {
        let before = record.progress.replace(CallProgress::Written);
        if before != CallProgress::Written {
            // A call that did not run waits for no disk: clients without the role could make many.
            let sync = record.is_secret() && before == CallProgress::Running;
            let mut line = record.finished(outcome);
            if before == CallProgress::Forbidden || record.is_limited {
                let admitted = self
                    .refusals
                    .borrow_mut()
                    .admit(&line.who(), Instant::now());
                let Some(left_out) = admitted else { return };
                line.left_out = Some(left_out).filter(|left_out| *left_out > 0);
                line.shorten();
            }
            // A failure was reported.
            let _ = self.write(&line, sync).await;
        }
    }

    /// As [`AuditLog::end`], for a call that was refused before its method ran, or whose task
    /// panicked. A call that outlives its deadline writes its own result later.
    pub async fn close<T>(&self, record: &Rc<AuditRecord>, outcome: &Result<T, RpcError>) {
        use crate::rpc::error::{Errno, INTERNAL_ERROR};
        let runs_on = record.progress.get() == CallProgress::Running
            && matches!(outcome, Err(error) if error.code == -(Errno::ETIMEDOUT as i32));
        let is_lost = matches!(outcome, Err(error) if error.code == INTERNAL_ERROR);
        let has_not_run = matches!(
            record.progress.get(),
            CallProgress::Waiting | CallProgress::Forbidden
        );
        if has_not_run || (is_lost && !runs_on) {
            self.end(record, outcome).await;
        }
    }

    /// Writes the line of an act on the page. A limit on the number of lines applies by account or
    /// API token, and by address for refused acts. Many sign-ins therefore do not fill the file.
    pub async fn act(&self, act: Act) {
        let mut line = AuditLine {
            account: act.account,
            api_token: act.api_token,
            address: Some(act.address.to_string()),
            role: act.role.map_or("none", Role::word),
            class: "page",
            method: act.name,
            result: "done",
            ..AuditLine::now()
        };
        let client = match &act.outcome {
            Ok(()) => match (&line.account, &line.api_token) {
                (_, Some(token)) => format!("page:token:{token}"),
                (account, None) => format!("page:{}", account.as_deref().unwrap_or_default()),
            },
            Err(error) => {
                line.result = "refused";
                line.error = Some(RefusedCall::of(error));
                format!("page:{}", act.address.ip())
            }
        };
        let admitted = self.refusals.borrow_mut().admit(&client, Instant::now());
        let Some(left_out) = admitted else { return };
        line.left_out = Some(left_out).filter(|left_out| *left_out > 0);
        // A failure was reported.
        let _ = self.write(&line, false).await;
    }

    async fn write(&self, line: &AuditLine, sync: bool) -> std::io::Result<()> {
        let line = serde_json::to_string(line).map_err(std::io::Error::other)?;
        info!(target: TARGET, "{line}");
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
                    let path = self.path().unwrap_or_else(|| Path::new("")).display();
                    warn!(%path, %error, "the audit log takes no line; calls go on, except those about keys");
                }
            }
        }
        written
    }
}

/// Writes the line on a helper thread, one line at a time. A disk that does not respond thus holds
/// up one helper thread only.
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
