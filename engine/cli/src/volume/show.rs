//! Prints volumes: their state, replicas and resyncs, and why a replica is out of sync.

use std::io::IsTerminal;
use std::time::Duration;

use serde_json::Value;

use super::super::reply::items;
use super::super::{Connection, Failure, output};
use nacre_engine::methods::volume::NameParams;
use nacre_engine::methods::volume::list::{GetVolume, List};
use nacre_engine_rpc::NoParams;

pub(super) fn list(connection: &Connection) -> Result<(), Failure> {
    let volumes = connection.call_for_json::<List>(&NoParams {})?;
    if connection.json {
        return output::json(&volumes);
    }
    let rows = items(&volumes).iter().map(|volume| {
        let replicas = items(&volume["replicas"]);
        let good = replicas
            .iter()
            .filter(|r| r["state"] == "in_sync" && r["attached"] == true);
        // The node that serves a volume knows this.
        let in_sync = if volume["state"] == "standby" {
            String::new()
        } else {
            format!("{}/{}", good.count(), replicas.len())
        };
        vec![
            output::cell(volume.get("name")),
            output::cell(volume.get("state")),
            output::bytes(bytes(volume)),
            in_sync,
            output::cell(volume.get("dirty_regions")),
            output::cell(volume.get("subsystems")),
            output::cell(volume["settings"].get("description")),
        ]
    });
    output::table(
        &[
            "name",
            "state",
            "size",
            "in sync",
            "dirty",
            "subsystems",
            "description",
        ],
        rows,
    )
}

pub(super) fn run(connection: &Connection, name: &str, watch: bool) -> Result<(), Failure> {
    let mut client = connection.open()?;
    let params = NameParams {
        name: name.to_owned(),
    };
    loop {
        let volume = client.call_for_json::<GetVolume, _>(&params)?;
        if connection.json {
            output::json(&volume)?
        } else {
            if watch && std::io::stdout().is_terminal() {
                // Home, and nothing below: the screen does not flicker.
                output::line("\x1b[H\x1b[J")?;
            }
            print(&volume)?;
        }
        if !watch {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn bytes(volume: &Value) -> u64 {
    let number = |key: &str| volume[key].as_u64().unwrap_or(0);
    number("num_blocks").saturating_mul(number("block_size"))
}

pub(super) fn size(volume: &Value) -> String {
    let (blocks, block) = (&volume["num_blocks"], &volume["block_size"]);
    format!(
        "{}: {blocks} blocks of {block} bytes",
        output::bytes(bytes(volume))
    )
}

fn print(volume: &Value) -> Result<(), Failure> {
    let text = |key: &str| output::cell(volume.get(key));
    let with_why = |state: String, why: &Value| match why.as_str() {
        Some(why) => format!("{state}: {why}"),
        None => state,
    };
    let region = volume["region_size"].as_u64().unwrap_or(0);
    let mut lines = vec![
        ("name", text("name")),
        ("uuid", text("uuid")),
        ("state", with_why(text("state"), &volume["why"])),
        ("size", size(volume)),
        (
            "epoch",
            format!("{}, revision {}", text("epoch"), text("revision")),
        ),
        (
            "dirty",
            format!(
                "{} of {} regions of {}",
                text("dirty_regions"),
                text("num_regions"),
                output::bytes(region)
            ),
        ),
    ];
    if !items(&volume["subsystems"]).is_empty() {
        lines.push(("subsystems", text("subsystems")));
    }
    let settings = volume["settings"].as_object().into_iter().flatten();
    let settings: Vec<String> = settings
        .filter(|(_, value)| *value != "")
        .map(|(key, value)| format!("{key} {}", output::cell(Some(value))))
        .collect();
    lines.push(("settings", settings.join(", ")));
    if volume["verify"].is_object() {
        lines.push(("verify", verify(&volume["verify"])));
    }
    for (key, value) in lines {
        output::line(&format!("{key:<11} {value}"))?;
    }
    output::line("")?;
    // A standby has no connection to the replicas: that is no fault.
    let is_standby = volume["state"] == "standby";
    let rows = items(&volume["replicas"]).iter();
    let rows = rows.map(|one| replica(one, is_standby));
    output::table(
        &[
            "slot", "device", "state", "over", "fencing", "read", "write", "reads", "writes",
            "errors", "replica",
        ],
        rows,
    )?;
    for replica in items(&volume["replicas"]) {
        let device = device(replica);
        if let Some(why) = replica["why"].as_str() {
            output::line(&format!("\n{device} is out: {why}"))?;
        }
        if replica["resync"].is_object() {
            output::line(&format!("\n{device} gets {}", progress(&replica["resync"])))?;
        }
    }
    Ok(())
}

/// The device of a replica: its name on its node, or the name of an lvol, says more than its UUID.
fn device(replica: &Value) -> String {
    device_of_node(replica)
        .unwrap_or_else(|| output::cell(replica.get("lvol").or_else(|| replica.get("device"))))
}

/// The replica as `NODE:DEVICE`; `None` outside a cluster.
pub(super) fn device_of_node(replica: &Value) -> Option<String> {
    let (node, device) = (replica["node"].as_str()?, replica["node_device"].as_str()?);
    Some(format!("{node}:{device}"))
}

fn replica(replica: &Value, is_standby: bool) -> Vec<String> {
    let text = |key: &str| output::cell(replica.get(key));
    let time = |key: &str| match replica[key].as_u64() {
        Some(us) => format!("{us} µs"),
        None => String::new(),
    };
    let mut state = text("state");
    if replica["offline"] == true {
        state.push_str(", offline");
    } else if replica["attached"] == false && !is_standby {
        state.push_str(", not there");
    }
    vec![
        text("slot"),
        device(replica),
        state,
        text("transport"),
        text("fencing"),
        time("read_latency_us"),
        time("write_latency_us"),
        text("reads"),
        text("writes"),
        text("errors"),
        text("id"),
    ]
}

/// The kind of a resync, its source, its rate, and the remaining time.
pub(super) fn progress(resync: &Value) -> String {
    let number = |key: &str| resync[key].as_u64().unwrap_or(0);
    let (total, left) = (number("total_bytes"), number("left_bytes"));
    let what = match resync["kind"].as_str() {
        Some("partial") => "missed writes",
        Some("reconcile") => "writes in flight at an unclean stop",
        _ => "everything",
    };
    let percent = ((total.saturating_sub(left)) * 100)
        .checked_div(total)
        .unwrap_or(100);
    let mut text = format!(
        "{what}: {percent} % of {}, {} left",
        output::bytes(total),
        output::bytes(left)
    );
    if let Some(source) = resync["source"].as_str() {
        text.push_str(&format!(", from {source}"));
    }
    text.push_str(&format!(", {}/s", output::bytes(number("bytes_per_s"))));
    if let Some(seconds) = resync["left_s"].as_u64() {
        let time = humantime::format_duration(Duration::from_secs(seconds));
        text.push_str(&format!(", {time} to go"));
    }
    text
}

/// The progress of a verification.
pub(super) fn verify(verify: &Value) -> String {
    let number = |key: &str| verify[key].as_u64().unwrap_or(0);
    let running = if verify["running"] == true {
        "running"
    } else {
        "ended"
    };
    let mut text = format!(
        "{running}: {} of {} compared, {} blocks differ, {} repaired",
        output::bytes(number("compared_bytes")),
        output::bytes(number("total_bytes")),
        number("different_blocks"),
        number("repaired_blocks"),
    );
    if !items(&verify["examples"]).is_empty() {
        text.push_str(&format!(
            "; the first: {}",
            output::cell(verify.get("examples"))
        ));
    }
    text
}
