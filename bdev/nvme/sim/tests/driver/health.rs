//! Tests of health monitoring: thresholds, events of the drive, and their reports.

use std::time::Duration;

use nacre_bdev_nvme::{DriveOptions, Event, HealthAlert, HealthEvent, HealthThresholds};
use nacre_bdev_nvme_sim::Config;
use nacre_nvmf_wire::log::{CriticalWarning, SmartHealth};

use super::rig::Rig;

fn alerts(rig: &Rig) -> Vec<HealthEvent> {
    let events = rig.events.take().into_iter();
    events
        .filter_map(|event| match event {
            Event::Health(health) => Some(health),
            _ => None,
        })
        .collect()
}

/// Goal: each threshold raises one alert when crossed, and clears it when crossed back.
#[test]
fn thresholds() {
    let mut rig = Rig::new(Config::default());
    let options = DriveOptions {
        health_period: Duration::from_secs(10),
        thresholds: HealthThresholds {
            temperature_c: Some(60),
            percentage_used: 80,
            spare: Some(20),
        },
        ..DriveOptions::new("nvme0")
    };
    let (controller, _bdev, mut queue) = rig.one(options);
    rig.pass(&mut *queue, Duration::from_secs(25));
    assert_eq!(alerts(&rig), []);
    type Change = fn(&mut SmartHealth, bool);
    let changes: [(Change, &str); 5] = [
        (
            |smart, bad| {
                smart
                    .composite_temperature
                    .set(if bad { 273 + 65 } else { 273 + 30 })
            },
            "temperature",
        ),
        (
            |smart, bad| smart.percentage_used = if bad { 85 } else { 5 },
            "percentage_used",
        ),
        (
            |smart, bad| smart.available_spare = if bad { 15 } else { 100 },
            "spare",
        ),
        (
            |smart, bad| {
                smart.critical_warning = if bad {
                    CriticalWarning::RELIABILITY_DEGRADED.bits()
                } else {
                    0
                };
            },
            "critical_warning",
        ),
        (
            |smart, bad| {
                if bad {
                    smart.media_errors = SmartHealth::counter(3);
                }
            },
            "media_errors",
        ),
    ];
    for (change, name) in changes {
        rig.drive.set_health(|smart| change(smart, true));
        rig.pass(&mut *queue, Duration::from_secs(35));
        let raised = alerts(&rig);
        let named: Vec<_> = raised
            .iter()
            .map(|alert| (alert.alert.name(), alert.raised))
            .collect();
        assert_eq!(named, [(name, true)]);
        rig.drive.set_health(|smart| change(smart, false));
        rig.pass(&mut *queue, Duration::from_secs(35));
        let taken = alerts(&rig);
        let named: Vec<_> = taken
            .iter()
            .map(|alert| (alert.alert.name(), alert.raised))
            .collect();
        match name {
            // A count of errors never falls, so this alert is not cleared.
            "media_errors" => assert_eq!(raised[0].alert, HealthAlert::MediaErrors { new: 3 }),
            _ => assert_eq!(named, [(name, false)]),
        }
    }
    rig.end(&controller, queue);
}

/// Goal: an event of the drive is reported immediately, long before the next SMART read.
#[test]
fn events_of_the_drive() {
    let mut rig = Rig::new(Config::default());
    let options = DriveOptions {
        health_period: Duration::from_secs(36_000),
        ..DriveOptions::new("nvme0")
    };
    let (controller, _bdev, mut queue) = rig.one(options);
    rig.events.take();
    for round in 1..=3u64 {
        rig.drive.set_health(|smart| {
            smart.critical_warning = CriticalWarning::TEMPERATURE.bits();
            smart.composite_temperature.set(360);
        });
        rig.pass(&mut *queue, Duration::from_secs(2));
        let events = rig.events.take();
        assert!(
            events
                .iter()
                .any(|event| matches!(event, Event::AsyncEvent(_)))
        );
        assert_eq!(controller.status().events, round);
        rig.drive.set_health(|smart| {
            smart.critical_warning = 0;
            smart.composite_temperature.set(300);
        });
        rig.pass(&mut *queue, Duration::from_secs(2));
    }
    assert!(rig.drive.async_requests() >= 1);
    rig.end(&controller, queue);
}
