//! `key_generate`, `key_import`, `key_seal` and `key_store_rotate`, Nacre extensions: keys that the
//! daemon stores itself, sealed, or reads from the credentials of the service manager.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use nacre_nvmf::auth::{Hash, Secret, SystemRandom};
use nacre_nvmf::tls::Psk;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::keys::moment;
use super::{not_added, record_key};
use crate::config::names::check_key_name;
use crate::journal::{EntryState, JournalEntry};
use crate::methods::nvmf::rotate::KeyKind;
use crate::rpc::error::Errno;
use crate::rpc::secret::{RevealedText, SecretText};
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError, When};
use crate::services::Engine;
use crate::services::keyring::seal::{SealError, Sealed, StoreKey};
use crate::services::keyring::store_key::{InUse, StoreKeys};
use crate::services::keyring::{
    KeyFacts, KeyForm, KeyPlace, KeyText, NamedKey, PREFIX, file, no_key,
};
use crate::store::{Change, Record};
use crate::values::time;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<Generate>().add::<Import>().add::<Seal>();
    registry.add::<RotateStore>();
}

/// The facts of a key.
#[derive(Debug, Serialize, JsonSchema)]
pub struct MadeReply {
    name: String,
    /// `dhchap`, `tls` or `text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    /// The hash function that ties the key to its owner's name: `none`, `sha256`, ...
    #[serde(skip_serializing_if = "Option::is_none")]
    hash: Option<&'static str>,
    /// Eight hexadecimal digits that are the same at the other end.
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint: Option<String>,
    /// The text of the key, if the call asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<RevealedText>,
}

impl MadeReply {
    fn of(name: String, facts: Option<KeyFacts>) -> Self {
        let facts = facts.as_ref();
        Self {
            name,
            kind: facts.map(|facts| facts.kind),
            hash: facts.and_then(|facts| facts.hash),
            fingerprint: facts.and_then(|facts| facts.fingerprint.clone()),
            text: None,
        }
    }
}

pub struct Generate;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GenerateParams {
    /// Name for the key: 1 to 128 bytes, no control characters.
    pub name: String,
    /// `dhchap` for authentication, `tls` for a pre-shared key of TLS.
    pub kind: KeyKind,
    /// The hash function that ties a key for authentication to its owner's name: `none`, `sha256`
    /// (default), `sha384`, `sha512`.
    pub hash: Option<String>,
    /// When the key expires: `2027-01-31` (UTC) or `2027-01-31T12:00:00Z`; left out: never.
    pub expires: Option<String>,
    /// True: the answer contains the text of the key, for the other end. No later call shows it.
    #[serde(default)]
    pub reveal: bool,
}

impl Method<Engine> for Generate {
    const NAME: &'static str = "key_generate";
    const ABOUT: &'static str = "Makes a key, and stores it sealed.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = GenerateParams;
    type Reply = MadeReply;

    async fn apply(params: GenerateParams, engine: Rc<Engine>) -> Result<MadeReply, RpcError> {
        check_new(&engine, &params.name)?;
        let expires = Expiry::parse(params.expires)?;
        let hash = hash(params.hash.as_deref())?;
        let made = match params.kind {
            KeyKind::Dhchap => Secret::generate(hash, &mut SystemRandom).map(KeyText::Dhchap),
            KeyKind::Tls if params.hash.is_some() => {
                let cause = "a TLS key has no choice of hash functions";
                return Err(RpcError::invalid_params(cause).field("hash"));
            }
            KeyKind::Tls => Psk::generate(&mut SystemRandom).map(KeyText::Tls),
        };
        let text = made.map_err(|error| RpcError::internal(error.to_string()))?;
        let text = text.to_text();
        let now = engine.keyring.clock.now();
        let place = sealed(&engine, &params.name, text.clone(), now).await?;
        let facts = add(&engine, &params.name, KeyForm::Nvme, place, expires).await?;
        Ok(MadeReply {
            text: params.reveal.then(|| text.into()),
            ..MadeReply::of(params.name, facts)
        })
    }
}

