//! Storage of reservations that persist through power loss (PTPL).
//!
//! A reservation is stored in the journal, below its namespace, or in the file that
//! `nvmf_subsystem_add_ns` names (`ptpl_file`, in SPDK's format). For a volume of a cluster it is
//! stored in etcd. It is durable before the host's command completes. The target sends the state
//! with a ticket. A task on the management thread stores the state and completes the ticket. A
//! namespace loads its reservation when it is added, so hosts never see the namespace without it.
//! The replay of the record only checks that it is loaded.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use nacre_nvmf::subsystems::NamespaceIds;
use nacre_nvmf::subsystems::reservation::{
    ReservationState, ReservationStore, Reservations, Ticket,
};
use nacre_nvmf_wire::Nqn;
use serde_json::json;
use tokio::sync::mpsc;
use tracing::warn;
use uuid::Uuid;

use super::cluster;
use super::stored_reservation::{RESTORE, StoredReservation, find};
use super::subsystems::key;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::store::Change;

/// Where the reservation of a namespace is stored.
#[derive(Debug, Clone)]
enum StoredIn {
    Journal {
        nqn: Nqn,
        nsid: u32,
        uuid: Uuid,
    },
    File {
        path: PathBuf,
        uuid: Uuid,
    },
    /// The store of the cluster, so that the reservation moves with the volume.
    Cluster {
        volume: Uuid,
    },
}

impl std::fmt::Display for StoredIn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Journal { nqn, nsid, .. } => write!(f, "namespace {nsid} of {nqn}"),
            Self::File { path, .. } => write!(f, "{}", path.display()),
            Self::Cluster { volume } => write!(f, "volume {volume}"),
        }
    }
}

struct StateToStore {
    place: StoredIn,
    state: Option<ReservationState>,
    ticket: Ticket,
}

/// The queue from the target's cores to the task that stores reservations.
#[derive(Debug)]
pub struct ReservationJobs {
    jobs: mpsc::UnboundedSender<StateToStore>,
    queue: RefCell<Option<mpsc::UnboundedReceiver<StateToStore>>>,
}

impl Default for ReservationJobs {
    fn default() -> Self {
        let (jobs, queue) = mpsc::unbounded_channel();
        Self {
            jobs,
            queue: RefCell::new(Some(queue)),
        }
    }
}

struct ToManagement {
    place: StoredIn,
    jobs: mpsc::UnboundedSender<StateToStore>,
}

impl ReservationStore for ToManagement {
    /// Queues the state. The queue is bounded by the number of namespaces: each has at most one job
    /// in flight.
    fn store(&self, state: Option<&ReservationState>, ticket: Ticket) {
        // If the task is gone, the dropped ticket reports the failure.
        let _ = self.jobs.send(StateToStore {
            place: self.place.clone(),
            state: state.cloned(),
            ticket,
        });
    }

    fn stores_all(&self) -> bool {
        matches!(self.place, StoredIn::Cluster { .. })
    }
}

/// Stores reservations until the daemon ends.
pub async fn store_reservations(engine: Rc<Engine>) {
    let queue = engine.reservation_jobs.queue.take();
    let Some(mut queue) = queue else { return };
    while let Some(job) = queue.recv().await {
        // A file that cannot be written delays only its own namespace, which has one job at a time.
        tokio::task::spawn_local(store(Rc::clone(&engine), job));
    }
}

async fn store(engine: Rc<Engine>, job: StateToStore) {
    let StateToStore {
        place,
        state,
        ticket,
    } = job;
    let stored = match &place {
        StoredIn::Journal { nqn, nsid, uuid } => {
            let kept = state
                .as_ref()
                .map(|state| StoredReservation::of(state, *uuid));
            in_journal(&engine, nqn, *nsid, *uuid, kept).await
        }
        StoredIn::File { path, uuid } => {
            let kept = state.as_ref();
            let kept = kept.map(|state| StoredReservation::of(state, *uuid).without_generation());
            in_file(path.clone(), *uuid, kept).await
        }
        StoredIn::Cluster { volume } => {
            let kept = state.as_ref();
            let kept = kept.map(|state| StoredReservation::of(state, *volume));
            cluster::reservation::store(&engine, *volume, kept).await
        }
    };
    match stored {
        Ok(()) => ticket.stored(),
        Err(error) => {
            warn!(%place, %error, "a reservation could not be stored; the command that changed it is refused");
            ticket.failed();
        }
    }
}

