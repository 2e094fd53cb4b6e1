//! [`Executor`]: executes the commands of the simulated controller that concern no queue: Identify,
//! features, log pages, firmware and I/O. [`crate::state`] fetches commands and posts completions.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use nacre_nvmf_wire::log::{ErrorInformation, SmartHealth};
use nacre_nvmf_wire::{Sqe, StatusCode};

use crate::config::Config;
use crate::data::{self, Pieces};
use crate::features::Features;
use crate::firmware::Firmware;
use crate::media::Namespace;
use crate::memory::Iommu;

/// Counters of events and actions, for tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// Commands fetched, by opcode.
    pub admin: [u64; 256],
    pub io: [u64; 256],
    /// Writes of doorbell registers: tails of submission queues, heads of completion queues.
    pub tail_doorbells: u64,
    pub head_doorbells: u64,
    pub completions: u64,
    pub interrupts: u64,
    /// Data transfers by PRPs, by SGLs, and from or to more than one piece of host memory.
    pub prps: u64,
    pub sgls: u64,
    pub scattered: u64,
    /// Read, Write, Compare and Verify commands that cross a multiple of NOIOB.
    pub boundary_crossings: u64,
    pub fua: u64,
    pub fused: u64,
    pub enabled: u64,
    pub controller_resets: u64,
    pub function_resets: u64,
    pub normal_shutdowns: u64,
    pub abrupt_shutdowns: u64,
    /// How often a completion found its queue full.
    pub full_completion_queues: u64,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            admin: [0; 256],
            io: [0; 256],
            tail_doorbells: 0,
            head_doorbells: 0,
            completions: 0,
            interrupts: 0,
            prps: 0,
            sgls: 0,
            scattered: 0,
            boundary_crossings: 0,
            fua: 0,
            fused: 0,
            enabled: 0,
            controller_resets: 0,
            function_resets: 0,
            normal_shutdowns: 0,
            abrupt_shutdowns: 0,
            full_completion_queues: 0,
        }
    }
}

/// Most violations that are stored; further ones are only counted.
const VIOLATIONS_KEPT: usize = 32;

#[derive(Default)]
pub(crate) struct Violations {
    pub kept: Vec<String>,
    pub count: u64,
}

impl Violations {
    pub(crate) fn note(&mut self, what: impl Into<String>) {
        self.count += 1;
        if self.kept.len() < VIOLATIONS_KEPT {
            self.kept.push(what.into());
        }
    }
}

pub(crate) struct Executor {
    pub config: Config,
    pub iommu: Arc<Iommu>,
    /// Bytes of a memory page (CC.MPS).
    pub page: u64,
    pub features: Features,
    pub firmware: Firmware,
    /// Namespaces in the Changed Namespace List log page.
    pub changed: BTreeSet<u32>,
    pub smart: SmartHealth,
    pub errors: VecDeque<ErrorInformation>,
    pub namespaces: BTreeMap<u32, Namespace>,
    pub stats: Stats,
    pub violations: Violations,

    /// Buffers kept for reuse.
    pub pieces: Pieces,
    pub buffer: Vec<u8>,
}

impl Executor {
    pub(crate) fn new(config: Config) -> Self {
        let namespaces = config.namespaces.iter();
        let namespaces = namespaces.map(|config| (config.nsid, Namespace::new(config.clone())));
        let mut smart = SmartHealth::zeroed();
        smart.composite_temperature.set(310);
        smart.available_spare = 100;
        smart.available_spare_threshold = 10;
        smart.temperature_sensors[0].set(311);
        smart.power_cycles = SmartHealth::counter(7);
        smart.power_on_hours = SmartHealth::counter(1234);
        Self {
            iommu: Arc::clone(&config.iommu),
            page: 4096,
            features: Features::new(config.volatile_cache),
            firmware: Firmware::default(),
            changed: BTreeSet::new(),
            smart,
            errors: VecDeque::new(),
            namespaces: namespaces.collect(),
            stats: Stats::default(),
            violations: Violations::default(),
            pieces: Pieces::new(),
            buffer: Vec::new(),
            config,
        }
    }

    /// Writes the data that an admin command returns to the host's memory.
    pub(crate) fn give_data(&mut self, sqe: &Sqe, bytes: &[u8]) -> StatusCode {
        let outcome = self
            .locate(sqe, bytes.len())
            .and_then(|()| data::scatter(&self.iommu, &self.pieces, bytes));
        self.checked(sqe, outcome)
            .err()
            .unwrap_or(StatusCode::SUCCESS)
    }

    /// Reads a command's data from the host's memory.
    pub(crate) fn take_data(&mut self, sqe: &Sqe, into: &mut [u8]) -> Result<(), StatusCode> {
        let outcome = self
            .locate(sqe, into.len())
            .and_then(|()| data::gather(&self.iommu, &self.pieces, into));
        self.checked(sqe, outcome)
    }

    pub(crate) fn locate(&mut self, sqe: &Sqe, len: usize) -> Result<(), data::Refusal> {
        let (page, sgls) = (self.page, self.config.sgls);
        data::find(sqe, len, page, sgls, &self.iommu, &mut self.pieces)?;
        let count = match sqe.flags >> 6 {
            0 => &mut self.stats.prps,
            _ => &mut self.stats.sgls,
        };
        *count += 1;
        self.stats.scattered += u64::from(self.pieces.len() > 1);
        Ok(())
    }

    /// Turns the refusal of a data pointer into the command's status, with Do Not Retry, and
    /// records it as a violation.
    pub(crate) fn checked(
        &mut self,
        sqe: &Sqe,
        outcome: Result<(), data::Refusal>,
    ) -> Result<(), StatusCode> {
        outcome.map_err(|(status, what)| {
            self.violations.note(format!("{what}: {sqe:?}"));
            status.with_dnr()
        })
    }
}
