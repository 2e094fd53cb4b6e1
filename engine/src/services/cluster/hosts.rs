//! The hosts that a subsystem of the cluster allows on this node.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use nacre_nvmf::subsystems::{Phase, Subsystem};
use nacre_nvmf_wire::Nqn;
use serde_json::{Value, json};

use crate::journal;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;

/// Time limit, in milliseconds, for the I/O of a host that is removed. The caller repeats the
/// removal. It must not wait for longer: the task of a volume also opens and closes the volume.
const REMOVED_MS: u64 = 1000;

/// The hosts that a subsystem allowed when [`Hosts::of`] was called, and their changes.
pub(super) struct Hosts<'a> {
    engine: &'a Rc<Engine>,
    subsystem: Arc<Subsystem>,
    allowed: BTreeSet<String>,
}

impl<'a> Hosts<'a> {
    pub(super) fn of(engine: &'a Rc<Engine>, nqn: &str) -> Result<Self, RpcError> {
        let nqn = Nqn::new(nqn).map_err(|error| RpcError::internal(error.to_string()))?;
        let subsystem = engine.plane()?.target.subsystem(&nqn).or_refuse()?;
        let hosts = subsystem.hosts();
        Ok(Self {
            engine,
            allowed: hosts.iter().map(Nqn::to_string).collect(),
            subsystem,
        })
    }

    /// Allows the host, unless it is allowed already.
    pub(super) async fn allow(&self, host: &str) -> Result<(), RpcError> {
        if self.allowed.contains(host) {
            return Ok(());
        }
        let params = json!({ "nqn": self.nqn(), "host": host });
        self.change("nvmf_subsystem_add_host", &params).await
    }

    /// Removes a host from the allowed hosts, and waits for its I/O. Called again after a timeout,
    /// it checks only that the I/O has ended.
    pub(super) async fn remove(&self, host: &str) -> Result<(), RpcError> {
        if self.allowed.contains(host) {
            let params = json!({ "nqn": self.nqn(), "host": host, "timeout_ms": REMOVED_MS });
            return self.change("nvmf_subsystem_remove_host", &params).await;
        }
        let controllers = self.subsystem.controllers();
        let mut its = controllers
            .iter()
            .filter(|one| one.hostnqn.as_str() == host);
        if its.any(|controller| controller.phase() == Phase::Closing) {
            let cause = format!("{host} is removed, and I/O of its last connections is in flight");
            return Err(RpcError::errno(Errno::EAGAIN, cause));
        }
        Ok(())
    }

    /// The hosts of `known` and the allowed ones that the publication does not name. An operator
    /// may have allowed one by a call.
    pub(super) fn surplus(&self, known: &[String], published: &[String]) -> BTreeSet<String> {
        let all = self.allowed.iter().chain(known);
        let surplus = all.filter(|host| !published.contains(host));
        surplus.cloned().collect()
    }

    pub(super) fn allows_any(&self) -> bool {
        self.subsystem.allows_any_host()
    }

    fn nqn(&self) -> &str {
        self.subsystem.nqn().as_str()
    }

    async fn change(&self, method: &str, params: &Value) -> Result<(), RpcError> {
        self.engine.declared_call(method, params).await?;
        Ok(())
    }
}

/// Refuses a client's call that would allow a host, or any host (`None`), on the subsystem of a
/// volume of the cluster. The call passes if the volume's publication allows the same. Otherwise
/// the node would remove the host again.
///
/// Calls of the journal and of the configuration file pass; [`Hosts::surplus`] finds their hosts.
pub fn refuse_by_hand(engine: &Engine, nqn: &Nqn, host: Option<&Nqn>) -> Result<(), RpcError> {
    if journal::is_declaring() || journal::is_replaying() {
        return Ok(());
    }
    let running = engine.cluster.running();
    let found = running.and_then(|running| running.inbox.published_as(nqn.as_str()));
    let Some((id, publication)) = found else {
        return Ok(());
    };
    let is_published = match host {
        Some(host) => publication.hosts.iter().any(|one| one == host.as_str()),
        None => publication.any_host,
    };
    if is_published {
        return Ok(());
    }
    let listed = engine.volumes.find(&id.0.to_string());
    let name = listed.map_or_else(|_| id.0.to_string(), |listed| listed.name());
    let (field, who, with) = match host {
        Some(host) => ("host", host.as_str(), "this host and the present ones"),
        None => ("allow_any_host", "any host", "allow_any_host"),
    };
    let says = if publication.any_host {
        format!("allows any host, and does not name {who}")
    } else {
        format!("does not allow {who}")
    };
    let cause = format!(
        "this is the subsystem of volume \"{name}\", and the volume's publication {says}: the \
         cluster would take the permission again"
    );
    let remedy = format!(
        "publish the volume again, with {with}: volume_publish; after a publication on another \
         node, try again"
    );
    let refused = RpcError::errno(Errno::EPERM, cause);
    Err(refused.field(field).remedy(remedy))
}

#[cfg(test)]
mod tests {
    use crate::methods::testing::test_daemon;

    use super::*;

    const NQN: &str = "nqn.2026-01.org.example:volume";
    const HOST: &str = "nqn.2026-01.org.example:host";

    /// Goal: a removal that timed out has removed the host. It does not fail from then on, and the
    /// host can be allowed again.
    #[test]
    fn a_removal_that_timed_out_is_done() {
        let daemon = test_daemon();
        let engine = &daemon.engine;
        daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
        let hosts = || Hosts::of(engine, NQN).unwrap();
        let allowed = || hosts().allowed.into_iter().collect::<Vec<_>>();
        daemon.run(hosts().allow(HOST)).unwrap();
        assert_eq!(allowed(), [HOST]);
        daemon.run(hosts().allow(HOST)).unwrap();

        // The state that a removal leaves when it times out.
        let params = json!({ "nqn": NQN, "host": HOST, "timeout_ms": 0 });
        daemon.call("nvmf_subsystem_remove_host", params);
        assert_eq!(allowed(), [""; 0]);
        daemon.run(hosts().remove(HOST)).unwrap();
        daemon.run(hosts().allow(HOST)).unwrap();
        daemon.run(hosts().remove(HOST)).unwrap();
        assert_eq!(allowed(), [""; 0]);
    }

    /// Goal: a host that an operator allowed by hand goes with the others, because the publication
    /// does not name it; one whose removal timed out is still waited for. Method: the lists.
    #[test]
    fn hosts_that_the_publication_does_not_name() {
        let daemon = test_daemon();
        let engine = &daemon.engine;
        daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
        let by_hand = "nqn.2026-01.org.example:by-hand";
        for host in [HOST, by_hand] {
            let params = json!({ "nqn": NQN, "host": host });
            daemon.call("nvmf_subsystem_add_host", params);
        }
        let hosts = || Hosts::of(engine, NQN).unwrap();
        let surplus = |known: &[&str], published: &[&str]| {
            let texts = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>();
            let found = hosts().surplus(&texts(known), &texts(published));
            found.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(surplus(&[HOST], &[HOST]), [by_hand]);
        assert_eq!(surplus(&[HOST], &[HOST, by_hand]), [""; 0]);
        daemon.run(hosts().remove(by_hand)).unwrap();
        assert_eq!(surplus(&[HOST], &[HOST]), [""; 0]);
        assert_eq!(surplus(&["nqn.closing"], &[HOST]), ["nqn.closing"]);
    }
}