fn hash(name: Option<&str>) -> Result<Option<Hash>, RpcError> {
    let Some(name) = name.filter(|name| *name != "none") else {
        return Ok(match name {
            None => Some(Hash::Sha256),
            Some(_) => None,
        });
    };
    let all = [Hash::Sha256, Hash::Sha384, Hash::Sha512];
    let found = all.into_iter().find(|hash| hash.name() == name);
    found.map(Some).ok_or_else(|| {
        let cause = format!("\"{name}\" is not none, sha256, sha384 or sha512");
        RpcError::invalid_params(cause).field("hash")
    })
}

pub struct Import;

/// The kind of a key that its text does not show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImportedKind {
    /// A line of text of at most 4096 bytes, such as the password of a mail server.
    Text,
}

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportParams {
    /// Name for the key: 1 to 128 bytes, no control characters.
    pub name: String,
    /// Left out: a key of NVMe, whose text says whether it is for authentication or TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<ImportedKind>,
    /// The text of the key. It is stored sealed.
    #[serde(serialize_with = "SecretText::send_some")]
    pub text: Option<SecretText>,
    /// Absolute path of a file with the text of the key, which only the daemon's user may read. The
    /// file is read once, and the key is stored sealed.
    pub file: Option<PathBuf>,
    /// The name of a credential of the service manager (`LoadCredentialEncrypted=`) with the text
    /// of the key. It is read at each use, and not stored.
    pub credential: Option<String>,
    /// The sealed text of a key, from the daemon's own state. It needs the same store key.
    #[serde(serialize_with = "SecretText::send_some")]
    pub sealed: Option<SecretText>,
    /// When the key expires: `2027-01-31` (UTC) or `2027-01-31T12:00:00Z`; left out: never.
    pub expires: Option<String>,
}

impl Method<Engine> for Import {
    const NAME: &'static str = "key_import";
    const ABOUT: &'static str =
        "Takes a key that exists: a text or a file, which it stores sealed, or a credential.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = ImportParams;
    type Reply = MadeReply;

    async fn apply(params: ImportParams, engine: Rc<Engine>) -> Result<MadeReply, RpcError> {
        let ImportParams {
            name,
            kind,
            text,
            file: path,
            credential,
            sealed: own,
            expires,
        } = params;
        check_new(&engine, &name)?;
        let expires = Expiry::parse(expires)?;
        let form = match kind {
            None => KeyForm::Nvme,
            Some(ImportedKind::Text) => KeyForm::Text,
        };
        let now = engine.keyring.clock.now();
        let place = match (text, path, credential, own) {
            (Some(text), None, None, None) => {
                let text = form
                    .parse(text.reveal())
                    .map_err(|error| invalid("text", &error))?;
                sealed(&engine, &name, text, now).await?
            }
            (None, Some(path), None, None) => {
                let refuse = |why: &dyn std::fmt::Display| {
                    invalid("file", &format!("{}: {why}", path.display()))
                };
                file::check(&path).map_err(|error| refuse(&error))?;
                let read = file::read_at_most(&path, form.longest());
                let (text, made) = read.map_err(|error| refuse(&error))?;
                let text = form.parse(&text).map_err(|error| refuse(&error))?;
                sealed(&engine, &name, text, made.unwrap_or(now)).await?
            }
            (None, None, Some(credential), None) => of_credential(&engine, credential)?,
            (None, None, None, Some(own)) => KeyPlace::Sealed {
                text: own.reveal().to_owned(),
                keys: StoreKeys::of(&engine),
            },
            _ => {
                let cause = "exactly one of text, file, credential and sealed is needed";
                return Err(RpcError::invalid_params(cause).field("text"));
            }
        };
        let facts = add(&engine, &name, form, place, expires).await?;
        Ok(MadeReply::of(name, facts))
    }
}

