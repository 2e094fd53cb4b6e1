//! Fences former holders of a volume whose replicas other machines can reach: by NVMe reservation,
//! if the replica's device supports it (a remote namespace of a target with reservations), and
//! everywhere by label and epoch (`label_poll`).
//!
//! ```text
//! store CAS ─▶ report ─▶ register ─▶ acquire ─▶ preempt and abort ─▶ label
//!                ▲  every step is decided by a new report            │
//!                └───────────────────────────────────────────────────┘
//! ```
//!
//! The reservation is Write Exclusive - All Registrants. A preempt with a key of zero ends all
//! other registrations at once, of any host, and completes after all their commands in flight have
//! ended. The key identifies a holder's volume and epoch. Of two holders, the one with the lower
//! key stops, so that a former holder that returns does not fence its successor.
//!
//! ```text
//!   key   volume:16 (never zero) | epoch:32 | holder:16
//! ```
//!
//! No label is written before the reservation is held ([`Membership::write_label`]): no earlier
//! holder writes to a replica that its holder has secured. A holder whose I/O is refused for a
//! reservation is fenced at once.

use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use nacre_bdev::Bdev;
use nacre_bdev::reservation::{ActiveReservation, ReservationReport, ReservationRequest};
use nacre_reactor::CoreHandle;
use uuid::Uuid;

use super::disk::Disk;
use super::membership::Membership;
use super::reasons::describe;
use super::state::Live;
use crate::model::VolumeRecord;
use crate::mutation::Mutation;
use crate::shared::Failure;

/// Most reports and steps: without interference four suffice.
const ROUNDS: usize = 16;
/// Interval at which the holder checks that its reservation exists, and that the label is its own.
/// A holder that does not write learns of another one after this time at the latest.
pub(super) const WATCH: Duration = Duration::from_secs(1);

/// The key of a holder in an epoch.
pub(super) fn key(volume: Uuid, epoch: u64, holder: Uuid) -> u64 {
    let fold = |id: Uuid| {
        let words = id.into_bytes();
        let words = words
            .chunks_exact(2)
            .map(|w| u16::from_be_bytes([w[0], w[1]]));
        u64::from(words.fold(0, |sum, word| sum ^ word))
    };
    // No holder exists from an epoch 2^32 ago.
    (fold(volume) | 1) << 48 | (epoch & 0xffff_ffff) << 16 | fold(holder)
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Only this holder has access to the device.
    Done,
    ReservationRequest(ReservationRequest),
    /// The volume has another holder, of this epoch or a later one.
    Outranked,
    /// An unrelated host has reserved the device.
    Strange,
}

pub(super) fn next(report: &ReservationReport, key: u64) -> Next {
    let of_volume = |other: &u64| other >> 48 == key >> 48;
    let (own, others) = (report.own, &report.others);
    // Equal keys of no holder: another host began an operation on the closed volume, and may have
    // stopped since. The store decides between the two operations.
    let same = key & 0xffff == 0;
    let outranks = |other: &&u64| **other > key || **other == key && !same;
    if others.iter().filter(outranks).any(of_volume) {
        return Next::Outranked;
    }
    match report.held {
        ActiveReservation::Other(_) => Next::Strange,
        ActiveReservation::AllRegistrants if own == Some(key) && others.is_empty() => Next::Done,
        // Any other registered host must be excluded.
        ActiveReservation::AllRegistrants if own == Some(key) => {
            Next::ReservationRequest(ReservationRequest::Preempt { key })
        }
        _ if !others.iter().all(of_volume) => Next::Strange,
        _ if own != Some(key) => {
            Next::ReservationRequest(ReservationRequest::Register { current: own, key })
        }
        _ => Next::ReservationRequest(ReservationRequest::Acquire { key }),
    }
}

pub(super) async fn ask(
    core: &CoreHandle,
    disk: &Disk,
    what: ReservationRequest,
    patience: Duration,
) -> Result<ReservationReport, Failure> {
    match core.timeout(patience, disk.reserve(what)).await {
        Ok(answer) => answer.map_err(Failure::Status),
        Err(_) => Err(Failure::Deadline),
    }
}

/// Reserves the device exclusively for the holder of `key`. Returns true if it was not reserved so
/// before.
pub(super) async fn reserve(
    core: &CoreHandle,
    disk: &Disk,
    key: u64,
    patience: Duration,
) -> Result<bool, Failure> {
    let mut changed = false;
    for _ in 0..ROUNDS {
        let report = ask(core, disk, ReservationRequest::Report, patience).await?;
        let what = match next(&report, key) {
            Next::Done => return Ok(changed),
            Next::ReservationRequest(what) => what,
            refused => {
                let device = &disk.name;
                let keys = report.others.iter().map(|key| format!("{key:#x}"));
                let keys = keys.collect::<Vec<_>>().join(", ");
                tracing::warn!(device, keys, "another owner has reserved a replica");
                return Err(match refused {
                    Next::Outranked => Failure::Fenced,
                    _ => Failure::Reserved,
                });
            }
        };
        match ask(core, disk, what, patience).await {
            Ok(_) => changed = true,
            // Another host was faster: the next report names it.
            Err(why) if why.is_fenced() => {}
            Err(why) => return Err(why),
        }
    }
    Err(Failure::Reserved)
}

