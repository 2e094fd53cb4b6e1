//! `[[remote]]`: a subsystem of another target, attached at start over one path or several.

use std::collections::BTreeSet;
use std::fmt;

use nacre_nvmf::address::{AddressError, Grammar};
use nacre_nvmf_remote::MAX_PATHS;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::check::Check;
use crate::attach::{AttachParams, Multipath, OF_ADDRESS, PolicyName, SelectorName, attach_params};
use crate::values::read::{self, Texts};

/// A subsystem of another target, whose namespaces are devices. `deny_unknown_fields` does not go
/// with `flatten`: [`super::lists::known_keys`] has the check.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RemoteTarget {
    /// Empty: the end of the subsystem's name.
    pub name: String,
    pub address: Addresses,
    /// How I/O is divided among several paths; none: as the options of all controllers say.
    pub policy: Option<PolicyName>,
    pub selector: Option<SelectorName>,
    pub min_io: Option<u32>,
    /// Names of keys.
    pub dhchap_key: Option<String>,
    pub dhchap_ctrlr_key: Option<String>,
    pub psk: Option<String>,
    /// Other parameters of the method that attaches it.
    #[serde(flatten)]
    pub params: serde_json::Map<String, Value>,
}

/// The addresses of one subsystem, each as `nacre bdev attach` takes it: `rdma://192.0.2.7/NQN`.
/// A single one needs no list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Addresses(pub Vec<String>);

impl Serialize for Addresses {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [one] => one.serialize(to),
            all => all.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for Addresses {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(OneOrList)
    }
}

struct OneOrList;

