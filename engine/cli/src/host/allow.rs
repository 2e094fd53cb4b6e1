//! `nacre host allow`: allows a host, and makes its keys. The secrets of new keys are shown once:
//! in the commands for the host, on the terminal or in a file.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::super::address::ListenUrl;
use super::super::key::{self, FOLDER, KeyHash, Made, NewKey, NewSecretFile};
use super::super::reply::items;
use super::super::{Connection, Failure, output};
use super::{change, namespace_host};
use nacre_engine::config::host_keys::HostKeyNames;
use nacre_engine::methods::nvmf::host::{AddHost, AddHostParams};
use nacre_engine::methods::nvmf::listener::{GetSubsystemListeners, SubsystemListenersParams};
use nacre_engine::methods::nvmf::namespace::AddNamespaceHost;

/// Longest identity of version 0 of a PSK, in bytes: the label of its key derivation has one byte
/// for the length.
const LONGEST_IDENTITY: usize = 255;

#[derive(Debug, Args)]
pub(super) struct AllowArgs {
    /// NQN of the subsystem
    nqn: String,
    /// NQN of the host
    hostnqn: String,
    /// Only show it this namespace, created with --not-visible
    #[arg(long, conflicts_with_all = ["dhchap_key", "dhchap_ctrlr_key", "psk"])]
    nsid: Option<u32>,
    /// Name of the key that the host must prove to have
    #[arg(long, value_name = "KEY", group = "own_key")]
    dhchap_key: Option<String>,
    /// Name of the key that the target must prove to have
    // clap does not apply `requires` to an option that conflicts with one that is given.
    #[arg(
        long,
        value_name = "KEY",
        requires = "dhchap_key",
        conflicts_with = "generate_key"
    )]
    dhchap_ctrlr_key: Option<String>,
    /// Make a key for the host under this name, and print the commands for the host
    #[arg(long, value_name = "KEY", group = "own_key", conflicts_with = "nsid")]
    generate_key: Option<String>,
    /// Make a key for the target, too, under this name
    #[arg(long, value_name = "KEY", requires = "generate_key")]
    generate_ctrlr_key: Option<String>,
    /// Make a key for the target, too, under the name of the host's key with "-ctrlr"
    #[arg(long, requires = "generate_key", conflicts_with = "generate_ctrlr_key")]
    mutual: bool,
    /// Make a pre-shared key, too, under the name of the host's key with "-tls": the host must use
    /// TLS
    #[arg(long, requires = "generate_key", conflicts_with_all = ["psk", "concat"])]
    tls: bool,
    /// Folder of the new key files
    #[arg(long, value_name = "FOLDER", default_value = FOLDER, requires = "generate_key")]
    key_folder: PathBuf,
    /// Write the commands for the host, which have the secrets, to this new file (mode 0600) in
    /// place of the terminal
    #[arg(long, value_name = "FILE", requires = "generate_key")]
    out: Option<PathBuf>,
    /// Name of the pre-shared key with which the host must use TLS
    #[arg(long, value_name = "KEY")]
    psk: Option<String>,
    /// The host must make its TLS key by authentication (`nvme connect --concat`)
    #[arg(long, requires = "own_key", conflicts_with_all = ["psk", "nsid"])]
    concat: bool,
}

impl AllowArgs {
    pub(super) fn run(self, connection: &Connection) -> Result<(), Failure> {
        // Each option has a name here, so that none is dropped: a host without its psk would be
        // served in clear.
        let Self {
            nqn,
            hostnqn,
            nsid,
            dhchap_key,
            dhchap_ctrlr_key,
            generate_key,
            generate_ctrlr_key,
            mutual,
            tls,
            key_folder,
            out,
            psk,
            concat,
        } = self;
        if let Some(nsid) = nsid {
            let params = namespace_host(nqn, nsid, hostnqn);
            return change::<AddNamespaceHost>(connection, &params);
        }
        let concat = concat.then_some(true);
        let keys = HostKeyNames {
            dhchap_key,
            dhchap_ctrlr_key,
            psk,
            concat,
        };
        let Some(key) = generate_key else {
            return change::<AddHost>(connection, &add_host(nqn, hostnqn, keys));
        };
        let new = NewHost {
            nqn,
            hostnqn,
            makes_psk: tls,
            keys: HostKeyNames {
                dhchap_ctrlr_key: if mutual {
                    Some(format!("{key}-ctrlr"))
                } else {
                    generate_ctrlr_key
                },
                psk: if tls {
                    Some(format!("{key}-tls"))
                } else {
                    keys.psk
                },
                dhchap_key: Some(key),
                concat,
            },
            folder: key_folder,
        };
        new.allow(connection, out.as_deref())
    }
}

