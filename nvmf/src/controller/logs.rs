//! Get Log Page (Base 5.16): builds the log pages of a controller.
//!
//! Each command builds its page anew. The exceptions are the discovery log and the telemetry log,
//! which hosts read in pieces; the controller stores them. A command with RAE cleared clears the
//! event of its page, before it builds the page, so that a change in between causes another event.
//! The last piece of the discovery log clears the event even with RAE set.

use std::sync::atomic::Ordering;

use nacre_nvmf_wire::commands::admin::GetLogPage;
use nacre_nvmf_wire::identify::{csi, nsid, write_ascii};
use nacre_nvmf_wire::log::ana::{self, AnaHeader, AnaState};
use nacre_nvmf_wire::log::{
    CommandEffects, Effects, ErrorInformation, FirmwareSlots, ReservationNotification, SmartHealth,
    SupportedLogPages, TelemetryHeader, changed_namespaces, lid,
};
use nacre_nvmf_wire::opcode::{admin, io};
use nacre_nvmf_wire::{Sqe, StatusCode};
use nacre_reactor::Nanos;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{Immutable, IntoBytes};

use super::{Controller, features};
use crate::subsystems::association::{Association, MAX_CHANGED_NAMESPACES, QueueInfo, pending};
use crate::subsystems::discovery::{self, Asker, Record};
use crate::subsystems::nvmf_target::Target;
use crate::subsystems::stats::{KindTotals, Totals};
use crate::subsystems::subsystem::{AnaLogGroup, Subsystem};

const INVALID: StatusCode = StatusCode::INVALID_FIELD.with_dnr();

/// Size of page 12h: 4 bytes per feature identifier.
const FEATURES_PAGE_BYTES: usize = 1024;
/// NVMe-MI Commands Supported and Effects.
const LID_MI_COMMANDS: u8 = 0x13;
const MI_COMMANDS_PAGE_BYTES: usize = 4096;

// Feature effects: supported, and the scope (Base figure 257).
const FEATURE_SUPPORTED: u32 = 1 << 0;
const FEATURE_NAMESPACE_SCOPE: u32 = 1 << 20;
const FEATURE_CONTROLLER_SCOPE: u32 = 1 << 21;

/// One log page: a row of [`PAGES`].
struct LogPage {
    lid: u8,
    offered: fn(&Controller) -> bool,
    contents: Contents,
    /// The event that reading the page clears: a bit of [`pending`], or zero.
    event: u32,
    /// Reading with RAE cleared empties the page; the value is its size in bytes.
    emptied: Option<usize>,
}

enum Contents {
    /// Builds the whole page.
    Whole(fn(&Controller, &Reading) -> Page),
    /// Writes the part at the command's offset.
    Part(fn(&mut Controller, &Reading, &mut [u8]) -> Result<(), StatusCode>),
}

type Page = Result<Vec<u8>, StatusCode>;

/// A Get Log Page command and its time.
struct Reading {
    command: GetLogPage,
    now: Nanos,
}

impl LogPage {
    const fn whole(
        lid: u8,
        offered: fn(&Controller) -> bool,
        contents: fn(&Controller, &Reading) -> Page,
    ) -> Self {
        Self::new(lid, offered, Contents::Whole(contents))
    }

    const fn in_parts(
        lid: u8,
        offered: fn(&Controller) -> bool,
        contents: fn(&mut Controller, &Reading, &mut [u8]) -> Result<(), StatusCode>,
    ) -> Self {
        Self::new(lid, offered, Contents::Part(contents))
    }

    const fn new(lid: u8, offered: fn(&Controller) -> bool, contents: Contents) -> Self {
        Self {
            lid,
            offered,
            contents,
            event: 0,
            emptied: None,
        }
    }

    const fn clears(self, event: u32) -> Self {
        Self { event, ..self }
    }

    const fn emptied(self, bytes: usize) -> Self {
        Self {
            emptied: Some(bytes),
            ..self
        }
    }
}

