//! The checks of `nacre doctor` of storage pools: they are open, their log can be written, and they
//! have space.

use serde::Deserialize;

use super::{Finding, Scope};
use nacre_engine_values::size::bytes;

/// Used share of a pool at which it needs space soon, in percent.
const SOON: u128 = 80;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pools {
    pub open: Vec<Pool>,
    pub closed: Vec<Closed>,
}

/// An open pool, as `pool_list` describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Pool {
    pub name: String,
    /// `held`: its log or metadata cannot be written.
    pub state: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
    /// Free bytes that metadata and thick lvols keep.
    pub reserved_bytes: u64,
    pub lost_pages: u64,
    pub waiting_writes: u64,
    pub disks: Vec<Disk>,
}

/// A disk of a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Disk {
    pub name: String,
    /// The progress of the removal of the disk; `None`: it stays.
    pub leaving: Option<Leaving>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Leaving {
    pub percent: u64,
}

/// A pool that the daemon could not import.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Closed {
    /// Its last disk.
    pub disk: String,
    pub reason: String,
}

pub(crate) fn checks(scope: &Scope, findings: &mut Vec<Finding>) {
    for closed in &scope.pools.closed {
        let remedy = "mend the cause: the daemon tries again; `nacre state list` has its record";
        let finding = Finding::fail("pool.open", closed.reason.clone(), remedy);
        findings.push(finding.of(&closed.disk));
    }
    for pool in &scope.pools.open {
        findings.push(log(pool).of(&pool.name));
        findings.push(space(pool).of(&pool.name));
        findings.extend(leaving(pool).map(|finding| finding.of(&pool.name)));
    }
}

fn log(pool: &Pool) -> Finding {
    const ID: &str = "pool.open";
    if pool.state != "online" {
        let evidence = format!(
            "it is {}: writes to new space and changes fail, since its disk failed a write of the log or of metadata",
            pool.state
        );
        return Finding::fail(ID, evidence, "repair the disk, then restart the daemon");
    }
    if pool.lost_pages > 0 {
        let evidence = format!("{} pages of its maps are unreadable", pool.lost_pages);
        let remedy = "`nacre pool check` names the volumes; restore them from a backup";
        return Finding::fail(ID, evidence, remedy);
    }
    Finding::pass(ID, "it is open, and its log can be written")
}

fn space(pool: &Pool) -> Finding {
    const ID: &str = "pool.space";
    const REMEDY: &str = "trim, delete snapshots, or add a disk: `nacre pool add-disk`";
    if pool.waiting_writes > 0 {
        let evidence = format!("it is full: {} writes wait for space", pool.waiting_writes);
        return Finding::fail(ID, evidence, REMEDY);
    }
    let free = pool.free_bytes.saturating_sub(pool.reserved_bytes);
    let evidence = format!("{} of {} are free", bytes(free), bytes(pool.total_bytes));
    let used = pool.total_bytes.saturating_sub(free);
    if u128::from(used) * 100 >= u128::from(pool.total_bytes) * SOON {
        Finding::warn(ID, evidence, REMEDY)
    } else {
        Finding::pass(ID, evidence)
    }
}

/// A disk that leaves still has data of the pool.
fn leaving(pool: &Pool) -> Option<Finding> {
    let mut disks = pool.disks.iter();
    let (name, leaving) = disks.find_map(|disk| Some((&disk.name, disk.leaving?)))?;
    let evidence = format!(
        "disk {name} is leaving, {} % of its data have moved: the pool needs it until it has left",
        leaving.percent
    );
    let remedy = "wait before you pull the disk: `nacre pool show` has the progress";
    Some(Finding::warn("pool.disk", evidence, remedy))
}

#[cfg(test)]
mod tests {
    //! Goal: pools that are closed, held, damaged or full are found. Method: tables of facts.

    use super::*;
    use crate::Status;

    #[test]
    fn pools_in_trouble() {
        let good = Pool {
            name: "pool0".into(),
            state: "online".into(),
            total_bytes: 100 << 30,
            free_bytes: 50 << 30,
            reserved_bytes: 1 << 30,
            ..Pool::default()
        };
        let of = |change: &dyn Fn(&mut Pool)| {
            let mut pool = good.clone();
            change(&mut pool);
            let scope = Scope {
                pools: Pools {
                    open: vec![pool],
                    closed: Vec::new(),
                },
                ..Scope::default()
            };
            let mut findings = Vec::new();
            checks(&scope, &mut findings);
            let of_pool = |found: &Finding| found.subject.as_deref() == Some("pool0");
            assert!(findings.iter().all(of_pool));
            [findings[0].status, findings[1].status]
        };
        assert_eq!(of(&|_| {}), [Status::Pass, Status::Pass]);
        let held = of(&|pool| pool.state = "held".into());
        assert_eq!(held, [Status::Fail, Status::Pass]);
        assert_eq!(
            of(&|pool| pool.lost_pages = 1),
            [Status::Fail, Status::Pass]
        );
        // Used and reserved bytes are exactly 80 %.
        let soon = |more| of(&move |pool| pool.free_bytes = (21u64 << 30) + more);
        assert_eq!(soon(0), [Status::Pass, Status::Warn]);
        assert_eq!(soon(1), [Status::Pass, Status::Pass]);
        assert_eq!(
            of(&|pool| pool.waiting_writes = 3),
            [Status::Pass, Status::Fail]
        );
        let leaving = |pool: &mut Pool| {
            pool.disks = vec![Disk {
                name: "disk3".into(),
                leaving: Some(Leaving { percent: 40 }),
            }];
        };
        assert_eq!(of(&leaving), [Status::Pass, Status::Pass]);
        let mut pool = good.clone();
        leaving(&mut pool);
        let found = super::leaving(&pool).unwrap();
        assert_eq!((found.id, found.status), ("pool.disk", Status::Warn));
        assert_eq!(super::leaving(&good), None);
        let closed = Closed {
            disk: "disk7".into(),
            reason: "disk 2 of 2 is missing".into(),
        };
        let scope = Scope {
            pools: Pools {
                open: Vec::new(),
                closed: vec![closed],
            },
            ..Scope::default()
        };
        let mut findings = Vec::new();
        checks(&scope, &mut findings);
        assert_eq!(findings.len(), 1);
        assert_eq!(
            (findings[0].id, findings[0].status),
            ("pool.open", Status::Fail)
        );
    }
}