fn add_host(nqn: String, host: String, keys: HostKeyNames) -> AddHostParams {
    AddHostParams {
        nqn,
        host,
        keys,
        ..AddHostParams::default()
    }
}

/// A host that gets new keys with its permission.
struct NewHost {
    nqn: String,
    hostnqn: String,
    /// The keys of the host. Those for authentication are new.
    keys: HostKeyNames,
    /// True if the psk is new, too.
    makes_psk: bool,
    /// The folder of the new key files.
    folder: PathBuf,
}

/// The new keys of a host. Unless [`NewKeys::keep`] is called, they are deleted again.
struct NewKeys<'a> {
    connection: &'a Connection,
    folder: &'a Path,
    made: Vec<Made>,
}

impl NewKeys<'_> {
    fn make(&mut self, name: &str, kind: NewKey) -> Result<(), Failure> {
        let made = key::generate(self.connection, name, kind, self.folder, None)?;
        self.made.push(made);
        Ok(())
    }

    fn keep(mut self) -> Vec<Made> {
        std::mem::take(&mut self.made)
    }
}

impl Drop for NewKeys<'_> {
    fn drop(&mut self) {
        for made in &self.made {
            made.discard(self.connection);
        }
    }
}

impl NewHost {
    /// Makes the keys, allows the host, and shows its commands. A failure before the host is
    /// allowed leaves no key behind.
    fn allow(&self, connection: &Connection, out: Option<&Path>) -> Result<(), Failure> {
        let params = SubsystemListenersParams {
            nqn: self.nqn.clone(),
            tgt_name: None,
        };
        let listeners = connection.call_for_json::<GetSubsystemListeners>(&params)?;
        let out = out.map(NewSecretFile::create).transpose()?;
        let mut new = NewKeys {
            connection,
            folder: &self.folder,
            made: Vec::new(),
        };
        let dhchap = NewKey::Dhchap(KeyHash::Sha256);
        let (own, other) = (&self.keys.dhchap_key, &self.keys.dhchap_ctrlr_key);
        for name in [own, other].into_iter().flatten() {
            new.make(name, dhchap)?;
        }
        if let Some(psk) = self.keys.psk.as_ref().filter(|_| self.makes_psk) {
            new.make(psk, NewKey::Tls)?;
        }
        let params = add_host(self.nqn.clone(), self.hostnqn.clone(), self.keys.clone());
        connection.call_for_json::<AddHost>(&params)?;
        let made = new.keep();
        let commands = Commands {
            host: self,
            made: &made,
        };
        commands.show(connection, &listeners, out)
    }

    /// True if the host must use TLS, with a PSK or a generated key.
    fn uses_tls(&self) -> bool {
        self.keys.psk.is_some() || self.keys.must_concat()
    }

    /// True if the host can connect to this listener with its keys.
    fn fits(&self, listener: &Value) -> bool {
        let is_tcp = listener["address"]["trtype"] == "TCP";
        let tls = listener["options"]["tls"].as_str().unwrap_or("off");
        match (self.keys.must_concat(), self.uses_tls()) {
            // The first connection is in clear, and the others are not.
            (true, _) => is_tcp && tls == "allow",
            (false, true) => is_tcp && tls != "off",
            (false, false) => tls != "require",
        }
    }
}

/// The commands that a host runs to connect.
struct Commands<'a> {
    host: &'a NewHost,
    made: &'a [Made],
}

