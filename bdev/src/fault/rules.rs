//! The list of faults of a device, shared by all cores, and its copy in each queue, which selects
//! the fault for an I/O.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use nacre_random::Random;

use crate::io::{Io, Op, Status};

/// A fault: its effect, and the I/O that it applies to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Operations in which the fault strikes; empty: all.
    #[serde(default)]
    pub ops: Vec<Op>,
    /// Blocks that an I/O must touch for the fault to strike: `(first block, number of blocks)`. A
    /// flush touches none.
    #[serde(default)]
    pub range: Option<(u64, u64)>,
    pub action: Action,
    /// Number of times that the fault strikes, over all queues; `None`: no limit.
    #[serde(default)]
    pub count: Option<u64>,
    /// Probability with which the fault strikes, from 0 to 1.
    #[serde(default = "always")]
    pub probability: f64,
    /// Seed of the random choices. Each queue has a generator of its own with this seed.
    #[serde(default)]
    pub seed: u64,
    /// Fewest I/Os of the queue in flight at the device below for the fault to strike.
    #[serde(default)]
    pub queue_depth: u64,
}

fn always() -> f64 {
    1.0
}

impl Fault {
    /// A fault for every I/O.
    pub fn new(action: Action) -> Self {
        Self {
            ops: Vec::new(),
            range: None,
            action,
            count: None,
            probability: 1.0,
            seed: 0,
            queue_depth: 0,
        }
    }

    pub fn on(self, ops: &[Op]) -> Self {
        Self {
            ops: ops.to_vec(),
            ..self
        }
    }

    pub fn times(self, count: u64) -> Self {
        Self {
            count: Some(count),
            ..self
        }
    }
}

/// The effect of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// The I/O ends with this status and is not submitted to the base.
    Fail(Status),
    /// The I/O fails with the medium error of its operation: a read with `ReadError`, and so on.
    FailMedium,
    /// XORs the byte at `offset` of the data with `value`: before a write, or after a successful
    /// read. Strikes only reads and writes with more than `offset` bytes of data.
    Corrupt { offset: u64, value: u8 },
    /// The I/O completes this much later than the base completes it.
    Delay { latency_us: u64 },
    /// The I/O reaches the base only after [`super::FaultDevice::resume_pending`]. An abort or the
    /// removal of the base ends it before.
    Hang,
    /// The queue refuses the I/O as `Busy`. If no I/O is in flight at the base, the queue accepts
    /// it instead and tries it again in each poll.
    Busy,
}

#[derive(Debug, thiserror::Error)]
pub enum FaultError {
    #[error("value 0 corrupts nothing: the data is XORed with it")]
    CorruptsNothing,
    #[error("probability {probability} is not between 0 and 1")]
    Probability { probability: f64 },
    #[error("{count} faults are set already: remove some")]
    TooMany { count: usize },
}

/// An active fault, and the number of times it was applied.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Injected {
    pub id: u64,
    pub fault: Fault,
    pub hits: u64,
    /// Remaining number of times; `None`: no limit.
    pub left: Option<u64>,
}

/// The operations of `bdev_error_inject_error`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum SpdkIoType {
    /// Removes all errors that this method has set.
    Clear,
    Read,
    Write,
    Unmap,
    Flush,
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum SpdkErrorType {
    /// The I/O fails.
    Failure,
    /// The I/O hangs until `bdev_error_resume_pending` (`nacre bdev resume`).
    Pending,
    /// A byte of the data is changed.
    CorruptData,
    /// The device is out of memory; the I/O is retried.
    Nomem,
    /// The I/O fails with the given NVMe status.
    NvmeFailure,
}

/// The parameters of `bdev_error_inject_error` without the name of the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpdkInjection {
    pub io_type: SpdkIoType,
    pub error_type: SpdkErrorType,
    #[serde(default = "once")]
    pub num: u32,
    #[serde(default)]
    pub queue_depth: u64,
    #[serde(default)]
    pub corrupt_offset: u64,
    #[serde(default)]
    pub corrupt_value: u8,
    #[serde(default)]
    pub nvme_sct: u8,
    #[serde(default)]
    pub nvme_sc: u8,
}

fn once() -> u32 {
    1
}

/// Most faults of a device. Every I/O checks all of them.
const MAX_FAULTS: usize = 256;
const FOR_EVER: u64 = u64::MAX;

/// All faults of a device.
#[derive(Debug, Default)]
pub(super) struct Rules {
    set: Mutex<Set>,
    /// Incremented with every change, so that queues update their copies only then.
    version: AtomicU64,
}

#[derive(Debug, Default)]
struct Set {
    rules: Vec<Arc<Rule>>,
    next: u64,
}

#[derive(Debug)]
struct Rule {
    id: u64,
    fault: Fault,
    left: AtomicU64,
    hits: AtomicU64,
    /// Set by `inject_spdk` for this operation, to be replaced by its next call for it.
    spdk: Option<Op>,
}

impl Rules {
    pub(super) fn add(&self, fault: Fault) -> Result<u64, FaultError> {
        self.change(|set| set.add(fault, None))
    }

    pub(super) fn remove(&self, id: u64) -> bool {
        self.change(|set| {
            let before = set.rules.len();
            set.rules.retain(|rule| rule.id != id);
            set.rules.len() < before
        })
    }

    pub(super) fn clear(&self) {
        self.change(|set| set.rules.clear());
    }

