//! Traffic classes that an operator configures: the DSCP and priority of their packets, and their
//! share of the bandwidth. Other traffic is not marked.

use serde::{Deserialize, Serialize};

use crate::dcb::{PRIORITIES, Priorities};

/// A class of traffic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Class {
    /// Differentiated services code point of its packets, 0 to 63.
    pub dscp: Option<u8>,
    /// Ethernet priority, 0 to 7.
    pub prio: Option<u8>,
    /// Percent of the bandwidth that it gets when the link is full, 1 to 100.
    pub share: Option<u8>,
}

/// The name of a field, its least value and its greatest value.
pub type Range = (&'static str, u8, u8);

const PRIO: Range = ("prio", 0, 7);

impl Class {
    /// The allowed range of each field.
    pub const RANGES: &[Range] = &[("dscp", 0, 63), PRIO, ("share", 1, 100)];

    /// The Type of Service byte: DSCP << 2, without ECN bits.
    pub fn tos(&self) -> Option<u8> {
        self.dscp.map(|dscp| dscp << 2)
    }

    fn problems(&self, name: &'static str, problems: &mut Vec<(String, String)>) {
        let values = [self.dscp, self.prio, self.share];
        for (value, (field, first, last)) in values.into_iter().zip(Self::RANGES) {
            if let Some(value) = value.filter(|value| !(*first..=*last).contains(value)) {
                let why = format!("{value} is not from {first} to {last}");
                problems.push((format!("{name}.{field}"), why));
            }
        }
    }
}

/// All other traffic. The daemon does not mark it; it gets the rest of the bandwidth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DefaultClass {
    /// Ethernet priority, 0 to 7. None: 0.
    pub prio: Option<u8>,
}

/// The classes of an interface, and of the daemon's connections.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Qos {
    /// Connections of hosts.
    pub storage: Class,
    /// Connections to remote namespaces, such as a volume's replicas.
    pub replication: Class,
    pub default: DefaultClass,
    /// The storage and replication priorities pause instead of losing packets (PFC).
    pub lossless: bool,
}

impl DefaultClass {
    /// The allowed range of each field.
    pub const RANGES: &[Range] = &[PRIO];
}

impl Qos {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The configured classes of `storage` and `replication`, with these names.
    pub fn classes(&self) -> impl Iterator<Item = (&'static str, Class)> {
        let classes = [("storage", self.storage), ("replication", self.replication)];
        classes
            .into_iter()
            .filter(|(_, class)| *class != Class::default())
    }

    pub fn default_priority(&self) -> u8 {
        self.default.prio.unwrap_or(0)
    }

    /// The priorities with PFC: those of the classes if `lossless` is set.
    pub fn lossless_priorities(&self) -> Priorities {
        let priorities = self.classes().filter_map(|(_, class)| class.prio);
        priorities.filter(|_| self.lossless).collect()
    }

    /// The configured share of each priority, in percent. If both classes have one priority, the
    /// share of `replication` counts.
    pub fn shares(&self) -> [Option<u8>; PRIORITIES] {
        let mut shares = [None; PRIORITIES];
        for (_, class) in self.classes() {
            if let (Some(prio), Some(share)) = (class.prio, class.share) {
                shares[usize::from(prio & 7)] = Some(share);
            }
        }
        shares
    }

    /// Keys that are out of range or contradict each other, with the reason.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        self.storage.problems("storage", &mut problems);
        self.replication.problems("replication", &mut problems);
        let default = Class {
            prio: self.default.prio,
            ..Class::default()
        };
        default.problems("default", &mut problems);
        if self.lossless && self.lossless_priorities().is_empty() {
            let why = "true needs prio in storage or replication: that priority pauses";
            problems.push(("lossless".into(), why.into()));
        }
        for (name, class) in self.classes() {
            if self.lossless && class.prio == Some(self.default_priority()) {
                let why = format!(
                    "{} is the priority of all other traffic, which would pause too",
                    self.default_priority()
                );
                problems.push((format!("{name}.prio"), why));
            }
        }
        let (storage, replication) = (self.storage, self.replication);
        if storage.dscp.is_some()
            && storage.dscp == replication.dscp
            && storage.prio != replication.prio
        {
            let why = "one DSCP cannot have the two priorities of storage and replication";
            problems.push(("replication.dscp".into(), why.into()));
        }
        let sum: u32 = self.shares().into_iter().flatten().map(u32::from).sum();
        if sum > 100 {
            let why = format!("the shares of all classes are {sum} percent together");
            problems.push(("storage.share".into(), why));
        } else if sum == 100 {
            let why = "the shares of storage and replication leave nothing to other traffic";
            problems.push(("storage.share".into(), why.into()));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(dscp: u8, prio: u8, share: u8) -> Class {
        Class {
            dscp: Some(dscp),
            prio: Some(prio),
            share: Some(share),
        }
    }

    #[test]
    fn the_default_requests_nothing() {
        let qos = Qos::default();
        assert!(qos.is_empty() && qos.problems().is_empty());
        assert!(qos.lossless_priorities().is_empty());
        assert_eq!(qos.classes().count(), 0);
    }

    #[test]
    fn contradictions_are_named() {
        let keys = |qos: Qos| -> Vec<String> {
            let problems = qos.problems();
            problems.into_iter().map(|(key, _)| key).collect()
        };
        let good = Qos {
            storage: class(26, 3, 50),
            replication: class(28, 5, 20),
            lossless: true,
            ..Qos::default()
        };
        assert_eq!(keys(good.clone()), [""; 0]);
        assert_eq!(good.lossless_priorities().to_string(), "3,5");
        assert_eq!(good.storage.tos(), Some(104));
        let bad = Qos {
            storage: class(64, 8, 0),
            ..Qos::default()
        };
        assert_eq!(keys(bad), ["storage.dscp", "storage.prio", "storage.share"]);
        let nothing = Qos {
            lossless: true,
            ..Qos::default()
        };
        assert_eq!(keys(nothing), ["lossless"]);
        let with_default = Qos {
            storage: class(26, 0, 50),
            lossless: true,
            ..Qos::default()
        };
        assert_eq!(keys(with_default), ["storage.prio"]);
        let one_dscp = Qos {
            replication: class(26, 5, 50),
            ..good.clone()
        };
        assert_eq!(keys(one_dscp), ["replication.dscp", "storage.share"]);
        let too_much = Qos {
            replication: class(28, 5, 60),
            ..good
        };
        assert_eq!(keys(too_much), ["storage.share"]);
    }
}
