//! Changes of this machine (*acts*) that the administration page requests, and their history.
//!
//! The daemon cannot change the machine itself: it starts no program. It writes a request to a file
//! instead, and systemd then starts `nacre appliance obey`:
//!
//! ```text
//!   daemon ──▶ request.json ──(nacre-request.path)──▶ nacre appliance obey ──▶ update, rollback, …
//!      ▲                                                        │
//!      └──────────────────────── history.json ◀─────────────────┘
//! ```

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nacre_bdev_nvme_vfio::pci::Address;
use nacre_engine_values::files;
use serde::{Deserialize, Serialize};

use crate::drives::DriveId;
use crate::host::HostName;
use crate::lock::{Lock, LockError};
use crate::network::{self, Interface, NetworkError, Settings};
use crate::place::{Places, create_folder, printable, small_text};
use crate::status::{self, StatusError};

/// Acts that the history keeps.
const MOST: usize = 32;
/// Most bytes of an act's text.
const MOST_TEXT: usize = 1000;
/// Name of the uploaded bundle in its folder.
pub const UPLOAD: &str = "bundle.tar";
/// Largest upload of a bundle: the parts of a bundle have smaller limits.
pub const MOST_UPLOAD: u64 = 2 << 30;

/// A request of the administration page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "act", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    Update {
        file: PathBuf,
        allow_older: bool,
        force: bool,
    },
    Rollback {
        force: bool,
    },
    Restart {
        #[serde(default)]
        force: bool,
    },
    PowerOff {
        #[serde(default)]
        force: bool,
    },
    /// Changes network settings. They are undone after a minute without [`Request::KeepNetwork`].
    SetNetwork {
        interface: Interface,
        settings: Settings,
    },
    KeepNetwork,
    RevertNetwork,
    SetName {
        name: HostName,
    },
    /// Switches the locate light of a disk's bay.
    Locate {
        disk: String,
        on: bool,
    },
    /// Binds a drive to vfio-pci, now and at each start.
    BindDrive {
        address: Address,
        serial: Option<String>,
    },
    UnbindDrive {
        drive: DriveId,
    },
}

impl Request {
    /// Its kind in the history; none: the history does not have it. The audit log has each call.
    fn kind(&self) -> Option<ActKind> {
        Some(match self {
            Self::Update { .. } => ActKind::Update,
            Self::Rollback { .. } => ActKind::Rollback,
            Self::Restart { .. } => ActKind::Restart,
            Self::PowerOff { .. } => ActKind::PowerOff,
            Self::SetName { .. } => ActKind::Name,
            Self::BindDrive { .. } | Self::UnbindDrive { .. } => ActKind::Drive,
            Self::Locate { .. } => return None,
            Self::SetNetwork { .. } | Self::KeepNetwork | Self::RevertNetwork => ActKind::Network,
        })
    }

    /// The bundle of an update.
    fn file(&self) -> Option<&Path> {
        match self {
            Self::Update { file, .. } => Some(file),
            _ => None,
        }
    }
}

/// A request in its file. Only the boot that left it executes it: a machine that stops with a
/// waiting restart would restart again after its start.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Left {
    boot: String,
    request: Request,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActKind {
    Update,
    Rollback,
    Restart,
    PowerOff,
    Network,
    Name,
    Drive,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActState {
    Running,
    Done,
    Failed,
    /// Its process has ended without a result, as after a power failure.
    Interrupted,
}

/// An entry of the history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Act {
    pub act: ActKind,
    pub state: ActState,
    /// The version of the system that ran at the start of the act.
    pub running: String,
    /// The bundle of an update.
    pub file: Option<PathBuf>,
    /// The present step of the act, or its result.
    pub text: String,
    /// Percentage of the bundle that was read, while the update checks and unpacks it.
    pub percent: Option<u8>,
    /// Milliseconds since 1970.
    pub began_ms: u64,
    pub ended_ms: Option<u64>,
    pid: u32,
    /// The kernel's identifier of this boot.
    boot: String,
}

