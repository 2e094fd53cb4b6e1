//! Queries the daemon: one [`Sample`] of replies per interval.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use nacre_bdev::module::ByName;
use serde::Serialize;
use serde_json::Value;

use super::super::reply::items;
use super::super::{Connection, Failure};
use super::histogram::Histogram;
use super::rates;
use nacre_engine::methods::bdev::histogram::{
    EnableHistogram, EnableHistogramParams, GetHistogram,
};
use nacre_engine::methods::bdev::iostat::{GetIostat, GetIostatParams};
use nacre_engine::methods::bdev::nvme::paths::{GetPaths, GetPathsParams};
use nacre_engine::methods::framework::GetVersion;
use nacre_engine::methods::nvmf::connected::{
    GetQpairs, GetTargetStats, SubsystemParams, TargetStatsParams,
};
use nacre_engine::methods::nvmf::subsystem::{GetSubsystems, GetSubsystemsParams};
use nacre_engine::methods::pool::ListPools;
use nacre_engine::methods::reactor::GetReactors;
use nacre_engine::services::Engine;
use nacre_engine_rpc::client::{Client, ClientError};
use nacre_engine_rpc::{Method, NoParams};

/// The daemon's replies at one moment.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub at: Instant,
    /// The daemon's name and version.
    pub daemon: String,
    pub reactors: Value,
    pub iostat: Value,
    pub subsystems: Value,
    /// Queue pairs by subsystem.
    pub qpairs: BTreeMap<String, Value>,
    pub nvmf: Value,
    /// Paths of remote devices.
    pub paths: Value,
    pub pools: Value,
    /// Latency histograms by device.
    pub histograms: BTreeMap<String, Histogram>,
    /// Calls that the daemon refused, with the errors, to explain missing data.
    pub refused: BTreeSet<String>,
}

/// Updates from the poller.
#[derive(Debug)]
pub(super) enum Update {
    Sample(Box<Sample>),
    /// The daemon is not running or does not reply; the poller retries.
    Gone(String),
}

/// Orders to the poller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Order {
    Interval(Duration),
    /// Percentiles of these devices.
    Watch(Vec<String>),
    Histograms(bool),
    /// Sample now.
    Now,
}

/// Most devices with percentiles: each needs a call of its own.
pub(super) const WATCHED_MAX: usize = 128;

pub(super) struct Poller {
    source: Source,
    interval: Duration,
}

impl Poller {
    pub(super) fn new(source: Source, interval: Duration) -> Self {
        Self { source, interval }
    }

    /// Samples and sends updates until the other end of `orders` is closed.
    pub(super) fn run(&mut self, orders: &Receiver<Order>, updates: &Sender<Update>) {
        loop {
            let started = Instant::now();
            let update = match self.source.sample() {
                Ok(sample) => Update::Sample(Box::new(sample)),
                Err(failure) => Update::Gone(failure.to_string()),
            };
            if updates.send(update).is_err() || !self.wait(orders, started) {
                return self.source.leave();
            }
        }
    }

