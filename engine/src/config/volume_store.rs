//! `[store]`: the records of volumes in etcd.

use std::net::IpAddr;
use std::path::PathBuf;

use nacre_cluster_etcd::{EndpointAddress, Prefix};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::values::read;

/// Where the records of volumes are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VolumeStoreSettings {
    /// Empty: the records are in a file of the data directory.
    pub endpoints: Vec<String>,
    /// Name of a [`Prefix`]. With `[cluster]`, the cluster's name is used instead.
    pub prefix: Option<String>,
    pub ca: Option<PathBuf>,
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
    pub user: Option<String>,
    pub password_file: Option<PathBuf>,
    /// Time limit of a request.
    #[serde(deserialize_with = "read::millis")]
    pub deadline_ms: u64,
    /// Compact the history of etcd.
    pub compact: bool,
    /// UUID in the claim of the prefix's previous owner, which must have ended for good.
    #[serde(deserialize_with = "read::some_uuid")]
    pub take_over: Option<Uuid>,
}

impl Default for VolumeStoreSettings {
    fn default() -> Self {
        Self {
            endpoints: Vec::new(),
            prefix: None,
            ca: None,
            cert: None,
            key: None,
            user: None,
            password_file: None,
            deadline_ms: 5000,
            compact: true,
            take_over: None,
        }
    }
}

const MAX_ENDPOINTS: usize = 5;
/// A key, the error in its value, and the remedy.
type Wrong = (&'static str, String, &'static str);

impl VolumeStoreSettings {
    pub fn is_etcd(&self) -> bool {
        !self.endpoints.is_empty()
    }

    /// Errors of these keys. If one key requires another, the error is under the missing key. So a
    /// key with an unreadable value has one error only.
    pub(super) fn problems(&self, is_node: bool) -> Vec<Wrong> {
        let mut wrong: Vec<Wrong> = Vec::new();
        let mut refuse = |key, cause: &str, remedy| wrong.push((key, cause.to_owned(), remedy));
        let is_set = [
            ("prefix", self.prefix.is_some()),
            ("ca", self.ca.is_some()),
            ("cert", self.cert.is_some()),
            ("key", self.key.is_some()),
            ("user", self.user.is_some()),
            ("password_file", self.password_file.is_some()),
            ("take_over", self.take_over.is_some()),
        ];
        if !self.is_etcd() {
            if let Some((key, _)) = is_set.iter().find(|(_, is_set)| *is_set) {
                let cause = format!("it is empty, and store.{key} is of use with etcd only");
                let remedy = "add endpoints = [\"https://HOST:2379\"] to [store]";
                refuse("endpoints", &cause, remedy);
            }
            return wrong;
        }
        let count = self.endpoints.len();
        if count > MAX_ENDPOINTS {
            let cause = format!("{count} endpoints, and {MAX_ENDPOINTS} are the most");
            refuse("endpoints", &cause, "name the members that are nearest");
        }
        match self.prefix.as_deref() {
            // The name of the cluster is the prefix.
            None if is_node => {}
            None => {
                let remedy = "add prefix = \"NAME\" to [store], another name for each daemon";
                refuse("prefix", "it is missing, and etcd needs it", remedy);
            }
            Some(name) if Prefix::new(name).is_none() => {
                let cause = format!(
                    "\"{name}\" is not 1 to {} letters, digits, \".\", \"_\" or \"-\"",
                    Prefix::MAX_NAME
                );
                refuse("prefix", &cause, "choose another name");
            }
            Some(_) => {}
        }
        let places: Result<Vec<EndpointAddress>, _> = self
            .endpoints
            .iter()
            .map(|url| EndpointAddress::parse(url))
            .collect();
        match &places {
            Err(error) => refuse("endpoints", &error.to_string(), ""),
            Ok(places) => {
                let has_tls = [("ca", &self.ca), ("cert", &self.cert), ("key", &self.key)];
                let has_tls = has_tls.iter().find(|(_, path)| path.is_some());
                if places.iter().any(|place| place.is_https) {
                    if self.ca.is_none() {
                        let remedy = "add ca = \"/…/ca.pem\" to [store]";
                        refuse("ca", "it is missing, and https needs it", remedy);
                    }
                } else if let Some((key, _)) = has_tls {
                    let remedy = "write https in endpoints, or leave it out";
                    refuse(key, "all endpoints are without TLS", remedy);
                }
                let is_open =
                    |place: &&EndpointAddress| !place.is_https && !is_loopback(&place.host);
                if self.user.is_some()
                    && let Some(place) = places.iter().find(is_open)
                {
                    let cause = format!("the password would go to {} in clear", place.host);
                    refuse("user", &cause, "write https in endpoints");
                }
            }
        }
        for (missing, is_missing, given, is_given) in [
            ("cert", self.cert.is_none(), "key", self.key.is_some()),
            ("key", self.key.is_none(), "cert", self.cert.is_some()),
            (
                "user",
                self.user.is_none(),
                "password_file",
                self.password_file.is_some(),
            ),
            (
                "password_file",
                self.password_file.is_none(),
                "user",
                self.user.is_some(),
            ),
        ] {
            if is_missing && is_given {
                let cause = format!("it is missing, and store.{given} needs it");
                refuse(missing, &cause, "add it to [store]");
            }
        }
        wrong
    }
}

fn is_loopback(host: &str) -> bool {
    let ip = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || ip.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use crate::config::load_text;

    fn said(keys: &str) -> String {
        let text = format!("[store]\n{keys}\n");
        match load_text(Some(("/n.toml", &text)), [], &[]) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    /// Goal: keys that do not go together are refused with the key, the cause and the remedy.
    #[test]
    fn keys_that_do_not_go_together() {
        const HTTP: &str = "endpoints = [\"http://[::1]:2379\"]\nprefix = \"a\"\n";
        const FAR: &str = "endpoints = [\"http://192.0.2.1:2379\"]\nprefix = \"a\"\n";
        const HTTPS: &str = "endpoints = [\"https://h:2379\"]\nprefix = \"a\"\nca = \"/ca.pem\"\n";
        let login = "user = \"u\"\npassword_file = \"/p\"\n";
        for (keys, expected) in [
            (
                "prefix = \"a\"".to_owned(),
                "store.endpoints: it is empty, and store.prefix",
            ),
            (
                "endpoints = [\"http://h:1\"]".to_owned(),
                "store.prefix: it is missing",
            ),
            (
                format!("{HTTP}ca = \"/a\""),
                "store.ca: all endpoints are without TLS",
            ),
            (
                format!("{HTTPS}cert = \"/a\""),
                "store.key: it is missing, and store.cert",
            ),
            (
                format!("{HTTPS}key = \"/a\""),
                "store.cert: it is missing, and store.key",
            ),
            (
                format!("{HTTPS}user = \"u\""),
                "store.password_file: it is missing, and store.user",
            ),
            (
                "endpoints = [\"https://h:1\"]\nprefix = \"a\"".to_owned(),
                "store.ca: it is missing, and https needs it",
            ),
            (
                format!("{FAR}{login}"),
                "store.user: the password would go to 192.0.2.1 in clear",
            ),
            (
                format!("{HTTP}[data]\ndir = \"none\""),
                "store.endpoints: data.dir = \"none\" keeps no identity",
            ),
        ] {
            let said = said(&keys);
            assert!(said.contains(expected), "{keys}: {said}");
        }
        for keys in [
            HTTP.to_owned(),
            format!("{HTTP}{login}"),
            format!("{HTTPS}{login}cert = \"/c\"\nkey = \"/k\""),
        ] {
            assert_eq!(said(&keys), "", "{keys}");
        }
    }
}
