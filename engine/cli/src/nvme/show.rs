//! `nacre nvme show`: the drives that the daemon has attached, and their health.

use serde_json::{Value, json};

use super::super::reply::items;
use super::super::{Connection, Failure, output};
use nacre_engine::methods::bdev::nvme::health::{DriveParams, GetHealth, GetLogs};
use nacre_engine::methods::bdev::nvme::list::{GetNvmeControllers, NvmeControllersParams};

/// Prints one drive with all details, or all drives in a table.
pub(super) fn run(connection: &Connection, name: Option<&str>) -> Result<(), Failure> {
    let controllers = connection.call_for_json::<GetNvmeControllers>(&NvmeControllersParams {
        name: name.map(str::to_owned),
    })?;
    let drives: Vec<&Value> = items(&controllers)
        .iter()
        .filter(|one| one["ctrlrs"][0]["drive"].is_object())
        .collect();
    let Some(name) = name else {
        return if connection.json {
            output::json(&json!(drives))
        } else {
            table(&drives)
        };
    };
    let params = DriveParams {
        name: name.to_owned(),
    };
    let health = connection.call_for_json::<GetHealth>(&params)?;
    let logs = connection.call_for_json::<GetLogs>(&params)?;
    let Some(drive) = drives.first() else {
        return Err(Failure::Usage(format!(
            "\"{name}\" is not a drive of this machine"
        )));
    };
    if connection.json {
        output::json(&json!({ "controller": drive, "health": health, "logs": logs }))
    } else {
        print(&drive["ctrlrs"][0], name, &health, &logs)
    }
}

fn table(drives: &[&Value]) -> Result<(), Failure> {
    let rows = drives.iter().map(|drive| {
        let one = &drive["ctrlrs"][0];
        let info = &one["drive"]["info"];
        vec![
            output::cell(drive.get("name")),
            output::cell(one.pointer("/trid/traddr")),
            output::cell(one.pointer("/drive/status/state")),
            output::cell(info.get("model")),
            output::cell(info.get("serial")),
            output::cell(info.get("firmware")),
            output::cell(one.get("bdevs")),
        ]
    });
    let header = [
        "name", "address", "state", "model", "serial", "firmware", "devices",
    ];
    output::table(&header, rows)
}

fn print(one: &Value, name: &str, health: &Value, logs: &Value) -> Result<(), Failure> {
    let at = |value: &Value, pointer: &str| output::cell(value.pointer(pointer));
    let (info, status) = (&one["drive"]["info"], &one["drive"]["status"]);
    let number = |value: &Value, key: &str| value[key].as_u64().unwrap_or(0);
    let units = |key: &str| output::bytes(number(health, key).saturating_mul(512_000));
    let state = match one["error"].as_str() {
        Some(why) => format!("{}: {why}", at(status, "/state")),
        None => at(status, "/state"),
    };
    let pointers = if info["sgl"] == true { "SGL" } else { "PRP" };
    let doorbells = if info["shadow_doorbells"] == true {
        ", shadow doorbells"
    } else {
        ""
    };
    let lines = [
        ("name", name.to_owned()),
        ("state", state),
        ("address", at(one, "/trid/traddr")),
        ("model", at(info, "/model")),
        ("serial", at(info, "/serial")),
        ("firmware", at(info, "/firmware")),
        ("nvme", at(info, "/version")),
        ("subsystem", at(info, "/subnqn")),
        ("node", at(info, "/numa_node")),
        (
            "queues",
            format!(
                "{} in use of {}, {} commands each, {pointers}{doorbells}",
                number(status, "queues"),
                number(info, "io_queues"),
                number(info, "io_queue_depth"),
            ),
        ),
        (
            "transfer",
            format!(
                "at most {}",
                output::bytes(number(info, "max_transfer_bytes"))
            ),
        ),
        ("devices", at(one, "/bdevs")),
        (
            "errors",
            format!(
                "{} resets, {} timeouts, {} aborts, {} retries, {} losses",
                number(status, "resets"),
                number(status, "timeouts") + number(status, "admin_timeouts"),
                number(status, "aborts"),
                number(status, "resubmitted"),
                number(status, "losses"),
            ),
        ),
        ("", String::new()),
        (
            "health",
            match items(&health["warnings"]) {
                [] => "no warning".to_owned(),
                _ => format!("warns of {}", at(health, "/warnings")),
            },
        ),
        (
            "temperature",
            format!("{} °C", at(health, "/temperature_celsius")),
        ),
        (
            "wear",
            format!(
                "{} % used, {} % of the spare left (warns at {} %)",
                number(health, "percentage_used"),
                number(health, "available_spare_percentage"),
                number(health, "available_spare_threshold_percentage"),
            ),
        ),
        ("read", units("data_units_read")),
        ("written", units("data_units_written")),
        (
            "life",
            format!(
                "{} hours, {} power cycles, {} unsafe shutdowns",
                number(health, "power_on_hours"),
                number(health, "power_cycles"),
                number(health, "unsafe_shutdowns"),
            ),
        ),
        ("media errors", at(health, "/media_errors")),
    ];
    for (key, value) in lines {
        output::line(format!("{key:<13}{value}").trim_end())?;
    }
    let slots = items(&logs["firmware"]["slots"]);
    for slot in slots {
        let active = if slot[0] == logs["firmware"]["active_slot"] {
            ", active"
        } else {
            ""
        };
        output::line(&format!(
            "{:<13}{}{active}",
            format!("slot {}", output::cell(slot.get(0))),
            output::cell(slot.get(1))
        ))?;
    }
    for refused in items(&one["refused"]) {
        let (device, why) = (at(refused, "/bdev"), at(refused, "/why"));
        output::line(&format!("\n{device} is not used: {why}"))?;
    }
    let errors = items(&logs["errors"]);
    if errors.is_empty() {
        return Ok(());
    }
    output::line("")?;
    let columns = [
        ("error", "/error_count"),
        ("queue", "/sqid"),
        ("opcode", "/opcode"),
        ("nsid", "/nsid"),
        ("lba", "/lba"),
        ("status", "/status"),
    ];
    output::columns(&logs["errors"], &columns)
}
