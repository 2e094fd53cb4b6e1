//! The administration page: starts its listeners, keeps their certificate, and samples the daemon
//! for its live data. The server itself is `nacre-engine-web`.

use std::cell::{Cell, OnceCell, RefCell};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use nacre_engine_appliance::acts::{MOST_UPLOAD, UPLOAD};
use nacre_engine_appliance::place::Places;
use nacre_engine_appliance::status;
use nacre_engine_web::acts::{Act, Trail};
use nacre_engine_web::certificate::{Certificate, CertificateError};
use nacre_engine_web::endpoint::Endpoint;
use nacre_engine_web::live::Source;
use nacre_engine_web::logins::Logins;
use nacre_engine_web::passwords::Cost;
use nacre_engine_web::server::Listener;
use nacre_engine_web::upload::UploadPlace;
use nacre_engine_web::web::{About, Limits, Web};
use nacre_nvmf::subsystems::{Kind, LATENCY_BUCKETS};
use nacre_reactor::Clock;
use serde_json::{Value, json};
use tracing::{info, warn};

use super::Engine;
use super::lifecycle::Phase;
use super::machine::host_name;
use crate::config::web::WebSettings;
use crate::notify::{Category, KEPT};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;

/// Interval at which the machine's host name is checked.
const CHECK_EVERY: Duration = Duration::from_secs(3);
/// Interval at which the expiry of the daemon's own certificate is checked.
const CHECK_END_EVERY: Duration = Duration::from_secs(86_400);

/// The administration page of a daemon; without `[web] listen`, nothing runs.
#[derive(Debug, Default)]
pub struct Page {
    running: OnceCell<RunningServer>,
    /// Kinds of objects that calls have changed since the last sample, as a bit for each of
    /// [`KINDS`].
    changed: Cell<u16>,
    /// Id of the first event that was not searched for changes yet.
    seen: Cell<u64>,
    last: RefCell<Option<(Instant, HostIo)>>,
}

#[derive(Debug)]
struct RunningServer {
    logins: Rc<Logins>,
    certificate: Rc<RefCell<Option<Certificate>>>,
    listen: Vec<Endpoint>,
    /// The data directory.
    folder: Option<PathBuf>,
    settings: RefCell<WebSettings>,
    /// The machine's host name at the last check.
    host: Rc<RefCell<String>>,
    /// The host name at the time when the certificate in use was read or made.
    certified_host: RefCell<String>,
    end_checked: Cell<SystemTime>,
    /// The last failure to make a certificate, so that it is logged once.
    last_error: RefCell<Option<String>>,
}

/// Kinds of objects that the page shows.
const KINDS: [&str; 7] = [
    "bdevs",
    "volumes",
    "subsystems",
    "pools",
    "keys",
    "alerts",
    "accounts",
];

/// The kinds that a method changes, by the prefix of its name. The first match counts.
const METHODS: [(&str, &[&str]); 11] = [
    ("bdev_lvol_", &["pools", "bdevs"]),
    ("bdev_", &["bdevs"]),
    ("volume_", &["volumes", "bdevs"]),
    ("pool_", &["pools", "bdevs"]),
    ("lvol_", &["pools", "bdevs"]),
    ("nvmf_", &["subsystems"]),
    ("host_", &["subsystems"]),
    ("key", &["keys"]),
    ("alert_", &["alerts"]),
    ("web_", &["accounts"]),
    ("framework_", &KINDS),
];

fn bits(kinds: &[&str]) -> u16 {
    let is_of = |at: &usize| kinds.contains(&KINDS[*at]);
    (0..KINDS.len()).filter(is_of).map(|at| 1 << at).sum()
}

impl Page {
    /// Marks the kinds of objects that a successful call may have changed.
    pub fn note(&self, method: &str) {
        let of = METHODS.iter().find(|(start, _)| method.starts_with(start));
        if let Some((_, kinds)) = of {
            self.changed.set(self.changed.get() | bits(kinds));
        }
    }

    /// The accounts. `ENOTSUP` without `[web] listen`.
    pub fn logins(&self) -> Result<Rc<Logins>, RpcError> {
        let running = self.running.get().ok_or_else(|| {
            RpcError::errno(
                Errno::ENOTSUP,
                "[web] listen is not set, so there is no page",
            )
            .remedy("set [web] listen in the configuration, and restart the daemon")
        })?;
        Ok(Rc::clone(&running.logins))
    }

