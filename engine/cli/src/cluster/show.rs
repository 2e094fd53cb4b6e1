//! Prints the cluster: status, nodes, volumes, events.

use std::io::IsTerminal;
use std::time::Duration;

use serde_json::Value;

use super::super::reply::items;
use super::super::{Connection, Failure, output};
use nacre_engine::methods::cluster::events::{GetClusterEvents, GetClusterEventsParams};
use nacre_engine::methods::cluster::pools::GetPools;
use nacre_engine::methods::cluster::status::{GetClusterStatus, GetNodes};
use nacre_engine::methods::cluster::volumes::GetVolumes;
use nacre_engine_rpc::NoParams;

/// Interval of `--watch` and `--follow`.
const AGAIN: Duration = Duration::from_secs(1);
/// Decisions on the page of `status`.
const DECISIONS: u64 = 5;

pub(super) fn status(connection: &Connection, watch: bool) -> Result<(), Failure> {
    let mut client = connection.open()?;
    let mut after = 0;
    loop {
        let status = client.call_for_json::<GetClusterStatus, _>(&NoParams {})?;
        if connection.json {
            output::json(&status)?;
        } else {
            if watch && std::io::stdout().is_terminal() {
                // Home, and nothing below: the screen does not flicker.
                output::line("\x1b[H\x1b[J")?;
            }
            page(&status)?;
            let params = GetClusterEventsParams { after };
            let answer = client.call_for_json::<GetClusterEvents, _>(&params)?;
            // The next page has the same ones, and later ones.
            after = answer["last"]
                .as_u64()
                .unwrap_or(0)
                .saturating_sub(DECISIONS);
            for line in decision_lines(&answer["events"], &status["nodes"]) {
                output::line(&line)?;
            }
        }
        if !watch {
            return match status["problem"].as_str() {
                None => Ok(()),
                Some(_) => Err(Failure::Failed(anyhow::anyhow!(
                    "etcd does not show the cluster"
                ))),
            };
        }
        std::thread::sleep(AGAIN);
    }
}

fn page(status: &Value) -> Result<(), Failure> {
    if let Some(line) = cluster_line(&status["cluster"]) {
        output::line(&line)?;
    }
    output::line(&this_line(&status["this_node"]))?;
    if let Some(problem) = status["problem"].as_str() {
        return output::line(&format!("problem    {problem}"));
    }
    let volumes = &status["volumes"];
    output::line(&format!("volumes    {}", volumes_line(volumes)))?;
    if let Some(running) = status["operations"].as_u64().filter(|count| *count > 0) {
        output::line(&format!("moves      {running} in progress"))?;
    }
    if let Some(line) = brake_line(&status["brake"], items(&status["nodes"])) {
        output::line(&line)?;
    }
    for line in removal_lines(&status["removals"]) {
        output::line(&line)?;
    }
    output::line("")?;
    etcd_table(&status["etcd"])?;
    output::line("")?;
    node_table(&status["nodes"])
}

fn cluster_line(cluster: &Value) -> Option<String> {
    let lease = Duration::from_millis(cluster["lease_ms"].as_u64()?);
    Some(format!(
        "cluster    {}, id {}, lease {}",
        output::cell(cluster.get("name")),
        output::cell(cluster.get("id")),
        humantime::format_duration(lease)
    ))
}

fn this_line(this: &Value) -> String {
    let state = output::cell(this.get("state"));
    let more = match (this["why"].as_str(), this["incarnation"].as_u64()) {
        (Some(why), _) => format!(": {why}"),
        (None, Some(_)) if this["lease_is_good"] == true => ", its lease is good".to_owned(),
        (None, Some(_)) => ", and cannot renew its lease now".to_owned(),
        (None, None) => String::new(),
    };
    format!("this node  {state}{more}")
}

fn volumes_line(volumes: &Value) -> String {
    let number = |key: &str| volumes[key].as_u64().unwrap_or(0);
    let mut text = format!(
        "{} healthy, {} degraded, {} without a holder",
        number("healthy"),
        number("degraded"),
        number("without_holder")
    );
    match number("unreadable") {
        0 => {}
        count => text += &format!(", {count} unreadable"),
    }
    text
}

fn brake_line(brake: &Value, nodes: &[Value]) -> Option<String> {
    let gone = brake["gone"].as_array()?;
    let name = |id: &Value| {
        let node = nodes.iter().find(|node| node["id"] == *id);
        node.map_or_else(
            || output::cell(Some(id)),
            |node| output::cell(node.get("name")),
        )
    };
    let names: Vec<String> = gone.iter().map(name).collect();
    let of = match brake["zone"].as_str() {
        Some(zone) => format!("{} of zone {zone}", brake["of"]),
        None => brake["of"].to_string(),
    };
    Some(format!(
        "brake      {} of {of} nodes went at once ({}): no lost replica is replaced until \
         `nacre cluster repair --go`",
        gone.len(),
        names.join(", ")
    ))
}

