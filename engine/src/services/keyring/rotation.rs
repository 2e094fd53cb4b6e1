//! Rotations, during which a host may use two keys, and the expiry of keys.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use nacre_nvmf::subsystems::SecretKind;
use nacre_nvmf_wire::Nqn;
use serde_json::{json, value::to_raw_value};
use tracing::{info, warn};

use super::text::kind_name;
use crate::services::Engine;
use crate::values::time;

/// The method that begins and ends the rotation of a host's key.
pub const ROTATE: &str = "host_rotate";

/// Interval at which expiries and rotations are checked.
const EVERY: Duration = Duration::from_secs(1);

/// The rotation of one host's key: the former key is accepted beside the new one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rotation {
    /// Names of the new keys: of the host, and of the controller.
    pub keys: (String, Option<String>),
    pub former: (String, Option<String>),
    /// The latest end of the rotation.
    pub until: SystemTime,
    /// True if the rotation may end once all queues of the host use the new key. False after a
    /// restart of the daemon: a path that has not reconnected yet may have the former key.
    pub may_end_early: bool,
}

impl Rotation {
    /// The reason for which the rotation ends now. `None`: it goes on.
    fn end(&self, now: SystemTime, has_rotated: bool) -> Option<&'static str> {
        if self.may_end_early && has_rotated {
            Some("the host uses the new key on every queue")
        } else if now >= self.until {
            Some("its time is over")
        } else {
            None
        }
    }
}

/// Subsystem, host, and the kind of the host's key.
pub type SecretId = (Nqn, Nqn, SecretKind);

/// The rotations in progress.
#[derive(Debug, Default)]
pub struct Rotations(RefCell<BTreeMap<SecretId, Rotation>>);

impl Rotations {
    pub fn find(&self, place: &SecretId) -> Option<Rotation> {
        self.0.borrow().get(place).cloned()
    }

    pub fn set(&self, place: SecretId, rotation: Option<Rotation>) {
        let mut all = self.0.borrow_mut();
        match rotation {
            Some(rotation) => drop(all.insert(place, rotation)),
            None => drop(all.remove(&place)),
        }
    }

    /// Drops the rotations of a host that is removed from the subsystem.
    pub fn forget(&self, subsystem: &Nqn, host: &Nqn) {
        let mut all = self.0.borrow_mut();
        all.retain(|(of, who, _), _| (of, who) != (subsystem, host));
    }

    fn list(&self) -> Vec<(SecretId, Rotation)> {
        let all = self.0.borrow();
        let copy = |(place, rotation): (&SecretId, &Rotation)| (place.clone(), rotation.clone());
        all.iter().map(copy).collect()
    }
}

/// Reports expired keys, and ends rotations, until the data plane ends.
pub async fn follow(engine: &Rc<Engine>) {
    loop {
        tokio::time::sleep(EVERY).await;
        report_expired(engine);
        end_rotations(engine).await;
    }
}

/// Sends an event for each key that expired since the last call.
pub fn report_expired(engine: &Engine) {
    for listed in engine.keyring.list() {
        let key = &listed.key;
        if !key.take_expiry() {
            continue;
        }
        let at = key.expires().map(time::moment).unwrap_or_default();
        let text = format!(
            "key {} expired at {at}: hosts that use it are refused",
            key.name
        );
        warn!(key = key.name, "{text}");
        let facts = json!({ "key": key.name, "expired": at });
        engine
            .notes
            .report("key_expired", key.name.clone(), text, facts);
    }
}

/// Ends the rotations whose time is over, or whose hosts use the new keys on all queues.
pub async fn end_rotations(engine: &Rc<Engine>) {
    for (place, rotation) in engine.keyring.rotations.list() {
        let (nqn, host, kind) = &place;
        let Ok(plane) = engine.plane() else { return };
        let subsystem = plane.target.subsystem(nqn);
        let Some(subsystem) = subsystem.ok().filter(|s| s.hosts().contains(host)) else {
            engine.keyring.rotations.set(place, None);
            continue;
        };
        let has_rotated = subsystem.has_rotated(host, *kind);
        let Some(why) = rotation.end(engine.keyring.clock.now(), has_rotated) else {
            continue;
        };
        let (key, controller) = &rotation.keys;
        let (former, kind) = (&rotation.former.0, kind_name(*kind));
        let params = json!({
            "nqn": nqn.as_str(), "host": host.as_str(), "kind": kind, "key": key,
            "dhchap_ctrlr_key": controller, "overlap_s": 0,
        });
        let Ok(params) = to_raw_value(&params) else {
            continue;
        };
        if let Err(error) = engine.own_call(ROTATE, Some(&params)).await {
            warn!(%nqn, %host, key, %error, "the former key of a host cannot end");
            continue;
        }
        let text = format!("key {former} of host {host} at {nqn} has ended: {why}");
        info!("{text}");
        let facts = json!({
            "subsystem": nqn.as_str(), "host": host.as_str(), "kind": kind, "key": key,
            "former": former, "reason": why,
        });
        let ctx = format!("{host} {former}");
        engine.notes.report("host_key_rotated", ctx, text, facts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends() {
        let now = SystemTime::now();
        let of = |may_end_early| Rotation {
            keys: ("new".into(), None),
            former: ("old".into(), None),
            until: now,
            may_end_early,
        };
        let before = now - Duration::from_secs(1);
        assert_eq!(of(true).end(before, false), None);
        assert!(of(true).end(before, true).is_some());
        assert_eq!(of(false).end(before, true), None, "after a restart");
        assert!(of(false).end(now, false).is_some());
    }
}