    /// Waits until the next sample is due; false when the poller must end.
    fn wait(&mut self, orders: &Receiver<Order>, started: Instant) -> bool {
        loop {
            let left = (started + self.interval).saturating_duration_since(Instant::now());
            match orders.recv_timeout(left) {
                Ok(Order::Interval(interval)) => self.interval = interval,
                Ok(Order::Watch(names)) => self.source.watch(names),
                Ok(Order::Histograms(on)) => self.source.set_histograms(on),
                Ok(Order::Now) | Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }
}

/// The daemon, reconnected after each loss.
pub(super) struct Source {
    connection: Connection,
    client: Option<Client>,
    daemon: String,
    histograms: bool,
    watched: Vec<String>,
    /// Devices whose histograms we enabled, and must disable.
    enabled: BTreeSet<String>,
}

impl Source {
    pub(super) fn new(connection: Connection, histograms: bool) -> Self {
        Self {
            connection,
            client: None,
            daemon: String::new(),
            histograms,
            watched: Vec::new(),
            enabled: BTreeSet::new(),
        }
    }

    pub(super) fn watch(&mut self, mut names: Vec<String>) {
        names.truncate(WATCHED_MAX);
        self.watched = names;
    }

    pub(super) fn set_histograms(&mut self, on: bool) {
        self.histograms = on;
        if !on {
            self.leave();
        }
    }

    /// Disables the histograms that we enabled. A daemon that ended has forgotten them.
    pub(super) fn leave(&mut self) {
        for name in std::mem::take(&mut self.enabled) {
            let Some(client) = &mut self.client else {
                return;
            };
            let disable = EnableHistogramParams::new(name, false);
            let refused = client.call_for_json::<EnableHistogram, _>(&disable);
            // A device may have been deleted meanwhile; but stop calling a daemon that does not
            // reply.
            if let Err(error) = refused
                && !matches!(error, ClientError::Refused { .. })
            {
                self.client = None;
            }
        }
    }

    pub(super) fn sample(&mut self) -> Result<Sample, Failure> {
        let sampled = self.try_sample();
        if sampled.is_err() {
            self.client = None;
            self.enabled.clear();
        }
        sampled
    }

    fn try_sample(&mut self) -> Result<Sample, Failure> {
        self.connect()?;
        let mut refused = BTreeSet::new();
        let mut sample = Sample {
            at: Instant::now(),
            daemon: self.daemon.clone(),
            reactors: self.ask::<GetReactors>(&NoParams {}, &mut refused)?,
            iostat: self.ask::<GetIostat>(&GetIostatParams::default(), &mut refused)?,
            subsystems: self.ask::<GetSubsystems>(&GetSubsystemsParams::default(), &mut refused)?,
            qpairs: BTreeMap::new(),
            nvmf: self.ask::<GetTargetStats>(&TargetStatsParams::default(), &mut refused)?,
            // Neither SPDK nor an older daemon has these two methods.
            paths: self.ask::<GetPaths>(&GetPathsParams::default(), &mut BTreeSet::new())?,
            pools: self.ask::<ListPools>(&NoParams {}, &mut BTreeSet::new())?,
            histograms: BTreeMap::new(),
            refused: BTreeSet::new(),
        };
        // One call per subsystem, omitted while no host is connected.
        if sample.nvmf.is_null() || connected(&sample.nvmf) {
            for subsystem in items(&sample.subsystems) {
                let Some(nqn) = subsystem["nqn"].as_str() else {
                    continue;
                };
                // A subsystem deleted since it was listed is not an error.
                let mut gone = BTreeSet::new();
                let params = SubsystemParams {
                    nqn: nqn.to_owned(),
                    tgt_name: None,
                };
                let qpairs = self.ask::<GetQpairs>(&params, &mut gone)?;
                sample.qpairs.insert(nqn.to_owned(), qpairs);
            }
        }
        sample.refused = refused;
        self.add_histograms(&mut sample)?;
        Ok(sample)
    }

    fn connect(&mut self) -> Result<&mut Client, Failure> {
        if self.client.is_none() {
            let mut client = self.connection.open()?;
            self.daemon = match client.call_for_json::<GetVersion, _>(&NoParams {}) {
                Ok(version) => match version["nacre"].as_str() {
                    Some(nacre) => format!("Nacre {nacre}"),
                    None => version["version"].as_str().unwrap_or("?").to_owned(),
                },
                Err(ClientError::Refused { .. }) => "?".into(),
                Err(error) => return Err(error.into()),
            };
            self.client = Some(client);
        }
        Ok(self.client.as_mut().expect("it was just made"))
    }

    /// Calls a method. If the daemon refuses it, adds the error to `refused` and returns null: an
    /// older daemon does not have the method, one that has not started yet cannot answer it, and a
    /// list of allowed methods may exclude it.
    fn ask<M: Method<Engine>>(
        &mut self,
        params: &M::Params,
        refused: &mut BTreeSet<String>,
    ) -> Result<Value, Failure>
    where
        M::Params: Serialize,
    {
        match self.connect()?.call_for_json::<M, _>(params) {
            Ok(answer) => Ok(answer),
            Err(ClientError::Refused { method, error }) => {
                refused.insert(format!("{method}: {}", error.message));
                Ok(Value::Null)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Adds the histograms of the watched devices to the sample. Enables missing ones if
    /// `histograms` is set.
    pub(super) fn add_histograms(&mut self, sample: &mut Sample) -> Result<(), Failure> {
        let there: BTreeSet<&str> = rates::devices(&sample.iostat)
            .map(|(name, _)| name)
            .collect();
        let watched: Vec<String> = self
            .watched
            .iter()
            .filter(|n| there.contains(n.as_str()))
            .cloned()
            .collect();
        for name in watched {
            let mut nothing = BTreeSet::new();
            let params = ByName { name: name.clone() };
            let mut answer = self.ask::<GetHistogram>(&params, &mut nothing)?;
            if answer.is_null() && self.histograms {
                // Nacre's resolution; SPDK's default makes the reply eight times as long.
                let enable = EnableHistogramParams {
                    granularity: 4,
                    ..EnableHistogramParams::new(name.clone(), true)
                };
                if self.ask::<EnableHistogram>(&enable, &mut nothing)? == true {
                    self.enabled.insert(name.clone());
                    answer = self.ask::<GetHistogram>(&params, &mut nothing)?;
                }
            }
            if let Some(histogram) = Histogram::read(&answer) {
                sample.histograms.insert(name, histogram);
            }
        }
        Ok(())
    }
}

fn connected(nvmf: &Value) -> bool {
    let number = |group: &Value, key: &str| group[key].as_u64().unwrap_or(0);
    items(&nvmf["poll_groups"])
        .iter()
        .any(|group| number(group, "current_admin_qpairs") + number(group, "current_io_qpairs") > 0)
}
