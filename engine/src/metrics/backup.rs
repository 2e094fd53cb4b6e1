//! Metrics of backups.

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};
use crate::services::backup::Operation;

family!(
    JOBS,
    "nacre_backup_running_jobs",
    Gauge,
    "Backup jobs that run.",
    []
);
family!(
    STORED,
    "nacre_backup_stored_bytes",
    Counter,
    "Bytes that complete backups added to their stores.",
    []
);
family!(
    FAILED,
    "nacre_backup_failed_jobs",
    Counter,
    "Backup jobs that failed.",
    ["operation"]
);

#[derive(Debug)]
pub struct BackupMetrics;

impl MetricsSource for BackupMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 3] = [&JOBS, &STORED, &FAILED];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        let backups = &of.engine.devices.backups;
        into.value(&JOBS, &[], backups.running() as u64);
        into.value(&STORED, &[], backups.stored_bytes());
        for operation in Operation::ALL {
            let failures = backups.failures(operation);
            into.value(&FAILED, &[operation.word()], failures);
        }
    }
}
