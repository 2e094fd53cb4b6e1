//! Methods of the daemon itself: the list of methods, version, start and shutdown, subsystems and
//! configuration.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::bdev::ANNOUNCED;
use super::spdk::sock::SET_SOCK_OPTIONS;
use crate::bdev_modules;
use crate::rpc::error::{Errno, causes};
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError, When};
use crate::services::Engine;
use crate::services::calls;
use crate::services::lifecycle::Phase;
use crate::services::startup::{POSIX, SockOptions};

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<GetMethods>()
        .add::<GetVersion>()
        .add::<KillInstance>()
        .add::<StartInit>()
        .add::<WaitInit>()
        .add::<GetFrameworkSubsystems>()
        .add::<GetConfig>();
}

/// The SPDK release whose RPC interface Nacre implements.
const SPDK_VERSION: &str = "SPDK v26.09-pre";

struct GetMethods;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetMethodsParams {
    /// Only methods that the caller's role and the daemon's present state allow.
    #[serde(default)]
    current: bool,
    /// List other names of methods, too; default false.
    #[serde(default)]
    include_aliases: bool,
}

impl Method<Engine> for GetMethods {
    const NAME: &'static str = "rpc_get_methods";
    const ABOUT: &'static str = "Lists the methods that can be called.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = GetMethodsParams;
    type Reply = Vec<&'static str>;

    async fn apply(
        params: GetMethodsParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<&'static str>, RpcError> {
        let mut names = Vec::new();
        for entry in engine.registry.iter() {
            let callable = || {
                let in_phase = calls::check_phase(engine.lifecycle.phase(), entry).is_ok();
                in_phase && engine.calls.permits(entry)
            };
            if !engine.allowed(entry.name) || (params.current && !callable()) {
                continue;
            }
            names.push(entry.name);
            names.extend(entry.aliases.iter().filter(|_| params.include_aliases));
        }
        Ok(names)
    }
}

pub struct GetVersion;

#[derive(Debug, Serialize, JsonSchema)]
pub struct Version {
    version: String,
    fields: VersionFields,
    /// Name and version of this program.
    nacre: &'static str,
}

#[derive(Debug, Serialize, JsonSchema)]
struct VersionFields {
    major: u32,
    minor: u32,
    patch: u32,
    suffix: &'static str,
}

impl Method<Engine> for GetVersion {
    const NAME: &'static str = "spdk_get_version";
    const ABOUT: &'static str = "Returns the version of SPDK whose dialect is spoken, and our own.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = Version;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<Version, RpcError> {
        Ok(Version {
            version: SPDK_VERSION.into(),
            fields: VersionFields {
                major: 26,
                minor: 9,
                patch: 0,
                suffix: "-pre",
            },
            nacre: env!("CARGO_PKG_VERSION"),
        })
    }
}

struct KillInstance;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct KillInstanceParams {
    /// The signal. SIGKILL ends the daemon as a crash does; SIGUSR1 has no effect.
    sig_name: Signal,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[allow(clippy::upper_case_acronyms)]
enum Signal {
    SIGINT,
    SIGTERM,
    SIGQUIT,
    SIGHUP,
    SIGKILL,
    SIGUSR1,
}

impl Method<Engine> for KillInstance {
    const NAME: &'static str = "spdk_kill_instance";
    const ABOUT: &'static str = "Sends the daemon a signal: SIGINT, SIGTERM and SIGQUIT stop it in good order; SIGHUP reopens the log file and reads the configuration again.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = KillInstanceParams;
    type Reply = bool;

    async fn apply(params: KillInstanceParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        use rustix::process::{Signal as Os, getpid, kill_process};
        let signal = match params.sig_name {
            // Stops directly; no signal needed.
            Signal::SIGINT | Signal::SIGTERM => {
                engine.lifecycle.stop();
                return Ok(true);
            }
            Signal::SIGQUIT => Os::QUIT,
            Signal::SIGHUP => Os::HUP,
            Signal::SIGKILL => Os::KILL,
            Signal::SIGUSR1 => Os::USR1,
        };
        kill_process(getpid(), signal).map_err(|e| RpcError::io("kill", &e.into()))?;
        Ok(true)
    }
}

struct StartInit;

impl Method<Engine> for StartInit {
    const NAME: &'static str = "framework_start_init";
    const ABOUT: &'static str = "Starts the data plane of a daemon started with --wait-for-rpc.";
    const CLASS: Class = Class::Admin;
    const WHEN: When = When::Startup;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = bool;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        crate::daemon::init(&engine).await.map_err(|error| {
            let why = format!("framework_initialization failed: {}", causes(&error));
            engine.lifecycle.fail(why.clone());
            RpcError::internal(why)
        })?;
        Ok(true)
    }
}

pub struct WaitInit;

