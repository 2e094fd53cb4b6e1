//! Sends the state machines' changes of volume records to etcd, and passes the answers back.

use std::sync::Arc;

use nacre_cluster_core::{Incarnation, Record, Revision};
use nacre_cluster_etcd::{Error as Said, Outcome};

use super::{Done, Driver, Phase};
use crate::volumes::Commit;

impl Driver {
    pub(super) fn commit(&mut self, of: Incarnation, commit: Commit) {
        let leases = Arc::clone(&self.leases);
        self.jobs.spawn(async move {
            let bytes = commit.value.to_string().into_bytes();
            let encode = |_: &Record| bytes.clone();
            let answer = leases.execute(&commit.transaction, encode).await;
            Done::Committed(of, commit, answer)
        });
    }

    pub(super) fn committed(
        &mut self,
        of: Incarnation,
        commit: Commit,
        answer: Result<Outcome, Said>,
    ) {
        let Commit {
            volume,
            number,
            value,
            ..
        } = commit;
        match answer {
            Ok(Outcome::Made(at)) => self.volumes.committed(volume, number, at, value),
            Ok(Outcome::Refused { is_gone, record }) => {
                if let Phase::In(lease) = &mut self.phase
                    && is_gone
                {
                    lease.end(of);
                    self.shared.word.set(lease.until());
                }
                // Without a record, the watch shows the deletion.
                if let Some(kv) = record {
                    let revision = Revision(kv.mod_revision as u64);
                    let refused = self.volumes.refused(volume, number, revision, &kv.value);
                    self.ignored(&kv.key, refused.err());
                }
            }
            Err(_) => self.volumes.unanswered(volume, number),
        }
    }
}
