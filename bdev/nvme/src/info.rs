//! The properties, state, counters and health of a controller, for RPC replies and metrics.

use nacre_nvmf_wire::identify::IdentifyController;
use nacre_nvmf_wire::log::{CriticalWarning, ErrorInformation, FirmwareSlots, SmartHealth};
use nacre_nvmf_wire::{StatusCode, identify};
use serde::Serialize;

use crate::link::Link;

/// Properties that do not change while a controller is attached, except by a reset with new
/// firmware.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ControllerInfo {
    /// PCI address of the function: `0000:5e:00.0`.
    pub address: String,
    pub numa_node: Option<u32>,
    #[serde(flatten)]
    pub drive: DriveIdentity,
    pub cntlid: u16,
    /// The NVMe version, such as `1.4.0`.
    pub version: String,
    /// Largest transfer of one command that this driver sends, in bytes.
    pub max_transfer_bytes: u64,
    /// The limit of MDTS, in bytes; `None`: no limit.
    pub mdts_bytes: Option<u64>,
    /// I/O queue pairs that the controller granted.
    pub io_queues: u16,
    /// Most commands in flight per I/O queue.
    pub io_queue_depth: u16,
    pub page_bytes: u32,
    pub sgl: bool,
    pub shadow_doorbells: bool,
    /// Interrupt vectors in use; 0: the queues are polled.
    pub vectors: u16,
    /// Namespaces that the controller may have (NN).
    pub nn: u32,
    pub oacs: u16,
    pub oncs: u16,
    pub fuses: u16,
    /// The drive has a volatile write cache.
    pub volatile_cache: bool,
    /// Temperature thresholds in degrees Celsius (WCTEMP, CCTEMP), if the drive reports them.
    pub warning_temperature_c: Option<i32>,
    pub critical_temperature_c: Option<i32>,
    /// Namespaces that cannot be used, with the reason.
    pub unusable: Vec<UnusableNamespace>,
}

/// Counters of an I/O queue pair since its core opened it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QueuePairActivity {
    /// The name of the thread that uses it.
    pub thread: String,
    pub polls: u64,
    /// Polls that found a completion.
    pub busy_polls: u64,
    pub submitted: u64,
    pub completions: u64,
    /// I/O that waited for a free command, a buffer or the queue.
    pub queued: u64,
    /// Writes of the submission queue's doorbell register, and of its shadow in memory.
    pub sq_register_writes: u64,
    pub sq_shadow_writes: u64,
    pub cq_register_writes: u64,
    pub cq_shadow_writes: u64,
}

impl QueuePairActivity {
    pub(crate) fn of(link: &Link) -> Self {
        let activity = &link.activity;
        Self {
            thread: link.thread.clone(),
            polls: activity.polls.get(),
            busy_polls: activity.busy_polls.get(),
            submitted: activity.submitted.get(),
            completions: activity.completions.get(),
            queued: activity.queued.get(),
            sq_register_writes: activity.submission.register.get(),
            sq_shadow_writes: activity.submission.shadow.get(),
            cq_register_writes: activity.completion.register.get(),
            cq_shadow_writes: activity.completion.shadow.get(),
        }
    }
}

/// The names that the manufacturer gave the drive (Identify Controller).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct DriveIdentity {
    pub vid: u16,
    pub ssvid: u16,
    pub serial: String,
    pub model: String,
    pub firmware: String,
    pub subnqn: String,
}

