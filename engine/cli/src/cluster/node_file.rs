//! Adds the keys that make a daemon a node to its configuration file: `[cluster]`, `[store]`, and
//! the listeners. Other keys and comments stay.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::Args;
use nacre_engine::config::settings::{Settings, VolumeStoreSettings};
use nacre_engine::config::{self, SYSTEM_FILE};
use nacre_engine_values::files;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde_json::{Value, json};
use toml_edit::{DocumentMut, Item, Table};

use super::super::{Failure, output};
use super::access::EtcdArgs;

/// Where the daemon's unit of systemd may be.
const UNITS: [&str; 3] = [
    "/etc/systemd/system/nacre.service",
    "/usr/lib/systemd/system/nacre.service",
    "/lib/systemd/system/nacre.service",
];
/// Largest configuration file, in bytes.
const LARGEST: u64 = 1 << 20;

#[derive(Debug, Default, Args)]
pub(super) struct NodeFileArgs {
    /// Name of the node [default: the name of the machine]
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// A fact about the place of the node, such as zone=a; several times for several
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,
    /// Where hosts and other nodes connect, such as tcp://192.0.2.1:4420; several times for several
    #[arg(long, value_name = "URI")]
    listen: Vec<String>,
}

impl NodeFileArgs {
    /// The first option that is given.
    pub(super) fn given(&self) -> Option<&'static str> {
        let options = [
            ("--node", self.node.is_some()),
            ("--label", !self.labels.is_empty()),
            ("--listen", !self.listen.is_empty()),
        ];
        let mut given = options.into_iter().filter(|(_, is_given)| *is_given);
        given.next().map(|(option, _)| option)
    }
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("it is not KEY=VALUE".to_owned()),
    }
}

/// A change of a configuration file that makes its daemon a node.
#[derive(Debug)]
pub(super) struct Edit {
    pub(super) path: PathBuf,
    before: Option<String>,
    pub(super) after: String,
    settings: Settings,
}

impl Edit {
    /// Reads the file. Refuses a key that has another value there, and a result that the daemon
    /// would refuse.
    pub(super) fn new(
        cluster: &str,
        store: &VolumeStoreSettings,
        etcd: &EtcdArgs,
        node: &NodeFileArgs,
    ) -> Result<Self, Failure> {
        let named = etcd.config.clone();
        let named = named.unwrap_or_else(|| PathBuf::from(SYSTEM_FILE));
        // A link stays one: its target is replaced.
        let path = named.canonicalize().unwrap_or(named);
        let before = read(&path).map_err(Failure::Failed)?;
        let shown = path.display().to_string();
        let wanted = wanted(cluster, store, node);
        let after = edited(before.as_deref().unwrap_or_default(), &wanted);
        let after = after.with_context(|| shown.clone())?;
        let loaded = config::load_text(Some((&shown, &after)), [], &[]);
        let settings = loaded.map_err(anyhow::Error::from)?.settings;
        Ok(Self {
            path,
            before,
            after,
            settings,
        })
    }

    pub(super) fn is_change(&self) -> bool {
        self.before.as_ref() != Some(&self.after)
    }

    /// Durable when it returns. Refused if the file has changed since it was read.
    pub(super) fn write(&self) -> Result<(), Failure> {
        if !self.is_change() {
            return Ok(());
        }
        let write = || {
            let now = read(&self.path).map_err(std::io::Error::other)?;
            if now != self.before {
                return Err(std::io::Error::other(
                    "another program has changed it meanwhile",
                ));
            }
            if let Some(folder) = self.path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            files::replace_contents(&self.path, self.after.as_bytes())
        };
        write().map_err(|error| {
            Failure::Failed(anyhow!(
                "{} was not written: {error}. The cluster exists: correct the cause, and run \
                 `nacre cluster join` again",
                self.path.display()
            ))
        })
    }

    /// Prints the change, and the next step.
    pub(super) fn report(&self) -> Result<(), Failure> {
        let shown = self.path.display();
        let nvmf = &self.settings.nvmf;
        if nvmf.listen.is_empty() && nvmf.listener.is_empty() {
            eprintln!(
                "warning: {shown} has no listener, so that neither hosts nor other nodes reach \
                 this one. Add --listen tcp://ADDRESS:4420, or [[nvmf.listener]]"
            );
        }
        let done = if self.is_change() {
            format!("Wrote {shown}.")
        } else {
            format!("{shown} has these keys already.")
        };
        output::line(&format!("{done} Next: {}", self.next_step()))
    }

