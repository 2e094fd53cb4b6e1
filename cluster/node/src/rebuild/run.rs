//! Runs a rebuild of the store (`nacre cluster rebuild-store`): claims the store, waits for reports
//! of the nodes, decides and writes the keys.
//!
//! ```text
//!   restoring: claimed ▸ no other key is there ▸ collecting: nodes put found/N ▸ decide ▸ keys of
//!   an earlier run are deleted ▸ all keys, one lease, meta, as a restore ▸ found/… is deleted
//! ```
//!
//! A refusal before the first key deletes the reports and the mark. A rebuild that dies leaves the
//! mark, and the next one takes its place.

use std::collections::BTreeMap;
use std::time::Duration;

use nacre_cluster_core::NodeId;
use nacre_cluster_etcd::{Client, Prefix};
use tokio::time::{Instant, sleep};

use super::decide::{Options, Plan, decide};
use super::error::{Note, RebuildError};
use super::facts::Found;
use super::report::{self, Collected, Refused};
use crate::backup::{Source, Writer, write_rebuilt};
use crate::error::Error;

/// Time between two looks at the reports.
const LOOK: Duration = Duration::from_millis(500);
/// Time without a new report before the reports count: nodes look for a rebuild each
/// half second, and one that knows less may report first.
const QUIET: Duration = Duration::from_secs(3);
/// Longest wait for devices of nodes that have reported: pools open after the start of a daemon.
const DEVICES: Duration = Duration::from_secs(10);

/// The parameters of a rebuild.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rebuild {
    pub options: Options,
    /// True: hosts get the access that the nodes' copies show. False: no host has access.
    pub publish: bool,
    /// Longest wait for reports of nodes.
    pub wait: Duration,
}

/// The result of a rebuild.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebuilt {
    pub cluster: uuid::Uuid,
    pub keys: usize,
    pub volumes: usize,
    pub nodes: usize,
    /// Published volumes that lost their list of hosts, because `publish` was false.
    pub without_hosts: usize,
    /// True: an earlier rebuild had begun to collect reports, and this one took its place.
    pub is_repeated: bool,
    pub notes: Vec<Note>,
}

impl Rebuild {
    /// Runs the rebuild. `progress` is called with the number of nodes that have reported and the
    /// names of those that have not, whenever they change.
    pub async fn run(
        &self,
        client: &Client,
        prefix: &Prefix,
        name: &str,
        mut progress: impl FnMut(usize, &[String]),
    ) -> Result<Rebuilt, RebuildError> {
        let checked = client.check_version().await;
        checked.map_err(Error::at(&prefix.meta()))?;
        let mut writer = Writer::claim(client, prefix, Source::Rebuild).await?;
        let claimed = Instant::now();
        if !writer.is_repeated {
            writer
                .must_be_alone(&std::collections::BTreeSet::new())
                .await?;
        }
        writer.collect().await?;
        let collected = self
            .collect(client, prefix, name, &writer, &mut progress)
            .await;
        let plan = match collected {
            Ok(plan) => plan,
            Err(refused) => {
                // Keys of an earlier run are not whole without this one. If etcd does not answer,
                // the mark stays, and the next run takes its place.
                if writer.clear().await.is_ok() {
                    let _ = writer.withdraw().await;
                }
                return Err(refused);
            }
        };
        let backup = &plan.backup;
        let (keys, without_hosts) =
            write_rebuilt(&mut writer, prefix, backup, self.publish, claimed).await?;
        // The cluster is there. Reports that stay do no harm.
        let _ = writer.forget_reports().await;
        Ok(Rebuilt {
            cluster: backup.id,
            keys,
            volumes: backup.volumes(),
            nodes: plan.nodes,
            without_hosts,
            is_repeated: writer.is_repeated,
            notes: plan.notes,
        })
    }

