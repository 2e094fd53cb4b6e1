//! Writes log lines and events about listeners.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::rc::Rc;

use tracing::{info, warn};

use super::plan::Path;
use super::{Actual, MAX_LOST_PATHS, PathId, PathStatus};
use crate::doctor;
use crate::services::Engine;

/// Logs doubtful RDMA settings of addresses when they come into use, before they cause a failure.
pub(super) async fn concern(
    said: Rc<RefCell<BTreeSet<String>>>,
    addresses: Vec<IpAddr>,
    marking: doctor::Marking,
) {
    let found = tokio::task::spawn_blocking(move || {
        doctor::concerns(&doctor::System::real(), &addresses, marking)
    });
    for finding in found.await.unwrap_or_default() {
        let (id, subject) = (finding.id, finding.subject.unwrap_or_default());
        if said.borrow_mut().insert(format!("{id} {subject}")) {
            let remedy = finding.remedy.unwrap_or_default();
            warn!(
                "RDMA is used on {subject}: {id}: {}; {remedy}",
                finding.evidence
            );
        }
    }
}

/// Writes log lines and events for paths whose state has changed.
pub(super) fn changes(
    engine: &Engine,
    old: &[PathStatus],
    new: &[PathStatus],
    away: &mut BTreeSet<PathId>,
) {
    let path_id = |path: &Path| {
        let ip = path.ip.clone();
        (path.listener.clone(), path.transport, ip, path.port)
    };
    let words = |path: &Path| {
        let transport = path.transport.trtype();
        format!(
            "listener \"{}\", {} {} port {}, {transport}",
            path.listener, path.iface, path.ip, path.port
        )
    };
    let before: BTreeMap<PathId, &Actual> =
        old.iter().map(|s| (path_id(&s.path), &s.actual)).collect();
    for now in new {
        let this = path_id(&now.path);
        if before.get(&this).is_some_and(|b| **b == now.actual) {
            continue;
        }
        let what = words(&now.path);
        match &now.actual {
            Actual::Listening => {
                info!(target: "nacre_engine::services::listeners", "{what}: listening");
                let was_absent = matches!(before.get(&this), Some(Actual::Not(_)));
                if away.remove(&this) || was_absent {
                    engine.notes.send("transport_restored", what);
                }
            }
            Actual::Idle => info!("{what}: no subsystem is served there"),
            Actual::Not(lack) => {
                warn!("{what}: {lack}");
                engine
                    .notes
                    .send("transport_downgraded", format!("{what}: {}", lack.reason));
            }
        }
    }
    let there: BTreeSet<PathId> = new.iter().map(|s| path_id(&s.path)).collect();
    for gone in old {
        let path = &gone.path;
        if there.contains(&path_id(path)) {
            continue;
        }
        let what = words(path);
        warn!("{what}: not listening any more: the address is gone");
        engine
            .notes
            .send("transport_downgraded", format!("{what}: no_address"));
        if away.len() < MAX_LOST_PATHS {
            away.insert(path_id(path));
        }
    }
}
