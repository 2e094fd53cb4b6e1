//! `nacre key`: creates and checks keys for authentication and TLS. Secrets stay in their files,
//! and the daemon gets names and paths only; or the daemon stores them sealed.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use nacre_nvmf::auth::{Hash, Secret, SystemRandom};
use nacre_nvmf::tls::Psk;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::output::done;
use super::reply::items;
use super::{Connection, Failure, output};
use nacre_engine::methods::keyring::keys::{Expire, ExpireParams, ListKeys};
use nacre_engine::methods::keyring::stored::{
    Generate, GenerateParams, Import, ImportParams, ImportedKind, RotateStore, Seal, SealParams,
};
use nacre_engine::methods::keyring::{AddKey, AddKeyParams, RemoveKey, RemoveKeyParams};
use nacre_engine::methods::nvmf::rotate::{KeyKind, Rotate, RotateParams};
use nacre_engine::services::keyring::text::kind_name;
use nacre_engine::services::keyring::{self, KeyForm, KeyText};
use nacre_engine_rpc::NoParams;
use nacre_engine_rpc::client::to_json;
use nacre_engine_values::time;

/// Where key files are made unless a folder is given.
pub(crate) const FOLDER: &str = "/etc/nacre/keys";

#[derive(Debug, Args)]
#[command(
    mut_args = |arg| arg.global(true),
    after_help = "Example: nacre key generate host1\n         \
                  nacre host allow NQN HOSTNQN --dhchap-key host1"
)]
pub(crate) struct KeyArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Debug, Subcommand)]
enum KeyCommand {
    /// Make a key in a new file, and give it a name
    Generate {
        /// Name of the key, and of its file
        name: String,
        /// Hash function that ties the key to its owner's name
        #[arg(long, value_enum, default_value = "sha256")]
        hash: KeyHash,
        /// Make a pre-shared key for TLS instead of one for authentication
        #[arg(long, conflicts_with = "hash")]
        tls: bool,
        /// Folder of the file
        #[arg(long, value_name = "FOLDER", default_value = FOLDER)]
        folder: PathBuf,
        /// When the key expires, such as 2027-01-31 (UTC)
        #[arg(long, value_name = "DATE", value_parser = date)]
        expires: Option<String>,
        /// Let the daemon store the key sealed, in no file; its text is shown once
        #[arg(long, conflicts_with = "folder")]
        sealed: bool,
        /// With --sealed: new file for the text of the key, in place of the terminal
        #[arg(long, value_name = "FILE", requires = "sealed")]
        out: Option<PathBuf>,
    },
    /// Give a name to the key in a file
    Import {
        /// Name of the key
        name: String,
        /// File with the text of the key, which only its owner may read
        file: PathBuf,
        /// When the key expires, such as 2027-01-31 (UTC)
        #[arg(long, value_name = "DATE", value_parser = date)]
        expires: Option<String>,
        /// Let the daemon store the key sealed; then the file may be deleted
        #[arg(long)]
        sealed: bool,
        /// Any line of text, such as the password of a mail server, instead of a key of NVMe
        #[arg(long, requires = "sealed")]
        text: bool,
    },
    /// Store the key of a file sealed; then the file may be deleted
    Seal {
        /// Name of the key
        name: String,
    },
    /// Seal all sealed keys with another store key
    RotateStore,
    /// Give a host a new key, and accept its former one for a while
    Rotate {
        /// NQN of the subsystem
        subsystem: String,
        /// NQN of the host
        host: String,
        /// Name of the host's new key: for authentication, or for TLS
        key: String,
        /// Name of the controller's new key, for authentication; without it the present one stays
        #[arg(long, value_name = "KEY")]
        controller_key: Option<String>,
        /// How long the former key stays in force, unless the host uses the new one everywhere
        /// before
        #[arg(long, value_name = "TIME", default_value = "1d", value_parser = time::whole_seconds)]
        overlap: Duration,
    },
    /// Set when a key expires; hosts with an expired key are refused
    #[command(group = clap::ArgGroup::new("when").required(true))]
    Expire {
        /// Name of the key
        name: String,
        /// At this moment, such as 2027-01-31 (UTC) or 2027-01-31T12:00:00Z
        #[arg(long, value_name = "DATE", group = "when", value_parser = date)]
        at: Option<String>,
        /// After this time, such as 90d
        #[arg(long = "in", value_name = "TIME", group = "when", value_parser = time::parse)]
        after: Option<Duration>,
        /// Not at all
        #[arg(long, group = "when")]
        never: bool,
    },
    /// List the keys, without their secrets
    #[command(visible_alias = "ls")]
    List,
    /// Take the name from a key; the file stays, and so do hosts that use it
    #[command(visible_alias = "rm")]
    Remove {
        /// Name of the key
        name: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KeyHash {
    None,
    Sha256,
    Sha384,
    Sha512,
}

impl KeyHash {
    fn name(self) -> &'static str {
        self.hash().map_or("none", Hash::name)
    }

    fn hash(self) -> Option<Hash> {
        match self {
            Self::None => None,
            Self::Sha256 => Some(Hash::Sha256),
            Self::Sha384 => Some(Hash::Sha384),
            Self::Sha512 => Some(Hash::Sha512),
        }
    }
}

pub(crate) fn run(args: KeyArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    match args.command {
        KeyCommand::Generate {
            name,
            hash,
            tls,
            folder,
            expires,
            sealed,
            out,
        } => {
            if sealed {
                let kind = if tls { KeyKind::Tls } else { KeyKind::Dhchap };
                let params = GenerateParams {
                    name,
                    kind,
                    hash: (!tls).then(|| hash.name().to_owned()),
                    expires,
                    reveal: true,
                };
                return generate_sealed(connection, &params, out.as_deref());
            }
            let kind = if tls {
                NewKey::Tls
            } else {
                NewKey::Dhchap(hash)
            };
            let made = generate(connection, &name, kind, &folder, expires)?;
            done(connection, made.facts())
        }
        KeyCommand::Import {
            name,
            file,
            expires,
            sealed,
            text: is_text,
        } => {
            let file = std::path::absolute(&file).map_err(|error| problem(&file, &error))?;
            if is_text {
                let form = KeyForm::Text;
                let read = keyring::file::read_at_most(&file, form.longest());
                let (text, _) = read.map_err(|error| problem(&file, &error))?;
                let text = form.parse(&text).map_err(|error| problem(&file, &error))?;
                let params = ImportParams {
                    name,
                    kind: Some(ImportedKind::Text),
                    text: Some(text.into()),
                    expires,
                    ..ImportParams::default()
                };
                return done(connection, connection.call_for_json::<Import>(&params)?);
            }
            let text = keyring::read(&file).map_err(|error| problem(&file, &error))?;
            let secret = KeyText::parse(&text).map_err(|error| problem(&file, &error))?;
            if sealed {
                let params = ImportParams {
                    name,
                    text: Some(secret.to_text().into()),
                    expires,
                    ..ImportParams::default()
                };
                return done(connection, connection.call_for_json::<Import>(&params)?);
            }
            let made = Made { name, file, secret };
            add(connection, &made, expires)?;
            done(connection, made.facts())
        }
        KeyCommand::Seal { name } => {
            let sealed = connection.call_for_json::<Seal>(&SealParams { name })?;
            done(connection, sealed)
        }
        KeyCommand::RotateStore => {
            let rotated = connection.call_for_json::<RotateStore>(&NoParams {})?;
            done(connection, rotated)
        }
        KeyCommand::Rotate {
            subsystem,
            host,
            key,
            controller_key,
            overlap,
        } => {
            let params = RotateParams {
                nqn: subsystem,
                host,
                key,
                dhchap_ctrlr_key: controller_key,
                overlap_s: Some(overlap.as_secs()),
                ..RotateParams::default()
            };
            connection.call_for_json::<Rotate>(&params)?;
            done(connection, to_json(&params))
        }
        KeyCommand::Expire {
            name, at, after, ..
        } => {
            let after = after.map(|after| time::moment(SystemTime::now() + after));
            let params = ExpireParams {
                name,
                expires: at.or(after),
            };
            connection.call_for_json::<Expire>(&params)?;
            done(connection, to_json(&params))
        }
        KeyCommand::List => list(connection),
        KeyCommand::Remove { name } => {
            let params = RemoveKeyParams { name };
            connection.call_for_json::<RemoveKey>(&params)?;
            done(connection, to_json(&params))
        }
    }
}

/// A key in its file.
pub(crate) struct Made {
    pub name: String,
    pub file: PathBuf,
    pub secret: KeyText,
}

/// The kind of a key to make.
#[derive(Debug, Clone, Copy)]
pub(crate) enum NewKey {
    Dhchap(KeyHash),
    Tls,
}

impl Made {
    /// Undoes the making of a key that nothing uses.
    pub(crate) fn discard(&self, connection: &Connection) {
        let params = RemoveKeyParams {
            name: self.name.clone(),
        };
        // The failure that led here is the one to report.
        let _ = connection.call_for_json::<RemoveKey>(&params);
        let _ = std::fs::remove_file(&self.file);
    }

