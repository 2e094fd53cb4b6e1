//! Checks the calls of clients against their roles and the daemon's phase, and counts the calls.

use std::cell::{Cell, RefCell};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use nacre_engine_alerts::Url;
use serde_json::value::RawValue;
use tokio::sync::{oneshot, watch};
use tracing::warn;

use super::Engine;
use super::keyring::store_key::StoreKeys;
use super::lifecycle::Phase;
use super::web::Page;
use crate::audit::{AuditLog, AuditRecord};
use crate::config::settings;
use crate::doctor;
use crate::rpc::access::{self, Access, Actor, Caller, Members, SocketAccess};
use crate::rpc::error::STARTING;
use crate::rpc::folder;
use crate::rpc::method::MethodEntry;
use crate::rpc::{Class, Role, RpcError};

/// The access rules for clients, the audit log, and the number of calls.
pub struct Calls {
    counts: Cell<CallCounts>,
    rules: RefCell<settings::Rpc>,
    access: RefCell<Access>,
    socket_access: watch::Sender<SocketAccess>,
    pub audit: AuditLog,
    /// The administration page, whose users are clients too.
    pub page: Page,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// Answered calls, refused ones included.
    pub answered: u64,
    /// Calls answered with an error.
    pub refused: u64,
}

/// A client of the management socket, with its role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    pub caller: Rc<Caller>,
    pub role: Role,
}

impl Client {
    /// The client as a method sees it.
    pub fn actor(&self) -> Actor {
        Actor {
            role: self.role,
            local: self.caller.identity.is_local(),
        }
    }
}

impl Calls {
    /// Applies the rules. Looks up the names of users and groups, which blocks for at most
    /// [`NAMES_LIMIT`].
    pub fn new(rules: &settings::Rpc, audit: AuditLog) -> Self {
        let access = resolve(rules);
        Self {
            counts: Cell::default(),
            socket_access: watch::channel(access.socket_access()).0,
            rules: RefCell::new(rules.clone()),
            access: RefCell::new(access),
            audit,
            page: Page::default(),
        }
    }

    /// Replaces the rules, for connected clients too. If the name service does not answer within
    /// [`NAMES_LIMIT`], this is an error. Users and groups then keep their old roles, and only the
    /// rules for certificates and for lists of methods change.
    pub async fn change_rules(&self, rules: settings::Rpc) -> anyhow::Result<()> {
        let looked_up = of_daemon_on_a_thread(&rules, rustix::process::geteuid().as_raw())?;
        let looked_up = tokio::time::timeout(NAMES_LIMIT, looked_up).await;
        self.change_to(rules, looked_up.ok().transpose()?)
    }

    /// `looked_up`: the rules with their names; `None` if the name service has not answered.
    fn change_to(
        &self,
        rules: settings::Rpc,
        looked_up: Option<(Access, Vec<String>)>,
    ) -> anyhow::Result<()> {
        let Some(looked_up) = looked_up else {
            let own_uid = self.access.borrow().own_uid;
            let nameless = of_daemon(&rules, own_uid, |_| (Members::default(), Vec::new())).0;
            let mut access = self.access.borrow_mut();
            access.certificates = nameless.certificates;
            access.operator_methods = nameless.operator_methods;
            access.viewer_methods = nameless.viewer_methods;
            let seconds = NAMES_LIMIT.as_secs();
            anyhow::bail!(
                "[rpc.access]: the name service has not answered within {seconds} s; users and \
                 groups keep their old roles, certificates have the new ones. Write numbers (uid:, \
                 gid:), or repair the name service"
            );
        };
        let access = known(looked_up);
        self.rules.replace(rules);
        self.socket_access.send_replace(access.socket_access());
        self.access.replace(access);
        Ok(())
    }

    /// The rules in effect, as the configuration has them.
    pub fn rules(&self) -> settings::Rpc {
        self.rules.borrow().clone()
    }

    /// The users and groups that the socket must admit, now and after each change.
    pub fn socket_access(&self) -> watch::Receiver<SocketAccess> {
        self.socket_access.subscribe()
    }

    pub fn counts(&self) -> CallCounts {
        self.counts.get()
    }

    pub fn count(&self, is_refused: bool) {
        let mut counts = self.counts.get();
        counts.answered += 1;
        counts.refused += u64::from(is_refused);
        self.counts.set(counts);
    }

    /// The client with its role. Refuses a caller without a role.
    pub fn client(&self, caller: &Rc<Caller>) -> Result<Client, RpcError> {
        match self.role(caller) {
            Some(role) => Ok(Client {
                caller: Rc::clone(caller),
                role,
            }),
            None => Err(self.access.borrow().stranger(caller)),
        }
    }

    pub fn admit(&self, caller: &Caller) -> Result<(), RpcError> {
        match self.role(caller) {
            Some(_) => Ok(()),
            None => Err(self.access.borrow().stranger(caller)),
        }
    }

    fn role(&self, caller: &Caller) -> Option<Role> {
        self.access.borrow().role(&caller.identity)
    }

