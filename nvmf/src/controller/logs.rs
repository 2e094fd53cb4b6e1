//! Get Log Page (Base 5.16).
//!
//! Each command makes a new page, except for the discovery log, which a host reads in pieces: the
//! controller keeps that one until the log changes. Reading a page without Retain Asynchronous
//! Event clears its event. Events are cleared before the page is made, so that a change in between
//! is reported again rather than lost.

use nacre_nvmf_wire::commands::admin::GetLogPage;
use nacre_nvmf_wire::identify::{csi, nsid, write_ascii};
use nacre_nvmf_wire::log::ana::{self, AnaHeader};
use nacre_nvmf_wire::log::{
    CommandEffects, Effects, ErrorInformation, FirmwareSlots, ReservationNotification, SmartHealth,
    SupportedLogPages, changed_namespaces, lid,
};
use nacre_nvmf_wire::opcode::{admin, io};
use nacre_nvmf_wire::{Sqe, StatusCode};
use nacre_reactor::Nanos;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32};

use super::{Controller, features};
use crate::subsystems::ana::AnaLogGroup;
use crate::subsystems::association::{MAX_CHANGED_NAMESPACES, pending};
use crate::subsystems::discovery::{self, Asker, Record};
use crate::subsystems::subsystem::SubsystemKind;

const INVALID: StatusCode = StatusCode::INVALID_FIELD.with_dnr();

/// Pages 12h and 13h have no structure of their own in the wire crate: 32 bits per identifier.
const FEATURES_PAGE_BYTES: usize = 1024;
/// NVMe-MI Commands Supported and Effects.
const LID_MI_COMMANDS: u8 = 0x13;
const MI_COMMANDS_PAGE_BYTES: usize = 4096;

/// Feature effects: supported, and bound to what (Base figure 257).
const FEATURE_SUPPORTED: u32 = 1 << 0;
const FEATURE_NAMESPACE_SCOPE: u32 = 1 << 20;
const FEATURE_CONTROLLER_SCOPE: u32 = 1 << 21;

