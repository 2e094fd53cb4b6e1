//! Detects files and block devices of bdevs that another program truncates.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev_uring::UringBdev;
use tracing::debug;

use crate::bdev_modules;
use crate::plane::Plane;
use crate::services::engine::Engine;

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
        super::known_files::settle(&engine, &open).await;
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

pub(super) fn files(plane: &Plane) -> Vec<Weak<UringBdev>> {
    let devices = plane.bdevs.list().into_iter();
    let files =
        devices.filter_map(|listed| bdev_modules::device::<UringBdev>(listed.layer.module()));
    files.map(|file| Arc::downgrade(&file)).collect()
}