/// Releases the reservation of [`reserve`]. An unreachable target keeps it, and the next holder
/// ends it.
pub(super) async fn release(core: &CoreHandle, disk: &Disk, key: u64, patience: Duration) {
    if let Err(why) = ask(core, disk, ReservationRequest::Unregister { key }, patience).await {
        let (device, why) = (&disk.name, describe(why));
        tracing::warn!(device, why, "the reservation of a replica stays");
    }
}

impl Membership {
    /// Reserves the replica's device before a label has `record`'s epoch. No holder of an earlier
    /// epoch writes to the replica any longer.
    pub(super) async fn keep_others_out(
        &self,
        live: &Rc<Live>,
        record: &VolumeRecord,
    ) -> Result<(), Failure> {
        let key = key(record.id, record.epoch, self.holder);
        if live.key.get() == key || !live.device.layer.reserves() {
            return Ok(());
        }
        let changed = reserve(&self.context.core, &live.disk, key, self.context.deadline()).await?;
        // A holder that came and left before the reservation may have written a label.
        if changed
            && let Ok((label, _)) = self.media.read_label(&live.disk).await?
            && label.volume == record.id
            && label.stamp > record.version()
        {
            release(&self.context.core, &live.disk, key, self.context.deadline()).await;
            return Err(Failure::Fenced);
        }
        live.key.set(key);
        Ok(())
    }

    /// Releases the reservation, because the replica left the volume, or the volume has no holder.
    pub(super) async fn let_others_in(&self, live: &Live) {
        let key = live.key.take();
        if key != 0 {
            release(&self.context.core, &live.disk, key, self.context.deadline()).await;
        }
    }

    /// Releases the reservations of all replicas. Not in a cluster, where a former holder that was
    /// stopped may go on after the end of its successors: the next holder takes them over.
    pub(super) async fn let_others_in_everywhere(&self) {
        if self.context.lease.is_some() && !Mutation::ReleaseAtClose.is_active() {
            return;
        }
        let present = self.context.state.borrow().present();
        join_all(present.iter().map(|(_, live)| self.let_others_in(live))).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: Uuid = Uuid::from_u128(0x77);

    fn of(epoch: u64, holder: u128) -> u64 {
        key(VOLUME, epoch, Uuid::from_u128(holder))
    }

    fn report(own: Option<u64>, others: &[u64], held: ActiveReservation) -> ReservationReport {
        ReservationReport {
            own,
            others: others.to_vec(),
            held,
        }
    }

    /// Keys increase with epochs, are never zero, and differ between volumes and holders.
    #[test]
    fn keys() {
        assert!(of(1, 9) < of(2, 1) && of(2, 1) < of(3, 0));
        assert!(of(0xffff, 0xffff) < of(0x1_0000, 0));
        assert_ne!(of(1, 1), of(1, 2));
        assert_ne!(key(Uuid::nil(), 0, Uuid::nil()), 0);
        assert_ne!(
            of(1, 1) >> 48,
            key(Uuid::from_u128(0x78_0000), 1, Uuid::nil()) >> 48
        );
    }

    /// The next step for every possible report.
    #[test]
    fn steps() {
        use ActiveReservation::*;
        let (key, older, newer) = (of(5, 1), of(4, 2), of(6, 2));
        let stranger = 0xabc;
        let does = |own, others: &[u64], held| next(&report(own, others, held), key);
        let register =
            |current| Next::ReservationRequest(ReservationRequest::Register { current, key });
        let acquire = Next::ReservationRequest(ReservationRequest::Acquire { key });
        let preempt = Next::ReservationRequest(ReservationRequest::Preempt { key });
        assert_eq!(does(None, &[], NotReserved), register(None));
        assert_eq!(
            does(Some(older), &[], AllRegistrants),
            register(Some(older))
        );
        assert_eq!(does(None, &[older], AllRegistrants), register(None));
        assert_eq!(does(Some(key), &[], NotReserved), acquire);
        assert_eq!(does(Some(key), &[older], NotReserved), acquire);
        assert_eq!(does(Some(key), &[older], AllRegistrants), preempt);
        assert_eq!(does(Some(key), &[older, stranger], AllRegistrants), preempt);
        assert_eq!(does(Some(key), &[], AllRegistrants), Next::Done);
        for own in [None, Some(older), Some(key)] {
            for held in [NotReserved, AllRegistrants, Other(1)] {
                assert_eq!(does(own, &[older, newer], held), Next::Outranked);
                assert_eq!(
                    does(own, &[of(5, 3)], held),
                    Next::Outranked,
                    "the higher one"
                );
            }
            assert_eq!(does(own, &[], Other(2)), Next::Strange);
            assert_eq!(does(own, &[stranger], NotReserved), Next::Strange);
        }
        assert_eq!(does(None, &[stranger], AllRegistrants), Next::Strange);
    }

    /// An operation on a closed volume takes the place of the same one of another host, but not of
    /// a later holder.
    #[test]
    fn steps_without_a_holder() {
        use ActiveReservation::AllRegistrants;
        let key = of(5, 0);
        let does = |own, other| next(&report(own, &[other], AllRegistrants), key);
        let register = ReservationRequest::Register { current: None, key };
        assert_eq!(does(None, key), Next::ReservationRequest(register));
        let preempt = ReservationRequest::Preempt { key };
        assert_eq!(does(Some(key), key), Next::ReservationRequest(preempt));
        assert_eq!(does(Some(key), of(5, 1)), Next::Outranked);
        assert_eq!(does(Some(key), of(6, 0)), Next::Outranked);
    }
}