/// Removals that wait for a node, of volumes that may be deleted.
fn removal_lines(removals: &Value) -> Vec<String> {
    let first = items(&removals["first"]);
    let more = removals["count"].as_u64().unwrap_or(0) as usize;
    let more = more.saturating_sub(first.len());
    let line = |one: &Value| format!("waits      {}", removal(one));
    let mut lines: Vec<String> = first.iter().map(line).collect();
    if more > 0 {
        lines.push(format!(
            "waits      {}",
            output::count(more as u64, "more removal")
        ));
    }
    lines
}

fn removal(one: &Value) -> String {
    let text = |key: &str| output::cell(one.get(key));
    let since = match one["since"].as_str() {
        Some(since) => format!(", since {since}"),
        None => String::new(),
    };
    format!("{} (volume {}{since})", text("text"), text("volume"))
}

fn etcd_table(members: &Value) -> Result<(), Failure> {
    let rows = items(members).iter().map(|member| {
        let size = |key: &str| member[key].as_u64().map(output::bytes).unwrap_or_default();
        let latency = member["latency_us"].as_u64().unwrap_or(0);
        vec![
            output::cell(member.get("endpoint")),
            member_state(member),
            output::cell(member.get("version")),
            format!("{}.{} ms", latency / 1000, latency % 1000 / 100),
            size("in_use_bytes"),
            size("size_bytes"),
            size("quota_bytes"),
        ]
    });
    let titles = [
        "etcd", "state", "version", "latency", "in use", "size", "quota",
    ];
    output::table(&titles, rows)
}

fn member_state(member: &Value) -> String {
    let alarms = items(&member["alarms"]);
    if let Some(error) = member["error"].as_str() {
        return format!("silent: {error}");
    }
    if !alarms.is_empty() {
        return format!("alarm: {}", output::cell(member.get("alarms")));
    }
    match (&member["is_leader"], &member["has_leader"]) {
        (Value::Bool(true), _) => "leader",
        (_, Value::Bool(true)) => "follower",
        _ => "without a leader",
    }
    .to_owned()
}

pub(super) fn nodes(connection: &Connection) -> Result<(), Failure> {
    let nodes = connection.call_for_json::<GetNodes>(&NoParams {})?;
    if connection.json {
        return output::json(&nodes);
    }
    node_table(&nodes)
}

fn node_table(nodes: &Value) -> Result<(), Failure> {
    let titles = [
        "node", "lease", "age", "held", "replicas", "in sync", "acts", "version", "id",
    ];
    output::table(&titles, items(nodes).iter().map(node_row))
}

fn node_row(node: &Value) -> Vec<String> {
    let text = |key: &str| output::cell(node.get(key));
    let name = if node["this_node"] == true {
        format!("{} (this)", text("name"))
    } else {
        text("name")
    };
    let acts = ["cordon", "drain", "evict"].into_iter();
    let acts: Vec<&str> = acts.filter(|key| node[*key] == true).collect();
    let age = node["lease_age_ms"].as_u64();
    vec![
        name.trim_start().to_owned(),
        text("lease"),
        age.map(|ms| format!("{ms} ms")).unwrap_or_default(),
        text("held"),
        text("replicas"),
        text("in_sync"),
        acts.join(","),
        text("version"),
        text("id"),
    ]
}

pub(super) fn volumes(connection: &Connection) -> Result<(), Failure> {
    let volumes = connection.call_for_json::<GetVolumes>(&NoParams {})?;
    if connection.json {
        return output::json(&volumes);
    }
    let titles = [
        "volume", "state", "holder", "lease", "in sync", "shown by", "id",
    ];
    output::table(&titles, items(&volumes).iter().map(volume_row))?;
    for volume in items(&volumes) {
        for one in items(&volume["removals"]) {
            let name = output::cell(volume.get("name"));
            output::line(&format!("{name} waits: {}", removal(one)))?;
        }
    }
    Ok(())
}

fn volume_row(volume: &Value) -> Vec<String> {
    let text = |key: &str| output::cell(volume.get(key));
    // A node without a description has no name.
    let node = |node: &Value| match &node["name"] {
        Value::String(name) => name.clone(),
        _ => output::cell(node.get("id")),
    };
    let lease = match (&volume["holder"], &volume["lease_stands"]) {
        (Value::Null, _) => "",
        (_, Value::Bool(true)) => "stands",
        _ => "over",
    };
    let nodes: Vec<String> = items(&volume["nodes"]).iter().map(node).collect();
    vec![
        text("name"),
        text("state"),
        node(&volume["holder"]),
        lease.to_owned(),
        format!("{} of {}", text("in_sync"), text("replicas")),
        nodes.join(","),
        text("id"),
    ]
}

