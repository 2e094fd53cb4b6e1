//! A snapshot of a volume that this node serves from several replicas.
//!
//! ```text
//!   hold writes back ─▶ chosen ─┬─ other nodes cut, and write that ─┬─▶ let writes go on ─▶ there
//!                               └─ this node cuts ──────────────────┘
//! ```
//!
//! Only cuts count that this node knows of before it lets the writes go on, and only if they were
//! held back until then. Otherwise all replicas are cut again.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev_replica::handle::{Command, VolumeError};
use nacre_cluster_core::Holder;
use nacre_cluster_node::clock::seconds;
use nacre_cluster_node::{
    Cut, CutSource, CutSources, CutState, SeenSnapshot, SnapshotChange, SnapshotKey,
};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::info;
use uuid::Uuid;

use super::super::Running;
use super::{Made, after_cut, make, note_made, remove};
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::volumes::snapshots::{HOLDS, hold_time};

/// Interval of the looks at the other nodes' cuts.
const LOOK: Duration = Duration::from_millis(2);

/// Takes a snapshot of each of these replicas, with the same contents. Without success, the key
/// asks for another attempt, or says that the snapshot failed.
pub(super) async fn take(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    by: Holder,
    (id, seen): (Uuid, &SeenSnapshot),
    replicas: &[CutSource],
    of: &CutSources,
) -> Result<(), RpcError> {
    let key = &seen.key;
    let change = async |seen: &SeenSnapshot, next: SnapshotKey, record: Option<i64>| {
        let change = SnapshotChange {
            id,
            seen,
            next: Some(next),
            by,
            record,
        };
        let snapshots = running.operator.snapshots();
        snapshots.change(&change).await.or_refuse()
    };
    let volume = engine.volumes.opened(&key.volume().0.to_string())?;
    let (hold, limit) = (Uuid::new_v4(), hold_time(key.attempts));
    let begun = volume
        .handle
        .run(Command::HoldWrites { id: hold, limit })
        .await;
    if let Err(error) = begun {
        if matches!(error, VolumeError::NotHeld { .. }) {
            // The next attempt waits longer for the writes in flight.
            let next = key.not_held(HOLDS, &error.to_string());
            change(seen, next, None).await?;
        }
        return Err(error).or_refuse();
    }
    let held = Instant::now();
    let end = held + limit;
    let chosen = key.chosen(replicas, of, Some(by));
    let attempt = async {
        if !change(seen, chosen.clone(), Some(of.revision)).await? {
            return Ok(None);
        }
        // Without its own cut the attempt has failed, so that the others are not awaited.
        let has_failed = Cell::new(false);
        let own = async {
            let own = cut_own(engine, id, by, &chosen, end).await;
            has_failed.set(own.iter().any(|(_, made)| !is_usable(made)));
            own
        };
        let others = others_are_cut(running, (id, seen.revision), &chosen, by, end, &has_failed);
        Ok::<_, RpcError>(Some(tokio::join!(own, others)))
    };
    let attempt = attempt.await;
    let released = volume.handle.run(Command::ReleaseWrites { id: hold }).await;
    let held = held.elapsed();
    info!(%id, ?held, is_ok = released.is_ok(), "writes were held back for a snapshot");
    let Some((own, is_cut_elsewhere)) = attempt? else {
        return Ok(());
    };
    let now = running.operator.snapshots().get(id).await.or_refuse()?;
    let Some(now) = now else {
        // The snapshot was given up, with its node.
        for (cut, _) in &own {
            remove(engine, cut).await?;
        }
        return Ok(());
    };
    if !is_same_choice(&now.key, &chosen) {
        // Another node has given it up.
        return Ok(());
    }
    let next = outcome(&now.key, own, is_cut_elsewhere && released.is_ok());
    let is_there = next.is == CutState::There;
    // False: the volume's record or the key has changed. The next look asks again.
    if change(&now, next.clone(), is_there.then_some(of.revision)).await? && is_there {
        note_made(id, &next);
    }
    Ok(())
}

/// Takes the snapshots of this node's lvols. One that is not made until `end` has failed.
async fn cut_own(
    engine: &Rc<Engine>,
    id: Uuid,
    by: Holder,
    chosen: &SnapshotKey,
    end: Instant,
) -> Vec<(Cut, Result<Made, RpcError>)> {
    let mut own = Vec::new();
    for cut in chosen.cuts.iter().filter(|cut| cut.node == by.node.0) {
        let made = timeout_at(end, make(engine, id, (chosen.volume().0, true), cut)).await;
        let late = || RpcError::errno(Errno::EAGAIN, "its pool does not answer".to_owned());
        own.push((cut.clone(), made.unwrap_or_else(|_| Err(late()))));
    }
    own
}

/// True for a cut, and for a replica that is on no pool.
fn is_usable(made: &Result<Made, RpcError>) -> bool {
    match made {
        Ok(Made::Counts(_)) => true,
        Ok(Made::Early) => false,
        Err(error) => error.code == -(Errno::ENOTSUP as i32),
    }
}

