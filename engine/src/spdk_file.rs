//! SPDK's configuration files, which `serve -c` carries out at start.
//!
//! A file is a list of calls in their order. Where state is kept what they made is in it, and is there before the next
//! start comes to the file: of what would be made again it stands, as it is by then.

use std::rc::Rc;

use anyhow::Context;
use serde_json::Value;
use tracing::{info, warn};

use crate::daemon::ServeOptions;
use crate::engine::Engine;
use crate::journal::Entry;
use crate::store::Record;

/// The calls of an SPDK configuration file, in order; batches are flattened.
pub fn calls(config: &Value) -> anyhow::Result<Vec<(String, Value)>> {
    let subsystems = config
        .get("subsystems")
        .and_then(Value::as_array)
        .context("no \"subsystems\" array")?;
    let mut calls = Vec::new();
    for subsystem in subsystems {
        let elements = subsystem
            .get("config")
            .and_then(Value::as_array)
            .map_or(&[][..], Vec::as_slice);
        for element in elements {
            for call in element
                .as_array()
                .map_or(std::slice::from_ref(element), Vec::as_slice)
            {
                let method = call
                    .get("method")
                    .and_then(Value::as_str)
                    .context("an entry without a \"method\"")?;
                calls.push((
                    method.to_owned(),
                    call.get("params").cloned().unwrap_or(Value::Null),
                ));
            }
        }
    }
    Ok(calls)
}

/// `restored`: what the state has; of what would be made again it stands, as it is.
pub async fn carry_out(
    engine: &Rc<Engine>,
    calls: Vec<(String, Value)>,
    options: &ServeOptions,
    restored: &[Entry],
) -> anyhow::Result<()> {
    for (method, params) in calls {
        if stands(engine, restored, &method, &params) {
            info!(method, %params, "it was made at an earlier start, and stands as it is now");
            continue;
        }
        let raw = match &params {
            Value::Null => None,
            Value::Object(map) if map.is_empty() => None,
            params => Some(serde_json::value::to_raw_value(params)?),
        };
        if let Err(refused) = engine.call(&method, raw.as_deref()).await {
            let path = options
                .json_config
                .as_ref()
                .map(|(p, _)| p.display().to_string())
                .unwrap_or_default();
            if !options.ignore_json_errors {
                anyhow::bail!(
                    "{path}: {method}: {refused}; --json-ignore-init-errors carries on regardless"
                );
            }
            warn!(method, %refused, "{path}: entry skipped");
        }
    }
    Ok(())
}

/// Whether the state has what the call would make.
fn stands(engine: &Engine, restored: &[Entry], method: &str, params: &Value) -> bool {
    let text = |at: &str| params.pointer(at).and_then(Value::as_str);
    let same = |record: &Record, at: &[&str]| {
        record.method == method
            && at.iter().all(|at| {
                match (params.pointer(at), record.params.pointer(at)) {
                    // Transports and families are written as one likes.
                    (Some(Value::String(asked)), Some(Value::String(is))) => {
                        asked.eq_ignore_ascii_case(is)
                    }
                    (asked, is) => asked == is,
                }
            })
    };
    let any = |at: &[&str]| restored.iter().any(|entry| same(&entry.record, at));
    let device = |name: String| {
        let key = format!("bdev/{name}");
        restored.iter().any(|entry| entry.record.key == key)
    };
    let address = |at: &'static str| ["trtype", "traddr", "trsvcid"].map(|f| format!("/{at}/{f}"));
    let any_at = |at: &'static str, other: &str| {
        let address = address(at);
        let mut all: Vec<&str> = address.iter().map(String::as_str).collect();
        all.push(other);
        any(&all)
    };
    match method {
        "bdev_nvme_attach_controller" => any(&["/name"]),
        "bdev_raid_create" | "volume_create" => {
            text("/name").is_some_and(|name| engine.volumes.find(name).is_ok())
        }
        "bdev_error_create" => text("/base_name").is_some_and(|base| device(format!("EE_{base}"))),
        _ if method.starts_with("bdev_") && method.ends_with("_create") => {
            text("/name").is_some_and(|name| device(name.to_owned()))
        }
        "nvmf_create_transport" => any(&["/trtype"]),
        "nvmf_create_subsystem" => any(&["/nqn"]),
        "nvmf_subsystem_add_host" => any(&["/nqn", "/host"]),
        "nvmf_ns_add_host" => any(&["/nqn", "/nsid", "/host"]),
        "nvmf_subsystem_add_ns" => match params.pointer("/namespace/nsid") {
            Some(nsid) if nsid.as_u64() != Some(0) => any(&["/nqn", "/namespace/nsid"]),
            _ => any(&["/nqn", "/namespace/bdev_name"]),
        },
        "nvmf_subsystem_add_listener" => any_at("listen_address", "/nqn"),
        "nvmf_discovery_add_referral" => any_at("address", "/subnqn"),
        _ => false,
    }
}
