//! `nacre key`: keys for authentication and for TLS. Secrets are made and checked here and stay in
//! their files: the daemon learns names and paths.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use nacre_nvmf::auth::{Hash, Secret, SecretError, SystemRandom};
use nacre_nvmf::tls::Psk;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::subsystem::{done, items};
use super::{Connection, Failure, output};
use nacre_engine::methods::keyring::{AddKey, AddKeyParams, GetKeys, RemoveKey, RemoveKeyParams};
use nacre_engine::services::keyring;
use nacre_engine_rpc::NoParams;
use nacre_engine_rpc::client::to_json;

/// Where key files are made unless a folder is given.
pub const FOLDER: &str = "/etc/nacre/keys";

#[derive(Debug, Args)]
#[command(
    mut_args = |arg| arg.global(true),
    after_help = "Example: nacre key generate host1\n         \
                  nacre host allow NQN HOSTNQN --dhchap-key host1"
)]
pub struct KeyArgs {
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
    },
    /// Give a name to the key in a file
    Import {
        /// Name of the key
        name: String,
        /// File with the text of the key, which only its owner may read
        file: PathBuf,
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
pub enum KeyHash {
    None,
    Sha256,
    Sha384,
    Sha512,
}

impl KeyHash {
    fn hash(self) -> Option<Hash> {
        match self {
            KeyHash::None => None,
            KeyHash::Sha256 => Some(Hash::Sha256),
            KeyHash::Sha384 => Some(Hash::Sha384),
            KeyHash::Sha512 => Some(Hash::Sha512),
        }
    }
}

pub fn run(args: KeyArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    match args.command {
        KeyCommand::Generate {
            name,
            hash,
            tls,
            folder,
        } => {
            let kind = if tls {
                NewKey::Tls
            } else {
                NewKey::Dhchap(hash)
            };
            let made = generate(connection, &name, kind, &folder)?;
            done(connection, made.facts())
        }
        KeyCommand::Import { name, file } => {
            let file = std::path::absolute(&file).map_err(|error| problem(&file, &error))?;
            let text = keyring::read(&file).map_err(|error| problem(&file, &error))?;
            let secret = KeyText::parse(&text).map_err(|error| problem(&file, &error))?;
            let made = Made { name, file, secret };
            add(connection, &made)?;
            done(connection, made.facts())
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
pub struct Made {
    pub name: String,
    pub file: PathBuf,
    pub secret: KeyText,
}

/// The kind of a key to make.
#[derive(Debug, Clone, Copy)]
pub enum NewKey {
    Dhchap(KeyHash),
    Tls,
}

/// A key of either kind.
pub enum KeyText {
    Dhchap(Secret),
    Tls(Psk),
}

impl KeyText {
    fn parse(text: &str) -> Result<KeyText, SecretError> {
        match Psk::parse(text) {
            Err(SecretError::Prefix(_)) => Secret::parse(text).map(KeyText::Dhchap),
            psk => psk.map(KeyText::Tls),
        }
    }

    pub fn to_text(&self) -> Zeroizing<String> {
        match self {
            KeyText::Dhchap(secret) => secret.to_text(),
            KeyText::Tls(psk) => psk.to_text(),
        }
    }

    fn transform(&self) -> Option<Hash> {
        match self {
            KeyText::Dhchap(secret) => secret.transform(),
            KeyText::Tls(psk) => psk.transform(),
        }
    }

    fn fingerprint(&self) -> String {
        match self {
            KeyText::Dhchap(secret) => secret.fingerprint(),
            KeyText::Tls(psk) => psk.fingerprint(),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            KeyText::Dhchap(_) => "dhchap",
            KeyText::Tls(_) => "tls",
        }
    }
}

impl Made {
    /// Undoes the making of a key that nothing uses.
    pub fn discard(&self, connection: &Connection) {
        let params = RemoveKeyParams {
            name: self.name.clone(),
        };
        // The failure that led here is the one to report.
        let _ = connection.call_for_json::<RemoveKey>(&params);
        let _ = std::fs::remove_file(&self.file);
    }

    fn facts(&self) -> Value {
        let hash = self.secret.transform().map_or("none", Hash::name);
        json!({
            "name": self.name, "path": self.file, "kind": self.secret.kind(), "hash": hash,
            "fingerprint": self.secret.fingerprint(),
        })
    }
}

/// Makes a key in a file that only its owner can read, and gives it its name.
pub fn generate(
    connection: &Connection,
    name: &str,
    kind: NewKey,
    folder: &Path,
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
    if let Err(refused) = add(connection, &made) {
        // Nothing knows this file.
        let _ = std::fs::remove_file(&made.file);
        return Err(refused);
    }
    Ok(made)
}

/// Never over an existing file: that could be a key in use.
fn write(path: &Path, secret: &KeyText) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(secret.to_text().as_bytes())?;
    // SPDK takes no end of line after a PSK.
    if matches!(secret, KeyText::Dhchap(_)) {
        file.write_all(b"\n")?;
    }
    file.sync_all()
}

fn add(connection: &Connection, made: &Made) -> Result<(), Failure> {
    let params = AddKeyParams {
        name: made.name.clone(),
        path: made.file.clone(),
    };
    connection.call_for_json::<AddKey>(&params).map(drop)
}

fn problem(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::Failed(anyhow::anyhow!("{}: {error}", path.display()))
}

fn list(connection: &Connection) -> Result<(), Failure> {
    let keys = connection.call_for_json::<GetKeys>(&NoParams {})?;
    if connection.json {
        return output::json(&keys);
    }
    let rows = items(&keys).iter().map(|key| {
        let path = output::cell(key.get("path"));
        let state = match key["removed"].as_bool() {
            Some(true) => "removed",
            _ => "",
        };
        let uses = key["refcnt"].as_u64().unwrap_or_default();
        let uses = if state.is_empty() {
            uses.saturating_sub(1)
        } else {
            uses
        };
        vec![
            output::cell(key.get("name")),
            fingerprint(Path::new(&path)),
            uses.to_string(),
            state.to_owned(),
            path,
        ]
    });
    output::table(&["name", "fingerprint", "uses", "", "file"], rows)
}

/// Returns the fingerprint of a key. It is empty if this user cannot read the file, and `damaged`
/// if the file holds no valid key.
fn fingerprint(path: &Path) -> String {
    match keyring::read(path).map(|text| KeyText::parse(&text)) {
        Ok(Ok(secret)) => secret.fingerprint(),
        Ok(Err(_)) => "damaged".to_owned(),
        Err(_) => String::new(),
    }
}