impl Method<Engine> for WaitInit {
    const NAME: &'static str = "framework_wait_init";
    const ABOUT: &'static str = "Answers once the daemon is initialized and has carried out the file that it was started with.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = bool;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        // The RPC deadline ends the call anyway.
        let _ = tokio::time::timeout(engine.deadline(), engine.lifecycle.configured()).await;
        let late = |cause, remedy| Err(RpcError::errno(Errno::ETIMEDOUT, cause).remedy(remedy));
        match engine.lifecycle.phase() >= Phase::Runtime {
            true if engine.lifecycle.is_configured() => Ok(true),
            true => late(
                "the daemon still carries out the file that it was started with",
                "ask again",
            ),
            false => late(
                "the daemon is not initialized yet",
                "call framework_start_init, if no client has",
            ),
        }
    }
}

/// Subsystems with saved configuration and their dependencies, in load order.
const SUBSYSTEMS: [(&str, &[&str]); 6] = [
    ("keyring", &[]),
    ("sock", &[]),
    ("iobuf", &[]),
    ("bdev", &["iobuf", "keyring"]),
    ("nvmf", &["bdev", "keyring", "sock"]),
    ("alert", &["keyring"]),
];

struct GetFrameworkSubsystems;

#[derive(Debug, Serialize, JsonSchema)]
struct FrameworkSubsystem {
    subsystem: &'static str,
    depends_on: &'static [&'static str],
}

impl Method<Engine> for GetFrameworkSubsystems {
    const NAME: &'static str = "framework_get_subsystems";
    const ABOUT: &'static str =
        "Lists the subsystems whose configuration can be saved, with their dependencies.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Vec<FrameworkSubsystem>;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<Vec<FrameworkSubsystem>, RpcError> {
        Ok(SUBSYSTEMS
            .iter()
            .map(|(subsystem, depends_on)| FrameworkSubsystem {
                subsystem,
                depends_on,
            })
            .collect())
    }
}

struct GetConfig;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetConfigParams {
    /// The subsystem, as `framework_get_subsystems` names it.
    name: String,
    /// Accepted as in SPDK; batches are not needed.
    #[serde(default)]
    #[allow(dead_code)]
    with_batches: bool,
}

impl Method<Engine> for GetConfig {
    const NAME: &'static str = "framework_get_config";
    const ABOUT: &'static str = "Gives the calls that make a subsystem's configuration again.";
    const CLASS: Class = Class::Read;
    type Params = GetConfigParams;
    type Reply = Vec<Value>;

    async fn apply(params: GetConfigParams, engine: Rc<Engine>) -> Result<Vec<Value>, RpcError> {
        config_of(&engine, &params.name).ok_or_else(|| {
            let known: Vec<&str> = SUBSYSTEMS.iter().map(|(name, _)| *name).collect();
            RpcError::invalid_params_text(format!("Subsystem '{}' not found", params.name))
                .cause(format!("known: {}", known.join(", ")))
                .field("name")
        })
    }
}

/// The calls that restore the configuration of `subsystem`; `None` for an unknown subsystem.
pub fn config_of(engine: &Engine, subsystem: &str) -> Option<Vec<Value>> {
    let call = |method: &str, params: Value| json!({ "method": method, "params": params });
    let made = |prefix: &str| {
        let ours = engine.journal.below(prefix).into_iter();
        ours.map(|mut e| {
            // The size known to hosts is state, not configuration.
            if let Value::Object(params) = &mut e.record.params {
                params.remove(ANNOUNCED);
            }
            call(&e.record.method, e.record.params)
        })
        .collect::<Vec<_>>()
    };
    let options = engine.options.borrow();
    match subsystem {
        "sock" => {
            let set = options.sock != SockOptions::default();
            let params = json!({
                "impl_name": POSIX,
                "recv_buf_size": options.sock.recv_buf_size,
                "send_buf_size": options.sock.send_buf_size,
            });
            Some(
                set.then(|| call(SET_SOCK_OPTIONS, params))
                    .into_iter()
                    .collect(),
            )
        }
        "keyring" => Some(made(crate::services::keyring::PREFIX)),
        "iobuf" => Some(vec![call("iobuf_set_options", json!(options.iobuf))]),
        "bdev" => {
            let mut calls = vec![call("bdev_set_options", json!(options.bdev))];
            calls.extend(made("nvme/options"));
            calls.extend(made("nvme/ctrlr/"));
            calls.extend(made(crate::services::nvme::PATHS));
            calls.extend(made(crate::services::nvme::DISCOVERIES));
            calls.extend(made(crate::services::nvme::POLICIES));
            calls.extend(made("volume/raid_options"));
            // Devices stacked on volumes come after the volumes, all others before.
            let mut on_volumes = volume_names(engine);
            let (above, below): (Vec<Value>, Vec<Value>) =
                made("bdev/").into_iter().partition(|call| {
                    let method = call["method"].as_str().unwrap_or_default();
                    let base = bdev_modules::base(method, &call["params"]);
                    let stands = base.is_some_and(|base| on_volumes.iter().any(|on| on == base));
                    if stands {
                        on_volumes.extend(bdev_modules::names(method, &call["params"]));
                    }
                    stands
                });
            calls.extend(below);
            calls.extend(super::volume::config(engine));
            calls.extend(above);
            calls.extend(made("pool/"));
            calls.extend(made(crate::journal::DEFERRED));
            calls.extend(made("qos/"));
            calls.push(json!({ "method": "bdev_wait_for_examine" }));
            Some(calls)
        }
        "nvmf" => Some(super::nvmf::config(engine)),
        "alert" => Some(made(crate::services::alerts::PREFIX)),
        _ => None,
    }
}