pub(super) fn pools(connection: &Connection) -> Result<(), Failure> {
    let pools = connection.call_for_json::<GetPools>(&NoParams {})?;
    if connection.json {
        return output::json(&pools);
    }
    let titles = [
        "pool",
        "node",
        "class",
        "state",
        "size",
        "free",
        "promised",
        "room",
        "thin room",
        "id",
    ];
    output::table(&titles, items(&pools).iter().map(pool_row))
}

fn pool_row(pool: &Value) -> Vec<String> {
    let text = |key: &str| output::cell(pool.get(key));
    let size = |key: &str| pool[key].as_u64().map(output::bytes).unwrap_or_default();
    let node = match &pool["node_name"] {
        Value::String(name) => name.clone(),
        _ => text("node"),
    };
    vec![
        text("name"),
        node,
        text("class"),
        text("state"),
        size("total_bytes"),
        size("free_bytes"),
        size("promised_bytes"),
        size("room_bytes"),
        size("thin_room_bytes"),
        text("id"),
    ]
}

pub(super) fn events(connection: &Connection, after: u64, follow: bool) -> Result<(), Failure> {
    let mut client = connection.open()?;
    // Names are for people: without them the text has ids.
    let nodes = if connection.json {
        Value::Null
    } else {
        let nodes = client.call_for_json::<GetNodes, _>(&NoParams {});
        nodes.unwrap_or_default()
    };
    let mut after = after;
    loop {
        let answer =
            client.call_for_json::<GetClusterEvents, _>(&GetClusterEventsParams { after })?;
        if connection.json && !follow {
            return output::json(&answer["events"]);
        }
        for event in items(&answer["events"]) {
            let line = if connection.json {
                event.to_string()
            } else {
                event_line(event, items(&nodes))
            };
            output::line(&line)?;
        }
        if !follow {
            return Ok(());
        }
        after = answer["last"].as_u64().unwrap_or(0);
        std::thread::sleep(AGAIN);
    }
}

/// The last decisions, with a title; nothing if there is none.
fn decision_lines(events: &Value, nodes: &Value) -> Vec<String> {
    let (events, nodes) = (items(events), items(nodes));
    let first = events.len().saturating_sub(DECISIONS as usize);
    if events.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![String::new(), "LAST DECISIONS OF THIS NODE".to_owned()];
    lines.extend(events[first..].iter().map(|event| event_line(event, nodes)));
    lines
}

