//! The checks of `nacre doctor` of the volume store in etcd: members answer, have a leader, a good
//! version and space, and the keys are this daemon's.

use std::time::Duration;

use super::cluster::Cluster;
use super::{Finding, Scope};
use nacre_engine_values::size::bytes;

/// An answer that takes longer delays changes of volumes noticeably.
const SLOW: Duration = Duration::from_millis(100);
/// The quota of an etcd that does not report one: etcd's default.
const QUOTA: u64 = 2 << 30;

/// The facts about the volume store that the checks use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeStoreReport {
    pub prefix: String,
    /// The reason why the configured files cannot be used.
    pub problem: Option<String>,
    pub members: Vec<Member>,
    pub owner: Owner,
    /// The cluster that the daemon is a node of.
    pub cluster: Option<Cluster>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub endpoint: String,
    pub took: Duration,
    pub status: Result<MemberStatus, String>,
}

/// The facts about a member of etcd that the checks use. The doctor does not depend on the client
/// of etcd. `cluster_get_status` also shows which member leads, which no check uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberStatus {
    pub version: String,
    /// The version is known to lose data.
    pub loses_data: bool,
    pub has_leader: bool,
    pub size: u64,
    pub in_use: u64,
    /// Bytes that the data may have; `None`: the member does not report it.
    pub quota: Option<u64>,
    /// Alarms of the member.
    pub errors: Vec<String>,
}

/// The owner of the prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Owner {
    Ours,
    /// The nodes of a cluster share the prefix.
    Cluster,
    Nobody,
    Other(String),
    /// The owner cannot be read, for this reason.
    Unknown(String),
}

pub fn checks(scope: &Scope, findings: &mut Vec<Finding>) {
    let Some(store) = &scope.volume_store else {
        return;
    };
    if let Some(problem) = &store.problem {
        let remedy = "correct [store] in the configuration";
        findings.push(Finding::fail("store.reachable", problem.clone(), remedy));
        return;
    }
    for member in &store.members {
        let found = match &member.status {
            Ok(status) => of_member(member.took, status),
            Err(why) => {
                let remedy = "start this member, or correct endpoints, ca and the firewall";
                vec![Finding::fail("store.reachable", why.clone(), remedy)]
            }
        };
        findings.extend(found.into_iter().map(|finding| Finding {
            subject: Some(member.endpoint.clone()),
            ..finding
        }));
    }
    findings.push(owner(store));
}

fn of_member(took: Duration, status: &MemberStatus) -> Vec<Finding> {
    let reachable = if status.has_leader {
        Finding::pass("store.reachable", "it answers, and has a leader")
    } else {
        let evidence = "it answers, and has no leader: volumes that lose a replica wait";
        let remedy = "start more members: a majority is needed";
        Finding::fail("store.reachable", evidence, remedy)
    };
    vec![reachable, latency(took), version(status), space(status)]
}

fn latency(took: Duration) -> Finding {
    const ID: &str = "store.latency";
    let evidence = format!("it answered within {:.1} ms", took.as_secs_f64() * 1e3);
    if took > SLOW {
        let remedy = "give etcd a disk of its own and a near network: a lost replica delays writes \
                      by a few such times";
        Finding::warn(ID, evidence, remedy)
    } else {
        Finding::pass(ID, evidence)
    }
}

fn version(status: &MemberStatus) -> Finding {
    const ID: &str = "store.version";
    let found = format!("etcd {}", status.version);
    if status.loses_data {
        let evidence = format!("{found} is known to lose data");
        let remedy = "upgrade it to 3.4.42, 3.5.28, 3.6.9 or later";
        return Finding::fail(ID, evidence, remedy);
    }
    Finding::pass(ID, found)
}