fn volume_names(engine: &Engine) -> Vec<String> {
    let all = engine.volumes.list();
    let names = |v: &crate::services::volumes::Listed| {
        let bdev = v.bdev().map(str::to_owned);
        [v.name(), v.id().to_string()].into_iter().chain(bdev)
    };
    all.iter().flat_map(names).collect()
}

/// The whole configuration in SPDK's file format.
pub fn whole_config(engine: &Engine) -> Value {
    let part = |(name, _): &(&str, &[&str])| json!({ "subsystem": name, "config": config_of(engine, name) });
    json!({ "subsystems": SUBSYSTEMS.iter().map(part).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{TestDaemon, test_daemon};
    use serde_json::json;

    #[test]
    fn methods_are_limited_to_their_phase() {
        let daemon = TestDaemon::waiting();
        let early = daemon.refused("framework_get_subsystems", json!(null));
        assert_eq!(
            (early.code, early.message.as_str()),
            (
                -1,
                "Method may only be called after framework is initialized using framework_start_init RPC."
            )
        );
        let current = daemon.call("rpc_get_methods", json!({ "current": true }));
        assert!(
            current
                .as_array()
                .unwrap()
                .contains(&json!("framework_start_init"))
        );
        assert!(
            !current
                .as_array()
                .unwrap()
                .contains(&json!("framework_get_config"))
        );
        assert_eq!(daemon.call("framework_start_init", json!(null)), true);
        let late = daemon.refused("framework_start_init", json!(null));
        assert_eq!(late.code, -1);
        assert!(late.message.starts_with(
            "Method may only be called before framework is initialized. Use --wait-for-rpc"
        ));
        assert_eq!(daemon.call("framework_wait_init", json!(null)), true);
    }

    /// Goal: a second simultaneous start is refused, and so are startup options after the start.
    #[test]
    fn the_data_plane_starts_once() {
        let daemon = TestDaemon::waiting();
        let params = serde_json::value::to_raw_value(&json!({ "small_pool_count": 128 })).unwrap();
        let engine = &daemon.engine;
        let (first, second, late) = daemon.run(async {
            tokio::join!(
                engine.call("framework_start_init", None),
                engine.call("framework_start_init", None),
                engine.call("iobuf_set_options", Some(&params)),
            )
        });
        assert_eq!(first.unwrap().get(), "true");
        for late in [second, late] {
            assert_eq!(late.unwrap_err().code, -1);
        }
        assert_ne!(engine.options.borrow().iobuf.small_pool_count, 128);
        assert_eq!(daemon.call("framework_wait_init", json!(null)), true);
    }

    #[test]
    fn unknown_methods_and_subsystems() {
        let daemon = test_daemon();
        let error = daemon.refused("framework_get_confg", json!(null));
        assert_eq!(
            (error.code, error.message.as_str()),
            (-32601, "Method not found")
        );
        assert_eq!(
            error.data.unwrap().remedy.unwrap(),
            "did you mean \"framework_get_config\"?"
        );
        let error = daemon.refused("framework_get_config", json!({ "name": "x" }));
        assert_eq!(
            (error.code, error.message.as_str()),
            (-32602, "Subsystem 'x' not found")
        );
        let error = daemon.refused("framework_get_config", json!({}));
        assert_eq!(error.data.unwrap().field.as_deref(), Some("name"));
    }

    #[test]
    fn versions_and_subsystems_are_listed_as_in_spdk() {
        let daemon = test_daemon();
        assert_eq!(
            daemon.call("spdk_get_version", json!(null)),
            json!({
                "version": "SPDK v26.09-pre",
                "fields": { "major": 26, "minor": 9, "patch": 0, "suffix": "-pre" },
                "nacre": env!("CARGO_PKG_VERSION"),
            })
        );
        assert_eq!(
            daemon.call("framework_get_subsystems", json!(null)),
            json!([
                { "subsystem": "keyring", "depends_on": [] },
                { "subsystem": "sock", "depends_on": [] },
                { "subsystem": "iobuf", "depends_on": [] },
                { "subsystem": "bdev", "depends_on": ["iobuf", "keyring"] },
                { "subsystem": "nvmf", "depends_on": ["bdev", "keyring", "sock"] },
                { "subsystem": "alert", "depends_on": ["keyring"] },
            ])
        );
    }
}