    /// True if the client of the current task may call the method.
    pub fn permits(&self, entry: &MethodEntry<Engine>) -> bool {
        let access = self.access.borrow();
        access.permits(access::role(), entry.name, entry.class)
    }

    /// Checks the client's role. Begins an audit record if the method's class is audited or the
    /// call may change something; refused calls have a record too.
    pub async fn begin(
        &self,
        client: &Client,
        entry: &MethodEntry<Engine>,
        params: Option<&RawValue>,
    ) -> (Option<Rc<AuditRecord>>, Result<(), RpcError>) {
        let checked = self.check(client, entry);
        if !entry.class.is_audited() && !entry.changes.in_call(params) {
            return (None, checked);
        }
        let record = Rc::new(AuditRecord::new(&client.caller, client.role, entry, params));
        let begun = match checked {
            Ok(()) => self.audit.begin(&record).await,
            refused => {
                record.forbid();
                refused
            }
        };
        (Some(record), begun)
    }

    /// Refuses a client whose role does not allow the method.
    fn check(&self, client: &Client, entry: &MethodEntry<Engine>) -> Result<(), RpcError> {
        let access = self.access.borrow();
        let (name, class) = (entry.name, entry.class);
        if access.permits(client.role, name, class) {
            return Ok(());
        }
        Err(access.refusal(&client.caller, client.role, name, class))
    }
}

/// Time limit for the name service. Names are looked up at the start and at a reload, never when a
/// client connects.
const NAMES_LIMIT: Duration = Duration::from_secs(5);

/// The rules with names looked up. Names without an answer in time have no role.
fn resolve(rules: &settings::Rpc) -> Access {
    let own_uid = rustix::process::geteuid().as_raw();
    let numbers = of_daemon(rules, own_uid, |texts| {
        Members::without_names(texts, NAMES_LIMIT)
    });
    if numbers.1.is_empty() {
        return numbers.0;
    }
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let of = rules.clone();
    let thread = std::thread::Builder::new().name("names".into());
    let spawned =
        thread.spawn(move || drop(sender.send(of_daemon(&of, own_uid, Members::resolve))));
    let looked_up = spawned.is_ok().then(|| receiver.recv_timeout(NAMES_LIMIT));
    known(looked_up.and_then(Result::ok).unwrap_or(numbers))
}

/// Looks up the names without a limit, on a thread of its own.
fn of_daemon_on_a_thread(
    rules: &settings::Rpc,
    own_uid: u32,
) -> std::io::Result<oneshot::Receiver<(Access, Vec<String>)>> {
    let (sender, receiver) = oneshot::channel();
    let rules = rules.clone();
    let thread = std::thread::Builder::new().name("names".into());
    thread.spawn(move || drop(sender.send(of_daemon(&rules, own_uid, Members::resolve))))?;
    Ok(receiver)
}

/// Logs the names that the machine does not know.
fn known((access, unknown): (Access, Vec<String>)) -> Access {
    for unknown in unknown {
        warn!("[rpc.access] entry ignored: {unknown}");
    }
    access
}

/// The rules of a daemon that runs as `own_uid`, and a text for each name that the machine does not
/// know.
fn of_daemon(
    rules: &settings::Rpc,
    own_uid: u32,
    resolve: impl Fn(&[String]) -> (Members, Vec<String>),
) -> (Access, Vec<String>) {
    let mut all_unknown = Vec::new();
    let mut members = |texts: &[String]| {
        let (members, unknown) = resolve(texts);
        all_unknown.extend(unknown);
        members
    };
    // The file was checked.
    let roles = rules.tls.roles.iter();
    let roles = roles.filter_map(|(text, role)| Some((text.parse().ok()?, *role)));
    let certificates = roles.collect();
    let rules = &rules.access;
    let access = Access {
        own_uid,
        admin: members(&rules.admin),
        operator: members(&rules.operator),
        viewer: members(&rules.viewer),
        certificates,
        operator_methods: rules.methods.operator.clone(),
        viewer_methods: rules.methods.viewer.clone(),
    };
    (access, all_unknown)
}

/// The socket that the doctor should find at `path`. May query the name service over the network.
pub fn expected_socket(rules: &settings::Rpc, path: &Path) -> doctor::Socket {
    let owner = std::fs::metadata(path).map(|metadata| metadata.uid());
    let own_uid = owner.unwrap_or_else(|_| rustix::process::geteuid().as_raw());
    let (access, unknown) = of_daemon(rules, own_uid, Members::resolve);
    let socket_access = access.socket_access();
    doctor::Socket {
        path: path.to_owned(),
        mode: socket_access.mode(),
        group: match socket_access {
            SocketAccess::Group(group) => Some(group),
            SocketAccess::Owner | SocketAccess::Everyone => None,
        },
        closed: folder::closed(path),
        unknown,
    }
}

