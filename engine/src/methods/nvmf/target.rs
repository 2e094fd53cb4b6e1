//! The target as a whole: `nvmf_*_target*`, its start-up options, and its part of the saved
//! configuration.

use std::rc::Rc;

use nacre_nvmf::auth::{Offer, UnknownName};
use nacre_nvmf::subsystems::TargetConfig;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{TARGET, refusal};
use crate::config::Personality;
use crate::rpc::error::Errno;
use crate::rpc::{Changes, Class, Method, NoParams, Order, Registry, RpcError, When};
use crate::services::Engine;
use crate::services::startup::DiscoveryFilter;
use crate::services::stored_reservation::RESTORE;
use crate::services::volumes::published;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<GetTargets>()
        .add::<CreateTarget>()
        .add::<DeleteTarget>()
        .add::<SetMaxSubsystems>()
        .add::<SetCrdt>()
        .add::<SetConfig>();
}

/// The calls that restore the target's configuration.
pub fn config(engine: &Engine) -> Vec<Value> {
    let call = |method: &str, params: Value| json!({ "method": method, "params": params });
    let options = &engine.options.borrow().nvmf;
    let mut offer = crate::daemon::offer(engine, options);
    // SPDK lists them by strength, and chooses the strongest.
    if engine.personality == Personality::NvmfTgt {
        offer.hashes.reverse();
        offer.groups.reverse();
    }
    let delays = options
        .command_retry_delay
        .unwrap_or_else(|| TargetConfig::default().command_retry_delay);
    let passthru: serde_json::Map<String, Value> = PASSTHRU
        .iter()
        .map(|name| ((*name).to_owned(), false.into()))
        .collect();
    let mut calls = vec![
        call(
            SetConfig::NAME,
            json!({
                "discovery_filters": options.discovery_filters,
                "admin_cmd_passthru": passthru,
                "dhchap_digests": offer.hashes.iter().map(|hash| hash.name()).collect::<Vec<_>>(),
                "dhchap_dhgroups": offer.groups.iter().map(|group| group.name()).collect::<Vec<_>>(),
                "dup_host_policy": "allow",
            }),
        ),
        call(
            SetMaxSubsystems::NAME,
            json!({ "max_subsystems": options.max_subsystems.unwrap_or(engine.settings.nvmf.max_subsystems) }),
        ),
        call(
            SetCrdt::NAME,
            json!({ "crdt1": delays[0], "crdt2": delays[1], "crdt3": delays[2] }),
        ),
    ];
    let entries = engine
        .journal
        .below("nvmf/")
        .into_iter()
        // Reservations are state, not configuration, and SPDK has no such call.
        .filter(|e| e.record.method != RESTORE);
    let made = entries.map(|e| call(&e.record.method, e.record.params));
    calls.extend(made);
    calls.extend(published::config(engine));
    calls
}

struct GetTargets;

impl Method<Engine> for GetTargets {
    const NAME: &'static str = "nvmf_get_targets";
    const ABOUT: &'static str = "Lists the targets, of which there is one.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = [&'static str; 1];

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<[&'static str; 1], RpcError> {
        Ok([TARGET])
    }
}

struct CreateTarget;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateTargetParams {
    /// `nvmf_tgt` exists already; other names are refused.
    name: String,
    /// Not used, as the call is refused; nvmf_set_max_subsystems sets the limit.
    #[allow(dead_code)]
    max_subsystems: Option<u32>,
    /// Not used, as the call is refused; nvmf_set_config sets the filter.
    #[allow(dead_code)]
    discovery_filter: Option<Value>,
    /// Not used, as the call is refused.
    #[allow(dead_code)]
    dup_host_policy: Option<String>,
}

impl Method<Engine> for CreateTarget {
    const NAME: &'static str = "nvmf_create_target";
    const ABOUT: &'static str = "Refused: there is one target, from the start.";
    const CLASS: Class = Class::Admin;
    const CHANGES: Changes = Changes::Nothing;
    const ORDER: Order = Order::Exclusive;
    type Params = CreateTargetParams;
    type Reply = String;

    async fn apply(params: CreateTargetParams, _: Rc<Engine>) -> Result<String, RpcError> {
        if params.name == TARGET {
            return Err(RpcError::invalid_params_text("Target already exists.")
                .cause("it is there from the start")
                .field("name"));
        }
        Err(refusal::failed(
            "Unable to create the requested target.",
            format!("there is one target, {TARGET}"),
        )
        .field("name")
        .remedy("leave tgt_name out of all calls; for targets apart, run a daemon for each"))
    }
}

