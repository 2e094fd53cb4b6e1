//! `nacre rdma counters`: the counters of ports, drivers and interfaces, once or by interval.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use nacre_transport_rdma_link::{CounterGroup, Fabric, Roots, counters};
use serde_json::{Value, json};

use super::{devices, none_there};
use crate::{Failure, output};

pub(super) fn run(
    roots: &Roots,
    port: Option<&str>,
    watch: Option<Duration>,
    all: bool,
    json: bool,
) -> Result<(), Failure> {
    let fabric = Fabric::read(&roots.sys);
    let ports = chosen(&fabric, port)?;
    if ports.is_empty() && !json {
        return none_there();
    }
    let mut before = CounterSample::take(roots, &ports);
    let Some(interval) = watch else {
        return if json {
            output::json(&before.json(None))
        } else {
            output::table(
                &["device", "port", "group", "counter", "value"],
                before.rows(None, all),
            )
        };
    };
    let mut quiet = false;
    loop {
        thread::sleep(interval);
        let now = CounterSample::take(roots, &ports);
        let rows = now.rows(Some(&before), all);
        if json {
            // A line per interval, as programs read a stream.
            output::line(&now.json(Some(&before)).to_string())?;
        } else if rows.is_empty() {
            // Printed once: more would push earlier changes off the screen.
            if !std::mem::replace(&mut quiet, true) {
                output::line("no counter changes; changes will be shown")?;
            }
        } else {
            quiet = false;
            output::table(
                &[
                    "device",
                    "port",
                    "group",
                    "counter",
                    "value",
                    "change",
                    "per second",
                ],
                rows,
            )?;
            output::line("")?;
        }
        before = now;
    }
}

/// A port whose counters are read.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CounterPort {
    device: String,
    port: u8,
    netdev: Option<String>,
}

pub(super) fn chosen(fabric: &Fabric, port: Option<&str>) -> Result<Vec<CounterPort>, Failure> {
    let (device, num) = match port.map(|text| text.split_once('/').unwrap_or((text, ""))) {
        None => (None, None),
        Some((device, "")) => (Some(device), None),
        Some((device, num)) => {
            let num: u8 = num.parse().map_err(|_| {
                Failure::Usage(format!(
                    "\"{num}\" is no port: DEVICE/PORT, such as mlx5_0/1"
                ))
            })?;
            (Some(device), Some(num))
        }
    };
    if let Some(name) = device {
        let found = fabric
            .device(name)
            .ok_or_else(|| devices::no_device(fabric, name))?;
        if let Some(num) = num.filter(|num| found.port(*num).is_none()) {
            return Err(Failure::Failed(anyhow::anyhow!(
                "RDMA device \"{name}\" has no port {num}; it has {}",
                found.ports.len()
            )));
        }
    }
    let wanted = fabric.ports().filter(|(of, port)| {
        device.is_none_or(|name| name == of.name) && num.is_none_or(|num| num == port.num)
    });
    let wanted = wanted.map(|(device, port)| CounterPort {
        device: device.name.clone(),
        port: port.num,
        netdev: port.netdev.clone(),
    });
    Ok(wanted.collect())
}

/// All counters at one moment.
pub(super) struct CounterSample {
    at: Instant,
    values: BTreeMap<(CounterPort, CounterGroup, String), u64>,
}

impl CounterSample {
    pub(super) fn take(roots: &Roots, ports: &[CounterPort]) -> Self {
        let mut values = BTreeMap::new();
        for port in ports {
            let netdev = port.netdev.as_deref();
            for counter in counters(&roots.sys, &port.device, port.port, netdev) {
                values.insert((port.clone(), counter.group, counter.name), counter.value);
            }
        }
        Self {
            at: Instant::now(),
            values,
        }
    }

    /// Returns the table rows. With an earlier sample, rows also show the change since then and
    /// its rate per second. Unless `all`, rows whose change (without a sample: value) is 0 are
    /// left out.
    pub(super) fn rows(&self, since: Option<&Self>, all: bool) -> Vec<Vec<String>> {
        let rows = self.values.iter().filter_map(|(key, value)| {
            let change = since.map(|since| change(since, key, *value));
            if !all && change.unwrap_or(*value) == 0 {
                return None;
            }
            let (port, group, name) = key;
            let mut row = vec![
                port.device.clone(),
                port.port.to_string(),
                word(*group).into(),
                name.clone(),
                value.to_string(),
            ];
            if let (Some(since), Some(change)) = (since, change) {
                let seconds = (self.at - since.at).as_secs_f64();
                row.push(change.to_string());
                row.push(format!("{:.1}", change as f64 / seconds));
            }
            Some(row)
        });
        rows.collect()
    }

    /// Counters that grew since an earlier sample: device and port, name and growth.
    pub(super) fn changes(&self, since: &Self) -> Vec<(String, String, u64)> {
        let grown = self.values.iter().filter_map(|(key, value)| {
            let (port, _, name) = key;
            let by = change(since, key, *value);
            let port = format!("{}/{}", port.device, port.port);
            (by > 0).then(|| (port, name.clone(), by))
        });
        grown.collect()
    }

    pub(super) fn json(&self, since: Option<&Self>) -> Value {
        let counters = self.values.iter().map(|(key, value)| {
            let (port, group, name) = key;
            let mut counter = json!({
                "device": port.device,
                "port": port.port,
                "netdev": port.netdev,
                "group": word(*group),
                "counter": name,
                "value": value,
            });
            if let Some(since) = since {
                counter["change"] = change(since, key, *value).into();
            }
            counter
        });
        let counters: Value = counters.collect();
        match since {
            None => counters,
            Some(since) => json!({
                "seconds": (self.at - since.at).as_secs_f64(),
                "counters": counters,
            }),
        }
    }
}

/// A counter that decreased was reset, and counts from 0.
fn change(since: &CounterSample, key: &(CounterPort, CounterGroup, String), value: u64) -> u64 {
    let before = since.values.get(key).copied().unwrap_or(0);
    value.checked_sub(before).unwrap_or(value)
}

fn word(group: CounterGroup) -> &'static str {
    match group {
        CounterGroup::Port => "port",
        CounterGroup::Hardware => "driver",
        CounterGroup::Netdev => "interface",
    }
}
