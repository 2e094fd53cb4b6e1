//! Objects that the configuration file declares (`[[key]]`, `[[remote]]`, `[[bdev]]`,
//! `[[nvmf.subsystem]]`). Ordinary RPC calls create them, and they are not stored.
//! [`super::listeners`] handles their listeners.
//!
//! An object of the same name in the store has priority, because a call created or changed it.
//! Changes by calls to a declared subsystem or namespace are records of their own, which are
//! replayed after the object. A failure to create an object is reported, does not stop the others,
//! and is retried.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use nacre_nvmf::address::IpTransport;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tracing::{info, warn};

use crate::bdev_modules;
use crate::config::Settings;
use crate::config::declared::{params_of, uuid_of};
use crate::config::settings::{Bdev, BdevKind, DEFAULT_BLOCK, Key, RemoteTarget, Subsystem};
use crate::journal::JournalEntry;
use crate::rpc::RpcError;
use crate::services::Engine;
use crate::services::nvme::{self, ATTACH};

const ADD_KEY: &str = "keyring_file_add_key";

/// One call that creates a part of a declaration.
#[derive(Debug, Clone, PartialEq)]
pub struct DeclaredCall {
    /// The declaration, for messages: `[[bdev]] "disk0"`.
    pub what: String,
    pub method: &'static str,
    pub params: Value,
}

impl DeclaredCall {
    fn makes_bdev(&self, name: &str) -> bool {
        let names = bdev_modules::names(self.method, &self.params);
        names.iter().any(|made| made == name)
    }
}

#[derive(Debug)]
struct Planned {
    call: DeclaredCall,
    made: bool,
    refused: Option<RpcError>,
}

/// The planned calls, and which of them have succeeded.
#[derive(Debug, Default)]
pub struct Declared {
    calls: RefCell<Vec<Planned>>,
    /// True from the planning of the calls until each was tried, and the listeners too.
    coming: Cell<bool>,
    /// Held while objects are created: no two tasks create the same one.
    making: Mutex<()>,
}

/// The differences of a new configuration.
#[derive(Debug, Default, PartialEq)]
pub struct ConfigChanges {
    /// Planned calls that were added or changed, and can be made now.
    pub added: Vec<String>,
    /// Changes that take effect at the next start.
    pub later: Vec<String>,
}

impl Declared {
    /// Plans the calls.
    pub fn plan(&self, settings: &Settings) {
        let calls = calls(settings);
        let anything = !calls.is_empty() || !settings.listeners().is_empty();
        self.coming.set(anything);
        let planned = calls.into_iter().map(|call| Planned {
            call,
            made: false,
            refused: None,
        });
        *self.calls.borrow_mut() = planned.collect();
    }

    /// True while an object that fails now may depend on a declared object that was not tried yet.
    pub fn is_coming(&self) -> bool {
        self.coming.get()
    }

    /// Marks all declarations as tried, including listeners. Returns true at the first call after
    /// [`Declared::plan`], if there was any declaration.
    /// pending.
    pub fn has_come(&self) -> bool {
        self.coming.replace(false)
    }

    /// Creates missing objects, in order. Returns whether any was created.
    pub async fn make(&self, engine: &Rc<Engine>) -> bool {
        self.make_where(engine, |_| true).await
    }

    /// Creates missing keys: controllers that name them can then connect at the same time.
    pub async fn make_keys(&self, engine: &Rc<Engine>) {
        self.make_where(engine, |call| call.method == ADD_KEY).await;
    }

    async fn make_where(
        &self,
        engine: &Rc<Engine>,
        wanted: impl Fn(&DeclaredCall) -> bool,
    ) -> bool {
        let _one = self.making.lock().await;
        let mut any = false;
        let waiting: Vec<(usize, DeclaredCall)> = {
            let calls = self.calls.borrow();
            calls
                .iter()
                .enumerate()
                .filter(|(_, p)| !p.made && wanted(&p.call))
                .map(|(at, p)| (at, p.call.clone()))
                .collect()
        };
        for (at, call) in waiting {
            let outcome = if stored_already(engine, &call) {
                info!("{}: the configuration by RPC stands", call.what);
                Ok(())
            } else {
                engine
                    .declared_call(call.method, &call.params)
                    .await
                    .map(drop)
            };
            let mut calls = self.calls.borrow_mut();
            let planned = &mut calls[at];
            match outcome {
                Ok(()) => {
                    if planned.refused.take().is_some() {
                        info!("{}: made at last", call.what);
                    }
                    planned.made = true;
                    any = true;
                }
                Err(error) => {
                    if planned.refused.is_none() {
                        warn!(%error, "{}: not made; it is tried again", call.what);
                    }
                    planned.refused = Some(error);
                }
            }
        }
        any
    }