const PAGES: &[LogPage] = &[
    LogPage::whole(
        lid::SUPPORTED_LOG_PAGES,
        always,
        Controller::supported_log_pages,
    ),
    LogPage::whole(
        lid::ERROR_INFORMATION,
        always,
        Controller::error_information,
    ),
    LogPage::whole(lid::SMART_HEALTH, for_io, Controller::smart_health),
    LogPage::whole(lid::FIRMWARE_SLOT, for_io, Controller::firmware_slots),
    LogPage::whole(
        lid::CHANGED_NAMESPACE_LIST,
        for_io,
        Controller::changed_namespaces,
    )
    .clears(pending::NAMESPACES)
    .emptied(changed_namespaces::SIZE),
    LogPage::whole(
        lid::COMMANDS_SUPPORTED_AND_EFFECTS,
        always,
        Controller::command_effects,
    ),
    LogPage::in_parts(lid::TELEMETRY_HOST, for_io, Controller::telemetry_page),
    LogPage::whole(lid::TELEMETRY_CONTROLLER, for_io, Controller::no_telemetry),
    LogPage::whole(
        lid::ASYMMETRIC_NAMESPACE_ACCESS,
        for_ana,
        Controller::asymmetric_access,
    )
    .clears(pending::ANA),
    LogPage::whole(
        lid::FEATURE_IDENTIFIERS_EFFECTS,
        always,
        Controller::feature_effects,
    ),
    LogPage::whole(LID_MI_COMMANDS, always, Controller::mi_commands),
    LogPage::in_parts(
        lid::DISCOVERY,
        Controller::is_discovery,
        Controller::discovery_page,
    )
    .clears(pending::DISCOVERY),
    LogPage::whole(
        lid::RESERVATION_NOTIFICATION,
        for_io,
        Controller::reservation_notification,
    )
    .clears(pending::RESERVATION)
    .emptied(ReservationNotification::SIZE),
];

fn always(_: &Controller) -> bool {
    true
}

fn for_io(controller: &Controller) -> bool {
    !controller.is_discovery()
}

fn for_ana(controller: &Controller) -> bool {
    for_io(controller) && controller.subsystem.config.ana_reporting
}

fn bytes(page: &(impl IntoBytes + Immutable + ?Sized)) -> Page {
    Ok(page.as_bytes().to_vec())
}

/// The stored pages, which hosts read in pieces and which must not change in between.
#[derive(Default)]
pub(crate) struct Logs {
    discovery: Option<CachedDiscoveryLog>,
    telemetry: Telemetry,
}

/// The captured Telemetry Host-Initiated page (07h), with its header.
#[derive(Default)]
struct Telemetry {
    page: Vec<u8>,
    captures: u8,
}

impl Telemetry {
    fn capture(&mut self, report: &str) {
        const BLOCK: usize = TelemetryHeader::BLOCK;
        let blocks = u16::try_from(report.len().div_ceil(BLOCK)).unwrap_or(u16::MAX);
        self.captures = self.captures.wrapping_add(1);
        let header = telemetry_header(self.captures, blocks);
        self.page = header.as_bytes().to_vec();
        self.page.extend_from_slice(report.as_bytes());
        self.page.resize(BLOCK + BLOCK * usize::from(blocks), 0);
    }
}

/// The stored discovery log, with its generation.
struct CachedDiscoveryLog {
    generation: u64,
    records: Vec<Record>,
}

impl Controller {
    pub(super) fn log_page(
        &mut self,
        sqe: &Sqe,
        data: &mut [u8],
        now: Nanos,
    ) -> Result<(), StatusCode> {
        let command = GetLogPage::parse(sqe).map_err(|error| error.status().with_dnr())?;
        let page = PAGES.iter().find(|page| page.lid == command.lid);
        let page = page
            .filter(|page| (page.offered)(self))
            .ok_or(StatusCode::INVALID_LOG_PAGE.with_dnr())?;
        // No page is namespace-specific, and none supports index offsets (OT).
        if (sqe.nsid() != 0 && sqe.nsid() != nsid::BROADCAST) || command.index_offset {
            return Err(INVALID);
        }
        // Check this before reading a page that the reading empties.
        if page
            .emptied
            .is_some_and(|size| command.offset > size as u64)
        {
            return Err(INVALID);
        }
        if !command.retain_event {
            self.clear_event(page.event);
        }
        let reading = Reading { command, now };
        match page.contents {
            Contents::Whole(contents) => part(&contents(self, &reading)?, command.offset, data),
            Contents::Part(contents) => contents(self, &reading, data),
        }
    }

