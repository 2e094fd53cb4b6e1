//! The expected contents: the values that each granule of each version may have.

use std::collections::BTreeMap;

use super::content::{Value, is_of};

/// Number of a version, as its name has it.
pub(super) type Number = u64;

#[derive(Debug, Clone)]
pub(super) struct Model {
    pub versions: BTreeMap<Number, ModelVersion>,
    clock: u64,
}

#[derive(Debug, Clone)]
pub(super) struct ModelVersion {
    pub family: u64,
    pub granules: Vec<History>,
    pub kind: Kind,
    /// Its creation is answered.
    pub is_created: bool,
    /// Its deletion is submitted.
    pub is_deleting: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Volume,
    Snapshot,
}

/// The values of a granule, since the last import.
#[derive(Debug, Clone, Default)]
pub(super) struct History {
    all: Vec<Written>,
    /// Index of the last value that is durable.
    durable: usize,
    /// Requests in flight about the last value: trims may meet.
    in_flight: usize,
}

#[derive(Debug, Clone, Copy)]
struct Written {
    value: Value,
    submitted: u64,
    /// 0: in flight.
    answered: u64,
}

impl History {
    fn of(value: Value) -> Self {
        Self {
            all: vec![Written {
                value,
                submitted: 0,
                answered: 1,
            }],
            durable: 0,
            in_flight: 0,
        }
    }

    /// Values that a read may find while the pool is open, or after the daemon died.
    fn current(&self) -> impl Iterator<Item = Value> {
        let last = self.all.iter().rposition(|written| written.answered > 0);
        self.all[last.unwrap_or(0)..]
            .iter()
            .map(|written| written.value)
    }

    /// Values that a read may find after a power failure.
    fn survivors(&self) -> impl Iterator<Item = Value> {
        let rest = self.all[self.durable..].iter();
        rest.map(|written| written.value)
    }

    pub(super) fn last(&self) -> Value {
        self.all.last().map_or(0, |written| written.value)
    }

    pub(super) fn in_flight(&self) -> bool {
        self.in_flight > 0
    }

    /// True when a trim, and no write of data, is in flight.
    pub(super) fn is_being_trimmed(&self) -> bool {
        self.in_flight() && self.last() == 0
    }
}

impl Model {
    pub(super) fn new() -> Self {
        Self {
            versions: BTreeMap::new(),
            clock: 1,
        }
    }

    pub(super) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub(super) fn add(&mut self, number: Number, family: u64, kind: Kind, granules: usize) {
        let version = ModelVersion {
            family,
            granules: vec![History::of(0); granules],
            kind,
            is_created: false,
            is_deleting: false,
        };
        self.versions.insert(number, version);
    }

    pub(super) fn begin_write(&mut self, number: Number, granule: u64, value: Value) {
        let submitted = self.tick();
        let version = self.versions.get_mut(&number).unwrap();
        let history = &mut version.granules[granule as usize];
        history.in_flight += 1;
        if history.in_flight > 1 {
            assert_eq!((history.last(), value), (0, 0), "only trims meet");
            return;
        }
        history.all.push(Written {
            value,
            submitted,
            answered: 0,
        });
    }

    /// The write of a granule was answered. `durable`: it had FUA.
    pub(super) fn end_write(&mut self, number: Number, granule: u64, done: bool, durable: bool) {
        let now = self.tick();
        let Some(version) = self.versions.get_mut(&number) else {
            return;
        };
        let history = &mut version.granules[granule as usize];
        history.in_flight = history.in_flight.saturating_sub(1);
        if !done {
            if !history.in_flight() {
                history.all.retain(|written| written.answered > 0);
            }
            return;
        }
        if let Some(last) = history.all.last_mut()
            && last.answered == 0
        {
            last.answered = now;
        }
        if durable {
            history.durable = history.all.len() - 1;
        }
    }

    /// A flush that was submitted at `since` is answered.
    pub(super) fn flushed(&mut self, since: u64) {
        let numbers: Vec<Number> = self.versions.keys().copied().collect();
        for number in numbers {
            self.flushed_of(number, since);
        }
    }

    /// The same for the flush of one version.
    pub(super) fn flushed_of(&mut self, number: Number, since: u64) {
        let version = self.versions.get_mut(&number).unwrap();
        for history in &mut version.granules {
            let answered = |written: &Written| (1..=since).contains(&written.answered);
            if let Some(last) = history.all.iter().rposition(answered) {
                history.durable = history.durable.max(last);
            }
        }
    }

    /// The values of a first read are the expected ones from then on.
    pub(super) fn settle_on(&mut self, number: Number, values: &[Value]) {
        let version = self.versions.get_mut(&number).unwrap();
        version.granules = values.iter().map(|value| History::of(*value)).collect();
    }

    /// The values of a version that takes no more writes are durable, and writes in flight will not
    /// change them. Older values stay known: the answer of a snapshot may come later.
    pub(super) fn fix(&mut self, number: Number, values: &[Value]) {
        let now = self.tick();
        let version = self.versions.get_mut(&number).unwrap();
        for (history, value) in version.granules.iter_mut().zip(values) {
            let is_it = |written: &Written| written.value == *value;
            let Some(last) = history.all.iter().rposition(is_it) else {
                continue;
            };
            let written = &mut history.all[last];
            if written.answered == 0 {
                written.answered = now;
            }
            history.all.truncate(last + 1);
            history.durable = last;
        }
    }

    /// Checks a read of a granule. `after_power_loss`: flushed data only is sure.
    pub(super) fn check(
        &self,
        number: Number,
        granule: u64,
        found: Option<Value>,
        after_power_loss: bool,
    ) -> Result<(), String> {
        let version = &self.versions[&number];
        let history = &version.granules[granule as usize];
        let fits = |value: Value| {
            if after_power_loss {
                history.survivors().any(|known| known == value)
            } else {
                history.current().any(|known| known == value)
            }
        };
        match found {
            Some(value) if fits(value) => Ok(()),
            Some(value) if !is_of(value, version.family, granule) => Err(format!(
                "foreign data in v{number} granule {granule}: {value:#x}, not of {history:?}"
            )),
            _ => Err(format!(
                "v{number} granule {granule}: {found:x?} is none of {history:x?}"
            )),
        }
    }

    /// Checks that the contents of a new snapshot of `volume` are a prefix of its writes.
    pub(super) fn check_cut(&self, volume: Number, values: &[Value]) -> Result<(), String> {
        let granules = &self.versions[&volume].granules;
        // Zeroes may have been there more than once: each bound takes the kinder position.
        let at = |history: &History, value: Value, last: bool| {
            let is_it = |written: &Written| written.value == value;
            if last {
                history.all.iter().rposition(is_it)
            } else {
                history.all.iter().position(is_it)
            }
        };
        let mut newest = 0;
        for (granule, (history, value)) in granules.iter().zip(values).enumerate() {
            let first = at(history, *value, false).ok_or_else(|| {
                format!("snapshot of v{volume} granule {granule}: {value:#x} not of {history:x?}")
            })?;
            newest = newest.max(history.all[first].submitted);
        }
        for (granule, (history, value)) in granules.iter().zip(values).enumerate() {
            let before = |written: &Written| written.answered > 0 && written.answered < newest;
            let least = history.all.iter().rposition(before).unwrap_or(0);
            if at(history, *value, true) < Some(least) {
                return Err(format!(
                    "snapshot of v{volume} granule {granule}: {value:#x} is older than a write \
                     before {newest}: {history:x?}"
                ));
            }
        }
        Ok(())
    }
}