    /// The addresses of the listeners.
    pub fn listen(&self) -> Vec<String> {
        let running = self.running.get();
        running.map_or_else(Vec::new, |running| {
            running.listen.iter().map(ToString::to_string).collect()
        })
    }

    /// The fingerprint of the certificate in use.
    pub fn fingerprint(&self) -> Option<String> {
        let certificate = self.running.get()?.certificate.borrow();
        certificate.as_ref().map(|of| of.fingerprint.clone())
    }

    /// Reads or makes the certificate for these settings, on another thread. After a failure the
    /// former one stays in use.
    pub async fn reload(&self, settings: &WebSettings) -> Result<(), CertificateError> {
        let Some(running) = self.running.get() else {
            return Ok(());
        };
        let (new, folder, listen, host) = (
            settings.clone(),
            running.folder.clone(),
            running.listen.clone(),
            running.host.borrow().clone(),
        );
        let certified_host = host.clone();
        let read = move || certificate(&new, folder.as_deref(), &listen, host);
        let read = match tokio::task::spawn_blocking(read).await {
            Ok(read) => read?,
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        };
        running.certificate.replace(read);
        running.settings.replace(settings.clone());
        running.certified_host.replace(certified_host);
        running.last_error.replace(None);
        Ok(())
    }

    /// Takes over the present host name. Reads or makes another certificate if the name is new, or
    /// the daemon's own certificate is to be renewed. A failure is logged once, and retried at the
    /// next check.
    async fn check(&self, host: String, now: SystemTime) {
        let Some(running) = self.running.get() else {
            return;
        };
        let former = running.host.replace(host.clone());
        if host != former {
            info!(former, host, "web: the machine has a new name");
        }
        let is_new = *running.certified_host.borrow() != host;
        if !is_new && !running.is_ending(now) {
            return;
        }
        let settings = running.settings.borrow().clone();
        if let Err(error) = self.reload(&settings).await {
            let error = error.to_string();
            let last = running.last_error.replace(Some(error.clone()));
            if last.as_ref() != Some(&error) {
                warn!("web: {error}; the certificate in use stays");
            }
        }
    }
}

impl RunningServer {
    /// True if the daemon's own certificate is to be renewed. Checks once in [`CHECK_END_EVERY`].
    fn is_ending(&self, now: SystemTime) -> bool {
        let since = now.duration_since(self.end_checked.get());
        // A clock that was set back: look at once.
        if since.is_ok_and(|since| since < CHECK_END_EVERY) {
            return false;
        }
        self.end_checked.set(now);
        let certificate = self.certificate.borrow();
        let renew_at = certificate.as_ref().and_then(|of| of.renew_at);
        renew_at.is_some_and(|at| at <= now)
    }
}

/// Starts the listeners of `[web] listen`, if any. `folder`: the data directory.
pub async fn start(engine: &Rc<Engine>, folder: Option<&Path>) -> anyhow::Result<()> {
    let settings = &engine.settings.web;
    // The file was checked.
    let wanted = settings.listen.iter().filter_map(|text| text.parse().ok());
    let wanted: Vec<Endpoint> = wanted.collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let mut listeners = Vec::new();
    for endpoint in wanted {
        listeners.push(Listener::bind(endpoint).await?);
    }
    let listen = listeners.iter().map(Listener::endpoint);
    let listen = listen.collect::<std::io::Result<Vec<Endpoint>>>()?;
    if folder.is_none() {
        warn!("web: no state is stored: accounts and certificate end with this daemon");
    }
    let logins = Logins::open(folder, Cost::default(), Clock::real())?;
    let host = host_name();
    let certificate = certificate(settings, folder, &listen, host.clone())?;
    let certified_host = RefCell::new(host.clone());
    let certificate = Rc::new(RefCell::new(certificate));
    let host = Rc::new(RefCell::new(host));
    let about = About {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host: Rc::clone(&host),
        uploads: uploads(),
    };
    let web = Web::new(
        Rc::clone(engine),
        Rc::clone(&logins),
        Rc::clone(&certificate),
        about,
        Limits::default(),
    );
    for (listener, endpoint) in listeners.into_iter().zip(&listen) {
        info!(address = %endpoint, "administration page");
        tokio::task::spawn_local(Rc::clone(&web).serve(listener));
    }
    if logins.wants_setup() {
        info!("the page has no account yet: `nacre web status` shows the set-up code");
    }
    let running = RunningServer {
        logins,
        certificate,
        listen,
        folder: folder.map(Path::to_owned),
        settings: RefCell::new(settings.clone()),
        host,
        certified_host,
        end_checked: Cell::new(SystemTime::now()),
        last_error: RefCell::default(),
    };
    engine.calls.page.running.get_or_init(|| running);
    tokio::task::spawn_local(keep_current(Rc::clone(engine)));
    Ok(())
}

