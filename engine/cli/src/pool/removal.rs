//! `nacre pool remove-disk`: begins, follows or cancels the removal of a disk.

use std::time::Duration;

use serde_json::Value;

use super::super::reply::items;
use super::super::{Connection, Failure, output};
use super::{disk_names, number};
use nacre_engine::methods::pool::{GetPool, PoolParams, RemoveDisk, RemoveDiskParams};

/// How often a command that waits asks for the progress.
const ASK: Duration = Duration::from_secs(1);

pub(super) fn run(
    connection: &Connection,
    params: &RemoveDiskParams,
    wait: bool,
) -> Result<(), Failure> {
    // The name of the device may go with the removal.
    let before = get(connection, &params.pool)?;
    let mut pool = connection.call_for_json::<RemoveDisk>(params)?;
    // The caller may know the disk by an alias.
    let disk = find(&before, &params.disk).or_else(|| {
        let mut disks = items(&pool["disks"]).iter();
        disks.find(|disk| disk.get("leaving").is_some())
    });
    let id = disk.map(|disk| disk["uuid"].clone());
    let present = |pool: &Value| {
        let mut disks = items(&pool["disks"]).iter();
        disks
            .find(|disk| Some(&disk["uuid"]) == id.as_ref())
            .cloned()
    };
    if wait {
        let mut last = String::new();
        while let Some(disk) = present(&pool) {
            if disk.get("leaving").is_none() {
                let cause = "the disk stays in the pool: `nacre events` has the cause";
                return Err(Failure::Failed(anyhow::anyhow!(cause)));
            }
            let now = line(&disk);
            if !connection.json && now != last {
                output::line(&now)?;
            }
            last = now;
            std::thread::sleep(ASK);
            pool = get(connection, &params.pool)?;
        }
    }
    if connection.json {
        return output::json(&pool);
    }
    match present(&pool) {
        Some(disk) => output::line(&line(&disk)),
        None => output::line(&format!(
            "{} has {}",
            output::cell(pool.get("name")),
            disk_names(&pool)
        )),
    }
}

fn get(connection: &Connection, pool: &str) -> Result<Value, Failure> {
    let pool = pool.to_owned();
    connection.call_for_json::<GetPool>(&PoolParams { pool })
}

fn find<'a>(pool: &'a Value, disk: &str) -> Option<&'a Value> {
    let mut disks = items(&pool["disks"]).iter();
    disks.find(|known| known["name"] == disk || known["uuid"] == disk)
}

/// The state of a disk in a table.
pub(super) fn state(disk: &Value) -> String {
    match disk.get("leaving") {
        Some(leaving) => format!("leaving, {} %", number(leaving, "percent")),
        None => "in".to_owned(),
    }
}

/// The progress of a disk.
fn line(disk: &Value) -> String {
    let name = output::cell(disk.get("name"));
    let Some(leaving) = disk.get("leaving") else {
        return format!("{name} stays in the pool");
    };
    let (percent, left) = (number(leaving, "percent"), number(leaving, "left_bytes"));
    let mut line = format!(
        "{name} is leaving: {percent} %, {} left",
        output::bytes(left)
    );
    if let Some(seconds) = leaving["seconds_left"].as_u64() {
        line += &format!(", about {seconds} s");
    }
    line
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Goal: the words for a disk. Method: a disk that stays, and one that leaves with and without
    /// an estimate.
    #[test]
    fn words_for_a_disk() {
        let mut disk = json!({ "name": "disk1" });
        assert_eq!(
            (state(&disk), line(&disk)),
            ("in".into(), "disk1 stays in the pool".into())
        );
        disk["leaving"] = json!({ "percent": 25, "left_bytes": 3 << 20 });
        assert_eq!(state(&disk), "leaving, 25 %");
        assert_eq!(line(&disk), "disk1 is leaving: 25 %, 3.0 MiB left");
        disk["leaving"]["seconds_left"] = json!(7);
        assert_eq!(
            line(&disk),
            "disk1 is leaving: 25 %, 3.0 MiB left, about 7 s"
        );
    }
}
