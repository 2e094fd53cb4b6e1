//! `bdev_set_qos_limit`: limits of a device per second.
//!
//! Limits have their own record, `qos/<name>`, beside the device's: they can change without
//! creating the device again, and are deleted with it.

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_bdev::qos::RateLimits;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::refusal::OrRefuse;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::device_records::{forget_limits, limits_key};
use crate::store::{Change, Edit, Record};

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<SetQosLimit>();
}

const MIB: u64 = 1 << 20;

/// Limits in SPDK's units; 0: none.
#[derive(Debug, Clone, Copy, Default, Serialize, JsonSchema)]
pub(super) struct Assigned {
    rw_ios_per_sec: u64,
    rw_mbytes_per_sec: u64,
    r_mbytes_per_sec: u64,
    w_mbytes_per_sec: u64,
}

impl Assigned {
    pub(super) fn of(limits: RateLimits) -> Self {
        Self {
            rw_ios_per_sec: limits.rw_ios,
            rw_mbytes_per_sec: limits.rw_bytes / MIB,
            r_mbytes_per_sec: limits.read_bytes / MIB,
            w_mbytes_per_sec: limits.write_bytes / MIB,
        }
    }
}

pub struct SetQosLimit;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SetQosLimitParams {
    /// The bdev: its name, alias or UUID.
    pub name: String,
    /// Reads and writes per second. 0 removes the limit, here and below. Left out: unchanged.
    pub rw_ios_per_sec: Option<u64>,
    /// MiB per second, reads and writes together.
    pub rw_mbytes_per_sec: Option<u64>,
    /// MiB per second.
    pub r_mbytes_per_sec: Option<u64>,
    /// MiB per second.
    pub w_mbytes_per_sec: Option<u64>,
}

impl SetQosLimitParams {
    fn apply_to(&self, limits: &mut RateLimits) -> Result<(), RpcError> {
        let bytes = |field, mbytes: u64| {
            mbytes.checked_mul(MIB).ok_or_else(|| {
                RpcError::errno(
                    Errno::EINVAL,
                    format!("{mbytes} MiB is more than 64 bits of bytes"),
                )
                .field(field)
            })
        };
        let asked = [
            self.rw_ios_per_sec,
            self.rw_mbytes_per_sec,
            self.r_mbytes_per_sec,
            self.w_mbytes_per_sec,
        ];
        if asked.iter().all(Option::is_none) {
            return Err(RpcError::errno(Errno::EINVAL, "no limit is given")
                .field("rw_ios_per_sec")
                .remedy("give at least one of the limits; 0 ends one"));
        }
        if let Some(ios) = self.rw_ios_per_sec {
            limits.rw_ios = ios;
        }
        for (field, asked, limit) in [
            (
                "rw_mbytes_per_sec",
                self.rw_mbytes_per_sec,
                &mut limits.rw_bytes,
            ),
            (
                "r_mbytes_per_sec",
                self.r_mbytes_per_sec,
                &mut limits.read_bytes,
            ),
            (
                "w_mbytes_per_sec",
                self.w_mbytes_per_sec,
                &mut limits.write_bytes,
            ),
        ] {
            if let Some(mbytes) = asked {
                *limit = bytes(field, mbytes)?;
            }
        }
        Ok(())
    }
}

impl Method<Engine> for SetQosLimit {
    const NAME: &'static str = "bdev_set_qos_limit";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Limits a device's I/O per second, over all hosts and cores; I/O beyond that waits. \
         Limits of a device count for those stacked on it as well.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Exclusive;
    type Params = SetQosLimitParams;
    type Reply = bool;

    async fn apply(params: SetQosLimitParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let layer = plane.bdevs.get(&params.name).or_refuse()?.layer;
        let name = layer.name().to_owned();
        let before = layer.qos().limits();
        let mut limits = before;
        params.apply_to(&mut limits)?;
        layer.qos().set(limits);
        let lasting = engine.volumes.lasting_name(&name);
        let mut edits = former(&engine, &name, &limits_key(&lasting));
        edits.push(if limits.is_none() {
            forget_limits(&lasting)
        } else {
            let mut params = json!(Assigned::of(limits));
            params["name"] = lasting.as_str().into();
            Edit::Put(Record {
                key: limits_key(&lasting),
                method: Self::NAME.into(),
                params,
            })
        });
        let stored = engine.journal.commit(Change(edits)).await;
        stored.inspect_err(|_| layer.qos().set(before))?;
        Ok(true)
    }
}