/// Where an appliance stores uploaded update bundles; `None` on other machines.
fn uploads() -> Option<UploadPlace> {
    let places = Places::system();
    status::image(&places).is_ok().then(|| UploadPlace {
        file: places.uploads().join(UPLOAD),
        most: MOST_UPLOAD,
        free_bytes: status::free_bytes,
    })
}

/// Checks the host name and the certificate every [`CHECK_EVERY`].
async fn keep_current(engine: Rc<Engine>) {
    loop {
        tokio::time::sleep(CHECK_EVERY).await;
        match tokio::task::spawn_blocking(host_name).await {
            Ok(host) => engine.calls.page.check(host, SystemTime::now()).await,
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
}

/// The certificate of the HTTPS listeners; `None` if no listener uses HTTPS.
fn certificate(
    settings: &WebSettings,
    folder: Option<&Path>,
    listen: &[Endpoint],
    host: String,
) -> Result<Option<Certificate>, CertificateError> {
    if !listen.iter().any(|endpoint| endpoint.secure) {
        return Ok(None);
    }
    let made = match (&settings.cert, &settings.key) {
        (Some(cert), Some(key)) => Certificate::of_files(cert, key),
        _ => Certificate::own(folder, &names(listen, host), SystemTime::now()),
    };
    made.map(Some)
}

/// The names and addresses under which browsers reach the listeners.
fn names(listen: &[Endpoint], host: String) -> Vec<String> {
    let mut names = vec![host, "localhost".into(), "127.0.0.1".into(), "::1".into()];
    let own = if_addrs::get_if_addrs().unwrap_or_default();
    let own: Vec<IpAddr> = own.iter().map(if_addrs::Interface::ip).collect();
    for endpoint in listen {
        match endpoint.address.ip() {
            any if any.is_unspecified() => names.extend(own.iter().map(ToString::to_string)),
            one => names.push(one.to_string()),
        }
    }
    names
}

/// Sums of the reads and of the writes of all hosts. They can shrink: a deleted subsystem takes its
/// counters with it.
#[derive(Debug, Clone, Copy, Default)]
struct HostIo([Sum; 2]);

#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    operations: u64,
    bytes: u64,
    latency: [u64; LATENCY_BUCKETS],
}

impl Sum {
    /// The difference to an earlier sum; 0 where a sum has shrunk.
    fn since(&self, earlier: &Self) -> Self {
        let mut latency = self.latency;
        for (now, then) in latency.iter_mut().zip(earlier.latency) {
            *now = now.saturating_sub(then);
        }
        Self {
            operations: self.operations.saturating_sub(earlier.operations),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            latency,
        }
    }

    /// The latency in microseconds below which this share of the commands (0 to 1) completed.
    /// `None` without commands.
    fn percentile(&self, share: f64) -> Option<f64> {
        let all: u64 = self.latency.iter().sum();
        if all == 0 {
            return None;
        }
        let wanted = share * all as f64;
        let mut below = 0.0;
        for (at, count) in self.latency.iter().enumerate() {
            let count = *count as f64;
            if count > 0.0 && below + count >= wanted {
                let lower = if at == 0 { 0.0 } else { upper_us(at - 1) };
                return Some(lower + (upper_us(at) - lower) * (wanted - below) / count);
            }
            below += count;
        }
        Some(upper_us(LATENCY_BUCKETS - 1))
    }
}

/// The upper bound of a latency bucket in microseconds.
fn upper_us(bucket: usize) -> f64 {
    (1_u64 << bucket) as f64
}

impl HostIo {
    fn of(engine: &Engine) -> Option<Self> {
        let plane = engine.plane().ok()?;
        let mut sums = Self::default();
        for subsystem in plane.target.subsystems() {
            for host in subsystem.host_sums() {
                for (at, kind) in [Kind::Read, Kind::Write].into_iter().enumerate() {
                    let (of_host, sum) = (&host.sums[kind as usize], &mut sums.0[at]);
                    sum.operations += of_host.operations;
                    sum.bytes += of_host.bytes;
                    for (all, of_host) in sum.latency.iter_mut().zip(of_host.latency) {
                        *all += of_host;
                    }
                }
            }
        }
        Some(sums)
    }

    /// The event `metrics` of the page, computed from two sums that are `seconds` apart.
    fn json(&self, earlier: &Self, seconds: f64, time_ms: u64) -> Value {
        let [read, write] = [0, 1].map(|at| self.0[at].since(&earlier.0[at]));
        let rate = |count: u64| count as f64 / seconds;
        let both = read.latency.iter().zip(write.latency).map(|(a, b)| a + b);
        let both = both.enumerate().filter(|(_, count)| *count > 0);
        let latency: Vec<Value> = both
            .map(|(at, count)| json!([upper_us(at), count]))
            .collect();
        json!({
            "time_ms": time_ms,
            "read_ops": rate(read.operations),
            "write_ops": rate(write.operations),
            "read_bytes": rate(read.bytes),
            "write_bytes": rate(write.bytes),
            "read_p50_us": read.percentile(0.5),
            "read_p99_us": read.percentile(0.99),
            "write_p50_us": write.percentile(0.5),
            "write_p99_us": write.percentile(0.99),
            "latency_us": latency,
        })
    }
}

impl Trail for Engine {
    async fn note(&self, act: Act) {
        self.calls.audit.act(act).await;
    }
}

impl Source for Engine {
    fn phase(&self) -> &'static str {
        match self.lifecycle.phase() {
            Phase::Startup => "startup",
            Phase::Starting => "starting",
            Phase::Runtime => "running",
            Phase::Stopping => "draining",
        }
    }

    fn watch(&self, _watched: bool) {
        // The first sample of a watcher is compared with one of its own time.
        self.calls.page.last.replace(None);
        self.calls.page.seen.set(self.notes.next());
    }

    async fn metrics(&self) -> Option<Value> {
        let now = (Instant::now(), HostIo::of(self)?);
        let (then, earlier) = self.calls.page.last.replace(Some(now))?;
        let seconds = now.0.duration_since(then).as_secs_f64();
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let time_ms = u64::try_from(time.unwrap_or_default().as_millis()).unwrap_or(u64::MAX);
        (seconds > 0.0).then(|| now.1.json(&earlier, seconds, time_ms))
    }

    fn next_event(&self) -> u64 {
        self.notes.next()
    }

    fn events(&self, from: u64, before: u64) -> Vec<(u64, String)> {
        let events = self.notes.after(from, KEPT, |event| event.id < before);
        let json = |event| serde_json::to_string(&event).unwrap_or_default();
        events
            .into_iter()
            .map(|event| (event.id, json(event)))
            .collect()
    }

    /// The kinds of objects that calls and events have changed. Events count because replicas and
    /// remote devices change without calls.
    fn take_changed(&self) -> Vec<&'static str> {
        let page = &self.calls.page;
        let from = page.seen.replace(self.notes.next());
        let mut changed = page.changed.replace(0);
        for event in self.notes.after(from, KEPT, |_| true) {
            changed |= bits(match event.category {
                Category::Device => &["bdevs", "pools"],
                Category::Target | Category::Transport => &["subsystems"],
                Category::Volume | Category::Replica => &["volumes"],
                Category::State => &KINDS,
            });
        }
        let is_set = |at: &usize| changed & 1 << at != 0;
        (0..KINDS.len())
            .filter(is_set)
            .map(|at| KINDS[at])
            .collect()
    }
}

#[cfg(test)]
mod tests;