    /// Plans the additions of a new configuration, and changes to objects that were not created
    /// yet.
    pub async fn amend(&self, settings: &Settings) -> ConfigChanges {
        let _one = self.making.lock().await;
        let (mut amended, new) = (ConfigChanges::default(), calls(settings));
        let mut planned = self.calls.borrow_mut();
        let subsystem = |call: &DeclaredCall| call.params.get("nqn").cloned();
        let known: Vec<Value> = planned.iter().filter_map(|p| subsystem(&p.call)).collect();
        rename_paths(&mut planned, &new);
        planned.retain(|p| {
            let stays = new.iter().any(|call| call.what == p.call.what);
            if !stays && p.made {
                amended.later.push(format!("{}: removed", p.call.what));
            }
            stays || p.made
        });
        // The first path of a remote target has no address in its name. If the file changes the
        // first address of an attached target, all of its paths change at the next start.
        let is_changed = |p: &&Planned| {
            let same = new.iter().find(|call| call.what == p.call.what);
            p.made && p.call.method == ATTACH && same.is_some_and(|call| *call != p.call)
        };
        let changed = planned.iter().filter(is_changed);
        let changed: Vec<Value> = changed.map(|p| p.call.params["name"].clone()).collect();
        let is_later =
            |call: &DeclaredCall| call.method == ATTACH && changed.contains(&call.params["name"]);
        for call in new {
            let what = call.what.clone();
            match planned.iter_mut().find(|p| p.call.what == what) {
                Some(p) if p.call == call => {}
                Some(p) if p.made || is_later(&call) => {
                    amended.later.push(format!("{what}: changed"))
                }
                Some(p) => {
                    (p.call, p.refused) = (call, None);
                    amended.added.push(what);
                }
                // A subsystem needs listeners, which this module does not handle.
                None if call.method == "nvmf_create_subsystem"
                    || call.method == "nvmf_create_transport"
                    || is_later(&call) =>
                {
                    amended.later.push(what);
                }
                None if subsystem(&call).is_some_and(|nqn| !known.contains(&nqn)) => {}
                None => {
                    amended.added.push(what);
                    planned.push(Planned {
                        call,
                        made: false,
                        refused: None,
                    });
                }
            }
        }
        amended
    }

    /// The parameters of all planned calls of a method.
    pub fn calls_of(&self, method: &str) -> Vec<Value> {
        let calls = self.calls.borrow();
        let all = calls.iter().filter(|p| p.call.method == method);
        all.map(|p| p.call.params.clone()).collect()
    }

    /// The parameters of a declared device that does not exist yet.
    pub fn missing_bdev(&self, name: &str) -> Option<Value> {
        let calls = self.calls.borrow();
        let mut missing = calls.iter().filter(|p| !p.made && p.call.makes_bdev(name));
        missing.next().map(|p| p.call.params.clone())
    }

    /// Why the declared device `name` could not be created.
    pub fn refusal_of_bdev(&self, name: &str) -> Option<RpcError> {
        let calls = self.calls.borrow();
        let mut all = calls.iter().filter(|p| p.call.makes_bdev(name));
        all.next()?.refused.clone()
    }

    /// Objects that could not be created, with the error.
    pub fn missing(&self) -> Vec<(DeclaredCall, RpcError)> {
        let calls = self.calls.borrow();
        calls
            .iter()
            .filter_map(|p| Some((p.call.clone(), p.refused.clone()?)))
            .collect()
    }
}

/// Gives the attached paths of a remote target the names that they have in `new`, if the path that
/// is now the first one is not attached under that name: the file may name an attached address
/// first.
fn rename_paths(planned: &mut Vec<Planned>, new: &[DeclaredCall]) {
    let is_path = |call: &DeclaredCall| call.method == ATTACH;
    let firsts = new.iter().enumerate().filter(|(at, call)| {
        let is_same = |before: &DeclaredCall| before.params["name"] == call.params["name"];
        is_path(call) && !new[..*at].iter().any(|one| is_path(one) && is_same(one))
    });
    for (_, first) in firsts {
        let target = &first.params["name"];
        let is_of = |p: &Planned| is_path(&p.call) && p.call.params["name"] == *target;
        let had_first = planned
            .iter()
            .any(|p| is_of(p) && p.made && p.call.what == first.what);
        if had_first {
            continue;
        }
        let mut is_renamed = false;
        for p in planned.iter_mut().filter(|p| is_of(p) && p.made) {
            if let Some(same) = new.iter().find(|call| call.params == p.call.params) {
                is_renamed |= p.call.what != same.what;
                p.call = same.clone();
            }
        }
        if is_renamed {
            // Planned again with the names of the file.
            planned.retain(|p| p.made || !is_of(p));
        }
    }
}

