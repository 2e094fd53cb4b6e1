//! `[[remote]]`: a subsystem of another target, attached at start over one path or several.

use std::fmt;

use nacre_nvmf::address::{AddressError, Grammar};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::attach::{AttachParams, PolicyName, SelectorName, attach_params};

/// A subsystem of another target, whose namespaces become bdevs. The check of unknown keys is in
/// [`super::lists::known_keys`]: serde's `deny_unknown_fields` cannot be used with `flatten`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RemoteTarget {
    /// Name of the controller. Empty: derived from the last part of the subsystem's NQN.
    pub name: String,
    pub address: Addresses,
    /// How I/O is divided among several paths; none: as the options of all controllers say.
    pub policy: Option<PolicyName>,
    pub selector: Option<SelectorName>,
    pub min_io: Option<u32>,
    /// Names of keys of the keyring.
    pub dhchap_key: Option<String>,
    pub dhchap_ctrlr_key: Option<String>,
    pub psk: Option<String>,
    /// Other parameters of the method `bdev_nvme_attach_controller`.
    #[serde(flatten)]
    pub params: serde_json::Map<String, Value>,
}

/// The addresses of one subsystem, each in the form of `nacre bdev attach`: `rdma://192.0.2.7/NQN`.
/// A single address may be written without a list.
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

    /// The parameters of one address, with those of the other keys.
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