    fn facts(&self) -> Value {
        json!({
            "name": self.name, "path": self.file, "kind": kind_name(self.secret.kind()),
            "hash": self.secret.hash(), "fingerprint": self.secret.fingerprint(),
        })
    }
}

/// Makes a key in a file that only its owner can read, and gives it its name.
pub(crate) fn generate(
    connection: &Connection,
    name: &str,
    kind: NewKey,
    folder: &Path,
    expires: Option<String>,
) -> Result<Made, Failure> {
    if name.is_empty() || name.contains('/') || name.starts_with('.') {
        return Err(Failure::Usage(format!(
            "\"{name}\" cannot be the name of a file: leave out / and a dot at its beginning"
        )));
    }
    let folder = std::path::absolute(folder).map_err(|error| problem(folder, &error))?;
    let made = match kind {
        NewKey::Dhchap(hash) => {
            Secret::generate(hash.hash(), &mut SystemRandom).map(KeyText::Dhchap)
        }
        NewKey::Tls => Psk::generate(&mut SystemRandom).map(KeyText::Tls),
    };
    let secret = made.map_err(|error| Failure::Failed(error.into()))?;
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder
        .create(&folder)
        .map_err(|error| problem(&folder, &error))?;
    let file = folder.join(name);
    write(&file, &secret).map_err(|error| problem(&file, &error))?;
    let made = Made {
        name: name.to_owned(),
        file,
        secret,
    };
    if let Err(refused) = add(connection, &made, expires) {
        // Nothing knows this file.
        let _ = std::fs::remove_file(&made.file);
        return Err(refused);
    }
    Ok(made)
}

/// Never over an existing file: that could be a key in use.
fn write(path: &Path, secret: &KeyText) -> std::io::Result<()> {
    let mut file = new_file(path)?;
    file.write_all(secret.to_text().as_bytes())?;
    // SPDK takes no end of line after a PSK.
    if matches!(secret, KeyText::Dhchap(_)) {
        file.write_all(b"\n")?;
    }
    file.sync_all()
}

/// A new file for secrets, which only its owner can read. It is deleted again unless
/// [`finish`](Self::finish) succeeds.
pub(crate) struct NewSecretFile {
    path: PathBuf,
    file: File,
    is_finished: bool,
}

impl NewSecretFile {
    /// Creates the file, so that a name that exists or cannot be written fails before any key is
    /// made.
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        let path = std::path::absolute(path).map_err(|error| problem(path, &error))?;
        let file = new_file(&path).map_err(|error| problem(&path, &error))?;
        Ok(Self {
            path,
            file,
            is_finished: false,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the lines. They are durable when it returns.
    pub(crate) fn finish(mut self, lines: &[Zeroizing<String>]) -> anyhow::Result<()> {
        let written = lines
            .iter()
            .try_for_each(|line| writeln!(self.file, "{}", **line))
            .and_then(|()| self.file.sync_all());
        written.with_context(|| self.path.display().to_string())?;
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for NewSecretFile {
    fn drop(&mut self) {
        if !self.is_finished {
            // The failure that led here is the one to report.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn new_file(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).open(path)
}

/// Lets the daemon make a sealed key, and shows its text or writes it to a new file.
fn generate_sealed(
    connection: &Connection,
    params: &GenerateParams,
    out: Option<&Path>,
) -> Result<(), Failure> {
    let out = out.map(std::path::absolute).transpose();
    let out = out.map_err(|error| Failure::Usage(error.to_string()))?;
    if let Some(file) = out.as_ref().filter(|file| file.exists()) {
        return Err(Failure::Usage(format!("{} exists", file.display())));
    }
    let mut made = connection.call_for_json::<Generate>(params)?;
    let text = match made["text"].take() {
        Value::String(text) => Zeroizing::new(text),
        _ => {
            let name = &params.name;
            return Err(Failure::Failed(anyhow::anyhow!(
                "the daemon made key {name}, and its answer has no text of it: remove it with \
                 `nacre key remove {name}`"
            )));
        }
    };
    let Some(file) = out else {
        if connection.json {
            made["text"] = text.as_str().into();
        } else {
            println!("{}", *text);
        }
        return done(connection, made);
    };
    let written = match KeyText::parse(&text) {
        Ok(secret) => write(&file, &secret).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(cause) = written {
        // Without its text the key is of no use.
        let name = params.name.clone();
        let removed = connection.call_for_json::<RemoveKey>(&RemoveKeyParams { name });
        let cause = not_written(&params.name, &cause, removed.is_ok());
        return Err(problem(&file, &cause));
    }
    if let Some(made) = made.as_object_mut() {
        made.remove("text");
        made.insert("path".into(), json!(file));
    }
    done(connection, made)
}

/// The error for a sealed key whose file could not be written. `is_removed`: the daemon has deleted
/// the key.
fn not_written(name: &str, cause: &str, is_removed: bool) -> String {
    if is_removed {
        format!("{cause}; key {name} was created and then deleted")
    } else {
        format!(
            "{cause}; key {name} exists in the daemon, but its text is lost: remove the key with \
             `nacre key remove {name}`"
        )
    }
}

fn add(connection: &Connection, made: &Made, expires: Option<String>) -> Result<(), Failure> {
    if let Some(remote) = crate::tls::remote() {
        return Err(Failure::Usage(format!(
            "the daemon at {} reads key files of its own machine: make or import the key there",
            remote.address
        )));
    }
    let params = AddKeyParams {
        name: made.name.clone(),
        path: made.file.clone(),
        expires,
    };
    connection.call_for_json::<AddKey>(&params).map(drop)
}

fn problem(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::Failed(anyhow::anyhow!("{}: {error}", path.display()))
}

/// Checks a date, and leaves it as it is for the daemon.
fn date(text: &str) -> Result<String, String> {
    time::parse_moment(text).map(|_| text.to_owned())
}

fn list(connection: &Connection) -> Result<(), Failure> {
    let keys = connection.call_for_json::<ListKeys>(&NoParams {})?;
    if connection.json {
        return output::json(&keys);
    }
    let rows = items(&keys).iter().map(|key| {
        let cell = |field: &str| output::cell(key.get(field));
        let users = key["used_by"].as_array().into_iter().flatten();
        let users: Vec<&str> = users.filter_map(Value::as_str).collect();
        let state = match key["removed"].as_bool() {
            Some(true) => "removed".to_owned(),
            _ => cell("state"),
        };
        vec![
            cell("name"),
            cell("kind"),
            cell("hash"),
            cell("fingerprint"),
            state,
            users.join(", "),
            cell("made"),
            cell("expires"),
            match key["source"].as_str() {
                Some("credential") => format!("credential {}", cell("credential")),
                Some("sealed") => "sealed".to_owned(),
                _ => cell("path"),
            },
        ]
    });
    let titles = [
        "name",
        "kind",
        "hash",
        "fingerprint",
        "state",
        "used by",
        "made",
        "expires",
        "where",
    ];
    output::table(&titles, rows)
}