/// Refuses a method that cannot be called in this phase of the daemon.
pub fn check_phase(phase: Phase, entry: &MethodEntry<Engine>) -> Result<(), RpcError> {
    match phase {
        Phase::Startup if !entry.callable(false) => {
            Err(RpcError::invalid_state(
                "Method may only be called after framework is initialized using framework_start_init RPC.",
            ))
        }
        Phase::Starting if !entry.callable(false) || !entry.callable(true) => {
            Err(RpcError::invalid_state("Method may only be called after framework is initialized using framework_start_init RPC.")
                .cause(STARTING)
                .remedy("wait with framework_wait_init"))
        }
        Phase::Runtime | Phase::Stopping if !entry.callable(true) => {
            Err(RpcError::invalid_state(
                "Method may only be called before framework is initialized. Use --wait-for-rpc command line parameter and then issue this RPC before the framework_start_init RPC.",
            ))
        }
        _ => Ok(()),
    }
}

/// Hides secrets' places in a reply or an error for a viewer. The paths of key files and of the
/// store key, and sealed keys, become names: `key web1` in place of `/etc/nacre/keys/web1`. The
/// URLs of webhooks, whose paths can be secrets, become their origins. Replaces values wherever
/// they occur, so saved configurations, stored objects, events and error texts are covered.
pub fn for_viewer(
    engine: &Engine,
    outcome: Result<Box<RawValue>, RpcError>,
) -> Result<Box<RawValue>, RpcError> {
    let listed = engine.keyring.list().into_iter();
    let listed = listed.filter_map(|listed| {
        let path = listed.key.path()?;
        Some((path, listed.key.name.clone()))
    });
    let declared = engine.settings.key.iter();
    let declared = declared.map(|key| (key.path.clone(), key.name.clone()));
    let stored = engine.journal.below(crate::services::keyring::PREFIX);
    let stored = stored.into_iter().filter_map(|entry| {
        let text = |key: &str| Some(entry.record.params.get(key)?.as_str()?.to_owned());
        // A sealed text, too: it is for the daemon's state only.
        Some((
            text("path").or_else(|| text("sealed"))?.into(),
            text("name")?,
        ))
    });
    // A receiver that was not restored is in the journal only.
    let receivers = engine.alerts.receivers().into_iter();
    let receivers = receivers.filter_map(|of| Some(of.receiver.url()?.to_owned()));
    let stored_urls = engine.journal.below(crate::services::alerts::PREFIX);
    let stored_urls = stored_urls.into_iter();
    let stored_urls =
        stored_urls.filter_map(|entry| Some(entry.record.params.get("url")?.as_str()?.to_owned()));
    let urls = receivers.chain(stored_urls).filter_map(|url| {
        let origin = Url::parse(&url).map_or_else(|_| "(URL)".to_owned(), |url| url.origin());
        // Without a path it is no secret, and other URLs begin with it.
        (url.trim_end_matches('/') != origin).then_some((url, origin))
    });
    let mut paths: Vec<(String, String)> = listed
        .chain(declared)
        .chain(stored)
        .map(|(path, name)| (path.display().to_string(), format!("(key {name})")))
        .chain(StoreKeys::of(engine).hidden_paths())
        .chain(urls)
        .filter(|(path, _)| path.len() > 1)
        .collect();
    // A path that begins with another one comes first.
    paths.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
    let hide = |text: &str| {
        let mut hidden = text.to_owned();
        for (path, name) in &paths {
            hidden = hidden.replace(path, name);
        }
        hidden
    };
    let in_json = |text: &str| {
        let mut hidden = text.to_owned();
        for (path, name) in &paths {
            let quoted = |text: &str| {
                let quoted = serde_json::to_string(text).expect("a text serialises");
                quoted[1..quoted.len() - 1].to_owned()
            };
            hidden = hidden.replace(&quoted(path), &quoted(name));
        }
        hidden
    };
    match outcome {
        Ok(answer) => RawValue::from_string(in_json(answer.get()))
            .map_err(|error| RpcError::internal(error.to_string())),
        Err(mut error) => {
            error.message = hide(&error.message);
            if let Some(facts) = &mut error.data {
                facts.cause = hide(&facts.cause);
                facts.remedy = facts.remedy.as_deref().map(hide);
            }
            Err(error)
        }
    }
}

/// True if [`for_viewer`] applies to the replies of this client.
pub fn is_viewer(client: &Client) -> bool {
    client.role < Class::Operate.role()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a certificate that has lost its role cannot act because the name service hangs.
    #[test]
    fn certificates_wait_for_no_name() {
        let mut rules = settings::Rpc::default();
        rules.access.admin = vec!["uid:7".into()];
        rules.tls.roles = [("CN=ops".to_owned(), Role::Admin)].into();
        let calls = Calls::new(&rules, AuditLog::default());
        assert_eq!(calls.access.borrow().certificates.len(), 1);
        let before = calls.access.borrow().admin.clone();
        let mut changed = rules.clone();
        changed.access.admin = vec!["bob".into()];
        changed.access.methods.viewer = vec!["spdk_get_version".into()];
        changed.tls.roles.clear();
        let error = calls.change_to(changed, None).unwrap_err();
        assert!(error.to_string().contains("certificates have the new ones"));
        let access = calls.access.borrow();
        assert!(access.certificates.is_empty());
        assert_eq!((&access.admin, access.viewer_methods.len()), (&before, 1));
        // The next reload tries again.
        assert!(calls.rules().tls.roles.len() == 1);
    }
}
