//! Detects files and block devices of bdevs that another program truncates.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Weak;
use std::time::Duration;

use nacre_bdev::Bdev;
use tracing::debug;

use super::known_files::{files, forget_changes};
use crate::services::Engine;

/// Interval at which files are checked for truncation by other programs.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Checks all files and block devices every `CHECK_INTERVAL` until the data plane ends.
pub async fn watch(engine: Rc<Engine>) {
    // Number of truncations already reported, by device.
    let mut reported: HashMap<String, u64> = HashMap::new();
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        let Ok(plane) = engine.plane() else { return };
        let files = files(&plane);
        if files.is_empty() {
            continue;
        }
        let open: Vec<_> = files.iter().filter_map(Weak::upgrade).collect();
        forget_changes(&engine, &open).await;
        drop(open);
        // A file on a server that does not respond delays only these checks.
        let look = move || -> HashMap<String, u64> {
            let files = files.iter().filter_map(Weak::upgrade);
            files
                .map(|f| (f.name().to_owned(), f.check_size()))
                .collect()
        };
        let Ok(seen) = tokio::task::spawn_blocking(look).await else {
            continue;
        };
        for (name, cuts) in &seen {
            if reported.get(name).copied().unwrap_or(0) != *cuts
                && let Err(error) = plane.bdevs.report_cut(name)
            {
                debug!(bdev = name, %error, "it was cut, and is gone");
            }
        }
        reported = seen;
    }
}
