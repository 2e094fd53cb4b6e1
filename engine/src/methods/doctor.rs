//! `doctor_run`, a Nacre extension: runs the doctor's checks inside the daemon.

use std::net::IpAddr;
use std::path::Path;
use std::rc::Rc;

use nacre_hugepages::Arena;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::daemon;
use crate::doctor::{Marking, Report, Scope, System, examine};
use crate::plane::demand::{self, Demand};
use crate::rpc::access;
use crate::rpc::{Changes, Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::certificates;
use crate::services::keyring::{self, store_key::StoreKeys};
use crate::services::rdma::Rdma;
use crate::services::sandbox::for_doctor;
use crate::services::{calls, cluster, concat, pools};

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<Run>();
}

struct Run;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RunParams {
    /// RDMA is required: its absence is a failure.
    #[serde(default)]
    rdma: bool,
    /// Interfaces of RDMA listeners: `name:eth0`, `ip:192.0.2.1`, `subnet:192.0.2.0/24`, `mac:…`,
    /// `rdma:mlx5_0`.
    #[serde(default)]
    listeners: Vec<String>,
    /// Another machine that must be reachable. If `nacre doctor --answer` runs there, the check
    /// compares both ends.
    #[serde(default)]
    peer: Option<IpAddr>,
    /// NVMe port of the peer; default 4420.
    #[serde(default)]
    port: u16,
    /// Bytes to move through each RDMA device, to itself or to `nacre rdma perf server` on the
    /// peer; default: none.
    #[serde(default)]
    traffic: Option<u64>,
}

impl Method<Engine> for Run {
    const NAME: &'static str = "doctor_run";
    const ABOUT: &'static str = "Checks the machine for what serving needs, as the daemon sees it: status, evidence and \
                                 remedy of each check.";
    const CLASS: Class = Class::Read;
    const CHANGES: Changes = Changes::With(&["peer", "traffic"]);
    const ORDER: Order = Order::Free;
    type Params = RunParams;
    type Reply = Report;

    async fn apply(params: RunParams, engine: Rc<Engine>) -> Result<Report, RpcError> {
        // A viewer has the daemon send nothing.
        if params.traffic.is_some() {
            access::require(Class::Operate, "traffic")?;
        }
        if params.peer.is_some() {
            access::require(Class::Operate, "peer")?;
        }
        let plane = engine.plane()?;
        let rdma = params.rdma || demand::wants_rdma(&engine.settings);
        let transport = engine.settings.rdma_transport();
        // As for listeners: memory that is already registered needs no second registration.
        let memory = if rdma {
            engine
                .rdma
                .memory_needed(&plane.arenas, plane.target.cores(), &transport)
        } else {
            0
        };
        let pages = {
            let iobuf = engine.options.borrow().iobuf.clone();
            demand::data_path(&engine.settings, &iobuf, engine.personality)
                .and_then(|config| Demand::of(&config, rdma.then_some(&transport)))
                .map(|demand| demand.pages())
        };
        let resyncing = engine.volumes.list().into_iter().filter(|volume| {
            let status = volume.status();
            status.is_some_and(|status| status.replicas.iter().any(|of| of.resync.is_some()))
        });
        let resyncs = resyncing.count() as u64;
        let is_short = |arena: &Arena| {
            let report = arena.report();
            !report.pages.is_hugetlb() && !report.shortages.is_empty()
        };
        let mut scope = Scope {
            rdma: params.rdma,
            listeners: params.listeners,
            peer: params.peer.map(Into::into),
            port: params.port,
            memory,
            tls_memory: demand::tls_bytes(&engine.settings),
            pages: pages.ok(),
            memory_had: plane.memory.clone(),
            memory_is_short: plane.arenas.iter().any(is_short),
            traffic: params.traffic,
            marking: Marking {
                qos: engine.settings.qos.clone(),
                tos: transport.tos,
            },
            resyncs,
            sandbox: Some(for_doctor(
                &engine.settings,
                engine.lifecycle.sandbox.problems(),
            )),
            concat_hosts: concat::of_target(&plane.target),
            pools: pools::for_doctor(&engine),
            ..Scope::default()
        };
        // Files, libraries and the network may be slow; keep them off the management thread.
        let rules = engine.settings.rpc.enabled.then(|| engine.calls.rules());
        let socket = daemon::socket_path(&engine.settings, engine.personality);
        let (keys, store) = (engine.keyring.keys(), StoreKeys::of(&engine));
        scope.revocations = certificates::in_effect(&engine);
        let settings = engine.settings.clone();
        let state = engine.journal.store_path().map(Path::to_owned);
        let report = tokio::task::spawn_blocking(move || {
            scope.volume_store = cluster::store_for_doctor(&settings, state.as_deref());
            scope.keys = keyring::for_doctor(&keys);
            scope.store_key = store.for_doctor(keys.iter().any(|key| key.is_sealed()));
            scope.socket = rules.map(|rules| calls::expected_socket(&rules, &socket));
            examine(&System::real(), &scope)
        });
        let report = report.await;
        Rdma::watch_for_removal(&engine);
        report.map_err(|error| RpcError::internal(format!("the checks did not end: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::methods::testing::test_daemon;
    use crate::plane::demand::{Demand, data_path};

    #[test]
    fn the_daemon_examines_its_machine() {
        let daemon = test_daemon();
        let report = daemon.call(
            "doctor_run",
            json!({ "listeners": ["name:none-such", "ip:127.0.0.1"] }),
        );
        let findings = report["findings"].as_array().expect("findings");
        let of = |id: &str| -> Vec<&str> {
            let of = findings.iter().filter(|f| f["id"] == id);
            of.filter_map(|f| f["status"].as_str()).collect()
        };
        assert_eq!(of("net.iface.exists"), ["FAIL", "PASS"]);
        // The daemon has its memory and reports its page size. Small pages are not a pass. The
        // advice covers all of the daemon's memory, not only a missing part.
        let pages = findings
            .iter()
            .find(|f| f["id"] == "mem.hugepages")
            .unwrap();
        let text = pages["evidence"].as_str().unwrap();
        let settings = &daemon.engine.settings;
        let config = data_path(settings, &Default::default(), daemon.engine.personality).unwrap();
        let whole = Demand::of(&config, None).unwrap().pages();
        if text.contains("remedy") {
            assert_eq!(of("mem.hugepages"), ["WARN"]);
            let remedy = pages["remedy"].as_str().unwrap();
            assert!(
                remedy.contains(&format!("reserve 2MiB {whole}`")),
                "{remedy}"
            );
        } else {
            assert_eq!(of("mem.hugepages"), ["PASS"])
        }
        assert!(report["failed"].as_u64() >= Some(1));
        daemon.refused("doctor_run", json!({ "listener": [] }));
    }
}
