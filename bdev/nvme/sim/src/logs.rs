//! Log pages of the simulated controller (Base 5.16), and the asynchronous events that refer to
//! them (Base 5.2).

use nacre_nvmf_wire::aen::{AsyncEvent, event_type};
use nacre_nvmf_wire::commands::admin::GetLogPage;
use nacre_nvmf_wire::features::AsyncEvents;
use nacre_nvmf_wire::log::{
    CommandEffects, CriticalWarning, Effects, ErrorInformation, FirmwareSlots, SupportedLogPages,
    changed_namespaces, lid,
};
use nacre_nvmf_wire::opcode::{admin, io};
use nacre_nvmf_wire::zerocopy::IntoBytes;
use nacre_nvmf_wire::{Sqe, StatusCode};

use crate::executor::Executor;
use crate::state::State;

/// Bytes of the telemetry log: with the default MDTS, more than one Get Log Page command reads.
const TELEMETRY_BYTES: usize = 300 << 10;

/// The contents of the Telemetry Host-Initiated log page, which never change; neighbouring pages of
/// 4 KiB differ.
pub fn telemetry() -> Vec<u8> {
    (0..TELEMETRY_BYTES)
        .map(|at| (at / 4096 * 7 + at % 251) as u8)
        .collect()
}

/// Most entries of the error log.
const ERRORS_KEPT: usize = 64;

impl Executor {
    pub(crate) fn get_log_page(&mut self, sqe: &Sqe) -> StatusCode {
        let get = match GetLogPage::parse(sqe) {
            Ok(get) => get,
            Err(error) => return error.status(),
        };
        let log = match get.lid {
            lid::SUPPORTED_LOG_PAGES => {
                let lids = [
                    lid::SUPPORTED_LOG_PAGES,
                    lid::ERROR_INFORMATION,
                    lid::SMART_HEALTH,
                    lid::FIRMWARE_SLOT,
                    lid::TELEMETRY_HOST,
                    lid::CHANGED_NAMESPACE_LIST,
                    lid::COMMANDS_SUPPORTED_AND_EFFECTS,
                ];
                SupportedLogPages::supporting(&lids).as_bytes().to_vec()
            }
            lid::ERROR_INFORMATION => {
                let mut log: Vec<u8> = self
                    .errors
                    .iter()
                    .flat_map(|e| e.as_bytes().to_vec())
                    .collect();
                log.resize(ERRORS_KEPT * ErrorInformation::SIZE, 0);
                log
            }
            lid::SMART_HEALTH => self.smart.as_bytes().to_vec(),
            lid::FIRMWARE_SLOT => {
                let mut page = FirmwareSlots::zeroed();
                page.afi = 1;
                let revision = self.config.identity.firmware.as_bytes();
                let len = revision.len().min(8);
                page.frs[0] = [b' '; 8];
                page.frs[0][..len].copy_from_slice(&revision[..len]);
                page.as_bytes().to_vec()
            }
            lid::CHANGED_NAMESPACE_LIST => {
                let nsids = self.changed.iter().flat_map(|nsid| nsid.to_le_bytes());
                let mut list: Vec<u8> = nsids.collect();
                if list.len() > changed_namespaces::SIZE {
                    list = changed_namespaces::TOO_MANY.to_le_bytes().to_vec();
                }
                list.resize(changed_namespaces::SIZE, 0);
                if !get.retain_event {
                    self.changed.clear();
                }
                list
            }
            lid::TELEMETRY_HOST => telemetry(),
            lid::COMMANDS_SUPPORTED_AND_EFFECTS => effects().as_bytes().to_vec(),
            _ => return StatusCode::INVALID_LOG_PAGE.with_dnr(),
        };
        let (from, len) = (get.offset as usize, get.bytes() as usize);
        if get.index_offset || from > log.len() {
            return StatusCode::INVALID_FIELD.with_dnr();
        }
        if let Err(status) = self.limit(sqe, len, self.config.mdts, "MDTS") {
            return status;
        }
        let mut part = log[from..].to_vec();
        part.resize(len, 0);
        self.give_data(sqe, &part)
    }

    pub(crate) fn log_error(&mut self, sqid: u16, sqe: &Sqe, status: StatusCode) {
        let mut entry = ErrorInformation::zeroed();
        let count = self
            .errors
            .front()
            .map_or(0, |newest| newest.error_count.get());
        entry.error_count.set(count + 1);
        entry.sqid.set(sqid);
        entry.cid = sqe.cid;
        entry.status_phase.set(status.field() << 1);
        entry.parameter_error_location.set(0xffff);
        entry.nsid = sqe.nsid;
        entry.opcode = sqe.opcode;
        self.errors.truncate(ERRORS_KEPT - 1);
        self.errors.push_front(entry);
    }
}