/// True if the store, or RPC, has the object that the call would create.
fn stored_already(engine: &Engine, call: &DeclaredCall) -> bool {
    let same = |field: &str, params: &Value| {
        params.get(field).is_some() && params.get(field) == call.params.get(field)
    };
    engine.journal.any(|e| match call.method {
        "nvmf_create_transport" => {
            e.record.method == call.method && same("trtype", &e.record.params)
        }
        _ if !e.durable => false,
        ADD_KEY => e.record.method == call.method && same("name", &e.record.params),
        ATTACH => {
            let name = call.params.get("name").and_then(Value::as_str);
            name.is_some_and(|name| e.record.key == nvme::key(name))
        }
        method if bdev_modules::by_create(method).is_some() => {
            let (made, here) = (
                bdev_modules::names(&e.record.method, &e.record.params),
                bdev_modules::names(method, &call.params),
            );
            e.record.key.starts_with("bdev/") && made.iter().any(|name| here.contains(name))
        }
        // RPC owns all parts of a subsystem that was created by RPC.
        _ => e.record.method == "nvmf_create_subsystem" && same("nqn", &e.record.params),
    })
}

/// NQNs of the subsystems that RPC created. Their parts are changed by RPC only.
pub fn subsystems_of_rpc(engine: &Engine) -> BTreeSet<String> {
    let of_rpc = |e: &JournalEntry| e.durable && e.record.method == "nvmf_create_subsystem";
    let made = engine.journal.select(of_rpc);
    made.iter()
        .filter_map(|e| Some(e.record.params.get("nqn")?.as_str()?.to_owned()))
        .collect()
}

/// The calls that create all declared objects, in an order that satisfies their dependencies.
pub fn calls(settings: &Settings) -> Vec<DeclaredCall> {
    let mut calls: Vec<DeclaredCall> = settings.key.iter().map(key).collect();
    calls.extend(settings.remote.iter().flat_map(remote));
    calls.extend(settings.bdev.iter().map(bdev));
    let nvmf = &settings.nvmf;
    if nvmf.listeners().iter().any(|l| l.uses(IpTransport::Tcp)) {
        calls.push(DeclaredCall {
            what: "[[nvmf.listener]]: the TCP transport".into(),
            method: "nvmf_create_transport",
            params: json!({ "trtype": "TCP" }),
        });
    }
    for declared in &nvmf.subsystem {
        subsystem(declared, &mut calls);
    }
    calls
}

fn key(declared: &Key) -> DeclaredCall {
    DeclaredCall {
        what: format!("[[key]] \"{}\"", declared.name),
        method: ADD_KEY,
        params: match &declared.expires {
            None => json!({ "name": declared.name, "path": declared.path }),
            Some(at) => json!({ "name": declared.name, "path": declared.path, "expires": at }),
        },
    }
}

/// A call for each path. Empty if an address is invalid, which the check of the configuration has
/// reported.
fn remote(declared: &RemoteTarget) -> Vec<DeclaredCall> {
    let paths = declared.attach_params().unwrap_or_default();
    let call = |(at, params): (usize, Value)| {
        let name = params["name"].as_str().unwrap_or_default();
        let path = match at {
            0 => String::new(),
            _ => format!(", path {}", declared.address.0[at]),
        };
        DeclaredCall {
            what: format!("[[remote]] \"{name}\"{path}"),
            method: ATTACH,
            params,
        }
    };
    paths.into_iter().enumerate().map(call).collect()
}

fn bdev(declared: &Bdev) -> DeclaredCall {
    let (method, params) = match declared.kind.module() {
        Some(module) => (module.create, params_of(declared)),
        None => own_params(declared),
    };
    let names = bdev_modules::names(method, &params);
    let name = names.first().unwrap_or(&declared.name);
    DeclaredCall {
        what: format!("[[bdev]] \"{name}\""),
        method,
        params,
    }
}