async fn in_journal(
    engine: &Engine,
    nqn: &Nqn,
    nsid: u32,
    uuid: Uuid,
    kept: Option<StoredReservation>,
) -> Result<(), RpcError> {
    let own = key::reservation(nqn, nsid);
    // Must not leave a record behind for a namespace that was removed meanwhile.
    find(engine, nqn, nsid, uuid)?;
    let change = match kept {
        None => Change::remove(own.clone()),
        Some(kept) => {
            let record = json!({ "nqn": nqn.as_str(), "nsid": nsid, "reservation": kept });
            Change::put(own.clone(), RESTORE, record)
        }
    };
    engine.journal.commit(change).await?;
    // The namespace may also be removed while the record is being stored.
    match find(engine, nqn, nsid, uuid) {
        Err(gone) if engine.plane().is_ok() => {
            engine.journal.commit(Change::remove(own)).await?;
            Err(gone)
        }
        _ => Ok(()),
    }
}

/// Replaces the file atomically: after a power loss it holds the old or the new reservation.
async fn in_file(
    path: PathBuf,
    uuid: Uuid,
    kept: Option<StoredReservation>,
) -> Result<(), RpcError> {
    let work = move || write_file(&path, uuid, kept.as_ref());
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| RpcError::internal(e.to_string()))?
        .map_err(|e| RpcError::errno(Errno::EIO, e.to_string()))
}

