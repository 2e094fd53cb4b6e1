//! The hash functions and Diffie-Hellman groups that one side allows, in order of preference.

use super::{Group, Hash};

/// The allowed hash functions and groups of one end. A controller chooses the first in this order
/// that the host offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    pub hashes: Vec<Hash>,
    pub groups: Vec<Group>,
}

/// A name that is neither a hash function nor a group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not one of {known}")]
pub struct UnknownName {
    pub name: String,
    pub known: String,
}

/// The fastest hash function first, and a group of the usual strength first, because larger ones
/// cost several times more. The null group is last: without a Diffie-Hellman exchange, weak keys
/// can be guessed from recorded messages.
impl Default for Offer {
    fn default() -> Self {
        Self {
            hashes: Hash::ALL.to_vec(),
            groups: vec![
                Group::Ffdhe3072,
                Group::Ffdhe4096,
                Group::Ffdhe2048,
                Group::Ffdhe6144,
                Group::Ffdhe8192,
                Group::Null,
            ],
        }
    }
}

impl Offer {
    /// All hash functions and groups, the strongest first, as SPDK's target chooses.
    pub fn strongest() -> Self {
        Self {
            hashes: Hash::ALL.into_iter().rev().collect(),
            groups: Group::ALL.into_iter().rev().collect(),
        }
    }

    /// Returns the hash functions with these names, in the same order and without repetitions.
    pub fn hashes_of<S: AsRef<str>>(names: &[S]) -> Result<Vec<Hash>, UnknownName> {
        of_names(names, Hash::from_name, Hash::ALL.map(Hash::name).join(", "))
    }

    pub fn groups_of<S: AsRef<str>>(names: &[S]) -> Result<Vec<Group>, UnknownName> {
        of_names(
            names,
            Group::from_name,
            Group::ALL.map(Group::name).join(", "),
        )
    }

    pub(super) fn hash_among(&self, ids: &[u8]) -> Option<Hash> {
        let mut allowed = self.hashes.iter();
        allowed.find(|hash| ids.contains(&hash.id())).copied()
    }

    pub(super) fn group_among(&self, ids: &[u8]) -> Option<Group> {
        let mut allowed = self.groups.iter();
        allowed.find(|group| ids.contains(&group.id())).copied()
    }
}

fn of_names<S: AsRef<str>, T: PartialEq>(
    names: &[S],
    from_name: fn(&str) -> Option<T>,
    known: String,
) -> Result<Vec<T>, UnknownName> {
    let mut found = Vec::new();
    for name in names.iter().map(AsRef::as_ref) {
        let one = from_name(name).ok_or_else(|| UnknownName {
            name: name.to_owned(),
            known: known.clone(),
        })?;
        if !found.contains(&one) {
            found.push(one);
        }
    }
    Ok(found)
}
