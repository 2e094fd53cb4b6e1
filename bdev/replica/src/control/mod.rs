//! The management of an open volume, as tasks on one reactor: membership, failures, resync,
//! fencing, the dirty-region log, and operators' commands.
//!
//! ```text
//!   lanes ── news ──▶ listen ─┬─ wanted regions ──▶ LogWriter  page on the media, then dirty
//!                             ├─ failures ────────▶ FailureHandler  out of sync, then a view
//!                             ├─ repairs ─────────▶ ReadRepair
//!                             └─ held answers ────▶ HolderConfirmation  replicas confirm it
//!   time ──▶ LogWriter clears idle regions         ▶ FailureHandler finds losses of devices
//!        ──▶ Attacher attaches absent replicas     ▶ Resyncer copies missing data, promotes
//!        ──▶ LabelPoll, Lease find other holders   ▶ Verify compares the replicas
//!   handle ─▶ Control   commands
//! ```
//!
//! Below the tasks:
//!
//! | part | owns |
//! |---|---|
//! | [`Context`] | the volume's state, tasks and signals, connections to lanes and observers |
//! | [`Media`] | the replicas' devices, and the control's buffers |
//! | [`Membership`] | the store, and the right to change the record |
//! | [`Copier`] | the ranges that are being copied, and the permitted rate |
//!
//! [`Membership::commit`] is the only access to the store. A membership change is decided,
//! compared-and-swapped, written into the labels of the present replicas, and only then published
//! to the lanes, which have held the I/O that depends on it. Changes are made one at a time, under
//! [`Membership::turn`]. The log's pages are written under [`LogWriter::turn`], one writer at a
//! time, so that an older page never overwrites a newer one.

mod attach;
mod chunk;
mod clean;
mod commands;
mod confirmation;
mod context;
mod create;
mod departure;
mod disk;
mod failures;
mod fence;
mod frozen;
mod hold;
mod label_poll;
mod labels;
mod lease;
mod log;
mod media;
mod membership;
mod open;
mod read_repair;
mod reasons;
mod restored;
mod resync;
mod salvage;
mod state;
#[cfg(test)]
mod tests;
mod truncation;
mod unawaited;
mod verify;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_reactor::Nanos;
use tokio::sync::Mutex as AsyncMutex;
use uuid::Uuid;

pub use self::create::{create, delete, force_in_sync};
pub use self::hold::MAX_HOLD;
pub use self::open::{open, open_prepared};

use self::attach::Attacher;
use self::chunk::Copier;
use self::confirmation::HolderConfirmation;
use self::context::Context;
use self::failures::FailureHandler;
use self::hold::WriteHold;
use self::label_poll::LabelPoll;
use self::lease::Lease;
use self::log::LogWriter;
use self::media::Media;
use self::membership::Membership;
use self::open::Opener;
use self::read_repair::ReadRepair;
use self::resync::Resyncer;
use self::unawaited::Unawaited;
use self::verify::Verify;
use crate::shared::REPAIRS;
use crate::store::VolumeStore;

/// Delay of a retry while a buffer, a stripe or a slot is short.
const MOMENT: Duration = Duration::from_micros(200);

/// An open volume's tasks, and the commands of its operator ([`commands`], [`frozen`]).
pub(crate) struct Control {
    context: Rc<Context>,
    media: Rc<Media>,
    replicas: Rc<Membership>,
    log: Rc<LogWriter>,
    failures: Rc<FailureHandler>,
    label_poll: Rc<LabelPoll>,
    repair: Rc<ReadRepair>,
    attacher: Rc<Attacher>,
    resync: Rc<Resyncer>,
    verify: Rc<Verify>,
    hold: Rc<WriteHold>,
    lease: Rc<Lease>,
    confirmations: Rc<HolderConfirmation>,
}

