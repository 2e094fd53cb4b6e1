//! Metrics of the NVMe drives of this machine.

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};

family!(
    INFO,
    "nacre_nvme_info",
    Gauge,
    "Always 1: an attached drive, with its address and model in the labels.",
    ["controller", "address", "model", "serial", "firmware"]
);
family!(
    STATE,
    "nacre_nvme_state",
    Gauge,
    "1 for the state that a drive is in: `live`, `resetting`, `failed` (needs a reset by an operator), `removed` (pulled) or `detached`.",
    ["controller", "state"]
);
family!(
    RESETS,
    "nacre_nvme_resets",
    Counter,
    "Resets of a drive's controller, of its function, and of single queues.",
    ["controller", "what"]
);
family!(
    TIMEOUTS,
    "nacre_nvme_timeouts",
    Counter,
    "Commands that a drive did not answer in time, by kind of queue: `io` or `admin`.",
    ["controller", "queue"]
);
family!(
    ABORTS,
    "nacre_nvme_aborts",
    Counter,
    "Abort commands sent to a drive.",
    ["controller"]
);
family!(
    RESUBMITTED,
    "nacre_nvme_resubmitted",
    Counter,
    "I/Os sent to a drive again, after a reset or on the drive's request.",
    ["controller"]
);
family!(
    PROTOCOL_ERRORS,
    "nacre_nvme_protocol_errors",
    Counter,
    "Completions of a drive without a matching command.",
    ["controller"]
);
family!(
    LOSSES,
    "nacre_nvme_losses",
    Counter,
    "How often a drive may have lost unflushed data: it was pulled, or its function was reset.",
    ["controller"]
);
family!(
    NUDGES,
    "nacre_nvme_nudges",
    Counter,
    "Doorbells rung again by their registers because a drive with shadow doorbells completed nothing for a while: it may have missed one.",
    ["controller"]
);
family!(
    DEVICES,
    "nacre_nvme_devices",
    Gauge,
    "Namespaces of a drive: those in `use` as devices, and those that are `refused`.",
    ["controller", "standing"]
);
family!(
    TEMPERATURE,
    "nacre_nvme_temperature_celsius",
    Gauge,
    "Composite temperature of a drive, from the last SMART log.",
    ["controller"]
);
family!(
    SPARE,
    "nacre_nvme_available_spare_percent",
    Gauge,
    "Spare capacity that is left, from the last SMART log.",
    ["controller"]
);
family!(
    USED,
    "nacre_nvme_percentage_used",
    Gauge,
    "How much of its rated life a drive has used; may be above 100.",
    ["controller"]
);
family!(
    WARNINGS,
    "nacre_nvme_critical_warning",
    Gauge,
    "The bits of Critical Warning of a drive's SMART log; 0: no warning.",
    ["controller"]
);
family!(
    MEDIA_ERRORS,
    "nacre_nvme_media_errors",
    Counter,
    "Media and data integrity errors over a drive's life, as it counts them.",
    ["controller"]
);

#[derive(Debug)]
pub struct DriveMetrics;

impl MetricsSource for DriveMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 15] = [
            &INFO,
            &STATE,
            &RESETS,
            &TIMEOUTS,
            &ABORTS,
            &RESUBMITTED,
            &PROTOCOL_ERRORS,
            &LOSSES,
            &NUDGES,
            &DEVICES,
            &TEMPERATURE,
            &SPARE,
            &USED,
            &WARNINGS,
            &MEDIA_ERRORS,
        ];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        for (name, drive) in of.engine.drives.list() {
            let name = name.as_str();
            let (info, status) = (drive.controller.info(), drive.controller.status());
            let labels = [
                name,
                &drive.address,
                &info.drive.model,
                &info.drive.serial,
                &info.drive.firmware,
            ];
            into.value(&INFO, &labels, 1u64);
            let state = status.state.name();
            into.value(&STATE, &[name, state], 1u64);
            for (what, count) in [
                ("controller", status.resets),
                ("function", status.function_resets),
                ("queue", status.queue_resets),
            ] {
                into.value(&RESETS, &[name, what], count);
            }
            into.value(&TIMEOUTS, &[name, "io"], status.timeouts);
            into.value(&TIMEOUTS, &[name, "admin"], status.admin_timeouts);
            into.value(&ABORTS, &[name], status.aborts);
            into.value(&RESUBMITTED, &[name], status.resubmitted);
            into.value(&PROTOCOL_ERRORS, &[name], status.protocol_errors);
            into.value(&LOSSES, &[name], status.losses);
            into.value(&NUDGES, &[name], status.nudges);
            into.value(&DEVICES, &[name, "use"], drive.devices().len() as u64);
            into.value(&DEVICES, &[name, "refused"], drive.refused().len() as u64);
            // A scrape sends no command: a hung drive must not block it.
            let Some(health) = drive.controller.last_health() else {
                continue;
            };
            into.value(&TEMPERATURE, &[name], f64::from(health.temperature_c));
            into.value(&SPARE, &[name], u64::from(health.available_spare));
            into.value(&USED, &[name], u64::from(health.percentage_used));
            into.value(&WARNINGS, &[name], u64::from(health.critical_warning));
            let errors = u64::try_from(health.media_errors).unwrap_or(u64::MAX);
            into.value(&MEDIA_ERRORS, &[name], errors);
        }
    }
}