    fn clear_event(&mut self, event: u32) {
        if event != 0 {
            self.events.notice(self.association.take_pending());
            self.events.clear(event);
        }
    }

    fn discovery_page(&mut self, reading: &Reading, data: &mut [u8]) -> Result<(), StatusCode> {
        let offset = reading.command.offset;
        let log = self.discovery_log();
        let (generation, end) = (log.generation, discovery::page_bytes(log.records.len()));
        discovery::write_page(generation, &log.records, offset, data)
            .map_err(|discovery::BeyondEnd { .. }| INVALID)?;
        // Older libnvme sets Retain Asynchronous Event with every piece of a log that it reads in
        // pieces, even the last one: its host would never get another event.
        let last_piece = offset > 0 && offset + data.len() as u64 >= end;
        if last_piece && generation == self.target.discovery_generation() {
            self.clear_event(pending::DISCOVERY);
        }
        Ok(())
    }

    fn supported_log_pages(&self, _: &Reading) -> Page {
        let offered = PAGES.iter().filter(|page| (page.offered)(self));
        let lids: Vec<u8> = offered.map(|page| page.lid).collect();
        bytes(&SupportedLogPages::supporting(&lids))
    }

    /// Telemetry Host-Initiated: the target's state of the host's association, as text. The host
    /// requests a capture with the command, and reads it in pieces.
    fn telemetry_page(&mut self, reading: &Reading, data: &mut [u8]) -> Result<(), StatusCode> {
        let GetLogPage { lsp, offset, .. } = reading.command;
        if !offset.is_multiple_of(TelemetryHeader::BLOCK as u64) {
            return Err(INVALID);
        }
        if lsp & TelemetryHeader::LSP_CREATE != 0 {
            let report = report(
                &self.association,
                &self.subsystem,
                &self.target,
                reading.now,
            );
            self.logs.telemetry.capture(&report);
        }
        match &self.logs.telemetry.page[..] {
            [] => part(telemetry_header(0, 0).as_bytes(), offset, data),
            page => part(page, offset, data),
        }
    }

    /// Telemetry Controller-Initiated: the controller never captures data on its own.
    fn no_telemetry(&self, _: &Reading) -> Page {
        let mut page = TelemetryHeader::zeroed();
        page.lid = lid::TELEMETRY_CONTROLLER;
        page.captures = TelemetryHeader::SCOPE_CONTROLLER;
        bytes(&page)
    }

    /// The Error Information log: as many entries as ELPE announces; unused ones are zero.
    fn error_information(&self, _: &Reading) -> Page {
        let entries = usize::from(self.target.config.error_log_entries.max(1));
        let (records, _) = self.association.errors();
        let mut page = vec![ErrorInformation::zeroed(); entries];
        for (entry, record) in page.iter_mut().zip(records) {
            entry.error_count = record.number.into();
            entry.sqid = U16::new(record.sqid);
            entry.cid = U16::new(record.cid);
            entry.status_phase = U16::new(record.status.field() << 1);
            // FFFFh: the byte of the command that caused the error is not recorded.
            entry.parameter_error_location = U16::new(u16::MAX);
            entry.lba = record.lba.into();
            entry.nsid = U32::new(record.nsid);
            entry.trtype = discovery::trtype_of(self.association.transport);
            entry.opcode = record.opcode;
            entry.log_page_version = 1;
        }
        bytes(page.as_slice())
    }

    /// The SMART / Health log. Its I/O and error counters start with the association, its power-on
    /// hours with the process.
    fn smart_health(&self, reading: &Reading) -> Page {
        let totals = self.association.totals();
        let (_, errors) = self.association.errors();
        let count = |value: u64| SmartHealth::counter(u128::from(value));
        let mut page = SmartHealth::zeroed();
        page.available_spare = 100;
        page.data_units_read = SmartHealth::data_units(u128::from(totals.read.bytes));
        page.data_units_written = SmartHealth::data_units(u128::from(totals.write.bytes));
        page.host_read_commands = count(totals.read.operations);
        page.host_write_commands = count(totals.write.operations);
        page.power_cycles = count(1);
        // Time counts from the start of the process.
        page.power_on_hours = count(reading.now.0 / 3_600_000_000_000);
        page.media_errors = count(self.association.media_errors());
        page.error_log_entries = count(errors);
        bytes(&page)
    }