/// The create method and its parameters for a type with keys of its own.
fn own_params(declared: &Bdev) -> (&'static str, Value) {
    let uuid = uuid_of(declared);
    if declared.kind == BdevKind::FILE {
        let mut params = json!({
            "name": declared.name,
            "filename": declared.path,
            "readonly": declared.read_only,
            "uuid": uuid,
        });
        if let Some(block_size) = declared.block_size {
            params["block_size"] = block_size.into();
        }
        if let Some(size) = declared.size {
            params["size"] = size.0.into();
        }
        return (bdev_modules::FILE.create, params);
    }
    let block_size = declared.block_size.unwrap_or(DEFAULT_BLOCK);
    let blocks = declared
        .size
        .map_or(0, |size| size.0 / u64::from(block_size.max(1)));
    let method = if declared.kind == BdevKind::MALLOC {
        bdev_modules::MALLOC.create
    } else {
        bdev_modules::NULL.create
    };
    (
        method,
        json!({ "name": declared.name, "num_blocks": blocks, "block_size": block_size, "uuid": uuid }),
    )
}

fn subsystem(declared: &Subsystem, calls: &mut Vec<DeclaredCall>) {
    let nqn = &declared.nqn;
    let mut call = |what: String, method, params| {
        calls.push(DeclaredCall {
            what: format!("[[nvmf.subsystem]] {nqn}{what}"),
            method,
            params,
        });
    };
    let mut create = json!(declared.options);
    create["nqn"] = nqn.as_str().into();
    call(String::new(), "nvmf_create_subsystem", create);
    for host in &declared.hosts {
        call(
            format!(", host {host}"),
            "nvmf_subsystem_add_host",
            json!({ "nqn": nqn, "host": host }),
        );
    }
    for host in &declared.host {
        let mut params = json!(host.keys);
        params["nqn"] = nqn.as_str().into();
        params["host"] = host.nqn.as_str().into();
        call(
            format!(", host {}", host.nqn),
            "nvmf_subsystem_add_host",
            params,
        );
    }
    for namespace in &declared.namespace {
        let mut params = json!({ "bdev_name": namespace.bdev });
        if namespace.nsid != 0 {
            params["nsid"] = namespace.nsid.into();
        }
        if let Some(uuid) = namespace.uuid {
            params["uuid"] = uuid.to_string().into();
        }
        let params = json!({ "nqn": nqn, "namespace": params });
        call(
            format!(", namespace on \"{}\"", namespace.bdev),
            "nvmf_subsystem_add_ns",
            params,
        );
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a declaration becomes its calls, or an error that names the alternatives.

    use super::*;
    use crate::config::load_text;
    use crate::methods::testing::TestDaemon;

    fn settings(text: &str) -> Settings {
        load_text(Some(("nacre.toml", text)), [], &[])
            .unwrap()
            .settings
    }

    const WHOLE: &str = r#"
        [[bdev]]
        name = "disk0"
        path = "/srv/disk0"
        size = "1GiB"
        [[bdev]]
        name = "ram"
        type = "malloc"
        size = "8MiB"
        block_size = 4096
        [[nvmf.listener]]
        name = "data"
        iface = ["name:eth0"]
        [[nvmf.listener]]
        name = "local"
        port = 4421
        [[nvmf.subsystem]]
        nqn = "nqn.2026-01.org.example:a"
        hosts = ["nqn.2026-01.org.example:host"]
        listeners = ["data"]
        namespace = [{ bdev = "disk0", nsid = 3 }, { bdev = "ram" }]
    "#;

    #[test]
    fn declarations_become_calls() {
        insta::assert_json_snapshot!(
            calls(&settings(WHOLE))
                .into_iter()
                .map(|c| json!([c.what, c.method, c.params]))
                .collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_new_configuration_is_compared() {
        let declared = Declared::default();
        declared.plan(&settings(WHOLE));
        let amend = |text: &str| {
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            runtime.unwrap().block_on(declared.amend(&settings(text)))
        };
        assert_eq!(amend(WHOLE), ConfigChanges::default());
        // Nothing exists yet: a changed call replaces the old one.
        let changed = WHOLE.replace("8MiB", "16MiB");
        assert_eq!(amend(&changed).added, ["[[bdev]] \"ram\""]);
        for planned in declared.calls.borrow_mut().iter_mut() {
            planned.made = true;
        }
        let more = "\n[[nvmf.subsystem]]\nnqn = \"nqn.2026-01.org.example:b\"\nhosts = [\"nqn.2026-01.org.example:h\"]\n\
            [[bdev]]\nname = \"new\"\ntype = \"null\"\nsize = \"1MiB\"\n";
        let text = WHOLE
            .replace(
                "org.example:host\"]",
                "org.example:host\", \"nqn.2026-01.org.example:c\"]",
            )
            .replace(", { bdev = \"ram\" }", "");
        let amended = amend(&format!("{text}{more}"));
        assert_eq!(
            amended.added,
            [
                "[[bdev]] \"new\"",
                "[[nvmf.subsystem]] nqn.2026-01.org.example:a, host nqn.2026-01.org.example:c"
            ]
        );
        assert_eq!(
            amended.later,
            [
                "[[nvmf.subsystem]] nqn.2026-01.org.example:a, namespace on \"ram\": removed",
                "[[bdev]] \"ram\": changed",
                "[[nvmf.subsystem]] nqn.2026-01.org.example:b"
            ]
        );
    }

    /// Goal: the paths of a remote target whose first address changes are not attached one by one.
    #[test]
    fn paths_in_another_order_come_later() {
        let text = |addresses: &str, key: &str| {
            let text = format!("[[remote]]\nname = \"far\"\naddress = [{addresses}]\n{key}");
            settings(&text)
        };
        let path = |host: &str| format!("\"tcp://192.0.2.{host}/nqn.2026-01.org.example:a\"");
        let [one, two, three] = ["1", "2", "3"].map(path);
        let amend = |made: &[bool], next: Settings| {
            let declared = Declared::default();
            declared.plan(&text(&format!("{one}, {two}"), ""));
            for (planned, made) in declared.calls.borrow_mut().iter_mut().zip(made) {
                planned.made = *made;
            }
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            runtime.unwrap().block_on(declared.amend(&next))
        };
        let at = |host: &str| {
            format!("[[remote]] \"far\", path tcp://192.0.2.{host}/nqn.2026-01.org.example:a")
        };
        let swapped = amend(&[true, true], text(&format!("{two}, {one}"), ""));
        assert_eq!(swapped.added, Vec::<String>::new());
        let first = "[[remote]] \"far\": changed".to_owned();
        let removed = format!("{}: removed", at("2"));
        assert_eq!(swapped.later, [removed, first.clone(), at("1")]);
        let keyed = text(&format!("{one}, {two}"), "dhchap_key = \"k\"\n");
        let keyed = amend(&[true, false], keyed);
        assert_eq!(keyed.added, Vec::<String>::new());
        assert_eq!(keyed.later, [first, format!("{}: changed", at("2"))]);
        // The first path is not attached: its address can change places with an attached one.
        let swapped = amend(&[false, true], text(&format!("{two}, {one}"), ""));
        assert_eq!((swapped.added, swapped.later), (vec![at("1")], Vec::new()));
        let more = amend(&[true, true], text(&format!("{one}, {two}, {three}"), ""));
        assert_eq!((more.added, more.later), (vec![at("3")], Vec::new()));
    }

    #[test]
    fn declared_devices_are_made_not_stored_and_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let text = format!(
            "[[bdev]]\nname = \"ram\"\ntype = \"malloc\"\nsize = \"1MiB\"\n[[bdev]]\nname = \"disk\"\npath = {path:?}\n"
        );
        let state = dir.path().join("state");
        let open = || Some(crate::store::Store::open(&state).unwrap());
        let uuid = {
            let daemon = TestDaemon::with(settings(&text), open());
            let made = daemon.call("bdev_get_bdevs", json!({ "name": "ram" }));
            assert_eq!(made[0]["num_blocks"], 2048);
            let objects = daemon.call("state_get", json!(null))["objects"].clone();
            assert_eq!(
                (&objects[0]["kept_in"], &objects[0]["state"]),
                (&json!("config"), &json!("live")),
                "{objects}"
            );
            assert_eq!(
                (&objects[1]["key"], &objects[1]["state"]),
                (&json!("[[bdev]] \"disk\""), &json!("failed")),
                "{objects}"
            );
            std::fs::write(&path, vec![0; 1 << 20]).unwrap();
            daemon.run(daemon.engine.declared.make(&daemon.engine));
            daemon.call("bdev_get_bdevs", json!({ "name": "disk" }));
            made[0]["uuid"].clone()
        };
        let daemon = TestDaemon::with(Settings::default(), open());
        assert_eq!(
            daemon.call("state_get", json!(null))["objects"],
            json!([]),
            "nothing of it was stored"
        );
        drop(daemon);
        let daemon = TestDaemon::with(settings(&text), open());
        assert_eq!(
            daemon.call("bdev_get_bdevs", json!({ "name": "ram" }))[0]["uuid"],
            uuid,
            "the same identity again"
        );
    }
}