/// Writes the file, unless it holds anything but the reservation of namespace `uuid`.
fn write_file(path: &Path, uuid: Uuid, kept: Option<&StoredReservation>) -> std::io::Result<()> {
    if let Some(found) = read_file(path)? {
        found.belongs_to(uuid).map_err(std::io::Error::other)?;
    }
    match kept {
        Some(kept) => crate::values::files::replace(path, &serde_json::to_vec_pretty(kept)?),
        None => match std::fs::remove_file(path) {
            Ok(()) => crate::values::files::sync_folder(path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        },
    }
}

/// The absolute path of the file, so that it does not depend on the working directory.
pub fn located(file: &str) -> Result<String, RpcError> {
    let refuse = |error: std::io::Error| {
        RpcError::errno(Errno::EINVAL, format!("{file}: {error}")).field("namespace.ptpl_file")
    };
    let path = crate::values::files::absolute(Path::new(file)).map_err(refuse)?;
    Ok(path.to_string_lossy().into_owned())
}

fn read_file(path: &Path) -> std::io::Result<Option<StoredReservation>> {
    match std::fs::read(path) {
        // SPDK creates an empty file and fills it later.
        Ok(bytes) if bytes.iter().all(u8::is_ascii_whitespace) => Ok(None),
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The stored reservation of a new namespace, and the place for later changes. A reservation that
/// cannot be read is an error: hosts could otherwise write to a namespace that another host has
/// reserved.
pub fn initial(
    engine: &Engine,
    (nqn, nsid, ids): (&Nqn, u32, &NamespaceIds),
    file: Option<&str>,
) -> Result<Reservations, RpcError> {
    let uuid = ids.uuid;
    let jobs = engine.reservation_jobs.jobs.clone();
    if engine.cluster.shows(nqn.as_str()) {
        let place = StoredIn::Cluster { volume: uuid };
        // Its state comes when this node serves the volume.
        return Ok(Reservations {
            store: Some(Arc::new(ToManagement { place, jobs })),
            stored: None,
        });
    }
    let (place, kept) = match file {
        Some(file) => {
            let path = PathBuf::from(file);
            let wrong = |why: String| {
                RpcError::errno(Errno::EINVAL, format!("{file}: {why}"))
                    .field("namespace.ptpl_file")
                    .remedy("give a file that can be written; remove one that is damaged")
            };
            let kept = read_file(&path).map_err(|e| wrong(e.to_string()))?;
            if let Some(kept) = &kept {
                kept.belongs_to(uuid).map_err(wrong)?;
            }
            (
                StoredIn::File { path, uuid },
                kept.map(|kept| (kept, file.to_owned())),
            )
        }
        None if engine.journal.is_durable() => {
            let own = key::reservation(nqn, nsid);
            let kept = engine.journal.find(&own).map(|entry| {
                let kept = entry.record.params["reservation"].clone();
                serde_json::from_value(kept)
                    .map(|kept| (kept, own.clone()))
                    .map_err(|e| damaged(&own, &e.to_string()))
            });
            let nqn = nqn.clone();
            (StoredIn::Journal { nqn, nsid, uuid }, kept.transpose()?)
        }
        None => return Ok(Reservations::default()),
    };
    let kept = match kept {
        Some((kept, from)) if kept.bdev_uuid == uuid && kept.ptpl => {
            Some(kept.state().map_err(|why| damaged(&from, &why))?)
        }
        _ => None,
    };
    Ok(Reservations {
        store: Some(Arc::new(ToManagement { place, jobs })),
        stored: kept,
    })
}

fn damaged(what: &str, why: &str) -> RpcError {
    RpcError::errno(
        Errno::EIO,
        format!("the reservation kept in {what} is damaged: {why}"),
    )
    .remedy("state_forget gives it up, or remove the file: hosts have to register again")
}

#[cfg(test)]
mod tests {
    use nacre_nvmf::subsystems::reservation::{HeldReservation, Registrant};
    use nacre_nvmf_wire::commands::reservation::ReservationType;

    use super::*;
    use crate::methods::testing::TestDaemon;

    fn state(held: Option<HeldReservation>) -> ReservationState {
        ReservationState {
            registrants: vec![
                Registrant {
                    host: [1; 16],
                    key: u64::MAX,
                },
                Registrant {
                    host: [2; 16],
                    key: 7,
                },
            ],
            held,
            generation: 9,
            ptpl: true,
        }
    }

    /// Goal: a reservation stored while its namespace is removed is deleted too, in either order.
    /// The next namespace with this NSID must not inherit it.
    #[test]
    fn no_record_remains_of_a_namespace_removed_meanwhile() {
        const NQN: &str = "nqn.2026-01.org.example:a";
        let nqn = Nqn::new(NQN).unwrap();
        for later in 0..3 {
            let dir = tempfile::tempdir().unwrap();
            let store = crate::store::Store::open(dir.path()).unwrap();
            let daemon = TestDaemon::with(crate::config::Settings::default(), Some(store));
            let uuid = Uuid::from_u128(7);
            daemon.call(
                "bdev_null_create",
                json!({ "name": "n", "num_blocks": 2048, "block_size": 512, "uuid": uuid }),
            );
            daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
            let namespace = json!({ "nqn": NQN, "namespace": { "bdev_name": "n" } });
            daemon.call("nvmf_subsystem_add_ns", namespace);
            let engine = &daemon.engine;
            let own = serde_json::value::to_raw_value(&json!({ "nqn": NQN, "nsid": 1 })).unwrap();
            let kept = StoredReservation::of(&state(None), uuid);
            let (removed, _) = daemon.run(async {
                let removing = engine.call("nvmf_subsystem_remove_ns", Some(&own));
                let reservation_jobs = async {
                    for _ in 0..later {
                        tokio::task::yield_now().await;
                    }
                    in_journal(engine, &nqn, 1, uuid, Some(kept)).await
                };
                tokio::join!(removing, reservation_jobs)
            });
            removed.unwrap();
            let left = engine.journal.find(&key::reservation(&nqn, 1));
            assert_eq!(left, None, "stored {later} turns later");
        }
    }

    /// Goal: a stored reservation loads unchanged, from a file too, except for the generation.
    #[test]
    fn stored_reservation_round_trips() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ptpl.json");
        assert_eq!(read_file(&path).unwrap(), None);
        let uuid = Uuid::from_u128(5);
        for held in [
            None,
            Some(HeldReservation {
                kind: ReservationType::ExclusiveAccess,
                holder: Some([2; 16]),
            }),
            Some(HeldReservation {
                kind: ReservationType::WriteExclusiveAllRegistrants,
                holder: None,
            }),
        ] {
            let state = state(held);
            let kept = StoredReservation::of(&state, uuid);
            assert_eq!(kept.state(), Ok(state));
            write_file(&path, uuid, Some(&kept)).unwrap();
            assert_eq!(read_file(&path).unwrap(), Some(kept));
        }
        // Neither another namespace's reservation nor an unrelated file is overwritten or removed.
        let other = Uuid::from_u128(6);
        let theirs = StoredReservation::of(&state(None), other);
        write_file(&path, other, Some(&theirs)).unwrap_err();
        write_file(&path, other, None).unwrap_err();
        write_file(&path, uuid, None).unwrap();
        write_file(&path, uuid, None).unwrap();
        let notes = folder.path().join("notes");
        std::fs::write(&notes, "precious").unwrap();
        write_file(&notes, other, Some(&theirs)).unwrap_err();
        write_file(&notes, other, None).unwrap_err();
        assert_eq!(std::fs::read_to_string(&notes).unwrap(), "precious");
        std::fs::remove_file(&notes).unwrap();
        assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none());
        std::fs::write(&path, "\n").unwrap();
        assert_eq!(read_file(&path).unwrap(), None, "an empty file of SPDK");
        std::fs::write(&path, "{").unwrap();
        assert!(read_file(&path).is_err());
        assert!(
            write_file(
                &folder.path().join("none/ptpl"),
                uuid,
                Some(&StoredReservation::of(&state(None), uuid))
            )
            .is_err()
        );
    }
}