fn of_credential(engine: &Engine, credential: String) -> Result<KeyPlace, RpcError> {
    // It is the name of a file.
    if credential.is_empty() || credential.contains('/') || credential.starts_with('.') {
        let cause = format!("\"{credential}\" is not the name of a credential");
        return Err(RpcError::invalid_params(cause).field("credential"));
    }
    Ok(KeyPlace::Credential {
        name: credential,
        keys: StoreKeys::of(engine),
    })
}

pub struct Seal;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SealParams {
    /// Name of the key, which is in a file.
    pub name: String,
}

impl Method<Engine> for Seal {
    const NAME: &'static str = "key_seal";
    const ABOUT: &'static str = "Stores the key of a file sealed, under the same name. The file is no longer used, and may be deleted.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = SealParams;
    type Reply = MadeReply;

    async fn apply(params: SealParams, engine: Rc<Engine>) -> Result<MadeReply, RpcError> {
        let name = params.name;
        let key = engine.keyring.find(&name);
        let key = key.ok_or_else(|| no_key("name", &name))?;
        if key.path().is_none() {
            let cause = format!("key \"{name}\" is in no file");
            return Err(invalid("name", &cause));
        }
        let own = record_key(&name);
        let entry = engine.journal.find(&own);
        if !entry.is_some_and(|entry| entry.durable) {
            let cause = format!("the configuration file declares key \"{name}\"");
            let remedy = "remove it there, and take it with key_import";
            return Err(invalid("name", &cause).remedy(remedy));
        }
        let (text, made) = key.read().map_err(|error| invalid("name", &error))?;
        let text = key
            .form()
            .parse(&text)
            .map_err(|error| invalid("name", &error))?;
        let made = made.unwrap_or_else(|| engine.keyring.clock.now());
        let place = sealed(&engine, &name, text, made).await?;
        let expires = key.expires().map(time::moment);
        // One record in place of another: a crash leaves the file in use, or the sealed text.
        let change = Change::put(
            own,
            Import::NAME,
            record(&name, key.form(), &place, expires.as_deref()),
        );
        engine.journal.commit(change).await?;
        key.set_place(place);
        Ok(MadeReply::of(name, key.facts().ok()))
    }
}

pub struct RotateStore;

#[derive(Debug, Serialize, JsonSchema)]
pub struct RotatedReply {
    /// The ID of the store key from now on: eight hexadecimal digits.
    store_key: String,
    /// Number of sealed keys.
    keys: usize,
}