impl State {
    /// Executes Get Log Page. A successful read without Retain Asynchronous Event unmasks the
    /// events of the page.
    pub(crate) fn get_log_page(&mut self, sqe: &Sqe) -> StatusCode {
        let status = self.exec.get_log_page(sqe);
        if let Ok(get) = GetLogPage::parse(sqe)
            && status.is_success()
            && !get.retain_event
        {
            self.masked &= !match get.lid {
                lid::ERROR_INFORMATION => 1 << event_type::ERROR,
                lid::SMART_HEALTH => 1 << event_type::SMART_HEALTH,
                lid::CHANGED_NAMESPACE_LIST | lid::FIRMWARE_SLOT => 1 << event_type::NOTICE,
                _ => 0,
            };
        }
        status
    }

    /// Queues an asynchronous event, unless the driver did not enable it or the same event is
    /// queued. Only events of Asynchronous Event Configuration need to be enabled.
    pub(crate) fn raise(&mut self, event: AsyncEvent) {
        let wanted = match event {
            AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED => AsyncEvents::NAMESPACE_ATTRIBUTE,
            AsyncEvent::FIRMWARE_ACTIVATION_STARTING => AsyncEvents::FIRMWARE_ACTIVATION,
            AsyncEvent::SPARE_BELOW_THRESHOLD => AsyncEvents::SMART_SPARE,
            AsyncEvent::TEMPERATURE_THRESHOLD => AsyncEvents::SMART_TEMPERATURE,
            AsyncEvent::SUBSYSTEM_RELIABILITY => AsyncEvents::SMART_RELIABILITY,
            _ => AsyncEvents::empty(),
        };
        if self.exec.features.async_events.contains(wanted) && !self.events.contains(&event) {
            self.events.push_back(event);
        }
    }

    /// Raises an event for each newly set bit of the critical warnings.
    pub(crate) fn raise_warnings(&mut self, before: u8) {
        let new = CriticalWarning::from_bits_truncate(self.exec.smart.critical_warning & !before);
        if new.contains(CriticalWarning::SPARE_LOW) {
            self.raise(AsyncEvent::SPARE_BELOW_THRESHOLD);
        }
        if new.contains(CriticalWarning::TEMPERATURE) {
            self.raise(AsyncEvent::TEMPERATURE_THRESHOLD);
        }
        let rest = CriticalWarning::SPARE_LOW | CriticalWarning::TEMPERATURE;
        if !new.difference(rest).is_empty() {
            self.raise(AsyncEvent::SUBSYSTEM_RELIABILITY);
        }
    }

    /// Completes one Asynchronous Event Request. Further events of its type wait for a read of
    /// their log page. Returns false if there is no event or no request.
    pub(crate) fn deliver_events(&mut self) -> bool {
        let free = |event: &AsyncEvent| self.masked & 1 << event.event_type == 0;
        let Some(at) = self.events.iter().position(free) else {
            return false;
        };
        if self.async_requests.is_empty() {
            return false;
        }
        let cid = self.async_requests.remove(0);
        if let Some(event) = self.events.remove(at) {
            self.masked |= 1 << event.event_type;
            self.answer(0, cid, StatusCode::SUCCESS, event.dword0());
        }
        true
    }
}

fn effects() -> CommandEffects {
    let mut page = CommandEffects::zeroed();
    for opcode in [
        admin::DELETE_IO_SQ,
        admin::CREATE_IO_SQ,
        admin::GET_LOG_PAGE,
        admin::DELETE_IO_CQ,
        admin::CREATE_IO_CQ,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT_REQUEST,
    ] {
        page.admin[usize::from(opcode)].set(Effects::CSUPP.bits());
    }
    for opcode in [io::FLUSH, io::READ, io::COMPARE, io::VERIFY] {
        page.io[usize::from(opcode)].set(Effects::CSUPP.bits());
    }
    for opcode in [
        io::WRITE,
        io::WRITE_ZEROES,
        io::DATASET_MANAGEMENT,
        io::COPY,
    ] {
        page.io[usize::from(opcode)].set((Effects::CSUPP | Effects::LBCC).bits());
    }
    page
}
