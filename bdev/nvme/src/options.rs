//! The user's options for a controller.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The first reaction to an I/O that does not complete in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActionOnTimeout {
    /// Count it, report it, and keep waiting.
    None,
    /// Abort the command; if that fails, recreate its queue; then reset the controller.
    #[default]
    Abort,
    /// Reset the controller.
    Reset,
}

/// Thresholds for raising alerts about a drive's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthThresholds {
    /// Composite temperature, degrees Celsius; `None`: the drive's own warning threshold (WCTEMP),
    /// or 70 °C if it has none.
    pub temperature_c: Option<u16>,
    /// Percentage Used: consumed share of the drive's rated endurance, percent; may exceed 100.
    pub percentage_used: u8,
    /// Available spare, percent; `None`: the drive's own threshold.
    pub spare: Option<u8>,
}

impl Default for HealthThresholds {
    fn default() -> Self {
        Self {
            temperature_c: None,
            percentage_used: 90,
            spare: None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveOptions {
    /// Prefix of the namespaces' names: `{name}n{nsid}`.
    pub name: String,
    /// Entries of an I/O submission queue, one of which stays empty. The controller's limit, 4096
    /// and [`DriveOptions::IO_QUEUE_DEPTH_MIN`] bound it.
    pub io_queue_depth: u16,
    /// Most I/O queue pairs: one per core that uses the drive.
    pub io_queues: u16,
    /// Timeout of an I/O; zero: no timeout.
    pub timeout: Duration,
    /// Timeout of an admin command. Values below [`DriveOptions::ADMIN_TIMEOUT_MIN`] count as that.
    pub admin_timeout: Duration,
    pub action_on_timeout: ActionOnTimeout,
    /// Most retries of an I/O that a reset interrupted, or that the drive asks to repeat.
    pub retry_limit: u8,
    /// Use SGLs if the controller supports them and PRPs would need a list.
    pub sgl: bool,
    /// Use shadow doorbells if the controller supports them.
    pub shadow_doorbells: bool,
    /// Use interrupts if the function has them. Without them, a reactor with I/O in flight never
    /// sleeps.
    pub interrupts: bool,
    /// Polling interval of the admin queue while only events can arrive, on a drive without
    /// interrupts.
    pub poll_admin: Duration,
    /// Interval of SMART reads; zero: never.
    pub health_period: Duration,
    pub thresholds: HealthThresholds,
}

impl DriveOptions {
    pub const ADMIN_TIMEOUT_MIN: Duration = Duration::from_millis(100);
    /// Fewest entries of an I/O queue. One stays empty, and a fused pair takes two.
    pub const IO_QUEUE_DEPTH_MIN: u16 = 4;

    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }
}

impl Default for DriveOptions {
    fn default() -> Self {
        Self {
            name: String::from("nvme"),
            io_queue_depth: 256,
            io_queues: 128,
            timeout: Duration::from_secs(8),
            admin_timeout: Duration::from_secs(60),
            action_on_timeout: ActionOnTimeout::default(),
            retry_limit: 4,
            sgl: true,
            shadow_doorbells: true,
            interrupts: true,
            poll_admin: Duration::from_millis(10),
            health_period: Duration::from_secs(60),
            thresholds: HealthThresholds::default(),
        }
    }
}