impl Control {
    fn new(
        context: Rc<Context>,
        media: Rc<Media>,
        store: Arc<dyn VolumeStore>,
        holder: Uuid,
    ) -> Rc<Self> {
        let lease = Rc::new(Lease {
            context: Rc::clone(&context),
            store: Arc::clone(&store),
        });
        let confirmations = Rc::new(HolderConfirmation {
            context: Rc::clone(&context),
            holder,
        });
        let replicas = Rc::new(Membership {
            context: Rc::clone(&context),
            media: Rc::clone(&media),
            store,
            holder,
            turn: AsyncMutex::new(()),
        });
        let failures = Rc::new(FailureHandler {
            context: Rc::clone(&context),
            replicas: Rc::clone(&replicas),
        });
        let label_poll = Rc::new(LabelPoll {
            context: Rc::clone(&context),
            replicas: Rc::clone(&replicas),
        });
        let log = Rc::new(LogWriter {
            context: Rc::clone(&context),
            media: Rc::clone(&media),
            failures: Rc::clone(&failures),
            label_poll: Rc::clone(&label_poll),
            turn: AsyncMutex::new(()),
        });
        let copier = Rc::new(Copier {
            context: Rc::clone(&context),
            media: Rc::clone(&media),
            turn: AsyncMutex::new(()),
            copy_at: Cell::new(Nanos::ZERO),
        });
        let repair = Rc::new(ReadRepair {
            context: Rc::clone(&context),
            copier: Rc::clone(&copier),
        });
        let attacher = Rc::new(Attacher {
            context: Rc::clone(&context),
            media: Rc::clone(&media),
            replicas: Rc::clone(&replicas),
            log: Rc::clone(&log),
        });
        let verify = Rc::new(Verify {
            context: Rc::clone(&context),
            copier: Rc::clone(&copier),
        });
        let hold = Rc::new(WriteHold {
            context: Rc::clone(&context),
            copier: Rc::clone(&copier),
            held: RefCell::default(),
        });
        let resync = Rc::new(Resyncer {
            context: Rc::clone(&context),
            media: Rc::clone(&media),
            replicas: Rc::clone(&replicas),
            log: Rc::clone(&log),
            copier,
            began: context.core.now(),
            waited_for: Cell::new(None),
        });
        Rc::new(Self {
            context,
            media,
            replicas,
            log,
            failures,
            label_poll,
            repair,
            attacher,
            resync,
            verify,
            hold,
            lease,
            confirmations,
        })
    }

    fn opener(&self) -> Opener {
        Opener {
            context: Rc::clone(&self.context),
            media: Rc::clone(&self.media),
            replicas: Rc::clone(&self.replicas),
            log: Rc::clone(&self.log),
            failures: Rc::clone(&self.failures),
        }
    }

    fn unawaited(&self) -> Unawaited {
        Unawaited {
            context: Rc::clone(&self.context),
            media: Rc::clone(&self.media),
        }
    }

    fn start(self: &Rc<Self>) {
        let bell = Arc::clone(&self.context.signals.news);
        self.context
            .shared
            .on_news(Some(Box::new(move || bell.notify_one())));
        self.context.spawn(Rc::clone(self).listen());
        self.context.spawn(Rc::clone(&self.log).keep_log());
        self.context
            .spawn(Rc::clone(&self.failures).handle_failures());
        self.context.spawn(Rc::clone(&self.repair).repair_reads());
        self.context.spawn(Rc::clone(&self.log).clean_log());
        self.context.spawn(Rc::clone(&self.failures).watch_losses());
        self.context.spawn(self.unawaited().find_silent());
        self.context
            .spawn(Rc::clone(&self.label_poll).stay_holder());
        self.context.spawn(Rc::clone(&self.attacher).take_back());
        self.context.spawn(Rc::clone(&self.resync).copy_regions());
        self.context.spawn(Rc::clone(&self.verify).verify_in_time());
        if self.context.lease.is_some() {
            self.context
                .spawn(Rc::clone(&self.confirmations).run_rounds());
        } else if self.replicas.store.is_shared() {
            self.context.spawn(Rc::clone(&self.lease).keep_lease());
        }
    }

    /// Ends all tasks and releases the devices.
    fn stop(&self) {
        self.context.shared.on_news(None);
        self.hold.end();
        for task in self.context.tasks.borrow_mut().drain(..) {
            task.cancel();
        }
        let mut state = self.context.state.borrow_mut();
        for live in state.live.iter_mut().filter_map(Option::take) {
            self.media.disks.forget(&live.disk);
        }
        drop(state);
        self.media.disks.close();
        if let Some(poller) = self.media.poller.take() {
            self.context.core.remove_poller(poller);
        }
    }

    /// Forwards the messages of lanes to the tasks.
    async fn listen(self: Rc<Self>) {
        loop {
            self.context.signals.news.notified().await;
            let (news, counts) = self.context.shared.take_news();
            let mut state = self.context.state.borrow_mut();
            if self.context.shared.confirmations.is_holding() {
                self.context.signals.confirmation.notify_one();
            }
            if !news.wanted.is_empty() {
                state.wanted.extend(news.wanted);
                self.context.signals.log.notify_one();
            }
            if counts != state.reported {
                state.reported = counts;
                state.take_reports(news.reports);
                self.context.signals.failures.notify_one();
            }
            if self.context.shared.unequal() != state.unequal {
                state.unequal = self.context.shared.unequal();
                self.context.signals.resync.notify_one();
                drop(state);
                self.context.refresh_status();
                state = self.context.state.borrow_mut();
            }
            if !news.urgent.is_empty() {
                state.urgent.extend(news.urgent);
                self.context.signals.urgent.notify_waiters();
                self.context.signals.resync.notify_one();
            }
            if !news.repairs.is_empty() {
                let room = REPAIRS.saturating_sub(state.repairs.len());
                state.repairs.extend(news.repairs.into_iter().take(room));
                self.context.signals.repair.notify_one();
            }
        }
    }
}