/// The discovery log as of a generation.
pub(crate) struct DiscoveryLog {
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
        if !self.log_pages().contains(&command.lid) {
            return Err(StatusCode::INVALID_LOG_PAGE.with_dnr());
        }
        // No page is about one namespace, and none counts its offset in entries.
        if (sqe.nsid() != 0 && sqe.nsid() != nsid::BROADCAST) || command.index_offset {
            return Err(INVALID);
        }
        let offset = command.offset;
        // Before anything is taken out of a page that is gone once it was read.
        if read_once(command.lid).is_some_and(|bytes| offset > bytes as u64) {
            return Err(INVALID);
        }
        if !command.retain_event {
            self.clear_events(command.lid);
        }
        match command.lid {
            lid::SUPPORTED_LOG_PAGES => {
                let page = SupportedLogPages::supporting(&self.log_pages());
                part(page.as_bytes(), offset, data)
            }
            lid::ERROR_INFORMATION => part(self.error_information().as_bytes(), offset, data),
            lid::SMART_HEALTH => part(self.smart_health(now).as_bytes(), offset, data),
            lid::FIRMWARE_SLOT => part(self.firmware_slots().as_bytes(), offset, data),
            lid::CHANGED_NAMESPACE_LIST => {
                let page = self.changed_namespace_list(command.retain_event);
                part(&page, offset, data)
            }
            lid::COMMANDS_SUPPORTED_AND_EFFECTS if command.csi != csi::NVM => Err(INVALID),
            lid::COMMANDS_SUPPORTED_AND_EFFECTS => {
                part(self.command_effects().as_bytes(), offset, data)
            }
            lid::FEATURE_IDENTIFIERS_EFFECTS => part(&self.feature_effects(), offset, data),
            LID_MI_COMMANDS => part(&[0; MI_COMMANDS_PAGE_BYTES], offset, data),
            lid::ASYMMETRIC_NAMESPACE_ACCESS => {
                let groups_only = command.lsp & AnaHeader::LSP_GROUPS_ONLY != 0;
                part(&self.asymmetric_access(groups_only), offset, data)
            }
            lid::RESERVATION_NOTIFICATION => {
                let page = self.reservation_notification(command.retain_event);
                part(page.as_bytes(), offset, data)
            }
            lid::DISCOVERY => {
                let log = self.discovery_log();
                let (generation, end) = (log.generation, discovery::page_bytes(log.records.len()));
                discovery::write_page(generation, &log.records, offset, data)
                    .map_err(|discovery::BeyondEnd { .. }| INVALID)?;
                // Older libnvme sets Retain Asynchronous Event with every piece of a log that it
                // reads in pieces, even the last one: its host would never get another event.
                let last_piece = offset > 0 && offset + data.len() as u64 >= end;
                if last_piece && generation == self.target.discovery_generation() {
                    self.clear_events(lid::DISCOVERY);
                }
                Ok(())
            }
            _ => Err(StatusCode::INVALID_LOG_PAGE.with_dnr()),
        }
    }

    fn log_pages(&self) -> arrayvec::ArrayVec<u8, 16> {
        let mut pages = arrayvec::ArrayVec::new();
        pages.extend([
            lid::SUPPORTED_LOG_PAGES,
            lid::ERROR_INFORMATION,
            lid::COMMANDS_SUPPORTED_AND_EFFECTS,
            lid::FEATURE_IDENTIFIERS_EFFECTS,
            LID_MI_COMMANDS,
        ]);
        match self.association.subsystem.kind {
            SubsystemKind::Nvm => {
                pages.extend([
                    lid::SMART_HEALTH,
                    lid::FIRMWARE_SLOT,
                    lid::CHANGED_NAMESPACE_LIST,
                    lid::RESERVATION_NOTIFICATION,
                ]);
                if self.association.subsystem.config.ana_reporting {
                    pages.push(lid::ASYMMETRIC_NAMESPACE_ACCESS);
                }
            }
            SubsystemKind::Discovery => pages.push(lid::DISCOVERY),
        }
        pages
    }

    fn clear_events(&mut self, lid: u8) {
        let told = match lid {
            lid::CHANGED_NAMESPACE_LIST => pending::NAMESPACES,
            lid::ASYMMETRIC_NAMESPACE_ACCESS => pending::ANA,
            lid::DISCOVERY => pending::DISCOVERY,
            lid::RESERVATION_NOTIFICATION => pending::RESERVATION,
            _ => return,
        };
        self.events.notice(self.association.take_pending());
        self.events.clear(told);
    }

    /// As many entries as ELPE announces; unused ones are zero.
    fn error_information(&self) -> Vec<ErrorInformation> {
        let entries = usize::from(self.target.config.error_log_entries.max(1));
        let (records, _) = self.association.errors();
        let mut page = vec![ErrorInformation::zeroed(); entries];
        for (entry, record) in page.iter_mut().zip(records) {
            entry.error_count = record.number.into();
            entry.sqid = U16::new(record.sqid);
            entry.cid = U16::new(record.cid);
            entry.status_phase = U16::new(record.status.field() << 1);
            // Which byte of the command was at fault is not kept.
            entry.parameter_error_location = U16::new(u16::MAX);
            entry.lba = record.lba.into();
            entry.nsid = U32::new(record.nsid);
            entry.trtype = discovery::trtype_of(self.association.transport);
            entry.opcode = record.opcode;
            entry.log_page_version = 1;
        }
        page
    }

    /// The life of a dynamic controller is its association: its counters begin with it.
    fn smart_health(&self, now: Nanos) -> SmartHealth {
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
        page.power_on_hours = count(now.0 / 3_600_000_000_000);
        page.media_errors = count(self.association.media_errors());
        page.error_log_entries = count(errors);
        page
    }

    fn firmware_slots(&self) -> FirmwareSlots {
        let mut page = FirmwareSlots::zeroed();
        page.afi = 1;
        write_ascii(&self.target.config.firmware_revision, &mut page.frs[0]);
        page
    }

    /// Reading the list empties it, unless the host retains the event.
    fn changed_namespace_list(&self, retain: bool) -> Vec<u8> {
        let changed = if retain {
            self.association.changed_namespaces()
        } else {
            self.association.take_changed_namespaces()
        };
        let mut page = vec![0; changed_namespaces::SIZE];
        if changed.len() > MAX_CHANGED_NAMESPACES {
            page[..4].copy_from_slice(&changed_namespaces::TOO_MANY.to_le_bytes());
            return page;
        }
        for (place, nsid) in page.chunks_exact_mut(4).zip(changed) {
            place.copy_from_slice(&nsid.to_le_bytes());
        }
        page
    }

    /// The oldest notification; reading it lets the next one be reported.
    fn reservation_notification(&self, retain: bool) -> ReservationNotification {
        let (page, more) = {
            let mut log = self.association.reservations();
            (log.page(retain), !log.is_empty())
        };
        if more && !retain {
            self.association.notify(pending::RESERVATION);
        }
        page
    }

    fn command_effects(&self) -> CommandEffects {
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
            return page;
        }
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
        page
    }

    fn feature_effects(&self) -> Vec<u8> {
        let mut page = vec![0; FEATURES_PAGE_BYTES];
        for (fid, _) in features::known(self.association.subsystem.kind) {
            let at = usize::from(*fid) * 4;
            let scope = if features::is_namespace_specific(*fid) {
                FEATURE_NAMESPACE_SCOPE
            } else {
                FEATURE_CONTROLLER_SCOPE
            };
            let effects = FEATURE_SUPPORTED | scope;
            page[at..at + 4].copy_from_slice(&effects.to_le_bytes());
        }
        page
    }

    fn asymmetric_access(&self, groups_only: bool) -> Vec<u8> {
        let association = &self.association;
        let log = association
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
        page
    }

    /// The log as it is now, or as it was when the host began to read it if nothing changed since.
    fn discovery_log(&mut self) -> &DiscoveryLog {
        let current = self.target.discovery_generation();
        if self
            .discovery_log
            .as_ref()
            .is_none_or(|log| log.generation != current)
        {
            let host = &self.association.hostnqn;
            // Read the generation first: a change while the log is made shows as a newer one.
            let snapshot = self.target.discovery_snapshot(host);
            let asker = Asker {
                transport: self.association.transport,
                listener: self.association.listener,
                local: &self.local,
            };
            self.discovery_log = Some(DiscoveryLog {
                generation: snapshot.generation,
                records: discovery::records(&snapshot, &asker),
            });
        }
        self.discovery_log.as_ref().expect("just made")
    }
}

/// The length of a page that reading empties.
fn read_once(lid: u8) -> Option<usize> {
    match lid {
        lid::CHANGED_NAMESPACE_LIST => Some(changed_namespaces::SIZE),
        lid::RESERVATION_NOTIFICATION => Some(ReservationNotification::SIZE),
        _ => None,
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