/// Edits that remove the limits of the device under keys other than `now`: a volume may have been
/// renamed since they were set.
fn former(engine: &Engine, name: &str, now: &str) -> Vec<Edit> {
    let Ok(plane) = engine.plane() else {
        return Vec::new();
    };
    let own = |entry: &crate::journal::JournalEntry| {
        let Record { key, params, .. } = &entry.record;
        let device = params.get("name").and_then(serde_json::Value::as_str);
        let device = device.and_then(|device| plane.bdevs.lookup(device));
        key.starts_with("qos/") && key != now && device.is_some_and(|d| d.name() == name)
    };
    let entries = engine.journal.select(own).into_iter();
    entries
        .map(|entry| Edit::Remove(entry.record.key))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{TestDaemon, test_daemon};
    use crate::config::Settings;
    use crate::store::Store;
    use serde_json::{Value, json};

    const SET: &str = "bdev_set_qos_limit";

    fn null(daemon: &TestDaemon) {
        let disk = json!({ "name": "n", "num_blocks": 2048, "block_size": 512 });
        daemon.call("bdev_null_create", disk);
    }

    fn limits(daemon: &TestDaemon) -> [u64; 4] {
        let all = daemon.call("bdev_get_bdevs", json!({ "name": "n" }));
        let limits = &all[0]["assigned_rate_limits"];
        [
            "rw_ios_per_sec",
            "rw_mbytes_per_sec",
            "r_mbytes_per_sec",
            "w_mbytes_per_sec",
        ]
        .map(|name| limits[name].as_u64().unwrap())
    }

    fn saved(daemon: &TestDaemon) -> Vec<Value> {
        let config = daemon.call("framework_get_config", json!({ "name": "bdev" }));
        let calls = config.as_array().unwrap().iter();
        calls.filter(|c| c["method"] == SET).cloned().collect()
    }

    /// Goal: limits left out are unchanged, 0 removes a limit, and the last state is saved.
    #[test]
    fn limits_are_set_listed_and_saved() {
        let daemon = test_daemon();
        null(&daemon);
        assert_eq!(limits(&daemon), [0; 4]);
        assert!(saved(&daemon).is_empty());
        let set = json!({ "name": "n", "rw_ios_per_sec": 20000, "r_mbytes_per_sec": 100 });
        assert_eq!(daemon.call(SET, set), true);
        let set = json!({ "name": "n", "rw_ios_per_sec": 0, "w_mbytes_per_sec": 50 });
        assert_eq!(daemon.call(SET, set), true);
        assert_eq!(limits(&daemon), [0, 0, 100, 50]);
        let call = json!({ "method": SET, "params": {
            "name": "n", "rw_ios_per_sec": 0, "rw_mbytes_per_sec": 0,
            "r_mbytes_per_sec": 100, "w_mbytes_per_sec": 50,
        }});
        assert_eq!(saved(&daemon), [call]);
        let set = json!({ "name": "n", "r_mbytes_per_sec": 0, "w_mbytes_per_sec": 0 });
        daemon.call(SET, set);
        assert!(
            saved(&daemon).is_empty(),
            "without limits there is no record"
        );
    }

    #[test]
    fn invalid_limits_are_refused() {
        let daemon = test_daemon();
        null(&daemon);
        let huge = u64::MAX / 2;
        for (params, code, field) in [
            (json!({ "name": "x", "rw_ios_per_sec": 1 }), -19, "name"),
            (json!({ "name": "n" }), -22, "rw_ios_per_sec"),
            (
                json!({ "name": "n", "r_mbytes_per_sec": huge }),
                -22,
                "r_mbytes_per_sec",
            ),
            (
                json!({ "name": "n", "rw_ios_per_sec": -1 }),
                -32603,
                "rw_ios_per_sec",
            ),
        ] {
            let refused = daemon.refused(SET, params.clone());
            let facts = refused.data.unwrap();
            assert_eq!(
                (refused.code, facts.field.as_deref()),
                (code, Some(field)),
                "{params}"
            );
        }
        assert_eq!(limits(&daemon), [0; 4]);
    }

    /// Goal: limits survive a restart and are deleted with the device.
    #[test]
    fn limits_are_deleted_with_the_device() {
        let dir = tempfile::tempdir().unwrap();
        let durable =
            || TestDaemon::with(Settings::default(), Some(Store::open(dir.path()).unwrap()));
        {
            let daemon = durable();
            null(&daemon);
            daemon.call(SET, json!({ "name": "n", "rw_mbytes_per_sec": 7 }));
        }
        {
            let daemon = durable();
            assert_eq!(limits(&daemon), [0, 7, 0, 0]);
            daemon.call("bdev_null_delete", json!({ "name": "n" }));
        }
        let daemon = durable();
        null(&daemon);
        assert_eq!(limits(&daemon), [0; 4]);
    }
}
