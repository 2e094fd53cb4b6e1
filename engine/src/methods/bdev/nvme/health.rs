//! `bdev_nvme_get_controller_health_info` and `bdev_nvme_get_controller_logs`: log pages of a
//! drive.

use std::collections::BTreeMap;
use std::rc::Rc;

use nacre_bdev_nvme::Health;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::drive::failed;
use super::no_controller;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::drives::Drive;

/// Bytes per data unit of the SMART log.
const DATA_UNIT: u128 = 512_000;
/// Maximum number of error log entries to read.
const ERRORS: usize = 64;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetHealth>().add::<GetLogs>();
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DriveParams {
    /// Name of the controller.
    pub name: String,
}

/// Finds a local drive. Refuses remote controllers: their logs do not describe a device of this
/// machine.
pub(super) fn drive(engine: &Engine, name: &str) -> Result<Rc<Drive>, RpcError> {
    match engine.drives.find(name) {
        Some(drive) => Ok(drive),
        None if engine.remotes.find(name).is_some() => {
            let cause = format!("\"{name}\" is a controller of another target, not a drive");
            Err(RpcError::errno(Errno::ENOTSUP, cause)
                .field("name")
                .remedy("ask that target"))
        }
        None => Err(RpcError {
            code: INTERNAL_ERROR,
            message: "Device not found".into(),
            ..no_controller(name)
        }),
    }
}

pub struct GetHealth;

/// The SMART / Health Information log (02h), under SPDK's names.
#[derive(Debug, Serialize, JsonSchema)]
pub struct HealthInfo {
    model_number: String,
    serial_number: String,
    firmware_revision: String,
    traddr: String,
    /// Bits: 0 spare, 1 temperature, 2 reliability, 3 read-only, 4 backup of volatile memory, 5
    /// persistent memory.
    critical_warning: u8,
    temperature_celsius: i32,
    available_spare_percentage: u8,
    available_spare_threshold_percentage: u8,
    /// Percent of the rated life; can exceed 100.
    percentage_used: u8,
    /// In units of 512,000 bytes.
    data_units_read: u128,
    data_units_written: u128,
    host_read_commands: u128,
    host_write_commands: u128,
    /// Minutes.
    controller_busy_time: u128,
    power_cycles: u128,
    power_on_hours: u128,
    unsafe_shutdowns: u128,
    media_errors: u128,
    num_err_log_entries: u128,
    warning_temperature_time_minutes: u32,
    critical_composite_temperature_time_minutes: u32,
    /// Nacre extension: temperatures of the existing sensors, by sensor number.
    temperature_sensors_celsius: BTreeMap<u8, i32>,
    /// Nacre extension: the names of the bits set in `critical_warning`.
    warnings: Vec<&'static str>,
}

impl HealthInfo {
    fn of(drive: &Drive, health: Health) -> Self {
        let info = drive.controller.info();
        Self {
            model_number: info.drive.model,
            serial_number: info.drive.serial,
            firmware_revision: info.drive.firmware,
            traddr: drive.address.clone(),
            critical_warning: health.critical_warning,
            temperature_celsius: health.temperature_c,
            available_spare_percentage: health.available_spare,
            available_spare_threshold_percentage: health.available_spare_threshold,
            percentage_used: health.percentage_used,
            data_units_read: health.bytes_read / DATA_UNIT,
            data_units_written: health.bytes_written / DATA_UNIT,
            host_read_commands: health.read_commands,
            host_write_commands: health.write_commands,
            controller_busy_time: health.controller_busy_minutes,
            power_cycles: health.power_cycles,
            power_on_hours: health.power_on_hours,
            unsafe_shutdowns: health.unsafe_shutdowns,
            media_errors: health.media_errors,
            num_err_log_entries: health.error_log_entries,
            warning_temperature_time_minutes: health.warning_temperature_minutes,
            critical_composite_temperature_time_minutes: health.critical_temperature_minutes,
            temperature_sensors_celsius: health.temperature_sensors_c.into_iter().collect(),
            warnings: health.warnings,
        }
    }
}

impl Method<Engine> for GetHealth {
    const NAME: &'static str = "bdev_nvme_get_controller_health_info";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Returns the SMART log of a drive: its health.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = DriveParams;
    type Reply = HealthInfo;

    async fn apply(params: DriveParams, engine: Rc<Engine>) -> Result<HealthInfo, RpcError> {
        let drive = drive(&engine, &params.name)?;
        let health = drive.controller.health().await.map_err(failed)?;
        Ok(HealthInfo::of(&drive, health))
    }
}

pub struct GetLogs;

#[derive(Debug, Serialize, JsonSchema)]
pub struct DriveLogs {
    /// Identity and features of the controller.
    controller: Value,
    /// Error log, newest first, at most 64 entries.
    errors: Value,
    /// Firmware slots that hold an image, and the active slot.
    firmware: Value,
}

impl Method<Engine> for GetLogs {
    const NAME: &'static str = "bdev_nvme_get_controller_logs";
    const ABOUT: &'static str = "Returns a drive's identity, error log and firmware slots.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = DriveParams;
    type Reply = DriveLogs;

    async fn apply(params: DriveParams, engine: Rc<Engine>) -> Result<DriveLogs, RpcError> {
        let drive = drive(&engine, &params.name)?;
        let errors = drive.controller.error_log(ERRORS).await.map_err(failed)?;
        let firmware = drive.controller.firmware_slots().await.map_err(failed)?;
        Ok(DriveLogs {
            controller: json!(drive.controller.info()),
            errors: json!(errors),
            firmware: json!(firmware),
        })
    }
}