struct DeleteTarget;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DeleteTargetParams {
    /// Name of the target.
    name: String,
}

impl Method<Engine> for DeleteTarget {
    const NAME: &'static str = "nvmf_delete_target";
    const ABOUT: &'static str = "Refused: the one target lives as long as the daemon.";
    const CLASS: Class = Class::Admin;
    const CHANGES: Changes = Changes::Nothing;
    const ORDER: Order = Order::Exclusive;
    type Params = DeleteTargetParams;
    type Reply = bool;

    async fn apply(params: DeleteTargetParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        if params.name != TARGET {
            return Err(RpcError::invalid_params_text(
                "The specified target doesn't exist, cannot delete it.",
            )
            .cause(format!("the one target is {TARGET}"))
            .field("name"));
        }
        Err(
            RpcError::errno(Errno::ENOTSUP, "the target lives as long as the daemon")
                .field("name")
                .remedy("delete its subsystems, or stop the daemon with spdk_kill_instance"),
        )
    }
}

struct SetMaxSubsystems;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct MaxSubsystemsParams {
    /// 1 to 65536, not counting the discovery subsystem.
    max_subsystems: u32,
}

impl Method<Engine> for SetMaxSubsystems {
    const NAME: &'static str = "nvmf_set_max_subsystems";
    const ABOUT: &'static str = "Sets how many subsystems there may be.";
    const CLASS: Class = Class::Admin;
    const WHEN: When = When::Startup;
    const ORDER: Order = Order::Exclusive;
    type Params = MaxSubsystemsParams;
    type Reply = bool;

    async fn apply(params: MaxSubsystemsParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let options = &mut engine.options.borrow_mut().nvmf;
        if options.max_subsystems.is_some() {
            return Err(refusal::failed(
                "Must not call more than once",
                "the number is set already",
            ));
        }
        if !TargetConfig::SUBSYSTEMS.contains(&params.max_subsystems) {
            return Err(RpcError::invalid_params(format!(
                "{} is not in {:?}",
                params.max_subsystems,
                TargetConfig::SUBSYSTEMS
            ))
            .field("max_subsystems"));
        }
        options.max_subsystems = Some(params.max_subsystems);
        Ok(true)
    }
}

struct SetCrdt;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CrdtParams {
    /// In units of 100 ms, like the others.
    #[serde(default)]
    crdt1: u16,
    /// The second delay, in units of 100 ms; default 0.
    #[serde(default)]
    crdt2: u16,
    /// The third delay, in units of 100 ms; default 0.
    #[serde(default)]
    crdt3: u16,
}

impl Method<Engine> for SetCrdt {
    const NAME: &'static str = "nvmf_set_crdt";
    const ABOUT: &'static str =
        "Sets the delays after which hosts repeat commands that were refused for now.";
    const CLASS: Class = Class::Admin;
    const WHEN: When = When::Startup;
    const ORDER: Order = Order::Exclusive;
    type Params = CrdtParams;
    type Reply = bool;

    async fn apply(params: CrdtParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.options.borrow_mut().nvmf.command_retry_delay =
            Some([params.crdt1, params.crdt2, params.crdt3]);
        Ok(true)
    }
}

