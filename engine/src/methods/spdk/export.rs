//! The part of an exported configuration that SPDK's own target loads.
//!
//! SPDK does not start with a file that contains a method or parameter of Nacre's own. Such entries
//! are omitted, with everything that depends on them. Mirrors are omitted too: a replica reserves
//! its first MiB, so SPDK's mirror of the same bdevs would show hosts other data.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::bdev_modules;

/// SPDK's methods that our configurations contain, beside the create methods of bdev modules.
const SPDKS: [&str; 26] = [
    "accel_set_options",
    "bdev_nvme_attach_controller",
    "bdev_nvme_set_hotplug",
    "bdev_nvme_set_multipath_policy",
    "bdev_nvme_set_options",
    "bdev_nvme_start_discovery",
    "bdev_raid_set_options",
    "bdev_set_options",
    "bdev_set_qos_limit",
    "bdev_wait_for_examine",
    "iobuf_set_options",
    "keyring_file_add_key",
    "nvmf_create_subsystem",
    "nvmf_create_transport",
    "nvmf_discovery_add_referral",
    "nvmf_ns_add_host",
    "nvmf_set_config",
    "nvmf_set_crdt",
    "nvmf_set_max_subsystems",
    "nvmf_subsystem_add_host",
    "nvmf_subsystem_add_listener",
    "nvmf_subsystem_add_ns",
    "nvmf_subsystem_allow_any_host",
    "nvmf_subsystem_listener_set_ana_state",
    "nvmf_subsystem_set_keys",
    "nvmf_subsystem_set_ns_ana_group",
];

/// Nacre's own parameters, which SPDK refuses or would have to implement.
const OWN: [(&str, &[&str]); 10] = [
    ("bdev_aio_create", &["size"]),
    ("bdev_split_create", &["part_bytes"]),
    ("bdev_uring_create", &["size", "readonly"]),
    (
        "bdev_nvme_attach_controller",
        &[
            "nsid",
            "uuid",
            "fallback",
            "keep_alive_timeout_ms",
            "cntlid",
            "concat",
            "serial",
        ],
    ),
    ("bdev_nvme_start_discovery", &["controllers"]),
    ("keyring_file_add_key", &["expires"]),
    ("nvmf_create_subsystem", &["controller_model"]),
    ("nvmf_discovery_add_referral", &["discovery"]),
    ("nvmf_subsystem_add_host", &["concat"]),
    ("nvmf_subsystem_add_listener", &["withheld"]),
];

/// The configuration for SPDK, and the omitted entries, each with its reason.
pub fn for_spdk(config: &Value) -> (Value, Vec<String>) {
    let mut config = config.clone();
    let mut left_out = Vec::new();
    // Objects left out, named as in `makes` and `needs`.
    let mut gone = BTreeSet::new();
    loop {
        let before = left_out.len();
        let subsystems = config.get_mut("subsystems").and_then(Value::as_array_mut);
        for subsystem in subsystems.into_iter().flatten() {
            let Some(calls) = subsystem.get_mut("config").and_then(Value::as_array_mut) else {
                continue;
            };
            calls.retain(|call| match reason(call, &gone) {
                None => true,
                Some(reason) => {
                    let made = makes(call);
                    let what = made.first().map_or("", String::as_str);
                    left_out.push(format!("{} {what}: {reason}", method(call)));
                    gone.extend(made);
                    false
                }
            });
        }
        // An entry may precede the device that it needs.
        if left_out.len() == before {
            return (config, left_out);
        }
    }
}

fn method(call: &Value) -> &str {
    call["method"].as_str().unwrap_or_default()
}

/// The reason that SPDK cannot load the call; `None` if it can.
fn reason(call: &Value, gone: &BTreeSet<String>) -> Option<String> {
    let (method, params) = (method(call), &call["params"]);
    if !SPDKS.contains(&method) && bdev_modules::by_create(method).is_none() {
        return Some("SPDK has no such method".to_owned());
    }
    let own = OWN.iter().find(|(of, _)| *of == method);
    let given = |field: &&&str| !matches!(params[**field], Value::Null | Value::Bool(false));
    if let Some(field) = own.and_then(|(_, fields)| fields.iter().find(given)) {
        return Some(format!("SPDK has no {field}"));
    }
    if params["trtype"] == "AUTO" {
        return Some("SPDK has no transport AUTO".to_owned());
    }
    if ["persistent_loss", "change"]
        .iter()
        .any(|state| params["ana_state"] == **state)
    {
        return Some(format!("SPDK has no ANA state {}", params["ana_state"]));
    }
    let needs = needs(call);
    let missing = needs
        .iter()
        .find(|object| gone.contains(*object) || is_of(object, gone));
    missing.map(|object| format!("it needs {object}, which is left out"))
}

