//! Upgrades records that an earlier version of this program stored.

use std::collections::BTreeSet;

use crate::store::Record;

/// The changed records of volumes published by an earlier version, whose subsystems report no ANA
/// states. Their hosts used the path that they had connected first. The changed records enable ANA
/// reporting, with TCP as non-optimized.
pub(super) fn with_ana(records: &[Record]) -> Vec<Record> {
    let silent = |r: &&Record| r.method == "volume_publish" && r.params["ana_reporting"] != false;
    let nqns: BTreeSet<&str> = records
        .iter()
        .filter(silent)
        .filter_map(|r| r.params["nqn"].as_str())
        .collect();
    let of = |r: &Record| r.params["nqn"].as_str().is_some_and(|n| nqns.contains(n));
    let old: BTreeSet<&str> = records
        .iter()
        .filter(|r| {
            r.method == "nvmf_create_subsystem" && of(r) && r.params["ana_reporting"] != true
        })
        .filter_map(|r| r.params["nqn"].as_str())
        .collect();
    let changed = |record: &Record| {
        if !old.contains(record.params["nqn"].as_str()?) {
            return None;
        }
        let mut record = record.clone();
        match record.method.as_str() {
            "nvmf_create_subsystem" => record.params["ana_reporting"] = true.into(),
            "nvmf_subsystem_add_listener" if record.params["listen_address"]["trtype"] == "TCP" => {
                record.params["ana_state"] = "non_optimized".into();
            }
            _ => return None,
        }
        Some(record)
    };
    records.iter().filter_map(changed).collect()
}