    /// Waits for the reports of all nodes.
    async fn collect(
        &self,
        client: &Client,
        prefix: &Prefix,
        name: &str,
        writer: &Writer<'_>,
        progress: &mut impl FnMut(usize, &[String]),
    ) -> Result<Plan, RebuildError> {
        let begun = Instant::now();
        let mut shown = None;
        let mut last = Decided::default();
        loop {
            let Collected { found, refused } = match self.reports(client, prefix, writer).await {
                Err(error) if error.is_passing() && begun.elapsed() < self.wait => {
                    sleep(LOOK).await;
                    continue;
                }
                reports => reports?,
            };
            if let Some(Refused { name, why }) = refused.into_iter().next() {
                return Err(RebuildError::Refused { name, why });
            }
            let is_late = begun.elapsed() >= self.wait;
            let waited_s = self.wait.as_secs();
            let is_new = last.take(found, |found| decide(name, found, &self.options))?;
            let Some(plan) = &last.plan else {
                if is_late {
                    return Err(RebuildError::NoNode { waited_s });
                }
                sleep(LOOK).await;
                continue;
            };
            if is_new {
                let state = (last.found.len(), plan.missing.clone());
                if shown.as_ref() != Some(&state) {
                    progress(state.0, &state.1);
                    shown = Some(state);
                }
            }
            let is_settled = plan.absent == 0 && plan.problems.is_empty();
            let quiet = if is_settled { QUIET } else { DEVICES };
            let is_quiet = plan.has_copy && last.since.elapsed() >= quiet;
            if plan.missing.is_empty() {
                if is_late || is_quiet {
                    return accepted(plan.clone());
                }
            } else if is_late {
                // An option that does not fit may have been meant for one of these nodes.
                if let Some(refused) = &plan.refused {
                    return Err(refused.clone());
                }
                let nodes = plan.missing.clone();
                return Err(RebuildError::Missing { nodes, waited_s });
            }
            sleep(LOOK).await;
        }
    }

    async fn reports(
        &self,
        client: &Client,
        prefix: &Prefix,
        writer: &Writer<'_>,
    ) -> Result<Collected, Error> {
        let all = prefix.all_found();
        let page = client.list(&all).await.map_err(Error::at(&all))?;
        Ok(report::read(prefix, writer.mark.run, &page.keys))
    }
}

/// The decision about the last reports. A decision about many volumes takes time, so the same
/// reports are not decided twice.
struct Decided {
    found: BTreeMap<NodeId, Found>,
    /// Since when the reports are these.
    since: Instant,
    /// `None`: no node has reported.
    plan: Option<Plan>,
}

impl Default for Decided {
    fn default() -> Self {
        Self {
            found: BTreeMap::new(),
            since: Instant::now(),
            plan: None,
        }
    }
}

impl Decided {
    /// True: the reports are other ones, and were decided.
    fn take(
        &mut self,
        found: BTreeMap<NodeId, Found>,
        decide: impl FnOnce(&BTreeMap<NodeId, Found>) -> Result<Plan, RebuildError>,
    ) -> Result<bool, RebuildError> {
        if found == self.found {
            return Ok(false);
        }
        self.plan = (!found.is_empty()).then(|| decide(&found)).transpose()?;
        self.found = found;
        self.since = Instant::now();
        Ok(true)
    }
}

fn accepted(plan: Plan) -> Result<Plan, RebuildError> {
    if let Some(refused) = plan.refused {
        return Err(refused);
    }
    if plan.problems.is_empty() {
        return Ok(plan);
    }
    Err(RebuildError::Problems {
        problems: plan.problems,
        notes: plan.notes,
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Goal: reports that stay the same are decided once. Method: the same report twice, then
    /// another one, and none.
    #[test]
    fn the_same_reports_are_decided_once() {
        let (decisions, mut last) = (Cell::new(0), Decided::default());
        let mut take = |found: &[Found]| {
            let found = found.iter().map(|one| (NodeId(one.node), one.clone()));
            let counted = |found: &BTreeMap<NodeId, Found>| {
                decisions.set(decisions.get() + 1);
                decide("lab", found, &Options::default())
            };
            let is_new = last.take(found.collect(), counted);
            let is_new = is_new.expect("one cluster");
            (is_new, decisions.get(), last.plan.is_some())
        };
        let mut found = super::super::tests::labelled_three();
        assert_eq!(take(&[]), (false, 0, false));
        assert_eq!(take(&found[..2]), (true, 1, true));
        assert_eq!(take(&found[..2]), (false, 1, true));
        found[0].description.name = "other".to_owned();
        assert_eq!(take(&found[..2]), (true, 2, true));
        assert_eq!(take(&[]), (true, 2, false));
    }
}
