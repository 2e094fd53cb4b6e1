//! `nacre subsystem connections`: the controllers of a subsystem, with their queue pairs.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::reply::{is_discovery, items, subsystems};
use super::super::{Connection, Failure, address, output};
use nacre_engine::methods::nvmf::connected::{GetControllers, GetQpairs, SubsystemParams};

pub(super) fn run(connection: &Connection, nqn: Option<&str>) -> Result<(), Failure> {
    let mut client = connection.open()?;
    let mut all = Vec::new();
    for subsystem in subsystems(&mut client, nqn)? {
        // SPDK does not report controllers of its discovery subsystem.
        if is_discovery(&subsystem) && nqn.is_none() {
            continue;
        }
        let params = SubsystemParams {
            nqn: output::cell(subsystem.get("nqn")),
            tgt_name: None,
        };
        let controllers = client.call_for_json::<GetControllers, _>(&params)?;
        let qpairs = client.call_for_json::<GetQpairs, _>(&params)?;
        all.push(json!({ "nqn": subsystem["nqn"], "controllers": controllers, "qpairs": qpairs }));
    }
    if connection.json {
        return output::json(&Value::Array(all));
    }
    let rows = all.iter().flat_map(rows);
    output::table(
        &[
            "subsystem",
            "cntlid",
            "host",
            "queues",
            "state",
            "from",
            "to",
            "threads",
        ],
        rows,
    )
}

fn rows(subsystem: &Value) -> Vec<Vec<String>> {
    let mut qpairs: BTreeMap<u64, Vec<&Value>> = BTreeMap::new();
    for qpair in items(&subsystem["qpairs"]) {
        qpairs
            .entry(qpair["cntlid"].as_u64().unwrap_or(0))
            .or_default()
            .push(qpair);
    }
    let row = |controller: &Value| {
        let ours = qpairs
            .get(&controller["cntlid"].as_u64().unwrap_or(0))
            .map_or(&[][..], Vec::as_slice);
        let distinct = |read: &dyn Fn(&Value) -> String| {
            let mut all: Vec<String> = ours
                .iter()
                .map(|q| read(q))
                .filter(|t| !t.is_empty())
                .collect();
            all.sort();
            all.dedup();
            all.join(",")
        };
        // Each queue has a source port of its own: only the address is useful.
        let peer = |q: &Value| {
            q["peer_address"]["traddr"]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        let listens = |q: &Value| {
            if q["listen_address"].is_object() {
                address::describe(&q["listen_address"])
            } else {
                String::new()
            }
        };
        vec![
            output::cell(subsystem.get("nqn")),
            output::cell(controller.get("cntlid")),
            output::cell(controller.get("hostnqn")),
            // The count includes the admin queue, which is not an I/O queue.
            controller["num_io_qpairs"]
                .as_u64()
                .unwrap_or(0)
                .saturating_sub(1)
                .to_string(),
            distinct(&|q| output::cell(q.get("state"))),
            distinct(&peer),
            distinct(&listens),
            distinct(&|q| output::cell(q.get("thread"))),
        ]
    };
    items(&subsystem["controllers"]).iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One line per controller, whatever the number and distribution of its queues.
    #[test]
    fn a_controller_is_a_line() {
        let qpair = |qid: u64, thread: &str, port: &str| {
            json!({
                "cntlid": 1, "qid": qid, "state": "enabled", "thread": thread, "hostnqn": "h",
                "listen_address": { "trtype": "TCP", "adrfam": "IPv4", "traddr": "192.0.2.1", "trsvcid": "4420" },
                "peer_address": { "trtype": "TCP", "adrfam": "IPv4", "traddr": "192.0.2.9", "trsvcid": port },
            })
        };
        let subsystem = json!({
            "nqn": "s",
            "controllers": [
                { "cntlid": 1, "cntrltype": "IO", "hostnqn": "h", "hostid": "x", "num_io_qpairs": 3 },
                { "cntlid": 2, "cntrltype": "IO", "hostnqn": "i", "hostid": "y", "num_io_qpairs": 0 },
            ],
            "qpairs": [qpair(0, "r0", "1"), qpair(1, "r0", "2"), qpair(2, "r1", "3")],
        });
        assert_eq!(
            rows(&subsystem),
            [
                vec![
                    "s",
                    "1",
                    "h",
                    "2",
                    "enabled",
                    "192.0.2.9",
                    "tcp://192.0.2.1:4420",
                    "r0,r1"
                ],
                vec!["s", "2", "i", "0", "", "", "", ""],
            ]
        );
    }
}