    /// The command that starts the daemon with the file.
    pub(super) fn next_step(&self) -> String {
        let has_systemd = Path::new("/run/systemd/system").is_dir();
        let has_unit = UNITS.iter().any(|unit| Path::new(unit).exists());
        if self.path == Path::new(SYSTEM_FILE) && has_systemd && has_unit {
            return "systemctl restart nacre".to_owned();
        }
        format!(
            "start the daemon again: nacre serve -c {}",
            self.path.display()
        )
    }
}

/// `None`: there is no file.
fn read(path: &Path) -> anyhow::Result<Option<String>> {
    let shown = || path.display().to_string();
    let size = match std::fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => anyhow::bail!("{}: it is no file", shown()),
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(shown),
    };
    if size > LARGEST {
        anyhow::bail!(
            "{}: it has {size} bytes, and {LARGEST} are the most",
            shown()
        );
    }
    std::fs::read_to_string(path).map(Some).with_context(shown)
}

/// A table, a key of it, and the value.
type Wanted = (&'static str, &'static str, Value);

fn wanted(cluster: &str, store: &VolumeStoreSettings, node: &NodeFileArgs) -> Vec<Wanted> {
    let mut wanted = vec![("cluster", "name", json!(cluster))];
    let mut add = |table, key, value: Option<Value>| {
        wanted.extend(value.map(|value| (table, key, value)));
    };
    let labels: BTreeMap<_, _> = node.labels.iter().cloned().collect();
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| json!(path));
    add(
        "cluster",
        "node",
        node.node.as_ref().map(|name| json!(name)),
    );
    add(
        "cluster",
        "labels",
        (!labels.is_empty()).then(|| json!(labels)),
    );
    add("store", "endpoints", Some(json!(store.endpoints)));
    add("store", "ca", path(&store.ca));
    add("store", "cert", path(&store.cert));
    add("store", "key", path(&store.key));
    add("store", "user", store.user.as_ref().map(|user| json!(user)));
    add("store", "password_file", path(&store.password_file));
    add(
        "nvmf",
        "listen",
        (!node.listen.is_empty()).then(|| json!(node.listen)),
    );
    wanted
}

/// The text with the wanted keys. A key that is there stays, and must have the same value.
fn edited(text: &str, wanted: &[Wanted]) -> anyhow::Result<String> {
    let mut document: DocumentMut = text.parse().context("it is not TOML")?;
    let mut is_changed = false;
    for (table, key, value) in wanted {
        let item = document.entry(table);
        let item = item.or_insert_with(|| Item::Table(Table::new()));
        let Some(keys) = item.as_table_like_mut() else {
            anyhow::bail!("{table}: it is no table. Correct it");
        };
        match keys.get(key) {
            None => {
                keys.insert(key, toml_edit::value(toml(value)));
                is_changed = true;
            }
            Some(found) if plain(found).as_ref() == Some(value) => {}
            Some(found) => anyhow::bail!(
                "{table}.{key}: the file has {}, and this command {value}. Correct one of them",
                found.to_string().trim()
            ),
        }
    }
    Ok(if is_changed {
        document.to_string()
    } else {
        text.to_owned()
    })
}

/// `None`: not a value that JSON has.
fn plain(item: &Item) -> Option<Value> {
    let value = item.clone().into_value().ok()?;
    Value::deserialize(value.into_deserializer()).ok()
}