fn space(status: &MemberStatus) -> Finding {
    const ID: &str = "store.space";
    let quota = status.quota.unwrap_or(QUOTA);
    let evidence = format!(
        "its database has {}, {} of them in use; it takes {}{}",
        bytes(status.size),
        bytes(status.in_use),
        bytes(quota),
        if status.quota.is_none() {
            " by default"
        } else {
            ""
        },
    );
    if !status.errors.is_empty() {
        let evidence = format!("{}: {evidence}", status.errors.join("; "));
        let remedy = if status.errors.iter().any(|alarm| alarm.contains("NOSPACE")) {
            "compact and defragment etcd (`etcdctl defrag`), then `etcdctl alarm disarm`"
        } else {
            "see `etcdctl alarm list`, and etcd's documentation of the alarm"
        };
        Finding::fail(ID, evidence, remedy)
    } else if status.size > quota / 2 {
        let remedy = "compact and defragment etcd, or raise --quota-backend-bytes: a full etcd \
                      refuses changes";
        Finding::warn(ID, evidence, remedy)
    } else {
        Finding::pass(ID, evidence)
    }
}

fn owner(store: &VolumeStoreReport) -> Finding {
    const ID: &str = "store.owner";
    let prefix = &store.prefix;
    match &store.owner {
        Owner::Ours => Finding::pass(ID, format!("{prefix} belongs to this daemon")),
        Owner::Cluster => Finding::pass(ID, format!("{prefix} belongs to the cluster")),
        Owner::Nobody => {
            let evidence = format!("{prefix} has no owner: the daemon takes it when it starts");
            Finding::pass(ID, evidence)
        }
        Owner::Other(owner) => {
            let evidence = format!("{prefix} belongs to another daemon: {owner}");
            let remedy = "give this daemon a prefix of its own";
            Finding::fail(ID, evidence, remedy)
        }
        Owner::Unknown(why) => Finding::skip(ID, why.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    fn member() -> MemberStatus {
        MemberStatus {
            version: "3.5.28".to_owned(),
            loses_data: false,
            has_leader: true,
            size: 1 << 20,
            in_use: 1 << 19,
            quota: None,
            errors: Vec::new(),
        }
    }

    fn found(took_ms: u64, status: Result<MemberStatus, String>, owner: Owner) -> Vec<Finding> {
        let store = VolumeStoreReport {
            prefix: "/nacre/a/".to_owned(),
            problem: None,
            members: vec![Member {
                endpoint: "http://a".to_owned(),
                took: Duration::from_millis(took_ms),
                status,
            }],
            owner,
            cluster: None,
        };
        let scope = Scope {
            volume_store: Some(store),
            ..Scope::default()
        };
        let mut findings = Vec::new();
        checks(&scope, &mut findings);
        findings
    }

    /// Goal: each problem of the store has its finding. Method: one problem at a time.
    #[test]
    fn each_trouble_is_found() {
        let good = found(2, Ok(member()), Owner::Ours);
        assert!(good.iter().all(|f| f.status == Status::Pass), "{good:?}");
        assert_eq!(good.len(), 5);
        let of = |change: fn(&mut MemberStatus)| {
            let mut status = member();
            change(&mut status);
            found(2, Ok(status), Owner::Nobody)
        };
        let cases = [
            (
                of(|s| s.has_leader = false),
                "store.reachable",
                Status::Fail,
            ),
            (of(|s| s.loses_data = true), "store.version", Status::Fail),
            (of(|s| s.size = 3 << 29), "store.space", Status::Warn),
            (
                of(|s| s.errors = vec!["memberID:1 alarm:NOSPACE".to_owned()]),
                "store.space",
                Status::Fail,
            ),
            (
                of(|s| (s.size, s.quota) = (3 << 29, Some(8 << 30))),
                "",
                Status::Pass,
            ),
            (
                found(300, Ok(member()), Owner::Ours),
                "store.latency",
                Status::Warn,
            ),
            (
                found(
                    1,
                    Err("refused".to_owned()),
                    Owner::Unknown("no answer".to_owned()),
                ),
                "store.reachable",
                Status::Fail,
            ),
            (
                found(1, Ok(member()), Owner::Other("node x".to_owned())),
                "store.owner",
                Status::Fail,
            ),
        ];
        for (findings, id, status) in cases {
            let bad: Vec<&Finding> = findings
                .iter()
                .filter(|f| matches!(f.status, Status::Warn | Status::Fail))
                .collect();
            match id {
                "" => assert!(bad.is_empty(), "{bad:?}"),
                id => assert_eq!((bad.len(), bad[0].id, bad[0].status), (1, id, status)),
            }
        }
    }
}