impl From<&IdentifyController> for DriveIdentity {
    fn from(page: &IdentifyController) -> Self {
        Self {
            vid: page.vid.get(),
            ssvid: page.ssvid.get(),
            serial: identify::read_ascii(&page.sn),
            model: identify::read_ascii(&page.mn),
            firmware: identify::read_ascii(&page.fr),
            subnqn: identify::read_ascii(&page.subnqn),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UnusableNamespace {
    pub nsid: u32,
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum State {
    #[default]
    Live,
    Resetting,
    /// The controller does not recover by itself; a reset may help.
    Failed {
        reason: String,
    },
    /// The drive was removed; it may return.
    Removed,
    Detached,
}

impl State {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Resetting => "resetting",
            Self::Failed { .. } => "failed",
            Self::Removed => "removed",
            Self::Detached => "detached",
        }
    }
}

/// The state and the counters of a controller.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Status {
    #[serde(flatten)]
    pub state: State,
    /// Controller resets, for any reason.
    pub resets: u64,
    pub function_resets: u64,
    /// Queue pairs deleted and recreated because a command did not complete.
    pub queue_resets: u64,
    /// Abort commands sent.
    pub aborts: u64,
    /// I/Os that did not complete in time.
    pub timeouts: u64,
    pub admin_timeouts: u64,
    /// I/Os retried after a reset, or because the drive requested it.
    pub resubmitted: u64,
    /// Completions that match no command.
    pub protocol_errors: u64,
    /// Asynchronous events.
    pub events: u64,
    /// How often the drive may have lost unflushed data: see [`nacre_bdev::Bdev::losses`].
    pub losses: u64,
    /// Extra register writes of doorbells, because the drive completed nothing for a while and may
    /// have missed a shadow doorbell.
    pub nudges: u64,
    /// Queue pairs in use.
    pub queues: u16,
}

/// The SMART / Health Information log, decoded.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Health {
    /// The raw bits; see [`CriticalWarning`].
    pub critical_warning: u8,
    /// The names of the set bits.
    pub warnings: Vec<&'static str>,
    pub temperature_c: i32,
    pub available_spare: u8,
    pub available_spare_threshold: u8,
    pub percentage_used: u8,
    pub bytes_read: u128,
    pub bytes_written: u128,
    pub read_commands: u128,
    pub write_commands: u128,
    pub controller_busy_minutes: u128,
    pub power_cycles: u128,
    pub power_on_hours: u128,
    pub unsafe_shutdowns: u128,
    pub media_errors: u128,
    pub error_log_entries: u128,
    pub warning_temperature_minutes: u32,
    pub critical_temperature_minutes: u32,
    /// Implemented temperature sensors: number (from 1) and degrees Celsius.
    pub temperature_sensors_c: Vec<(u8, i32)>,
    /// The SMART / Health Information log page as the drive sent it.
    #[serde(skip)]
    pub raw: Vec<u8>,
}

pub(crate) fn celsius(kelvin: u16) -> i32 {
    i32::from(kelvin) - 273
}

const WARNINGS: [(CriticalWarning, &str); 6] = [
    (CriticalWarning::SPARE_LOW, "available_spare"),
    (CriticalWarning::TEMPERATURE, "temperature"),
    (CriticalWarning::RELIABILITY_DEGRADED, "reliability"),
    (CriticalWarning::READ_ONLY, "read_only"),
    (
        CriticalWarning::VOLATILE_BACKUP_FAILED,
        "volatile_memory_backup",
    ),
    (
        CriticalWarning::PERSISTENT_MEMORY_UNRELIABLE,
        "persistent_memory",
    ),
];

impl From<&SmartHealth> for Health {
    fn from(log: &SmartHealth) -> Self {
        use zerocopy::IntoBytes;
        let counter = SmartHealth::counter_value;
        let warning = CriticalWarning::from_bits_retain(log.critical_warning);
        let named = WARNINGS.iter().filter(|(bit, _)| warning.contains(*bit));
        let sensors = log.temperature_sensors.iter().zip(1u8..);
        Self {
            critical_warning: log.critical_warning,
            warnings: named.map(|(_, name)| *name).collect(),
            temperature_c: celsius(log.composite_temperature.get()),
            available_spare: log.available_spare,
            available_spare_threshold: log.available_spare_threshold,
            percentage_used: log.percentage_used,
            bytes_read: counter(&log.data_units_read).saturating_mul(512_000),
            bytes_written: counter(&log.data_units_written).saturating_mul(512_000),
            read_commands: counter(&log.host_read_commands),
            write_commands: counter(&log.host_write_commands),
            controller_busy_minutes: counter(&log.controller_busy_time),
            power_cycles: counter(&log.power_cycles),
            power_on_hours: counter(&log.power_on_hours),
            unsafe_shutdowns: counter(&log.unsafe_shutdowns),
            media_errors: counter(&log.media_errors),
            error_log_entries: counter(&log.error_log_entries),
            warning_temperature_minutes: log.warning_temperature_time.get(),
            critical_temperature_minutes: log.critical_temperature_time.get(),
            temperature_sensors_c: sensors
                .filter(|(kelvin, _)| kelvin.get() != 0)
                .map(|(kelvin, number)| (number, celsius(kelvin.get())))
                .collect(),
            raw: log.as_bytes().to_vec(),
        }
    }
}

