//! Checks of a configuration that do not depend on the machine.
//!
//! Bdevs and subsystems are created in a temporary registry and target, so the rules are those of
//! the RPC calls that create them.

pub(crate) mod alert;
mod cluster;
mod ranges;
mod remote;
mod tls;
mod volume_store;
mod web;

use std::collections::{BTreeMap, BTreeSet};

use nacre_bdev::{Registry, null};
use nacre_nvmf::auth::{Offer, UnknownName};
use nacre_nvmf::subsystems::{SubsystemConfig, Target, TargetConfig};
use nacre_nvmf_wire::Nqn;
use serde_json::Value;
use serde_path_to_error::Segment;

use super::declared;
use super::listener::Listener;
use super::names::{RELATIVE_KEY, check_key_name, host_nqn};
use super::settings::{Access, Bdev, BdevKind, DEFAULT_BLOCK, Memory, Subsystem};
use super::{Cores, Problem, Settings, origin_of};
use crate::bdev_modules::ModuleEntry;
use crate::rpc::RpcError;
use crate::rpc::access::Member;
use crate::values::read::{self, ValueError};
use crate::values::selector::Selector;
use crate::values::size;
use crate::values::time::parse_moment;

use ranges::MOST_MEMORY;
pub(super) use ranges::{in_range, ranges};

/// Checks that types cannot express. Does not depend on the machine.
pub(super) fn everywhere(settings: &Settings, origins: &BTreeMap<String, String>) -> Vec<Problem> {
    let mut check = Check {
        origins,
        problems: Vec::new(),
    };
    check.ranges(settings);
    check.general(settings);
    check.volume_store(settings);
    check.cluster(settings);
    check.keys(settings);
    check.remotes(&settings.remote);
    check.devices(&settings.bdev);
    check.listeners(settings);
    check.subsystems(settings);
    check.alerts(&settings.alert);
    check.problems
}

pub(super) struct Check<'a> {
    origins: &'a BTreeMap<String, String>,
    problems: Vec<Problem>,
}

