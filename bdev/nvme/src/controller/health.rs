//! Reads the SMART / Health log periodically and compares it with thresholds. Reports an alert once
//! when raised and once when cleared, but critical warnings and media errors at each change.

use std::sync::Arc;

use nacre_nvmf_wire::commands::admin::GetLogPage;
use nacre_nvmf_wire::identify::nsid;
use nacre_nvmf_wire::log::{CriticalWarning, SmartHealth, lid};
use nacre_reactor::CoreHandle;
use zerocopy::FromBytes;

use super::Controller;
use crate::error::ControlError;
use crate::event::{Event, HealthAlert, HealthEvent};
use crate::info::{Health, celsius};
use crate::options::HealthThresholds;
use crate::properties::Properties;

/// Default threshold in kelvin, if neither the user nor the drive has one: most drives allow 70 °C.
const TEMPERATURE: u16 = 273 + 70;

/// The present alerts.
#[derive(Debug, Default)]
pub(crate) struct Alerts {
    temperature: bool,
    used: bool,
    spare: bool,
    critical: u8,
    /// Media errors when the controller was attached, and the last reported number.
    media: Option<(u128, u128)>,
}

impl Controller {
    pub(super) async fn watch_health(self: Arc<Self>, core: CoreHandle) {
        let period = self.shared.options.health_period;
        if period.is_zero() {
            return;
        }
        loop {
            if self.shared.is_live() {
                self.check_health(&core).await;
            }
            let _ = core.timeout(period, self.stop.notified()).await;
            if self.shared.is_detached() {
                return;
            }
        }
    }

    /// Reads the log and reports the values that have crossed a threshold.
    pub(super) async fn check_health(self: &Arc<Self>, core: &CoreHandle) {
        let health = match self.read_health(core).await {
            Ok(health) => health,
            Err(error) => {
                tracing::warn!(controller = self.name(), %error, "NVMe health not read");
                return self.handle_outcome(core, Err(error)).await;
            }
        };
        let properties = self.shared.properties();
        let events = health_events(
            &mut self.alerts.lock(),
            &health,
            &self.shared.options.thresholds,
            &properties,
        );
        for event in events {
            tracing::debug!(
                controller = self.name(),
                alert = event.alert.name(),
                raised = event.raised,
                "NVMe health crossed a threshold"
            );
            self.send_event(Event::Health(event));
        }
    }

    pub(crate) async fn read_health(&self, core: &CoreHandle) -> Result<Health, ControlError> {
        let mut page = [0; SmartHealth::SIZE];
        let sqe =
            GetLogPage::new(lid::SMART_HEALTH, page.len() as u32, 0).to_sqe(0, nsid::BROADCAST);
        self.commands(core).ask(sqe, &[], &mut page).await?;
        let log = SmartHealth::read_from_bytes(&page).map_err(|_| ControlError::Busy)?;
        let health = Health::from(&log);
        *self.newest_health.lock() = Some(health.clone());
        Ok(health)
    }
}

fn health_events(
    alerts: &mut Alerts,
    health: &Health,
    thresholds: &HealthThresholds,
    properties: &Properties,
) -> Vec<HealthEvent> {
    let mut events = Vec::new();
    let mut change = |was: &mut bool, is: bool, alert: HealthAlert| {
        if std::mem::replace(was, is) != is {
            events.push(HealthEvent { alert, raised: is });
        }
    };
    let own = Some(properties.warning_kelvin).filter(|kelvin| *kelvin != 0);
    let kelvin = own.unwrap_or(TEMPERATURE);
    let limit = thresholds
        .temperature_c
        .map_or_else(|| celsius(kelvin), i32::from);
    let warm = health.temperature_c;
    // The temperature must drop by some degrees before the alert ends, so that it does not flap.
    let hot = warm >= limit || alerts.temperature && warm > limit - 3;
    change(
        &mut alerts.temperature,
        hot,
        HealthAlert::Temperature {
            celsius: warm,
            threshold: limit,
        },
    );
    change(
        &mut alerts.used,
        health.percentage_used >= thresholds.percentage_used,
        HealthAlert::PercentageUsed {
            percent: health.percentage_used,
            threshold: thresholds.percentage_used,
        },
    );
    let limit = thresholds.spare.unwrap_or(health.available_spare_threshold);
    change(
        &mut alerts.spare,
        health.available_spare < limit,
        HealthAlert::Spare {
            percent: health.available_spare,
            threshold: limit,
        },
    );
    // The temperature and the spare have their own alerts.
    let others = (CriticalWarning::TEMPERATURE | CriticalWarning::SPARE_LOW).bits();
    let critical = health.critical_warning & !others;
    if std::mem::replace(&mut alerts.critical, critical) != critical {
        events.push(HealthEvent {
            alert: HealthAlert::Critical { warnings: critical },
            raised: critical != 0,
        });
    }
    let errors = health.media_errors;
    let (first, last) = alerts.media.get_or_insert((errors, errors));
    if errors > *last {
        let new = u64::try_from(errors - *first).unwrap_or(u64::MAX);
        *last = errors;
        events.push(HealthEvent {
            alert: HealthAlert::MediaErrors { new },
            raised: true,
        });
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: each alert is raised once when its threshold is crossed, and cleared once.
    #[test]
    fn alerts_are_raised_and_cleared_once() {
        let mut alerts = Alerts::default();
        let thresholds = HealthThresholds {
            temperature_c: Some(60),
            percentage_used: 90,
            spare: None,
        };
        let properties = Properties::default();
        let mut health = Health {
            temperature_c: 40,
            available_spare: 100,
            available_spare_threshold: 10,
            media_errors: 3,
            ..Health::default()
        };
        let mut alerts_of = |health: &Health| -> Vec<(&'static str, bool)> {
            let events = health_events(&mut alerts, health, &thresholds, &properties);
            events.iter().map(|e| (e.alert.name(), e.raised)).collect()
        };
        assert_eq!(alerts_of(&health), []);
        health.temperature_c = 60;
        health.media_errors = 5;
        assert_eq!(
            alerts_of(&health),
            [("temperature", true), ("media_errors", true)]
        );
        assert_eq!(alerts_of(&health), []);
        health.temperature_c = 58;
        assert_eq!(alerts_of(&health), []);
        health.temperature_c = 57;
        health.percentage_used = 90;
        health.available_spare = 9;
        health.critical_warning = 0b1011;
        assert_eq!(
            alerts_of(&health),
            [
                ("temperature", false),
                ("percentage_used", true),
                ("spare", true),
                ("critical_warning", true)
            ]
        );
        health.critical_warning = 0b11;
        assert_eq!(alerts_of(&health), [("critical_warning", false)]);
    }
}