/// Waits until all other nodes have written their cuts. False: another node has given the choice
/// up, this one has failed, or this is not so until `end`. `before`: the revision of the key before
/// the choice.
async fn others_are_cut(
    running: &Running,
    (id, before): (Uuid, i64),
    chosen: &SnapshotKey,
    by: Holder,
    end: Instant,
    has_failed: &Cell<bool>,
) -> bool {
    while Instant::now() < end && !has_failed.get() {
        match running.inbox.snapshot(id) {
            Some(seen) if seen.revision <= before => {}
            Some(seen) if is_same_choice(&seen.key, chosen) => {
                let mut others = seen.key.cuts.iter().filter(|cut| cut.node != by.node.0);
                if others.all(|cut| cut.pool.is_some()) {
                    return true;
                }
            }
            _ => return false,
        }
        sleep(LOOK).await;
    }
    false
}

/// True if `now` is `chosen` with more cuts, or without replicas that are on no pool.
fn is_same_choice(now: &SnapshotKey, chosen: &SnapshotKey) -> bool {
    let was_chosen = |cut: &Cut| chosen.cuts.iter().any(|one| one.lvol == cut.lvol);
    now.is == CutState::Chosen
        && now.want == chosen.want
        && now.held_by == chosen.held_by
        && now.cuts.iter().all(was_chosen)
}

/// The key after the attempt. `counts`: all others were cut, and the writes were held back.
fn outcome(
    now: &SnapshotKey,
    own: Vec<(Cut, Result<Made, RpcError>)>,
    counts: bool,
) -> SnapshotKey {
    let mut next = now.clone();
    for (cut, made) in own {
        next = match after_cut(&next, &cut, made) {
            Ok(pool) => next.with_cut(cut.lvol, pool),
            Err(other) if other.is == CutState::Chosen => *other,
            Err(other) => return *other,
        };
    }
    if counts && next.is_cut() {
        next.made(seconds())
    } else if next.attempts >= HOLDS {
        let text = "the nodes of the replicas are too slow: writes of hosts would wait too long";
        next.failed(-(Errno::EAGAIN as i32), text)
    } else {
        next.again()
    }
}

#[cfg(test)]
mod tests {
    use nacre_cluster_core::{ExportId, Incarnation, NodeId};
    use nacre_cluster_node::CutHolder;

    use super::*;

    fn holder() -> Holder {
        Holder {
            node: NodeId(Uuid::from_u128(1)),
            incarnation: Incarnation(5),
        }
    }

    /// Three replicas, of which this node has the first.
    fn chosen() -> SnapshotKey {
        let key: SnapshotKey = serde_json::from_value(serde_json::json!({
            "v": 1, "volume": Uuid::from_u128(7), "name": "s", "want": "there", "is": "asked",
        }))
        .expect("a key");
        let source = |number: u128| CutSource {
            node: NodeId(Uuid::from_u128(number)),
            export_id: ExportId(Uuid::from_u128(10 + number)),
            device: format!("lvol{number}"),
        };
        let sources: Vec<_> = (1..=3).map(source).collect();
        let of = CutSources {
            revision: 9,
            bytes: 1 << 20,
            holder: CutHolder::Stands(holder()),
            replicas: sources.clone(),
        };
        key.chosen(&sources, &of, Some(holder()))
    }

    fn failed(code: Errno) -> Result<Made, RpcError> {
        Err(RpcError::errno(code, "no".to_owned()))
    }

    /// Goal: a snapshot is there only if each replica was cut while writes were held back. Method:
    /// all results of an attempt.
    #[test]
    fn a_snapshot_counts_on_all_replicas_or_on_none() {
        let chosen = chosen();
        let [own, second, third] = [0, 1, 2].map(|at| chosen.cuts[at].clone());
        let pool = Uuid::from_u128(40);
        let others = chosen
            .with_cut(second.lvol, pool)
            .with_cut(third.lvol, pool);
        let own_is_cut = others.with_cut(own.lvol, pool);
        assert_eq!(outcome(&own_is_cut, Vec::new(), true).is, CutState::There);
        for (now, counts) in [
            (&own_is_cut, false),
            (&others, true),
            (&chosen.with_cut(own.lvol, pool), true),
        ] {
            let next = outcome(now, Vec::new(), counts);
            assert_eq!((next.is, next.held_by), (CutState::Asked, None));
            assert_eq!(next.former.len(), 3, "all are deleted");
        }
        let mut late = others.clone();
        late.attempts = HOLDS;
        assert_eq!(outcome(&late, Vec::new(), false).is, CutState::Failed);
        let full = outcome(&others, vec![(own.clone(), failed(Errno::ENOSPC))], true);
        assert_eq!(full.is, CutState::Asked);
        // One that is on no pool does not count.
        let without = outcome(&others, vec![(own, failed(Errno::ENOTSUP))], true);
        assert_eq!((without.is, without.cuts.len()), (CutState::There, 2));
    }

    /// Goal: the result of one attempt is not taken for that of another one.
    #[test]
    fn another_choice_is_not_this_one() {
        let first = chosen();
        let lvol = first.cuts[1].lvol;
        assert!(is_same_choice(&first.with_cut(lvol, Uuid::nil()), &first));
        let without = first.without_cut(lvol).expect("two are left");
        assert!(is_same_choice(&without, &first));
        assert!(!is_same_choice(&first.again(), &first));
        assert!(!is_same_choice(&chosen(), &first), "others' lvols");
        let mut unheld = first.clone();
        unheld.held_by = None;
        assert!(!is_same_choice(&unheld, &first));
    }
}