impl Check<'_> {
    pub(super) fn refuse(&mut self, key: &str, cause: impl std::fmt::Display, remedy: &str) {
        let problem = Problem::new(origin_of(self.origins, key), key, format!("{key}: {cause}"));
        self.problems.push(match remedy {
            "" => problem,
            remedy => problem.remedy(remedy),
        });
    }

    /// Reports the error that the RPC call would return.
    pub(super) fn refused(&mut self, key: &str, error: &RpcError) {
        match &error.data {
            Some(facts) => {
                let remedy = facts.remedy.clone().unwrap_or_default();
                self.refuse(key, &facts.cause, &remedy);
            }
            None => self.refuse(key, &error.message, ""),
        }
    }

    /// True if the key has a value, even one that cannot be read.
    pub(super) fn is_set(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// True if the key, or a key within it, has a problem.
    fn is_refused(&self, key: &str) -> bool {
        self.problems.iter().any(|p| {
            let within = p.key.strip_prefix(key);
            within.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        })
    }

    fn ranges(&mut self, settings: &Settings) {
        let all = serde_json::to_value(settings).expect("settings are plain data");
        for (pattern, least, most) in ranges() {
            let mut found = Vec::new();
            find(&all, &pattern, String::new(), &mut found);
            for (key, number) in found {
                if !(least..=most).contains(&number) {
                    self.refuse(&key, format!("{number} is not from {least} to {most}"), "");
                }
            }
        }
    }

    fn general(&mut self, settings: &Settings) {
        if let Err(cause) = Cores::parse(&settings.reactor.cores) {
            self.refuse("reactor.cores", cause, Cores::FORMS);
        }
        let nodes = &settings.memory.numa_mb;
        if nodes.len() > Memory::MAX_NODES {
            let cause = format!("{} nodes; {} at most", nodes.len(), Memory::MAX_NODES);
            self.refuse("memory.numa_mb", cause, "");
        }
        for (at, mb) in nodes
            .iter()
            .enumerate()
            .filter(|(_, mb)| **mb > MOST_MEMORY)
        {
            let cause = format!("{mb} is not from 0 to {MOST_MEMORY}");
            self.refuse(&format!("memory.numa_mb[{at}]"), cause, "");
        }
        for (key, cause) in settings.nvmf.invalid_sizes() {
            self.refuse_unless_refused(&format!("nvmf.{key}"), cause);
        }
        if let Err(error) = settings.nvmf.discovery_name() {
            let cause = format!("\"{}\": {error}", settings.nvmf.discovery_nqn);
            let remedy = "write \"auto\", \"well-known\" or an NQN";
            self.refuse("nvmf.discovery_nqn", cause, remedy);
        }
        for (key, cause) in settings.rdma.problems() {
            self.refuse_unless_refused(&format!("rdma.{key}"), cause);
        }
        for (key, cause) in settings.replication.problems() {
            self.refuse_unless_refused(&format!("replication.{key}"), cause);
        }
        for (key, cause) in settings.qos.problems() {
            self.refuse_unless_refused(&format!("qos.{key}"), cause);
        }
        self.access(&settings.rpc.access);
        self.tls(settings);
        self.web(settings);
        for (at, name) in settings.security.capabilities.iter().enumerate() {
            if let Err(cause) = nacre_engine_sandbox::parse(name) {
                self.refuse(&format!("security.capabilities[{at}]"), cause, "");
            }
        }
        self.selectors("replication.iface", &settings.replication.iface);
        for (at, unknown) in super::log_flags::unknown_flags(&settings.log.flags) {
            self.refuse(&format!("log.flags[{at}]"), &unknown, &unknown.remedy());
        }
    }

    fn access(&mut self, access: &Access) {
        for (role, members) in [
            ("admin", &access.admin),
            ("operator", &access.operator),
            ("viewer", &access.viewer),
        ] {
            for (at, text) in members.iter().enumerate() {
                if let Err(error) = text.parse::<Member>() {
                    let key = format!("rpc.access.{role}[{at}]");
                    self.refuse(&key, error, Member::FORMS);
                }
            }
        }
    }

    fn refuse_unless_refused(&mut self, key: &str, cause: String) {
        self.refuse_unless_refused_with(key, cause, "");
    }

    pub(super) fn refuse_unless_refused_with(&mut self, key: &str, cause: String, remedy: &str) {
        if !self.is_refused(key) {
            self.refuse(key, cause, remedy);
        }
    }

    fn selectors(&mut self, key: &str, selectors: &[String]) {
        for (at, text) in selectors.iter().enumerate() {
            if let Err(error) = text.parse::<Selector>() {
                self.refuse(&format!("{key}[{at}]"), error, Selector::FORMS);
            }
        }
    }

    /// Reports a key that is a parameter of a call and has a wrong value.
    pub(super) fn wrong_param(&mut self, key: &str, place: &[Segment], error: &ValueError) {
        let field = match (error, read::path(place)) {
            (ValueError::Unknown { key, .. }, _) => key.clone(),
            (ValueError::Missing { key }, path) if path.is_empty() => (*key).to_owned(),
            (_, path) => path,
        };
        let remedy = error.remedy().unwrap_or_default();
        self.refuse_unless_refused_with(&format!("{key}.{field}"), error.to_string(), &remedy);
    }

    fn devices(&mut self, devices: &[Bdev]) {
        let registry = Registry::new();
        for (at, bdev) in devices.iter().enumerate() {
            let key = format!("bdev[{at}]");
            if let Some(module) = bdev.kind.module() {
                self.module(&key, bdev, module, &registry);
                continue;
            }
            for field in bdev.params.keys() {
                let cause = "a key of devices of another type";
                let remedy = "leave it out, or set the type that it belongs to";
                self.refuse(&format!("{key}.{field}"), cause, remedy);
            }
            match (bdev.kind, &bdev.path, bdev.size) {
                (BdevKind::FILE, None, _) => {
                    let key = format!("{key}.path");
                    self.refuse(&key, "a file device without a path", "add path = \"/…\"");
                }
                (BdevKind::MALLOC | BdevKind::NULL, _, None) => {
                    let key = format!("{key}.size");
                    self.refuse(&key, "a device without a size", "add size = \"64MiB\"");
                }
                (BdevKind::MALLOC | BdevKind::NULL, Some(_), _) => {
                    let remedy = "leave it out, or set type = \"file\"";
                    self.refuse(
                        &format!("{key}.path"),
                        "a device in memory has no path",
                        remedy,
                    );
                }
                _ => {}
            }
            let block_size = bdev.block_size.unwrap_or(DEFAULT_BLOCK);
            if bdev.uuid.is_some_and(|uuid| uuid.is_nil()) {
                let cause = "a UUID of zeroes identifies no device";
                let remedy = "leave it out, or write another";
                self.refuse(&format!("{key}.uuid"), cause, remedy);
            }
            let blocks = match (size::check_block(block_size.into()), bdev.size) {
                (Err(cause), _) => {
                    self.refuse_unless_refused(&format!("{key}.block_size"), cause);
                    continue;
                }
                (Ok(()), Some(bytes)) => size::blocks(bytes.0, block_size.into()),
                (Ok(()), None) => Ok(1),
            };
            if bdev.name.is_empty() {
                self.refuse(
                    &format!("{key}.name"),
                    "a device without a name",
                    "add name = \"…\"",
                );
                continue;
            }
            let num_blocks = blocks.unwrap_or_else(|cause| {
                self.refuse_unless_refused(&format!("{key}.size"), cause);
                1
            });
            let config = |num_blocks| null::Config {
                name: bdev.name.clone(),
                block_size,
                num_blocks,
                physical_block_size: None,
                uuid: Some(declared::uuid_of(bdev)),
                reads: null::Reads::default(),
            };
            let made = null::create(config(num_blocks)).or_else(|error| {
                self.refuse_unless_refused(&format!("{key}.size"), error.to_string());
                null::create(config(1))
            });
            let registered = made.map(|device| registry.register(device).map(drop));
            let registered = registered.expect("one block is a size");
            if let Err(error) = registered {
                let field = if error.to_string().contains(&bdev.name) {
                    "name"
                } else {
                    "uuid"
                };
                self.refuse(&format!("{key}.{field}"), error, "");
            }
        }
    }

    /// Checks a bdev whose keys are the parameters of its module.
    fn module(&mut self, key: &str, bdev: &Bdev, module: &ModuleEntry, registry: &Registry) {
        let others = [
            ("path", bdev.path.is_some()),
            ("size", bdev.size.is_some()),
            ("block_size", bdev.block_size.is_some()),
            ("read_only", bdev.read_only),
        ];
        for (field, _) in others.iter().filter(|(_, given)| *given) {
            let cause = format!("a device of type \"{}\" has no {field}", module.kind);
            self.refuse(&format!("{key}.{field}"), cause, "leave it out");
        }
        let params = declared::params_of(bdev);
        let check = module.declared.map(|declared| declared.check);
        if let Some((place, error)) = check.and_then(|check| check(&params)) {
            self.wrong_param(key, &place, &error);
            return;
        }
        for name in (module.names)(&params) {
            let one_block = null::create(null::Config {
                name,
                block_size: DEFAULT_BLOCK,
                num_blocks: 1,
                physical_block_size: None,
                uuid: bdev.uuid,
                reads: null::Reads::default(),
            });
            let registered = registry.register(one_block.expect("one block is a size"));
            if let Err(error) = registered {
                let field = if bdev.name.is_empty() { "type" } else { "name" };
                self.refuse(&format!("{key}.{field}"), error, "");
                return;
            }
        }
    }

    fn keys(&mut self, settings: &Settings) {
        let mut names = BTreeSet::new();
        for (at, declared) in settings.key.iter().enumerate() {
            let key = format!("key[{at}]");
            if let Err(error) = check_key_name(&declared.name) {
                self.refused(&format!("{key}.name"), &error);
            } else if !names.insert(declared.name.as_str()) {
                let cause = format!("a second key \"{}\"", declared.name);
                self.refuse(&format!("{key}.name"), cause, "give each a name of its own");
            }
            if let Some(Err(error)) = declared.expires.as_deref().map(parse_moment) {
                self.refuse(&format!("{key}.expires"), error, "");
            }
            if !declared.path.is_absolute() {
                let key = format!("{key}.path");
                self.refuse(
                    &key,
                    RELATIVE_KEY,
                    "write it from the root: /etc/nacre/keys/name",
                );
            }
        }
        let nvmf = &settings.nvmf;
        let unknown = |error: UnknownName| error.to_string();
        let (hashes, groups) = (&nvmf.dhchap_digests, &nvmf.dhchap_dhgroups);
        let names = [
            (
                "nvmf.dhchap_digests",
                hashes,
                Offer::hashes_of(hashes).map(drop),
            ),
            (
                "nvmf.dhchap_dhgroups",
                groups,
                Offer::groups_of(groups).map(drop),
            ),
        ];
        for (key, names, parsed) in names {
            match parsed.map_err(unknown) {
                Err(cause) => self.refuse(key, cause, ""),
                Ok(()) if names.is_empty() => {
                    self.refuse(key, "none is allowed", "leave it out to allow all");
                }
                Ok(()) => {}
            }
        }
    }

    fn listeners(&mut self, settings: &Settings) {
        let mut names = BTreeSet::new();
        for (at, listener) in settings.nvmf.listener.iter().enumerate() {
            let key = format!("nvmf.listener[{at}]");
            if !names.insert(listener.name.as_str()) {
                let cause = format!("a second listener \"{}\"", listener.name);
                self.refuse(&format!("{key}.name"), cause, "give each a name of its own");
            }
            self.selectors(&format!("{key}.iface"), &listener.iface);
            for (field, cause, remedy) in listener.problems() {
                let key = format!("{key}.{field}");
                if !self.is_refused(&key) {
                    self.refuse(&key, cause, remedy);
                }
            }
        }
        for (at, text) in settings.nvmf.listen.iter().enumerate() {
            if let Err(error) = Listener::short(at + 1, text) {
                self.refuse(&format!("nvmf.listen[{at}]"), error, "");
            }
        }
        let all = settings.nvmf.listeners();
        if all.iter().any(Listener::wants_rdma) && !self.is_refused("nvmf.max_io_size") {
            let most = *nacre_transport_rdma::IO_SIZES.end();
            let bytes = settings.nvmf.max_io_size;
            if bytes > most {
                let cause = format!("{bytes} is more than {most}, the most over RDMA");
                self.refuse("nvmf.max_io_size", cause, "lower it, or set rdma = \"off\"");
            }
        }
    }

    fn subsystems(&mut self, settings: &Settings) {
        let nvmf = &settings.nvmf;
        let all = nvmf.listeners();
        let listeners: BTreeSet<&str> = all.iter().map(|l| l.name.as_str()).collect();
        let target = Target::new(
            TargetConfig {
                max_subsystems: nvmf.max_subsystems as usize,
                ..TargetConfig::default()
            },
            1,
        );
        for (at, subsystem) in nvmf.subsystem.iter().enumerate() {
            let key = format!("nvmf.subsystem[{at}]");
            self.subsystem(&key, subsystem, nvmf, &target);
            for (n, name) in subsystem.listeners.iter().enumerate() {
                if !listeners.contains(name.as_str()) {
                    let known: Vec<&str> = listeners.iter().copied().collect();
                    let close = crate::values::suggest::closest(name, known.iter().copied());
                    let remedy = match (close, known.is_empty()) {
                        (Some(close), _) => format!("did you mean \"{close}\"?"),
                        (None, true) => "declare it, or leave it out".into(),
                        (None, false) => format!("there are: {}", known.join(", ")),
                    };
                    let cause = format!("no [[nvmf.listener]] is named \"{name}\"");
                    self.refuse(&format!("{key}.listeners[{n}]"), cause, &remedy);
                }
            }
        }
    }

    fn subsystem(
        &mut self,
        key: &str,
        subsystem: &Subsystem,
        nvmf: &super::settings::Nvmf,
        target: &Target,
    ) {
        let of_nqn = format!("{key}.nqn");
        let nqn = match Nqn::new(&subsystem.nqn) {
            Ok(nqn) => Some(nqn),
            Err(_) if subsystem.nqn.is_empty() => {
                let remedy = "add nqn = \"nqn.2026-01.org.example:name\"";
                self.refuse(&of_nqn, "a subsystem without an NQN", remedy);
                None
            }
            Err(error) => {
                let cause = format!("\"{}\": {error}", subsystem.nqn);
                let remedy = "write a name such as \"nqn.2026-01.org.example:name\"";
                self.refuse(&of_nqn, cause, remedy);
                None
            }
        };
        if subsystem.nqn == nvmf.discovery_nqn {
            let cause = format!("\"{}\" is the name of the discovery service", subsystem.nqn);
            self.refuse(&of_nqn, cause, "see discovery_nqn in [nvmf]");
        }
        let (min, max) = subsystem.options.cntlids();
        let of_ids = format!("{key}.min_cntlid");
        if min > max && !self.is_refused(&of_ids) {
            self.refuse(
                &of_ids,
                format!("{min} is more than max_cntlid ({max})"),
                "",
            );
        }
        if let Some(nqn) = &nqn
            && !self.is_refused(&of_nqn)
            && !self.is_refused(&of_ids)
            && !self.is_refused(&format!("{key}.max_cntlid"))
            && let Err(error) = target.create_subsystem(SubsystemConfig::with(
                nqn.clone(),
                subsystem.options.clone(),
            ))
        {
            use nacre_nvmf::subsystems::TargetError as E;
            let field = match &error {
                E::Invalid { field, .. } => field,
                _ => "nqn",
            };
            self.refuse(&format!("{key}.{field}"), error, "");
        }
        let mut hosts = BTreeSet::new();
        let bare = subsystem.hosts.iter().enumerate();
        let bare = bare.map(|(n, host)| (format!("{key}.hosts[{n}]"), host));
        let with_keys = subsystem.host.iter().enumerate();
        let with_keys = with_keys.map(|(n, host)| (format!("{key}.host[{n}].nqn"), &host.nqn));
        for (key, host) in bare.chain(with_keys) {
            match host_nqn(host) {
                Ok(host) if !hosts.insert(host.clone()) => {
                    self.refuse(&key, format!("\"{host}\" is there twice"), "");
                }
                Ok(_) => {}
                Err(error) => {
                    let cause = error.data.as_ref().map_or("", |facts| &facts.cause);
                    let error = error.clone().cause(format!("\"{host}\": {cause}"));
                    self.refused(&key, &error);
                }
            }
        }
        for (n, _) in subsystem.host.iter().enumerate().filter(|(_, host)| {
            let given = |key: &Option<String>| key.as_ref().is_some_and(|key| !key.is_empty());
            !given(&host.keys.dhchap_key) && !given(&host.keys.psk)
        }) {
            let remedy = "add dhchap_key = \"name\" or psk = \"name\", or put it into hosts";
            self.refuse(
                &format!("{key}.host[{n}].dhchap_key"),
                "a host without a key",
                remedy,
            );
        }
        self.concat(key, subsystem);
        let most = SubsystemConfig::DEFAULT_MAX_NAMESPACES as usize;
        if subsystem.namespace.len() > most {
            let cause = format!(
                "{} namespaces are more than {most}",
                subsystem.namespace.len()
            );
            self.refuse(&format!("{key}.namespace"), cause, "");
        }
        let (mut ids, mut uuids, mut devices) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for (n, namespace) in subsystem.namespace.iter().enumerate() {
            let key = format!("{key}.namespace[{n}]");
            if namespace.bdev.is_empty() {
                let remedy = "add bdev = \"name\"";
                self.refuse(
                    &format!("{key}.bdev"),
                    "a namespace without a device",
                    remedy,
                );
            } else if !devices.insert(&namespace.bdev) && namespace.uuid.is_none() {
                let cause = format!("a second namespace on \"{}\"", namespace.bdev);
                let remedy = "give it a uuid of its own, or leave it out";
                self.refuse(&format!("{key}.bdev"), cause, remedy);
            }
            if namespace.nsid != 0 && !ids.insert(namespace.nsid) {
                let cause = format!("a second namespace with the id {}", namespace.nsid);
                self.refuse(&format!("{key}.nsid"), cause, "");
            }
            match namespace.uuid {
                Some(uuid) if uuid.is_nil() => {
                    let cause = "a UUID of zeroes identifies no namespace";
                    let remedy = "leave it out to use the device's, or write another";
                    self.refuse(&format!("{key}.uuid"), cause, remedy);
                }
                Some(uuid) if !uuids.insert(uuid) => {
                    let cause = format!("a second namespace with the UUID {uuid}");
                    self.refuse(&format!("{key}.uuid"), cause, "");
                }
                _ => {}
            }
        }
    }
}

/// Collects the numbers at `pattern`, each with its key.
fn find(value: &Value, pattern: &str, path: String, into: &mut Vec<(String, u64)>) {
    if let Some(items) = value.as_array() {
        for (at, item) in items.iter().enumerate() {
            find(item, pattern, format!("{path}[{at}]"), into);
        }
        return;
    }
    let (head, rest) = pattern.split_once('.').unwrap_or((pattern, ""));
    if head.is_empty() {
        into.extend(value.as_u64().map(|number| (path, number)));
        return;
    }
    if let Some(inner) = value.get(head) {
        let path = match path.as_str() {
            "" => head.to_owned(),
            path => format!("{path}.{head}"),
        };
        find(inner, rest, path, into);
    }
}