impl Commands<'_> {
    fn secret(&self, name: Option<&String>) -> Option<Zeroizing<String>> {
        let made = self.made.iter().find(|made| Some(&made.name) == name)?;
        Some(made.secret.to_text())
    }

    /// The commands that put the PSK into the host's keyring: of nvme-cli 2 and of nvme-cli 3.
    /// Empty without a PSK.
    fn keyring(&self) -> Vec<Zeroizing<String>> {
        let NewHost {
            nqn, hostnqn, keys, ..
        } = self.host;
        let Some(name) = keys.psk.as_ref() else {
            return Vec::new();
        };
        // The file of a key that exists is the daemon's, which does not show its text.
        let text = match self.secret(Some(name)) {
            Some(text) => text,
            None => format!("TEXT-OF-KEY-{name}").into(),
        };
        let is_long = "NVMe0R01  ".len() + hostnqn.len() + nqn.len() > LONGEST_IDENTITY;
        let version = if is_long { " --identity 1" } else { "" };
        let options = Zeroizing::new(format!(
            "{version} --hostnqn {hostnqn} --subsysnqn {nqn} --keydata '{}'",
            *text
        ));
        ["check-tls-key --insert", "keys insert-tls-psk"]
            .map(|act| Zeroizing::new(format!("nvme {act}{}", *options)))
            .to_vec()
    }

    /// A line for each listener that serves the host.
    fn connect(&self, listeners: &Value) -> Vec<Zeroizing<String>> {
        let host = self.host;
        let listeners = items(listeners).iter().filter(|one| host.fits(one));
        let places = listeners.filter_map(|one| ListenUrl::from_value(&one["address"]));
        let line = |place: ListenUrl| {
            let connect = place.connect_line(&host.nqn);
            let mut line = Zeroizing::new(format!("{connect} --hostnqn {}", host.hostnqn));
            for (option, name) in [
                ("--dhchap-secret", &host.keys.dhchap_key),
                ("--dhchap-ctrl-secret", &host.keys.dhchap_ctrlr_key),
            ] {
                if let Some(secret) = self.secret(name.as_ref()) {
                    line.push_str(&format!(" {option} '{}'", *secret));
                }
            }
            if host.keys.psk.is_some() {
                line.push_str(" --tls");
            }
            if host.keys.must_concat() {
                line.push_str(" --concat");
            }
            line
        };
        places.map(line).collect()
    }

    /// Shows the names and files of the keys, and the commands: on the terminal, or in `out`.
    fn show(
        &self,
        connection: &Connection,
        listeners: &Value,
        out: Option<NewSecretFile>,
    ) -> Result<(), Failure> {
        let (keyring, connect) = (self.keyring(), self.connect(listeners));
        let files: Vec<_> = self.made.iter().map(|key| &key.file).collect();
        let texts = |lines: &[Zeroizing<String>]| -> Vec<String> {
            lines.iter().map(|line| (**line).clone()).collect()
        };
        let mut lines = Vec::new();
        if let [second, third] = &*keyring {
            lines.push(second.clone());
            lines.push(Zeroizing::new(format!("# With nvme-cli 3: {}", **third)));
        }
        lines.extend(connect.iter().cloned());
        let path = out.as_ref().map(|out| out.path().to_owned());
        if let Some(out) = out {
            out.finish(&lines).map_err(|error| {
                Failure::Failed(error.context(format!(
                    "the host is allowed, and its keys are in {}; their commands were not written",
                    self.host.folder.display()
                )))
            })?;
        }
        if connection.json {
            let mut answer = json!({ "files": files });
            match path {
                Some(path) => answer["out"] = json!(path),
                None => {
                    answer["commands"] = json!(texts(&connect));
                    answer["keyring_commands"] = json!(texts(&keyring));
                }
            }
            return output::json(&answer);
        }
        for key in self.made {
            output::line(&format!("key {}: {}", key.name, key.file.display()))?;
        }
        match path {
            Some(path) if !lines.is_empty() => {
                output::line(&format!("on the host: the commands in {}", path.display()))?;
            }
            None if !lines.is_empty() => {
                output::line("on the host:")?;
                for line in &lines {
                    output::line(&format!("  {}", **line))?;
                }
            }
            _ => {}
        }
        if connect.is_empty() {
            return output::line(&self.advice());
        }
        Ok(())
    }

    /// The step that is missing, if no listener serves the host.
    fn advice(&self) -> String {
        let host = self.host;
        let nqn = &host.nqn;
        if host.uses_tls() {
            return format!(
                "no TCP listener with TLS that serves this host: `nacre listener add {nqn} \
                 tcp://ADDRESS:4420 --tls allow`, then `nvme connect` on the host"
            );
        }
        "no listener that serves this host: add one with `nacre listener add`, then give the host \
         the key"
            .to_owned()
    }
}
