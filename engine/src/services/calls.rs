//! Calls of clients: who may make them, in which phase, and how many were made.

use std::cell::{Cell, RefCell};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;

use serde_json::value::RawValue;
use tokio::sync::watch;
use tracing::warn;

use super::engine::Engine;
use super::lifecycle::Phase;
use crate::audit::{AuditLog, AuditRecord};
use crate::config::settings;
use crate::doctor;
use crate::rpc::access::{self, Access, Caller, Entrance, Members};
use crate::rpc::error::STARTING;
use crate::rpc::folder;
use crate::rpc::method::MethodEntry;
use crate::rpc::{Class, Role, RpcError};

/// The rules for clients, and the number of their calls.
pub struct Calls {
    counts: Cell<CallCounts>,
    rules: RefCell<settings::Access>,
    access: RefCell<Access>,
    entrance: watch::Sender<Entrance>,
    pub audit: AuditLog,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// Answered calls, refused ones included.
    pub answered: u64,
    /// Calls answered with an error.
    pub refused: u64,
}

/// The client of one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    pub caller: Rc<Caller>,
    pub role: Role,
}

impl Calls {
    /// Resolves the names of users and groups, which may ask the network.
    pub fn new(rules: &settings::Access, audit: AuditLog) -> Calls {
        let access = resolve(rules);
        Calls {
            counts: Cell::default(),
            entrance: watch::channel(access.entrance()).0,
            rules: RefCell::new(rules.clone()),
            access: RefCell::new(access),
            audit,
        }
    }

    /// Applies other rules; they count for connected clients, too.
    pub async fn change_rules(&self, rules: settings::Access) -> anyhow::Result<()> {
        // The name service may not respond.
        let of = rules.clone();
        let access = tokio::task::spawn_blocking(move || resolve(&of)).await?;
        self.rules.replace(rules);
        self.entrance.send_replace(access.entrance());
        self.access.replace(access);
        Ok(())
    }

    /// The rules in effect, as written.
    pub fn rules(&self) -> settings::Access {
        self.rules.borrow().clone()
    }

    /// Who must be able to open the socket, now and after each change.
    pub fn entrance(&self) -> watch::Receiver<Entrance> {
        self.entrance.subscribe()
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

    /// The client with its role. Refuses one without.
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
        self.access.borrow().role(&caller.credentials)
    }

    /// True if the client of the current task may call the method.
    pub fn permits(&self, entry: &MethodEntry<Engine>) -> bool {
        let access = self.access.borrow();
        access.permits(access::role(), entry.name, entry.class)
    }

    /// Checks the client's role, and begins the record of a call that may change something. A
    /// refused call has a record, too.
    pub async fn begin(
        &self,
        client: &Client,
        entry: &MethodEntry<Engine>,
        params: Option<&RawValue>,
    ) -> (Option<Rc<AuditRecord>>, Result<(), RpcError>) {
        let checked = self.check(client, entry);
        if !entry.class.changes() {
            return (None, checked);
        }
        let record = Rc::new(AuditRecord::new(&client.caller, client.role, entry, params));
        let begun = match checked {
            Ok(()) => self.audit.begin(&record).await,
            refused => refused,
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

fn resolve(rules: &settings::Access) -> Access {
    let (access, unknown) = of_daemon(rules, rustix::process::geteuid().as_raw());
    for unknown in unknown {
        warn!("[rpc.access] entry ignored: {unknown}");
    }
    access
}

/// The rules of a daemon of this user, and a text for each name that the machine does not know.
fn of_daemon(rules: &settings::Access, own_uid: u32) -> (Access, Vec<String>) {
    let mut all_unknown = Vec::new();
    let mut members = |texts: &[String]| {
        let (members, unknown) = Members::resolve(texts);
        all_unknown.extend(unknown);
        members
    };
    let access = Access {
        own_uid,
        admin: members(&rules.admin),
        operator: members(&rules.operator),
        viewer: members(&rules.viewer),
        operator_methods: rules.methods.operator.clone(),
        viewer_methods: rules.methods.viewer.clone(),
    };
    (access, all_unknown)
}

/// The socket that the doctor should find at this path. May ask the network.
pub fn expected_socket(rules: &settings::Access, path: &Path) -> doctor::Socket {
    let owner = std::fs::metadata(path).map(|metadata| metadata.uid());
    let own_uid = owner.unwrap_or_else(|_| rustix::process::geteuid().as_raw());
    let (access, unknown) = of_daemon(rules, own_uid);
    let entrance = access.entrance();
    doctor::Socket {
        path: path.to_owned(),
        mode: entrance.mode(),
        group: match entrance {
            Entrance::Group(group) => Some(group),
            Entrance::Owner | Entrance::Everyone => None,
        },
        closed: folder::closed(path),
        unknown,
    }
}

/// Checks whether a client may call the method in this phase of the daemon.
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

/// Replaces the paths of key files in an answer or refusal for a viewer: key `web1` in place of
/// `/etc/nacre/keys/web1`. By value and not by field, so that it covers saved configurations,
/// stored objects, events and the causes of errors.
pub fn without_key_paths(
    engine: &Engine,
    outcome: Result<Box<RawValue>, RpcError>,
) -> Result<Box<RawValue>, RpcError> {
    let listed = engine.keyring.list().into_iter();
    let listed = listed.map(|listed| (listed.key.path.clone(), listed.key.name.clone()));
    let declared = engine.settings.key.iter();
    let declared = declared.map(|key| (key.path.clone(), key.name.clone()));
    let stored = engine.journal.below(crate::services::keyring::PREFIX);
    let stored = stored.into_iter().filter_map(|entry| {
        let text = |key: &str| Some(entry.record.params.get(key)?.as_str()?.to_owned());
        Some((text("path")?.into(), text("name")?))
    });
    let mut paths: Vec<(String, String)> = listed
        .chain(declared)
        .chain(stored)
        .map(|(path, name)| (path.display().to_string(), format!("(key {name})")))
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

/// True if answers of this call hide the paths of key files.
pub fn hides_key_paths(client: &Client) -> bool {
    client.role < Class::Operate.role()
}