/// An entry of the Error Information log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorEntry {
    pub error_count: u64,
    pub sqid: u16,
    pub cid: u16,
    /// The specification's name of the status.
    pub status: String,
    /// Status code type and status code.
    pub sct: u8,
    pub sc: u8,
    pub opcode: u8,
    pub nsid: u32,
    pub lba: u64,
    pub parameter_error_location: u16,
}

impl From<&ErrorInformation> for ErrorEntry {
    fn from(entry: &ErrorInformation) -> Self {
        let status: StatusCode = entry.status();
        Self {
            error_count: entry.error_count.get(),
            sqid: entry.sqid.get(),
            cid: entry.cid.get(),
            status: status.to_string(),
            sct: status.sct(),
            sc: status.sc(),
            opcode: entry.opcode,
            nsid: entry.nsid.get(),
            lba: entry.lba.get(),
            parameter_error_location: entry.parameter_error_location.get(),
        }
    }
}

/// The Firmware Slot Information log.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct FirmwareInfo {
    /// The slot of the running firmware.
    pub active_slot: u8,
    /// The slot of the firmware after the next reset, if it differs.
    pub next_slot: Option<u8>,
    /// Number (from 1) and firmware revision of each slot in use.
    pub slots: Vec<(u8, String)>,
}

impl From<&FirmwareSlots> for FirmwareInfo {
    fn from(log: &FirmwareSlots) -> Self {
        let slots = log.frs.iter().zip(1u8..);
        Self {
            active_slot: log.afi & 0b111,
            next_slot: Some(log.afi >> 4 & 0b111).filter(|slot| *slot != 0),
            slots: slots
                .map(|(revision, number)| (number, identify::read_ascii(revision)))
                .filter(|(_, revision)| !revision.is_empty())
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::little_endian::U16;

    use super::*;

    /// A log with a value in each kind of field converts to the usual units.
    #[test]
    fn health_of_a_log() {
        let mut log = SmartHealth::zeroed();
        log.critical_warning = 0b10_0010;
        log.composite_temperature = U16::new(273 + 41);
        log.percentage_used = 7;
        log.data_units_written = SmartHealth::counter(3);
        log.temperature_sensors[1] = U16::new(263);
        let health = Health::from(&log);
        assert_eq!(health.warnings, ["temperature", "persistent_memory"]);
        assert_eq!((health.temperature_c, health.percentage_used), (41, 7));
        assert_eq!(health.bytes_written, 1_536_000);
        assert_eq!(health.temperature_sensors_c, [(2, -10)]);
        assert_eq!(health.raw.len(), SmartHealth::SIZE);
    }

    #[test]
    fn firmware_of_a_log() {
        let mut log = FirmwareSlots::zeroed();
        log.afi = 0x21;
        log.frs[0] = *b"1.0     ";
        log.frs[1] = *b"1.1     ";
        let info = FirmwareInfo::from(&log);
        assert_eq!((info.active_slot, info.next_slot), (1, Some(2)));
        assert_eq!(info.slots, [(1, "1.0".to_owned()), (2, "1.1".to_owned())]);
    }
}