impl Method<Engine> for RotateStore {
    const NAME: &'static str = "key_store_rotate";
    const ABOUT: &'static str = "Seals all sealed keys again: with the credential nacre-store-key, else with a new store key in the data directory. The former store key of the data directory is deleted.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = NoParams;
    type Reply = RotatedReply;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<RotatedReply, RpcError> {
        let (keys, in_use) = (StoreKeys::of(&engine), in_use(&engine));
        let entries = engine.journal.below(PREFIX).into_iter();
        let stored: Vec<JournalEntry> = entries
            .filter(|entry| sealed_text(entry).is_some())
            .collect();
        // Keys without a name end with their last user.
        let removed = engine.keyring.list().into_iter().filter(|one| one.removed);
        let removed: Vec<Arc<NamedKey>> = removed.map(|one| one.key).collect();
        let work = {
            let (keys, removed) = (keys.clone(), removed.clone());
            move || {
                let opened: Result<Vec<_>, _> = stored.iter().map(|of| opened(&keys, of)).collect();
                let opened = opened?;
                let new = keys
                    .begin_rotation(&in_use)
                    .map_err(|error| refused(&error))?;
                let seal = |of: UnsealedKey| of.sealed(&new).map_err(|error| refused(&error));
                let resealed: Result<Vec<_>, _> = opened.into_iter().map(seal).collect();
                let of_removed = removed.iter().map(|key| {
                    let opened = UnsealedKey::of_key(&keys, key)?;
                    opened.sealed(&new).ok().map(|of| of.text)
                });
                Ok((resealed?, of_removed.collect::<Vec<_>>(), new))
            }
        };
        let (resealed, of_removed, new) = blocking(work).await?;
        let mut change = Change::default();
        for of in &resealed {
            let Some(mut record) = of.record.clone() else {
                continue;
            };
            record.params["sealed"] = of.text.as_str().into();
            change = change.and(Change::put(record.key, record.method, record.params));
        }
        engine.journal.commit(change).await?;
        let place = |text| KeyPlace::Sealed {
            text,
            keys: keys.clone(),
        };
        let count = resealed.len();
        for of in resealed {
            if let Some(key) = engine.keyring.find(&of.name) {
                key.set_place(place(of.text));
            }
        }
        for (key, text) in removed.iter().zip(of_removed) {
            if let Some(text) = text {
                key.set_place(place(text));
            }
        }
        let id = new.id();
        // Both store keys open keys until this is done. The next sealing finishes the rename of a
        // file; where a credential is the new one, the next rotation deletes the files.
        let ended = blocking(move || keys.end_rotation(&new).map_err(|error| refused(&error)));
        if let Err(error) = ended.await {
            warn!(%error, "the former store key is not deleted: rotate the store key again");
        }
        info!(store_key = id, keys = count, "the store key was rotated");
        Ok(RotatedReply {
            store_key: id,
            keys: count,
        })
    }
}

/// A key that was opened for a rotation of the store key.
struct UnsealedKey {
    name: String,
    text: Zeroizing<String>,
    made: SystemTime,
    /// None: the key was removed, and is still in use.
    record: Option<Record>,
}

/// The key, sealed with the new store key.
struct Resealed {
    name: String,
    text: String,
    record: Option<Record>,
}

impl UnsealedKey {
    /// Opens a key without a record. `None`: it is not sealed, or cannot be opened.
    fn of_key(keys: &StoreKeys, key: &NamedKey) -> Option<Self> {
        let KeyPlace::Sealed { text, .. } = key.place() else {
            return None;
        };
        let (text, made) = keys.open(&key.name, &text).ok()?;
        Some(Self {
            name: key.name.clone(),
            text,
            made,
            record: None,
        })
    }

    fn sealed(self, new: &StoreKey) -> Result<Resealed, SealError> {
        let text = new.seal(&self.name, &self.text, self.made)?;
        let Self { name, record, .. } = self;
        Ok(Resealed { name, text, record })
    }
}

fn opened(keys: &StoreKeys, entry: &JournalEntry) -> Result<UnsealedKey, RpcError> {
    let record = &entry.record;
    let name = record.params["name"].as_str().unwrap_or_default();
    let refuse = |why: &dyn std::fmt::Display| {
        RpcError::errno(Errno::EINVAL, format!("key \"{name}\": {why}"))
            .remedy("restore its store key, or remove the key: `nacre key remove`")
    };
    if entry.state != EntryState::Live {
        return Err(refuse(&"it is in the state, and could not be restored"));
    }
    let sealed = sealed_text(entry).unwrap_or_default();
    let (text, made) = keys.open(name, sealed).map_err(|error| refuse(&error))?;
    Ok(UnsealedKey {
        name: name.to_owned(),
        text,
        made,
        record: Some(record.clone()),
    })
}

fn sealed_text(entry: &JournalEntry) -> Option<&str> {
    entry.record.params.get("sealed")?.as_str()
}

/// The expiry of a new key. Parsed before the key is sealed, because sealing may create a store
/// key.
struct Expiry {
    text: Option<String>,
    at: Option<SystemTime>,
}

impl Expiry {
    fn parse(text: Option<String>) -> Result<Self, RpcError> {
        let at = moment(text.as_deref())?;
        Ok(Self { text, at })
    }
}