impl Act {
    /// True if `later` has failed as this act has.
    fn is_repeated_by(&self, later: &Self) -> bool {
        self.state == ActState::Failed
            && later.state == ActState::Failed
            && (self.act, &self.file, &self.text) == (later.act, &later.file, &later.text)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error(transparent)]
    Status(#[from] StatusError),
    #[error("another request waits for its turn; try again when it has begun")]
    Waiting,
    #[error("this machine is changed already ({text}, for {seconds} s); wait for its end")]
    Running { text: String, seconds: u64 },
    #[error("{path}: {cause}", path = path.display())]
    File { path: PathBuf, cause: String },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: {source}; the request is discarded", path = path.display())]
    Malformed {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// Writes a request for `nacre appliance obey`. Refused while another request waits. While an act
/// runs, only [`Request::KeepNetwork`], [`Request::RevertNetwork`] and [`Request::Locate`] are
/// accepted.
pub fn ask(places: &Places, request: &Request) -> Result<(), RequestError> {
    status::image(places)?;
    let path = places.request();
    let failed = |source| RequestError::Io {
        path: places.request(),
        source,
    };
    if path.try_exists().map_err(failed)? {
        return Err(RequestError::Waiting);
    }
    // A trial of the network ends by itself: it does not wait for an update. A locate light changes
    // nothing on disk, so it need not wait.
    let is_answer = matches!(
        request,
        Request::KeepNetwork | Request::RevertNetwork | Request::Locate { .. }
    );
    let mut acts = history(places).into_iter();
    if !is_answer && let Some(act) = acts.find(|act| act.state == ActState::Running) {
        return Err(RequestError::Running {
            text: format!("{:?}", act.act).to_lowercase(),
            seconds: now_ms().saturating_sub(act.began_ms) / 1000,
        });
    }
    match request {
        Request::Update { file, .. } => check_bundle(file)?,
        Request::SetNetwork {
            interface,
            settings,
        } => network::check(places, interface, settings)?,
        Request::KeepNetwork | Request::RevertNetwork if network::pending(places)?.is_none() => {
            return Err(NetworkError::NonePending.into());
        }
        _ => {}
    }
    create_folder(&places.notes(), 0o700).map_err(failed)?;
    let left = Left {
        boot: boot_id(places),
        request: request.clone(),
    };
    let text = serde_json::to_vec(&left).map_err(|error| failed(error.into()))?;
    // Another call may have left a request since the check above.
    match files::create_private(&path, &text) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(RequestError::Waiting),
        done => done.map_err(failed),
    }
}

/// Refuses a path without a file, before the request waits. The update checks the rest.
fn check_bundle(file: &Path) -> Result<(), RequestError> {
    let refused = |cause: String| RequestError::File {
        path: file.to_owned(),
        cause,
    };
    if !file.is_absolute() {
        return Err(refused("the path is not absolute".into()));
    }
    match fs::metadata(file) {
        Ok(facts) if facts.is_file() => Ok(()),
        Ok(facts) => Err(refused(format!("it is {}, no file", files::kind(&facts)))),
        Err(error) => Err(refused(error.to_string())),
    }
}

/// The request that `nacre appliance obey` has not taken yet.
pub fn waiting(places: &Places) -> Option<Request> {
    let left: Left = serde_json::from_str(&small_text(&places.request())?).ok()?;
    Some(left.request)
}

/// Takes the request that waits. It is removed first: systemd starts `obey` while it exists. A
/// request of an earlier boot goes to the history as interrupted.
pub fn take(places: &Places) -> Result<Option<Request>, RequestError> {
    let path = places.request();
    let failed = |source| RequestError::Io {
        path: places.request(),
        source,
    };
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    fs::remove_file(&path).map_err(failed)?;
    files::sync_folder(&path).map_err(failed)?;
    let left: Left =
        serde_json::from_slice(&text).map_err(|source| RequestError::Malformed { path, source })?;
    if left.boot == boot_id(places) {
        return Ok(Some(left.request));
    }
    let Some(kind) = left.request.kind() else {
        return Ok(None);
    };
    let entry = Entry::begin(places, kind, left.request.file())?;
    entry.end(ActState::Interrupted, "the machine started before it began")?;
    Ok(None)
}

/// The acts of this machine, the newest first.
pub fn history(places: &Places) -> Vec<Act> {
    let mut acts = read(places);
    let boot = boot_id(places);
    for act in &mut acts {
        if act.state == ActState::Running && (act.boot != boot || !places.process(act.pid).exists())
        {
            act.state = ActState::Interrupted;
        }
    }
    acts.reverse();
    acts
}

/// The oldest first. A damaged file counts as none: it is history only. Acts that a later version
/// has written in another form are left out.
fn read(places: &Places) -> Vec<Act> {
    let text = fs::read(places.history()).unwrap_or_default();
    let acts: Vec<serde_json::Value> = serde_json::from_slice(&text).unwrap_or_default();
    let acts = acts.into_iter();
    acts.filter_map(|act| serde_json::from_value(act).ok())
        .collect()
}

fn boot_id(places: &Places) -> String {
    small_text(&places.boot_id()).unwrap_or_default()
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

/// Writes the history entry of an act, from its begin to its end.
#[derive(Debug)]
pub struct Entry<'a> {
    places: &'a Places,
    act: Act,
}

impl<'a> Entry<'a> {
    /// Begins an entry. Fails on a machine that is no appliance.
    pub fn begin(
        places: &'a Places,
        kind: ActKind,
        file: Option<&Path>,
    ) -> Result<Self, RequestError> {
        let running = status::image(places)?.version.to_string();
        let act = Act {
            act: kind,
            state: ActState::Running,
            running,
            file: file.map(Path::to_owned),
            text: "begins".into(),
            percent: None,
            began_ms: now_ms(),
            ended_ms: None,
            pid: std::process::id(),
            boot: boot_id(places),
        };
        let entry = Self { places, act };
        entry.write()?;
        Ok(entry)
    }

    /// Records the present step of the act.
    pub fn step(&mut self, text: &str, percent: Option<u8>) -> Result<(), RequestError> {
        self.act.text = text.to_owned();
        self.act.percent = percent;
        self.write()
    }

    pub fn end(mut self, state: ActState, text: &str) -> Result<(), RequestError> {
        self.act.state = state;
        self.act.text = printable(text).chars().take(MOST_TEXT).collect();
        self.act.percent = None;
        self.act.ended_ms = Some(now_ms());
        self.write()
    }

    fn write(&self) -> Result<(), RequestError> {
        let _lock = Lock::of_history(self.places)?;
        let mut acts = read(self.places);
        let is_this = |act: &Act| (act.began_ms, act.pid) == (self.act.began_ms, self.act.pid);
        match acts.iter_mut().find(|act| is_this(act)) {
            Some(act) => *act = self.act.clone(),
            None => acts.push(self.act.clone()),
        }
        // An update that a volume delays fails every two minutes: the last of these is enough.
        acts.retain(|act| is_this(act) || !act.is_repeated_by(&self.act));
        let most = acts.len().saturating_sub(MOST);
        acts.drain(..most);
        let path = self.places.history();
        let failed = |source| RequestError::Io {
            path: self.places.history(),
            source,
        };
        let text = serde_json::to_vec(&acts).map_err(|error| failed(error.into()))?;
        files::replace_private(&path, &text).map_err(failed)
    }
}

/// A reader that reports each twentieth of its file.
pub(crate) struct Watched<'a, R> {
    from: R,
    read: u64,
    length: u64,
    told: u64,
    report: &'a mut dyn FnMut(u8),
}

impl<'a, R> Watched<'a, R> {
    pub(crate) fn new(from: R, length: u64, report: &'a mut dyn FnMut(u8)) -> Self {
        Self {
            from,
            read: 0,
            length: length.max(1),
            told: 0,
            report,
        }
    }
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buffer)?;
        self.read = self.read.saturating_add(count as u64);
        let part = (self.read.min(self.length).saturating_mul(20)) / self.length;
        if part > self.told {
            self.told = part;
            (self.report)(u8::try_from(part * 5).unwrap_or(100));
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESTART: Request = Request::Restart { force: false };

    fn appliance() -> (tempfile::TempDir, Places) {
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        for path in [places.os_release(), places.boot_id()] {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
        }
        fs::write(places.os_release(), "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n").unwrap();
        fs::write(places.boot_id(), "one\n").unwrap();
        fs::create_dir_all(places.process(std::process::id())).unwrap();
        (root, places)
    }

    /// Goal: a request is executed once, by the boot that left it, and a second one waits. Method:
    /// requests of each kind, taken and asked for in turn; one of another boot; a damaged one.
    #[test]
    fn a_request_is_taken_once() {
        let (root, places) = appliance();
        assert_eq!(take(&places).unwrap(), None);
        let file = root.path().join("nacre_0.2.0.tar");
        let update = Request::Update {
            file: file.clone(),
            allow_older: false,
            force: true,
        };
        for bad in [file.clone(), root.path().into(), "nacre_0.2.0.tar".into()] {
            let refused = ask(
                &places,
                &Request::Update {
                    file: bad,
                    allow_older: false,
                    force: false,
                },
            );
            assert!(matches!(refused, Err(RequestError::File { .. })));
        }
        fs::write(&file, "x").unwrap();
        for request in [update, Request::Rollback { force: false }, RESTART] {
            ask(&places, &request).unwrap();
            assert_eq!(waiting(&places), Some(request.clone()));
            let second = ask(&places, &RESTART);
            assert!(matches!(second, Err(RequestError::Waiting)));
            assert_eq!(take(&places).unwrap(), Some(request));
            assert_eq!(take(&places).unwrap(), None);
        }
        // A light of an earlier boot has no entry in the history.
        let light = Request::Locate {
            disk: "sda".into(),
            on: true,
        };
        ask(&places, &light).unwrap();
        fs::write(places.boot_id(), "two\n").unwrap();
        assert_eq!(take(&places).unwrap(), None);
        assert_eq!(history(&places), []);
        ask(&places, &RESTART).unwrap();
        fs::write(places.boot_id(), "three\n").unwrap();
        assert_eq!(take(&places).unwrap(), None);
        assert!(!places.request().exists());
        let noted = history(&places).remove(0);
        assert_eq!(
            (noted.act, noted.state),
            (ActKind::Restart, ActState::Interrupted)
        );
        fs::write(places.request(), "{\"act\":\"shell\"}").unwrap();
        assert!(matches!(take(&places), Err(RequestError::Malformed { .. })));
        assert_eq!(take(&places).unwrap(), None);
        fs::remove_file(places.os_release()).unwrap();
        let refused = ask(&places, &RESTART);
        assert!(matches!(refused, Err(RequestError::Status(_))));
    }

    /// Goal: of two requests at the same moment one waits, and the other one is refused. Method:
    /// two threads, again and again.
    #[test]
    fn a_request_is_not_overwritten() {
        let (_root, places) = appliance();
        let places = &places;
        let restart = RESTART;
        let light = Request::Locate {
            disk: "sda".into(),
            on: true,
        };
        for _ in 0..32 {
            let results = std::thread::scope(|scope| {
                let threads = [&restart, &light];
                let threads = threads.map(|one| scope.spawn(move || ask(places, one)));
                threads.map(|thread| thread.join().unwrap())
            });
            let expected = match &results {
                [Ok(()), Err(RequestError::Waiting)] => &restart,
                [Err(RequestError::Waiting), Ok(())] => &light,
                other => panic!("{other:?}"),
            };
            assert_eq!(take(places).unwrap().as_ref(), Some(expected));
        }
    }

    /// Goal: the history has the newest acts first, and is bounded. An act without a process is
    /// interrupted, and blocks no request. Method: another boot, and a process that has ended.
    #[test]
    fn the_history_of_acts() {
        let (_root, places) = appliance();
        let mut entry = Entry::begin(&places, ActKind::Update, Some(Path::new("/b.tar"))).unwrap();
        entry.step("unpacks the bundle", Some(35)).unwrap();
        let found = history(&places);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].state, found[0].percent),
            (ActState::Running, Some(35))
        );
        // Also while a later act, which it refused, is the newest one.
        let mut later = Entry::begin(&places, ActKind::Rollback, None).unwrap();
        later.act.pid = 999_999;
        later.end(ActState::Failed, "another command").unwrap();
        let refused = ask(&places, &RESTART);
        assert!(matches!(refused, Err(RequestError::Running { .. })));
        fs::remove_file(places.history()).unwrap();
        entry.step("unpacks the bundle", Some(35)).unwrap();
        for end in ["boot", "process"] {
            match end {
                "boot" => fs::write(places.boot_id(), "two").unwrap(),
                _ => fs::remove_dir_all(places.process(std::process::id())).unwrap(),
            }
            assert_eq!(history(&places)[0].state, ActState::Interrupted, "{end}");
            fs::write(places.boot_id(), "one").unwrap();
        }
        entry.end(ActState::Failed, "a\u{1b}[2Jb").unwrap();
        let ended = &history(&places)[0];
        assert_eq!((ended.state, &*ended.text), (ActState::Failed, "a?[2Jb"));
        assert_eq!(ended.percent, None);
        fs::create_dir_all(places.process(std::process::id())).unwrap();
        for (n, pid) in (0..MOST + 3).zip(1_000_000..) {
            let mut entry = Entry::begin(&places, ActKind::Rollback, None).unwrap();
            // Entries of one process within a millisecond are told apart by hand.
            entry.act.pid = pid;
            entry.end(ActState::Done, &n.to_string()).unwrap();
        }
        let all = history(&places);
        assert_eq!(all.len(), MOST);
        assert_eq!(all[0].text, (MOST + 2).to_string());
        let ends = ["delayed", "delayed", "delayed", "damaged", "delayed"];
        for (number, text) in (2_000_000..).zip(ends) {
            let mut entry = Entry::begin(&places, ActKind::Update, None).unwrap();
            entry.act.pid = number;
            entry.end(ActState::Failed, text).unwrap();
        }
        let failed = history(&places).into_iter();
        let failed = failed.filter(|act| act.state == ActState::Failed && act.file.is_none());
        let texts: Vec<String> = failed.map(|act| act.text).collect();
        assert_eq!(texts, ["delayed", "damaged"]);
        let mut of_later: serde_json::Value =
            serde_json::from_slice(&fs::read(places.history()).unwrap()).unwrap();
        of_later[0]["act"] = "of a later version".into();
        fs::write(places.history(), of_later.to_string()).unwrap();
        assert_eq!(history(&places).len(), MOST - 1);
        fs::write(places.history(), "not json").unwrap();
        assert!(history(&places).is_empty());
    }

    #[test]
    fn a_reader_reports_its_progress() {
        let mut reports = Vec::new();
        let mut report = |percent| reports.push(percent);
        let mut from = Watched::new(&[7u8; 1000][..], 1000, &mut report);
        let mut buffer = [0; 10];
        while from.read(&mut buffer).unwrap() > 0 {}
        assert_eq!(reports, (1..=20).map(|part| part * 5).collect::<Vec<u8>>());
    }
}