    fn firmware_slots(&self, _: &Reading) -> Page {
        let mut page = FirmwareSlots::zeroed();
        page.afi = 1;
        write_ascii(&self.target.config.firmware_revision, &mut page.frs[0]);
        bytes(&page)
    }

    /// The Changed Namespace List. Reading with RAE cleared empties it.
    fn changed_namespaces(&self, reading: &Reading) -> Page {
        let changed = if reading.command.retain_event {
            self.association.changed_namespaces()
        } else {
            self.association.take_changed_namespaces()
        };
        let mut page = vec![0; changed_namespaces::SIZE];
        if changed.len() > MAX_CHANGED_NAMESPACES {
            page[..4].copy_from_slice(&changed_namespaces::TOO_MANY.to_le_bytes());
            return Ok(page);
        }
        for (place, nsid) in page.chunks_exact_mut(4).zip(changed) {
            place.copy_from_slice(&nsid.to_le_bytes());
        }
        Ok(page)
    }

    /// The oldest reservation notification. Reading it allows the event of the next one.
    fn reservation_notification(&self, reading: &Reading) -> Page {
        let retain = reading.command.retain_event;
        let (page, more) = {
            let mut log = self.association.reservations();
            (log.page(retain), !log.is_empty())
        };
        if more && !retain {
            self.association.notify(pending::RESERVATION);
        }
        bytes(&page)
    }

    fn command_effects(&self, reading: &Reading) -> Page {
        if reading.command.csi != csi::NVM {
            return Err(INVALID);
        }
        let mut page = CommandEffects::zeroed();
        let supported = Effects::CSUPP;
        let changes_blocks = Effects::CSUPP | Effects::LBCC;
        for opcode in [
            admin::GET_LOG_PAGE,
            admin::IDENTIFY,
            admin::ABORT,
            admin::SET_FEATURES,
            admin::GET_FEATURES,
            admin::ASYNC_EVENT_REQUEST,
            admin::KEEP_ALIVE,
        ] {
            page.admin[usize::from(opcode)] = U32::new(supported.bits());
        }
        if self.is_discovery() {
            return bytes(&page);
        }
        page.admin[usize::from(admin::GET_LBA_STATUS)] = U32::new(supported.bits());
        for (opcode, effects) in [
            (io::FLUSH, supported),
            (io::READ, supported),
            (io::COMPARE, supported),
            (io::VERIFY, supported),
            (io::WRITE, changes_blocks),
            (io::WRITE_ZEROES, changes_blocks),
            (io::DATASET_MANAGEMENT, changes_blocks),
            (io::COPY, changes_blocks),
            (io::RESERVATION_REGISTER, supported),
            (io::RESERVATION_ACQUIRE, supported),
            (io::RESERVATION_RELEASE, supported),
            (io::RESERVATION_REPORT, supported),
        ] {
            page.io[usize::from(opcode)] = U32::new(effects.bits());
        }
        bytes(&page)
    }

    fn feature_effects(&self, _: &Reading) -> Page {
        let mut page = vec![0; FEATURES_PAGE_BYTES];
        for (fid, _) in features::known(self.subsystem.kind) {
            let at = usize::from(*fid) * 4;
            let scope = if features::is_namespace_specific(*fid) {
                FEATURE_NAMESPACE_SCOPE
            } else {
                FEATURE_CONTROLLER_SCOPE
            };
            let effects = FEATURE_SUPPORTED | scope;
            page[at..at + 4].copy_from_slice(&effects.to_le_bytes());
        }
        Ok(page)
    }

    /// The NVMe-MI Commands Supported and Effects log: no command is supported.
    fn mi_commands(&self, _: &Reading) -> Page {
        Ok(vec![0; MI_COMMANDS_PAGE_BYTES])
    }

    fn asymmetric_access(&self, reading: &Reading) -> Page {
        let groups_only = reading.command.lsp & AnaHeader::LSP_GROUPS_ONLY != 0;
        let association = &self.association;
        let log = self
            .subsystem
            .ana_log(&association.hostnqn, association.listener);
        let header = AnaHeader::new(log.change_count, log.groups.len() as u16);
        let mut page = header.as_bytes().to_vec();
        for AnaLogGroup {
            group,
            state,
            change_count,
            mut nsids,
        } in log.groups
        {
            if groups_only {
                nsids.clear();
            }
            ana::write_group(&mut page, group, state, change_count, &nsids);
        }
        Ok(page)
    }