/// True for a namespace of an omitted controller.
fn is_of(object: &str, gone: &BTreeSet<String>) -> bool {
    let Some((controller, nsid)) = object
        .strip_prefix("bdev ")
        .and_then(|name| name.rsplit_once('n'))
    else {
        return false;
    };
    let is_number = !nsid.is_empty() && nsid.bytes().all(|byte| byte.is_ascii_digit());
    is_number && gone.contains(&format!("controller {controller}"))
}

fn text(params: &Value, at: &str) -> Option<String> {
    match params.pointer(at)? {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn listener(params: &Value) -> Option<String> {
    let part = |field: &str| text(params, &format!("/listen_address/{field}"));
    let nqn = text(params, "/nqn")?;
    let (trtype, traddr, trsvcid) = (part("trtype")?, part("traddr")?, part("trsvcid")?);
    Some(format!("listener {nqn} {trtype} {traddr} {trsvcid}"))
}

fn namespace(params: &Value, nsid: &str) -> Option<String> {
    Some(format!(
        "namespace {} {}",
        text(params, "/nqn")?,
        text(params, nsid)?
    ))
}

fn host(params: &Value) -> Option<String> {
    let (nqn, host) = (text(params, "/nqn")?, text(params, "/host")?);
    Some(format!("host {host} at {nqn}"))
}

/// The keys that a call names, in any of its roles.
fn keys(params: &Value) -> impl Iterator<Item = String> {
    ["/dhchap_key", "/dhchap_ctrlr_key", "/psk"]
        .into_iter()
        .filter_map(move |role| text(params, role))
        .map(|name| format!("key {name}"))
}

/// The objects that a call creates.
fn makes(call: &Value) -> Vec<String> {
    let params = &call["params"];
    let bdev = |at: &str| text(params, at).map(|name| format!("bdev {name}"));
    let made = match method(call) {
        "bdev_nvme_attach_controller" => {
            vec![text(params, "/name").map(|name| format!("controller {name}"))]
        }
        // The UUID also names a volume.
        "volume_create" => vec![bdev("/name"), bdev("/id"), bdev("/uuid")],
        "nvmf_create_subsystem" => vec![text(params, "/nqn").map(|nqn| format!("subsystem {nqn}"))],
        "nvmf_subsystem_add_ns" => vec![namespace(params, "/namespace/nsid")],
        "nvmf_subsystem_add_listener" => vec![listener(params)],
        "nvmf_subsystem_add_host" => vec![host(params)],
        "host_rotate" => vec![host(params).map(|host| format!("rotation of {host}"))],
        "keyring_file_add_key" | "key_import" => {
            vec![text(params, "/name").map(|name| format!("key {name}"))]
        }
        method => match bdev_modules::by_create(method) {
            Some(module) => (module.names)(params)
                .into_iter()
                .map(|name| Some(format!("bdev {name}")))
                .collect(),
            None => vec![bdev("/name")],
        },
    };
    made.into_iter().flatten().collect()
}

/// The objects that a call depends on.
fn needs(call: &Value) -> Vec<String> {
    let params = &call["params"];
    let bdev = |at: &str| text(params, at).map(|name| format!("bdev {name}"));
    let subsystem = text(params, "/nqn").map(|nqn| format!("subsystem {nqn}"));
    let other = match method(call) {
        "bdev_set_qos_limit" => bdev("/name"),
        "nvmf_create_subsystem" => return Vec::new(),
        "nvmf_subsystem_add_ns" => bdev("/namespace/bdev_name"),
        "nvmf_ns_add_host" | "nvmf_subsystem_set_ns_ana_group" => namespace(params, "/nsid"),
        "nvmf_subsystem_listener_set_ana_state" => listener(params),
        // Without its rotation the host would have its former key.
        "nvmf_subsystem_add_host" => host(params).map(|host| format!("rotation of {host}")),
        "nvmf_subsystem_set_keys" => host(params),
        method => bdev_modules::base(method, params).map(|base| format!("bdev {base}")),
    };
    let all = subsystem.into_iter().chain(other);
    all.chain(keys(params)).collect()
}

#[cfg(test)]
mod tests {
    //! Goal: no entry stays that SPDK refuses, and every other entry stays. Method: configurations
    //! with one entry of ours each. `tests/spdk/compare.py` loads such a file in SPDK.

    use serde_json::json;

    use super::*;

    const NQN: &str = "nqn.2026-01.io.example:a";

    fn config(calls: &[(&str, Value)]) -> Value {
        let calls: Vec<Value> = calls
            .iter()
            .map(|(method, params)| json!({ "method": method, "params": params }))
            .collect();
        json!({ "subsystems": [
            { "subsystem": "iobuf", "config": [{ "method": "iobuf_set_options", "params": {} }] },
            { "subsystem": "bdev", "config": calls },
        ]})
    }

    fn left_out(calls: &[(&str, Value)]) -> Vec<String> {
        let (kept, left_out) = for_spdk(&config(calls));
        let count = |config: &Value| config["subsystems"][1]["config"].as_array().unwrap().len();
        assert_eq!(count(&kept) + left_out.len(), calls.len());
        assert_eq!(kept["subsystems"][0]["config"].as_array().unwrap().len(), 1);
        left_out
    }

    #[test]
    fn entries_of_spdk_stay_unchanged() {
        let address = json!({ "trtype": "TCP", "traddr": "192.0.2.1", "trsvcid": "4420" });
        let all = config(&[
            (
                "bdev_aio_create",
                json!({ "name": "a", "filename": "/a", "readonly": true }),
            ),
            (
                "bdev_uring_create",
                json!({ "name": "u", "filename": "/u" }),
            ),
            (
                "bdev_set_qos_limit",
                json!({ "name": "a", "rw_ios_per_sec": 1000 }),
            ),
            ("nvmf_create_subsystem", json!({ "nqn": NQN })),
            (
                "nvmf_subsystem_add_ns",
                json!({ "nqn": NQN, "namespace": { "nsid": 1, "bdev_name": "a" } }),
            ),
            (
                "nvmf_subsystem_add_listener",
                json!({ "nqn": NQN, "listen_address": address }),
            ),
        ]);
        assert_eq!(for_spdk(&all), (all, Vec::new()));
    }

    #[test]
    fn a_volume_is_left_out_with_its_dependents() {
        let id = "11111111-2222-4333-8444-555555555555";
        let add_ns = |nsid: u32, bdev: &str| {
            let namespace = json!({ "nsid": nsid, "bdev_name": bdev });
            (
                "nvmf_subsystem_add_ns",
                json!({ "nqn": NQN, "namespace": namespace }),
            )
        };
        let host = |nsid: u32| {
            (
                "nvmf_ns_add_host",
                json!({ "nqn": NQN, "nsid": nsid, "host": "h" }),
            )
        };
        let gone = left_out(&[
            (
                "bdev_passthru_create",
                json!({ "name": "p", "base_bdev_name": "v" }),
            ),
            (
                "volume_create",
                json!({ "name": "v", "id": id, "devices": ["a"] }),
            ),
            ("bdev_malloc_create", json!({ "name": "m" })),
            ("bdev_error_create", json!({ "base_name": "p" })),
            ("bdev_set_qos_limit", json!({ "name": id })),
            ("nvmf_create_subsystem", json!({ "nqn": NQN })),
            add_ns(1, "EE_p"),
            host(1),
            add_ns(2, "m"),
            host(2),
        ]);
        let methods: Vec<&str> = gone
            .iter()
            .map(|text| text.split(' ').next().unwrap())
            .collect();
        let expected = [
            "volume_create",
            "bdev_error_create",
            "bdev_set_qos_limit",
            "nvmf_subsystem_add_ns",
            "nvmf_ns_add_host",
            "bdev_passthru_create",
        ];
        assert_eq!(
            BTreeSet::from_iter(methods),
            BTreeSet::from(expected),
            "{gone:?}"
        );
        assert!(
            gone[0].starts_with("volume_create bdev v: SPDK has no such method"),
            "{gone:?}"
        );
    }

    /// Goal: a host is left out with a key that expires or is in no file, with `concat`, and after
    /// a rotation; other hosts and keys stay.
    #[test]
    fn hosts_are_left_out_with_their_keys() {
        let key = |name: &str, expires: Option<&str>| {
            let params = json!({ "name": name, "path": "/k", "expires": expires });
            ("keyring_file_add_key", params)
        };
        let host = |host: &str, more: (&str, Value)| {
            let mut params = json!({ "nqn": NQN, "host": host, "dhchap_key": "k" });
            params[more.0] = more.1;
            ("nvmf_subsystem_add_host", params)
        };
        let mut calls = vec![
            key("k", None),
            key("e", Some("2027-01-31")),
            ("nvmf_create_subsystem", json!({ "nqn": NQN })),
            host("a", ("dhchap_ctrlr_key", "k".into())),
        ];
        let stay = calls.len() - 1;
        calls.push(("key_import", json!({ "name": "s", "sealed": "v1:" })));
        for (name, more) in [
            ("b", ("psk", json!("e"))),
            ("f", ("psk", json!("s"))),
            ("c", ("concat", json!(true))),
            ("d", ("dhchap_ctrlr_key", json!("k"))),
        ] {
            calls.push(host(name, more));
            let params = json!({ "nqn": NQN, "host": name, "dhchap_key": "k" });
            calls.push(("nvmf_subsystem_set_keys", params));
        }
        let rotate = json!({ "nqn": NQN, "host": "d", "key": "k", "overlap_s": 0 });
        calls.push(("host_rotate", rotate));
        let gone = left_out(&calls);
        assert_eq!(gone.len(), calls.len() - stay, "{gone:?}");
        assert!(
            !gone.iter().any(|text| text.contains("host a ")),
            "{gone:?}"
        );
    }

    #[test]
    fn own_parameters_remove_their_objects() {
        let address = json!({ "trtype": "TCP", "traddr": "192.0.2.1", "trsvcid": "4420" });
        let state =
            |word: &str| json!({ "nqn": NQN, "listen_address": address, "ana_state": word });
        let set = "nvmf_subsystem_listener_set_ana_state";
        let add_ns =
            |bdev: &str| json!({ "nqn": NQN, "namespace": { "nsid": 1, "bdev_name": bdev } });
        for (calls, left) in [
            (
                vec![
                    (
                        "nvmf_create_subsystem",
                        json!({ "nqn": NQN, "controller_model": "static" }),
                    ),
                    (
                        "nvmf_subsystem_add_host",
                        json!({ "nqn": NQN, "host": "h" }),
                    ),
                ],
                2,
            ),
            (
                vec![
                    (
                        "nvmf_subsystem_add_listener",
                        json!({ "nqn": NQN, "listen_address": address, "withheld": true }),
                    ),
                    (set, state("optimized")),
                ],
                2,
            ),
            (
                vec![(set, state("change")), (set, state("inaccessible"))],
                1,
            ),
            (
                vec![
                    (
                        "bdev_uring_create",
                        json!({ "name": "u", "readonly": true }),
                    ),
                    ("nvmf_subsystem_add_ns", add_ns("u")),
                ],
                2,
            ),
            (
                vec![
                    (
                        "bdev_nvme_attach_controller",
                        json!({ "name": "c", "trtype": "AUTO" }),
                    ),
                    ("nvmf_subsystem_add_ns", add_ns("cn12")),
                    ("nvmf_subsystem_add_ns", add_ns("cn")),
                ],
                2,
            ),
            (
                vec![
                    ("nvmf_discovery_add_referral", json!({ "discovery": false })),
                    ("nvmf_discovery_set_nqn", json!({ "nqn": NQN })),
                ],
                1,
            ),
        ] {
            assert_eq!(left_out(&calls).len(), left, "{calls:?}");
        }
    }

    /// Goal: every method in the list exists.
    #[test]
    fn the_listed_methods_exist() {
        let registry = crate::methods::all();
        for name in SPDKS {
            assert!(registry.find(name).is_some(), "{name}");
        }
    }
}