impl<'de> Visitor<'de> for OneOrList {
    type Value = Addresses;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text in quotes, nor a list of such texts")
    }

    fn visit_str<E>(self, text: &str) -> Result<Addresses, E> {
        Ok(Addresses(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Addresses, A::Error> {
        let mut all = Vec::new();
        while let Some(text) = items.next_element()? {
            all.push(text);
        }
        Ok(Addresses(all))
    }
}

impl RemoteTarget {
    /// The parameters that attach each path. Later addresses may omit the namespace and the host
    /// NQN; those of the first address apply. The error has the index of its address.
    pub fn attach_params(&self) -> Result<Vec<Value>, (usize, AddressError)> {
        let mut all: Vec<AttachParams> = Vec::new();
        for (at, text) in self.address.0.iter().enumerate() {
            let address = Grammar::NAMESPACE
                .parse(text)
                .map_err(|error| (at, error))?;
            let name = Some(&self.name).filter(|name| !name.is_empty());
            let mut params = attach_params(&address, name.cloned());
            if let Some(first) = all.first() {
                if (params.nsid, params.uuid) == (None, None) {
                    (params.nsid, params.uuid) = (first.nsid, first.uuid);
                }
                params.hostnqn = params.hostnqn.or_else(|| first.hostnqn.clone());
                if self.name.is_empty() {
                    params.name.clone_from(&first.name);
                }
            }
            all.push(params);
        }
        Ok(all.iter().map(|params| self.with_keys(params)).collect())
    }

    /// The parameters of an address, with the other keys.
    fn with_keys(&self, params: &AttachParams) -> Value {
        let mut params = serde_json::to_value(params).expect("parameters are plain data");
        let all = params.as_object_mut().expect("parameters have names");
        all.extend(self.params.clone());
        let keys = [
            ("dhchap_key", &self.dhchap_key),
            ("dhchap_ctrlr_key", &self.dhchap_ctrlr_key),
            ("psk", &self.psk),
        ];
        for (field, key) in keys {
            if let Some(key) = key {
                all.insert(field.into(), key.as_str().into());
            }
        }
        let divided = serde_json::json!({
            "policy": self.policy, "selector": self.selector, "min_io": self.min_io,
        });
        if self.policy.is_some() || self.selector.is_some() || self.min_io.is_some() {
            all.insert("multipath_opts".into(), divided);
        }
        params
    }
}

impl Check<'_> {
    pub(super) fn remotes(&mut self, targets: &[RemoteTarget]) {
        let mut names = BTreeSet::new();
        for (at, target) in targets.iter().enumerate() {
            let key = format!("remote[{at}]");
            let Some(paths) = self.paths(&key, target) else {
                continue;
            };
            self.several_paths(&key, target, &paths);
            if !names.insert(paths[0].name.clone()) {
                let cause = format!("a second remote target \"{}\"", paths[0].name);
                let remedy = "give each a name of its own";
                self.refuse(&format!("{key}.name"), cause, remedy);
            }
        }
    }

    /// The parameters of each path. Reports the first error of the target, then `None` if a path
    /// has no parameters.
    fn paths(&mut self, key: &str, target: &RemoteTarget) -> Option<Vec<AttachParams>> {
        if target.address.0.iter().all(String::is_empty) {
            let remedy = "add address = \"auto://ADDRESS/NQN\"";
            let cause = "a target without an address".to_owned();
            self.refuse_unless_refused_with(&format!("{key}.address"), cause, remedy);
            return None;
        }
        let all = match target.attach_params() {
            Ok(all) => all,
            Err((at, error)) => {
                self.refuse(&address_key(key, target, at), error, "");
                return None;
            }
        };
        let (mut paths, mut is_refused) = (Vec::new(), false);
        for (at, params) in all.iter().enumerate() {
            match read::first::<AttachParams>(params, Texts::Read) {
                Ok(params) => {
                    let refused = params.check_alone().err().filter(|_| !is_refused);
                    if let Some(error) = refused {
                        is_refused = true;
                        let field = error.data.as_ref().and_then(|facts| facts.field.as_deref());
                        let key = match field.filter(|field| !OF_ADDRESS.contains(field)) {
                            Some(field) => format!("{key}.{}", key_of(field)),
                            None => address_key(key, target, at),
                        };
                        self.refused(&key, &error);
                    }
                    paths.push(params);
                }
                Err((place, error)) => {
                    self.wrong_param(key, &place, &error);
                    return None;
                }
            }
        }
        Some(paths)
    }

    /// Refuses paths that are not to the same namespaces of one subsystem, and a second path where
    /// the attaching method would refuse it.
    fn several_paths(&mut self, key: &str, target: &RemoteTarget, paths: &[AttachParams]) {
        let (first, count) = (&paths[0], paths.len());
        if count > MAX_PATHS {
            let cause = format!("{count} paths, and {MAX_PATHS} are the most");
            self.refuse(&format!("{key}.address"), cause, "leave some out");
        }
        if count > 1 && first.multipath == Some(Multipath::Disable) {
            let cause = format!("it refuses a second path, and there are {count} addresses");
            let remedy = "leave it out";
            self.refuse(&format!("{key}.multipath"), cause, remedy);
        }
        for (at, path) in paths.iter().enumerate().skip(1) {
            let of_address = address_key(key, target, at);
            let place = |one: &AttachParams| {
                let transport = one.trtype.to_ascii_lowercase();
                (transport, one.traddr.clone(), one.trsvcid.clone())
            };
            let same = paths[..at].iter().position(|one| place(one) == place(path));
            let (cause, remedy) = if path.subnqn != first.subnqn {
                let nqn = first.subnqn.as_deref().unwrap_or_default();
                (
                    format!("another subsystem than that of address[0], {nqn}"),
                    "all addresses of a target are paths to one subsystem: write another [[remote]]",
                )
            } else if (path.nsid, path.uuid) != (first.nsid, first.uuid) {
                (
                    "it selects another namespace than address[0]".to_owned(),
                    "select it in the first address: that holds for all paths",
                )
            } else if path.hostnqn != first.hostnqn {
                (
                    "another hostnqn than that of address[0]".to_owned(),
                    "write it in the first address: that holds for all paths",
                )
            } else if let Some(same) = same {
                (
                    format!("the same path as address[{same}]"),
                    "leave it out, or write another address, port or transport",
                )
            } else {
                continue;
            };
            self.refuse(&of_address, cause, remedy);
        }
    }
}

/// The key of an address: one that is in a list has an index.
fn address_key(key: &str, target: &RemoteTarget, at: usize) -> String {
    match target.address.0.len() {
        1 => format!("{key}.address"),
        _ => format!("{key}.address[{at}]"),
    }
}

/// The key of a parameter.
fn key_of(field: &str) -> &str {
    field.strip_prefix("multipath_opts.").unwrap_or(field)
}