    /// The stored discovery log, built anew if the log has changed since.
    fn discovery_log(&mut self) -> &CachedDiscoveryLog {
        let current = self.target.discovery_generation();
        if self
            .logs
            .discovery
            .as_ref()
            .is_none_or(|log| log.generation != current)
        {
            let host = &self.association.hostnqn;
            // Read the generation first, so that a change during the reading gives a newer one.
            let snapshot = self.target.discovery_snapshot(host);
            let asker = Asker {
                transport: self.association.transport,
                listener: self.association.listener,
                local: &self.local,
                secure: !self.association.has_clear_queue(),
            };
            self.logs.discovery = Some(CachedDiscoveryLog {
                generation: snapshot.generation,
                records: discovery::records(&snapshot, &asker),
            });
        }
        self.logs.discovery.as_ref().expect("just made")
    }
}

fn telemetry_header(captures: u8, blocks: u16) -> TelemetryHeader {
    let mut header = TelemetryHeader::zeroed();
    header.lid = lid::TELEMETRY_HOST;
    header.last_blocks = [U16::new(blocks); 3];
    header.host_scope = TelemetryHeader::SCOPE_CONTROLLER;
    header.captures = captures;
    header
}

/// The telemetry data as lines of text. Without data of other hosts, because any host may read it.
fn report(association: &Association, subsystem: &Subsystem, target: &Target, now: Nanos) -> String {
    let (errors, error_count) = association.errors();
    let mut lines = vec![
        format!("target: {}", subsystem.config.model_number),
        format!("version: {}", target.config.firmware_revision),
        format!("uptime: {} s", now.0 / 1_000_000_000),
        format!("subsystem: {}", subsystem.nqn()),
        format!("controller: {}", association.cntlid),
        format!("transport: {}", association.transport),
        format!("host: {}", association.hostnqn),
        format!("errors: {error_count}"),
    ];
    lines.extend(association.queues().iter().map(describe_queue));
    let view = association.view();
    lines.extend(view.iter().map(|namespace| {
        let geometry = namespace.geometry();
        let state = view.access(namespace.nsid).map_or("unknown", ana_word);
        format!(
            "namespace {}: {}, {} blocks of {} bytes, {state}",
            namespace.nsid, namespace.ids.uuid, geometry.blocks, geometry.block_size
        )
    }));
    lines.extend(errors.iter().map(|error| {
        format!(
            "error {}: queue {}, command {}, opcode {:#04x}, {}, namespace {}, block {}",
            error.number, error.sqid, error.cid, error.opcode, error.status, error.nsid, error.lba
        )
    }));
    lines.join("\n") + "\n"
}

fn describe_queue(queue: &QueueInfo) -> String {
    let kind = |name, totals: KindTotals| {
        let KindTotals {
            operations,
            bytes,
            errors,
        } = totals;
        format!("{name} {operations} ({bytes} bytes, {errors} errors)")
    };
    let Totals { read, write, other } = queue.stats.totals();
    format!(
        "queue {}: {} entries, from {} to {}, in progress {}, {}, {}, {}",
        queue.qid,
        queue.entries,
        queue.peer,
        queue.local,
        queue.stats.inflight.load(Ordering::Relaxed),
        kind("reads", read),
        kind("writes", write),
        kind("others", other),
    )
}

fn ana_word(state: AnaState) -> &'static str {
    match state {
        AnaState::Optimized => "optimized",
        AnaState::NonOptimized => "non-optimized",
        AnaState::Inaccessible => "inaccessible",
        AnaState::PersistentLoss => "persistent loss",
        AnaState::Change => "change",
    }
}

/// Copies the part of a page that begins at `offset`; bytes beyond its end stay zero.
fn part(page: &[u8], offset: u64, data: &mut [u8]) -> Result<(), StatusCode> {
    let rest = usize::try_from(offset)
        .ok()
        .and_then(|offset| page.get(offset..))
        .ok_or(INVALID)?;
    super::identify::put(rest, data);
    Ok(())
}