    pub(super) fn list(&self) -> Vec<Injected> {
        let injected = |rule: &Arc<Rule>| {
            let left = rule.left.load(Ordering::Relaxed);
            Injected {
                id: rule.id,
                fault: rule.fault.clone(),
                hits: rule.hits.load(Ordering::Relaxed),
                left: (left != FOR_EVER).then_some(left),
            }
        };
        self.set.lock().rules.iter().map(injected).collect()
    }

    pub(super) fn inject_spdk(&self, injection: &SpdkInjection) -> Result<(), FaultError> {
        let ops: &[Op] = match injection.io_type {
            SpdkIoType::Clear => {
                self.change(|set| set.rules.retain(|rule| rule.spdk.is_none()));
                return Ok(());
            }
            SpdkIoType::Read => &[Op::Read],
            SpdkIoType::Write => &[Op::Write],
            SpdkIoType::Unmap => &[Op::Unmap],
            SpdkIoType::Flush => &[Op::Flush],
            SpdkIoType::All => &[Op::Read, Op::Write, Op::Unmap, Op::Flush],
        };
        let action = match injection.error_type {
            SpdkErrorType::Failure => Action::FailMedium,
            SpdkErrorType::Pending => Action::Hang,
            SpdkErrorType::CorruptData => Action::Corrupt {
                offset: injection.corrupt_offset,
                value: injection.corrupt_value,
            },
            SpdkErrorType::Nomem => Action::Busy,
            SpdkErrorType::NvmeFailure => Action::Fail(Status::Nvme {
                sct: injection.nvme_sct,
                sc: injection.nvme_sc,
                dnr: false,
            }),
        };
        self.change(|set| {
            for op in ops {
                let fault = Fault {
                    queue_depth: injection.queue_depth,
                    ..Fault::new(action)
                        .on(&[*op])
                        .times(u64::from(injection.num))
                };
                fault.check()?;
                set.rules.retain(|rule| rule.spdk != Some(*op));
                set.add(fault, Some(*op))?;
            }
            Ok(())
        })
    }

    /// Updates the queue's copy after a change.
    pub(super) fn refresh(&self, copy: &mut Copy) {
        let version = self.version.load(Ordering::Acquire);
        if version == copy.version {
            return;
        }
        let set = self.set.lock();
        // Faults that remain keep the state of their random generators.
        let mut old = std::mem::take(&mut copy.rules);
        for rule in &set.rules {
            let known = old.iter().position(|(other, _)| other.id == rule.id);
            let random = known.map(|at| old.swap_remove(at).1);
            let random = random.unwrap_or_else(|| Random::new(rule.fault.seed));
            copy.rules.push((Arc::clone(rule), random));
        }
        copy.version = version;
    }

    fn change<T>(&self, how: impl FnOnce(&mut Set) -> T) -> T {
        let mut set = self.set.lock();
        let answer = how(&mut set);
        self.version.fetch_add(1, Ordering::Release);
        answer
    }
}

impl Set {
    fn add(&mut self, fault: Fault, spdk: Option<Op>) -> Result<u64, FaultError> {
        fault.check()?;
        if self.rules.len() >= MAX_FAULTS {
            return Err(FaultError::TooMany {
                count: self.rules.len(),
            });
        }
        self.next += 1;
        let left = AtomicU64::new(fault.count.unwrap_or(FOR_EVER));
        let rule = Rule {
            id: self.next,
            fault,
            left,
            hits: AtomicU64::new(0),
            spdk,
        };
        self.rules.push(Arc::new(rule));
        Ok(self.next)
    }
}

impl Fault {
    fn check(&self) -> Result<(), FaultError> {
        if matches!(self.action, Action::Corrupt { value: 0, .. }) {
            return Err(FaultError::CorruptsNothing);
        }
        if !(0.0..=1.0).contains(&self.probability) {
            return Err(FaultError::Probability {
                probability: self.probability,
            });
        }
        Ok(())
    }

    fn concerns(&self, io: &Io, below: u64) -> bool {
        let op = self.ops.is_empty() || self.ops.contains(&io.op);
        let range = self.range.is_none_or(|(first, blocks)| {
            let end = first.saturating_add(blocks);
            io.op != Op::Flush
                && io.lba < end
                && first < io.lba.saturating_add(u64::from(io.blocks))
        });
        let possible = match self.action {
            Action::Corrupt { offset, .. } => {
                matches!(io.op, Op::Read | Op::Write) && offset < io.data_len() as u64
            }
            _ => true,
        };
        op && range && possible && below >= self.queue_depth
    }
}

/// A queue's copy of the list.
#[derive(Debug, Default)]
pub(super) struct Copy {
    version: u64,
    rules: Vec<(Arc<Rule>, Random)>,
}

impl Copy {
    /// The fault for `io`, if any. `below`: number of I/Os in flight at the base.
    pub(super) fn strike(&mut self, io: &Io, below: u64) -> Option<Action> {
        self.rules.iter_mut().find_map(|(rule, random)| {
            let strikes = rule.fault.concerns(io, below)
                && random.happens(rule.fault.probability)
                && rule.use_up();
            strikes.then_some(rule.fault.action)
        })
    }
}

impl Rule {
    /// Uses one of the remaining times. Returns false if none is left.
    fn use_up(&self) -> bool {
        let take = |left| match left {
            0 => None,
            FOR_EVER => Some(FOR_EVER),
            left => Some(left - 1),
        };
        let took = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok();
        if took {
            self.hits.fetch_add(1, Ordering::Relaxed);
        }
        took
    }
}