/// The value in TOML. Only text, lists and tables of it are wanted.
fn toml(value: &Value) -> toml_edit::Value {
    match value {
        Value::Array(values) => values.iter().map(toml).collect(),
        Value::Object(values) => {
            let pairs = values
                .iter()
                .map(|(key, value)| (key.as_str(), toml(value)));
            toml_edit::Value::InlineTable(pairs.collect())
        }
        value => value.as_str().unwrap_or_default().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> NodeFileArgs {
        NodeFileArgs {
            node: Some("ant".to_owned()),
            labels: vec![("zone".to_owned(), "a".to_owned())],
            listen: vec!["tcp://192.0.2.1:4420".to_owned()],
        }
    }

    fn all(store: &VolumeStoreSettings) -> Vec<Wanted> {
        wanted("lab", store, &node())
    }

    /// Goal: a change that another program makes between the read and the write is not lost.
    #[test]
    fn a_file_that_was_changed_meanwhile() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("nacre.toml");
        let before = "[nvmf]\nmax_subsystems = 7\n".to_owned();
        let edit = Edit {
            path: path.clone(),
            before: Some(before.clone()),
            after: edited(&before, &all(&store())).expect("good"),
            settings: Settings::default(),
        };
        for now in [Some("# mine\n"), None] {
            match now {
                Some(text) => std::fs::write(&path, text).expect("written"),
                None => std::fs::remove_file(&path).expect("removed"),
            }
            let Err(Failure::Failed(refused)) = edit.write() else {
                panic!("it was written");
            };
            let said = refused.to_string();
            assert!(said.contains("changed it meanwhile"), "{said}");
            assert_eq!(std::fs::read_to_string(&path).ok().as_deref(), now);
        }
        std::fs::write(&path, &before).expect("written");
        assert!(edit.write().is_ok());
        assert_eq!(std::fs::read_to_string(&path).expect("a file"), edit.after);
    }

    fn store() -> VolumeStoreSettings {
        VolumeStoreSettings {
            endpoints: vec!["https://a:1".into(), "https://b:1".into()],
            ca: Some("/ca \"1\".pem".into()),
            user: Some("nacre".into()),
            password_file: Some("/p".into()),
            ..VolumeStoreSettings::default()
        }
    }

    /// Goal: the result is the configuration of a node, comments and other keys stay, and a second
    /// edit changes nothing.
    #[test]
    fn all_else_stays() {
        let old = "# Ours.\n[nvmf]\nmax_subsystems = 7 # few\n\n[cluster] # soon\nlabels = { zone = \"a\" }\n";
        for text in [
            "",
            old,
            "[data]\ndir = \"/d\"",
            "cluster.name = \"lab\" # here\n",
        ] {
            let edited = edited(text, &all(&store())).expect("good");
            for line in text.lines() {
                assert!(edited.contains(line), "{line}: {edited}");
            }
            let loaded = config::load_text(Some(("/n.toml", &edited)), [], &[]);
            let loaded = loaded
                .unwrap_or_else(|error| panic!("{edited}: {error}"))
                .settings;
            assert_eq!(loaded.store, store());
            assert_eq!(loaded.cluster.name.as_deref(), Some("lab"));
            assert_eq!(loaded.cluster.node.as_deref(), Some("ant"));
            assert_eq!(
                loaded.cluster.labels.get("zone").map(String::as_str),
                Some("a")
            );
            assert_eq!(loaded.nvmf.listen, ["tcp://192.0.2.1:4420"]);
            assert_eq!(
                super::edited(&edited, &all(&store())).expect("good"),
                edited
            );
        }
    }

    /// Goal: a value in the file is never replaced.
    #[test]
    fn another_value_is_refused() {
        for (text, expected) in [
            (
                "[cluster]\nname = \"den\"",
                "cluster.name: the file has \"den\", and this command \"lab\"",
            ),
            ("[cluster]\nlabels = { zone = \"b\" }", "cluster.labels"),
            ("[cluster.labels]\nzone = \"b\"", "cluster.labels"),
            ("[store]\nendpoints = [\"https://a:1\"]", "store.endpoints"),
            ("[nvmf]\nlisten = []", "nvmf.listen"),
            ("store = 1", "store: it is no table"),
            ("[store", "not TOML"),
        ] {
            let refused = edited(text, &all(&store())).expect_err(text);
            assert!(format!("{refused:#}").contains(expected), "{refused:#}");
        }
        // A table is the same as an inline one.
        assert!(edited("[cluster.labels]\nzone = \"a\"", &all(&store())).is_ok());
    }
    /// Goal: a daemon whose remote controllers have keys does not become a node, because it would
    /// reach no other one; its file stays.
    #[test]
    fn keys_for_all_remote_controllers_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("nacre.toml");
        let text = "[replication]\npsk = \"far-tls\"\n";
        std::fs::write(&path, text).expect("a file");
        let etcd = EtcdArgs::of_file(path.clone());
        let refused = Edit::new("lab", &store(), &etcd, &node()).expect_err("a key");
        let Failure::Failed(refused) = refused else {
            panic!("{refused:?}");
        };
        let refused = format!("{refused:#}");
        let expected = format!("{}:2: replication.psk: [cluster] names", path.display());
        assert!(refused.contains(&expected), "{refused}");
        assert_eq!(std::fs::read_to_string(&path).expect("it stays"), text);
    }
}