/// Refuses an invalid name, and one that cannot be added.
fn check_new(engine: &Engine, name: &str) -> Result<(), RpcError> {
    check_key_name(name)?;
    let room = engine.keyring.check_room(name);
    room.map_err(|error| not_added(error, name))
}

/// Seals a text.
async fn sealed(
    engine: &Engine,
    name: &str,
    text: Zeroizing<String>,
    made: SystemTime,
) -> Result<KeyPlace, RpcError> {
    let (keys, in_use) = (StoreKeys::of(engine), in_use(engine));
    let name = name.to_owned();
    let (text, keys) = blocking(move || {
        let sealed = keys.seal(&name, &text, made, &in_use);
        Ok((sealed.map_err(|error| refused(&error))?, keys))
    })
    .await?;
    Ok(KeyPlace::Sealed { text, keys })
}

/// The IDs of the store keys of all stored keys.
fn in_use(engine: &Engine) -> InUse {
    let entries = engine.journal.below(PREFIX);
    let id = |entry: &JournalEntry| Some(Sealed::parse(sealed_text(entry)?).ok()?.id.to_owned());
    entries.iter().filter_map(id).collect()
}

/// Runs work that waits for a disk.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RpcError> + Send + 'static,
) -> Result<T, RpcError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| RpcError::internal(error.to_string()))?
}

fn refused(error: &SealError) -> RpcError {
    let refused = RpcError::errno(Errno::EIO, error.to_string());
    match error {
        SealError::Missing | SealError::OtherKey { .. } => refused.remedy(
            "restore the store key; or remove the keys that it sealed, which nothing else opens",
        ),
        SealError::NoState => {
            refused.remedy("set [data] dir, or give the daemon the credential nacre-store-key")
        }
        SealError::OnlyCredential => refused.remedy(
            "give the daemon a new nacre-store-key, and the present one as \
             nacre-store-key-former; restart it, and call again",
        ),
        _ => refused,
    }
}

fn invalid(field: &'static str, cause: &dyn std::fmt::Display) -> RpcError {
    RpcError::errno(Errno::EINVAL, cause.to_string()).field(field)
}

/// The parameters of the call that creates the key again.
fn record(name: &str, form: KeyForm, place: &KeyPlace, expires: Option<&str>) -> serde_json::Value {
    let mut record = json!({ "name": name });
    if form == KeyForm::Text {
        record["kind"] = json!(ImportedKind::Text);
    }
    match place {
        KeyPlace::File(path) => record["file"] = json!(path),
        KeyPlace::Credential { name, .. } => record["credential"] = json!(name),
        KeyPlace::Sealed { text, .. } => record["sealed"] = json!(text),
    }
    if let Some(expires) = expires {
        record["expires"] = expires.into();
    }
    record
}

/// Adds a key to the keyring and to the journal. `None`, in a replay only: its secret cannot be
/// read, and its hosts are refused until it can.
async fn add(
    engine: &Rc<Engine>,
    name: &str,
    form: KeyForm,
    place: KeyPlace,
    expires: Expiry,
) -> Result<Option<KeyFacts>, RpcError> {
    let record = record(name, form, &place, expires.text.as_deref());
    let key = NamedKey::new(name.to_owned(), place, engine.keyring.clock.clone()).with_form(form);
    key.set_expiry(expires.at);
    let facts = match key.facts() {
        Ok(facts) => Some(facts),
        Err(error) if crate::journal::is_replaying() => {
            warn!(
                key = name,
                "hosts of a key are refused until it can be read: {error}"
            );
            None
        }
        Err(error) => return Err(invalid("name", &error)),
    };
    let added = engine.keyring.add(key);
    added.map_err(|error| not_added(error, name))?;
    let change = Change::put(record_key(name), Import::NAME, record);
    if let Err(refused) = engine.journal.commit(change).await {
        engine.keyring.remove(name);
        return Err(refused);
    }
    Ok(facts)
}