/// `nvmf_set_config`: options of the target, given before the start.
struct SetConfig;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ConfigParams {
    /// Must all be false.
    #[serde(default)]
    admin_cmd_passthru: Passthru,
    /// Must be left out: every reactor serves connections.
    poll_groups_mask: Option<String>,
    /// The old form of discovery_filters: `match_any`, or names separated by commas.
    discovery_filter: Option<String>,
    /// The discovery log shows listeners that share all of these with the queried one: `transport`,
    /// `address`, `svcid` (the port). Empty: every listener.
    discovery_filters: Option<Vec<DiscoveryFilter>>,
    /// Hash functions that hosts may use to authenticate themselves: `sha256`, `sha384`, `sha512`.
    /// Default: all. The first that the host offers is used; with the name `nvmf_tgt` the
    /// strongest.
    dhchap_digests: Option<Vec<String>>,
    /// Diffie-Hellman groups, likewise: `null`, `ffdhe2048`, `ffdhe3072`, `ffdhe4096`,
    /// `ffdhe6144`, `ffdhe8192`.
    dhchap_dhgroups: Option<Vec<String>>,
    /// Must be `allow`.
    dup_host_policy: Option<DupHostPolicy>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum DupHostPolicy {
    Allow,
    RestrictPerListener,
}

const PASSTHRU: [&str; 9] = [
    "identify_ctrlr",
    "identify_uuid_list",
    "get_log_page",
    "get_set_features",
    "sanitize",
    "security_send_recv",
    "fw_update",
    "nvme_mi",
    "vendor_specific",
];

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Passthru {
    /// Must be false.
    identify_ctrlr: bool,
    /// Must be false.
    identify_uuid_list: bool,
    /// Must be false.
    get_log_page: bool,
    /// Must be false.
    get_set_features: bool,
    /// Must be false.
    sanitize: bool,
    /// Must be false.
    security_send_recv: bool,
    /// Must be false.
    fw_update: bool,
    /// Must be false.
    nvme_mi: bool,
    /// Must be false.
    vendor_specific: bool,
}

impl Passthru {
    fn asked(&self) -> Option<&'static str> {
        let given = [
            self.identify_ctrlr,
            self.identify_uuid_list,
            self.get_log_page,
            self.get_set_features,
            self.sanitize,
            self.security_send_recv,
            self.fw_update,
            self.nvme_mi,
            self.vendor_specific,
        ];
        PASSTHRU
            .into_iter()
            .zip(given)
            .find_map(|(name, given)| given.then_some(name))
    }
}

impl Method<Engine> for SetConfig {
    const NAME: &'static str = "nvmf_set_config";
    const ABOUT: &'static str = "Sets the filter of the discovery log.";
    const CLASS: Class = Class::Admin;
    const WHEN: When = When::Startup;
    const ORDER: Order = Order::Exclusive;
    type Params = ConfigParams;
    type Reply = bool;

    async fn apply(params: ConfigParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        if let Some(name) = params.admin_cmd_passthru.asked() {
            return Err(RpcError::errno(
                Errno::ENOTSUP,
                "admin commands are not passed on to devices",
            )
            .field(format!("admin_cmd_passthru.{name}"))
            .remedy("leave it out"));
        }
        if params.poll_groups_mask.is_some() {
            return Err(RpcError::errno(Errno::ENOTSUP, "every reactor serves hosts")
                .field("poll_groups_mask")
                .remedy("choose the reactors' cores instead: -m, or reactor.cores in the configuration"));
        }
        if params.dup_host_policy == Some(DupHostPolicy::RestrictPerListener) {
            return Err(RpcError::errno(
                Errno::ENOTSUP,
                "a host may connect to a listener as often as it likes",
            )
            .field("dup_host_policy")
            .remedy("use \"allow\""));
        }
        let bad = |field: &'static str, error: UnknownName| {
            RpcError::invalid_params(error.to_string()).field(field)
        };
        let hashes = params.dhchap_digests.filter(|names| !names.is_empty());
        let hashes = hashes.map(|names| Offer::hashes_of(&names)).transpose();
        let groups = params.dhchap_dhgroups.filter(|names| !names.is_empty());
        let groups = groups.map(|names| Offer::groups_of(&names)).transpose();
        {
            let options = &mut engine.options.borrow_mut().nvmf;
            options.hashes = hashes.map_err(|error| bad("dhchap_digests", error))?;
            options.groups = groups.map_err(|error| bad("dhchap_dhgroups", error))?;
        }
        let old = params
            .discovery_filter
            .as_deref()
            .map(old_form)
            .transpose()?;
        if let Some(mut filters) = params.discovery_filters.or(old) {
            filters.sort_unstable();
            filters.dedup();
            engine.options.borrow_mut().nvmf.discovery_filters = filters;
        }
        Ok(true)
    }
}

fn old_form(text: &str) -> Result<Vec<DiscoveryFilter>, RpcError> {
    if text == "match_any" {
        return Ok(Vec::new());
    }
    let one = |name: &str| match name {
        "transport" => Ok(DiscoveryFilter::Transport),
        "address" => Ok(DiscoveryFilter::Address),
        "svcid" => Ok(DiscoveryFilter::Svcid),
        other => Err(RpcError::invalid_params(format!(
            "\"{other}\" is none of transport, address, svcid, and match_any stands alone"
        ))
        .field("discovery_filter")
        .remedy("use discovery_filters")),
    };
    text.split(',').map(one).collect()
}