fn event_line(event: &Value, nodes: &[Value]) -> String {
    let mut text = output::cell(event.get("text"));
    for node in nodes {
        if let (Some(id), Some(name)) = (node["id"].as_str(), node["name"].as_str()) {
            text = text.replace(id, name);
        }
    }
    format!(
        "{:>5}  {}  {:21}  {text}",
        event["number"].as_u64().unwrap_or(0),
        output::cell(event.get("time")),
        output::cell(event.get("event"))
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn members_of_etcd_have_one_state() {
        let member = |error: Option<&str>, is_leader, has_leader, alarms: &[&str]| {
            let answer = json!({
                "error": error, "is_leader": is_leader, "has_leader": has_leader, "alarms": alarms,
            });
            member_state(&answer)
        };
        assert_eq!(
            member(Some("refused"), false, false, &[]),
            "silent: refused"
        );
        assert_eq!(member(None, true, true, &["NOSPACE"]), "alarm: NOSPACE");
        assert_eq!(member(None, true, true, &[]), "leader");
        assert_eq!(member(None, false, true, &[]), "follower");
        assert_eq!(member(None, false, false, &[]), "without a leader");
    }

    #[test]
    fn rows_of_nodes() {
        let row = node_row(&json!({
            "id": "7", "name": "ant", "this_node": true, "lease": "good", "lease_age_ms": 120,
            "cordon": true, "drain": true, "held": 2, "replicas": 3, "in_sync": 3,
            "version": "0.1.0",
        }));
        let expected = "ant (this)|good|120 ms|2|3|3|cordon,drain|0.1.0|7";
        assert_eq!(row.join("|"), expected);
        let row = node_row(&json!({
            "id": "8", "name": null, "lease": "none", "lease_age_ms": null, "held": 0,
            "replicas": 1, "in_sync": 0,
        }));
        assert_eq!(row.join("|"), "|none||0|1|0|||8");
    }

    #[test]
    fn rows_of_pools() {
        let row = pool_row(&json!({
            "id": "7", "name": "p", "node": "1", "node_name": "ant", "class": "nvme",
            "state": "online", "total_bytes": 1 << 30, "free_bytes": 1 << 29,
            "promised_bytes": 0, "room_bytes": 1 << 20, "thin_room_bytes": 1 << 21,
        }));
        let expected = "p|ant|nvme|online|1.0 GiB|512.0 MiB|0 B|1.0 MiB|2.0 MiB|7";
        assert_eq!(row.join("|"), expected);
    }

    #[test]
    fn the_line_of_the_brake() {
        let nodes = [json!({ "id": "1", "name": "ant" })];
        let brake = json!({ "zone": "a", "gone": ["1", "2"], "of": 3 });
        let line = brake_line(&brake, &nodes).expect("a brake");
        assert!(
            line.starts_with("brake      2 of 3 of zone a nodes went at once (ant, 2)"),
            "{line}"
        );
        assert_eq!(brake_line(&Value::Null, &nodes), None);
    }

    #[test]
    fn the_lines_of_removals() {
        let removals = json!({ "count": 3, "first": [
            { "text": "removal of a device: node ant has no lease", "volume": "7", "since": "now" },
            { "text": "removal of a host: node bee failed", "volume": "8", "since": null },
        ]});
        let expected = [
            "waits      removal of a device: node ant has no lease (volume 7, since now)",
            "waits      removal of a host: node bee failed (volume 8)",
            "waits      1 more removal",
        ];
        assert_eq!(removal_lines(&removals), expected);
        assert_eq!(removal_lines(&Value::Null), [""; 0]);
    }

    #[test]
    fn rows_of_volumes() {
        let row = volume_row(&json!({
            "id": "7", "name": "v", "state": "degraded", "lease_stands": true,
            "holder": { "id": "1", "name": "ant" }, "replicas": 3, "in_sync": 2,
            "nodes": [{ "id": "1", "name": "ant" }, { "id": "2", "name": null }],
        }));
        assert_eq!(row.join("|"), "v|degraded|ant|stands|2 of 3|ant,2|7");
        let row = volume_row(&json!({
            "id": "8", "name": "w", "state": "without_holder", "lease_stands": false,
            "holder": { "id": "2", "name": null }, "replicas": 1, "in_sync": 1, "nodes": [],
        }));
        assert_eq!(row.join("|"), "w|without_holder|2|over|1 of 1||8");
        let row = volume_row(&json!({
            "id": "9", "name": null, "state": "unreadable", "lease_stands": false,
            "holder": null, "replicas": 0, "in_sync": 0, "nodes": [],
        }));
        assert_eq!(row.join("|"), "|unreadable|||0 of 0||9");
    }

    #[test]
    fn the_line_of_this_node() {
        let line = |this: Value| this_line(&this);
        assert_eq!(
            line(json!({ "state": "joined", "incarnation": 7, "lease_is_good": true })),
            "this node  joined, its lease is good"
        );
        assert_eq!(
            line(json!({ "state": "joined", "incarnation": 7, "lease_is_good": false })),
            "this node  joined, and cannot renew its lease now"
        );
        assert_eq!(
            line(json!({ "state": "out", "why": "etcd has lost its data" })),
            "this node  out: etcd has lost its data"
        );
    }

    #[test]
    fn the_page_has_the_last_decisions() {
        let event = |number: u64| json!({ "number": number, "time": "T", "event": "node_gone", "text": "node 77 is gone" });
        let nodes = json!([{ "id": "77", "name": "bee" }]);
        assert_eq!(decision_lines(&json!([]), &nodes), [""; 0]);
        assert_eq!(decision_lines(&Value::Null, &nodes), [""; 0]);
        let few = decision_lines(&json!([event(1)]), &nodes);
        let line = "    1  T  node_gone              node bee is gone";
        assert_eq!(few, ["", "LAST DECISIONS OF THIS NODE", line]);
        let events: Vec<Value> = (1..=8).map(event).collect();
        let many = decision_lines(&json!(events), &nodes);
        assert_eq!(many.len(), 7);
        assert!(many[2].starts_with("    4") && many[6].starts_with("    8"));
    }

    #[test]
    fn events_name_nodes() {
        let event = json!({
            "number": 12, "time": "2026-01-01T00:00:00Z", "event": "node_gone",
            "text": "the lease of node 77 is over",
        });
        let nodes = [json!({ "id": "77", "name": "bee" })];
        assert_eq!(
            event_line(&event, &nodes),
            "   12  2026-01-01T00:00:00Z  node_gone              the lease of node bee is over"
        );
    }
}
