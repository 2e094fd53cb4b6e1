//! What an RPC method is: a name, when it may be called, its parameter and reply types (which are
//! the schema), and what it does.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::error::{INVALID_PARAMS, RpcError};

/// In which states of the daemon a method may be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Only before `framework_start_init`.
    Startup,
    /// Only after it.
    Runtime,
    Always,
}

/// What a call waits for, of the other calls under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Runs beside other reads, after every exclusive call that came before it.
    Read,
    /// Runs alone among the `Read` and `Exclusive` calls, in the order of arrival.
    Exclusive,
    /// Not ordered with other calls; may run for a long time.
    Free,
}

/// One method of the socket. `C` is what methods act on.
pub trait Method<C: 'static>: 'static {
    const NAME: &'static str;
    /// One sentence for the reference.
    const ABOUT: &'static str;
    const WHEN: When = When::Runtime;
    const ORDER: Order = Order::Read;
    /// Whether a call may change the configuration, or what hosts and devices do.
    const CHANGES: bool = matches!(Self::ORDER, Order::Exclusive);
    const ALIASES: &'static [&'static str] = &[];
    /// The error code for parameters that cannot be decoded: modules of SPDK differ in it.
    const UNDECODABLE: i32 = INVALID_PARAMS;
    type Params: DeserializeOwned + JsonSchema + 'static;
    type Reply: Serialize + JsonSchema + 'static;

    fn apply(
        params: Self::Params,
        on: Rc<C>,
    ) -> impl Future<Output = Result<Self::Reply, RpcError>>;
}

/// The parameters of a method that takes none: a `params` member is refused, as SPDK does.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoParams {}

pub type Answer = Result<Box<RawValue>, RpcError>;
pub type CallFuture = Pin<Box<dyn Future<Output = Answer>>>;

/// A registered method, its types erased.
pub struct MethodEntry<C> {
    pub name: &'static str,
    pub about: &'static str,
    pub when: When,
    pub order: Order,
    pub changes: bool,
    pub aliases: &'static [&'static str],
    pub params_schema: fn() -> schemars::Schema,
    pub reply_schema: fn() -> schemars::Schema,
    call: fn(Option<&RawValue>, Rc<C>) -> Result<CallFuture, RpcError>,
}

impl<C> std::fmt::Debug for MethodEntry<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MethodEntry")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl<C: 'static> MethodEntry<C> {
    fn of<M: Method<C>>() -> MethodEntry<C> {
        MethodEntry {
            name: M::NAME,
            about: M::ABOUT,
            when: M::WHEN,
            order: M::ORDER,
            changes: M::CHANGES,
            aliases: M::ALIASES,
            params_schema: || schemars::schema_for!(M::Params),
            reply_schema: || schemars::schema_for!(M::Reply),
            call: |params, on| {
                let params = decode::<M::Params>(M::NAME, params).map_err(|error| RpcError {
                    code: M::UNDECODABLE,
                    ..error
                })?;
                Ok(Box::pin(async move {
                    let reply = M::apply(params, on).await?;
                    serde_json::value::to_raw_value(&reply).map_err(|e| {
                        RpcError::internal(format!("the reply does not serialise: {e}"))
                    })
                }))
            },
        }
    }

    /// Decodes the parameters; the future does the work.
    pub fn call(&self, params: Option<&RawValue>, on: Rc<C>) -> Result<CallFuture, RpcError> {
        (self.call)(params, on)
    }

    pub fn callable(&self, runtime: bool) -> bool {
        match self.when {
            When::Startup => !runtime,
            When::Runtime => runtime,
            When::Always => true,
        }
    }
}

/// All methods by name. Aliases point at the same entry.
#[derive(Debug)]
pub struct Registry<C> {
    entries: Vec<MethodEntry<C>>,
    names: BTreeMap<&'static str, usize>,
}

impl<C: 'static> Default for Registry<C> {
    fn default() -> Registry<C> {
        Registry {
            entries: Vec::new(),
            names: BTreeMap::new(),
        }
    }
}

impl<C: 'static> Registry<C> {
    /// # Panics
    /// When the name or an alias is taken: two methods cannot share one.
    pub fn add<M: Method<C>>(&mut self) -> &mut Self {
        let at = self.entries.len();
        for name in std::iter::once(&M::NAME).chain(M::ALIASES) {
            assert!(
                self.names.insert(name, at).is_none(),
                "method {name} registered twice"
            );
        }
        self.entries.push(MethodEntry::of::<M>());
        self
    }

    pub fn find(&self, name: &str) -> Option<&MethodEntry<C>> {
        self.names.get(name).map(|&at| &self.entries[at])
    }

    /// Methods in alphabetical order, each once.
    pub fn iter(&self) -> impl Iterator<Item = &MethodEntry<C>> {
        self.names
            .iter()
            .map(|(name, &at)| (name, &self.entries[at]))
            .filter(|(n, e)| **n == e.name)
            .map(|(_, e)| e)
    }

    /// Every name, aliases too.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.names.keys().copied()
    }
}

fn decode<P: DeserializeOwned + 'static>(
    method: &str,
    params: Option<&RawValue>,
) -> Result<P, RpcError> {
    let text = match params {
        Some(_) if std::any::TypeId::of::<P>() == std::any::TypeId::of::<NoParams>() => {
            return Err(
                RpcError::invalid_params_text(format!("{method} requires no parameters"))
                    .field("params")
                    .cause("the method takes no parameters")
                    .remedy("leave \"params\" out"),
            );
        }
        None => "{}",
        Some(raw) => raw.get(),
    };
    if !text.starts_with('{') {
        return Err(
            RpcError::invalid_params("parameters must be given by name, in an object")
                .field("params"),
        );
    }
    let mut json = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut json).map_err(|e| refusal(&e))
}

/// Names the field at fault; serde's own text names it only inside a sentence.
fn refusal(error: &serde_path_to_error::Error<serde_json::Error>) -> RpcError {
    let text = error.inner().to_string();
    let cause = text
        .rsplit_once(" at line")
        .map_or(text.as_str(), |(head, _)| head)
        .to_owned();
    let quoted = cause.split('`').nth(1).map(str::to_owned);
    let path = error.path().to_string();
    let parent = match path.as_str() {
        "." => String::new(),
        // An unknown or missing field is reported at its own path or at its parent's.
        p => format!("{p}."),
    };
    let refusal = RpcError::invalid_params(cause.clone());
    if let Some(name) = quoted
        .clone()
        .filter(|_| cause.starts_with("unknown field"))
    {
        let known: Vec<&str> = cause.split('`').skip(3).step_by(2).collect();
        let at = path.strip_suffix(&name).unwrap_or(&parent).to_owned();
        let refusal = refusal.field(format!("{at}{name}"));
        return match crate::config::suggest::closest(&name, known) {
            Some(close) => refusal.remedy(format!("did you mean \"{close}\"?")),
            None => refusal,
        };
    }
    if let Some(name) = cause
        .strip_prefix("missing field `")
        .and_then(|r| r.split('`').next())
    {
        return refusal.field(format!("{parent}{name}")).remedy("add it");
    }
    match (
        path.as_str(),
        quoted.filter(|_| cause.starts_with("duplicate field")),
    ) {
        (_, Some(name)) => refusal.field(format!("{parent}{name}")),
        (".", None) => refusal,
        (_, None) => refusal.field(path),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: every refused parameter is named. Method: decode tables.

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct P {
        name: String,
        num_blocks: Option<u64>,
        namespace: Option<Inner>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Inner {
        nsid: u32,
    }

    #[test]
    fn the_field_at_fault_is_named() {
        for (text, field, remedy) in [
            (r#"{}"#, Some("name"), Some("add it")),
            (
                r#"{"name":"a","num_block":1}"#,
                Some("num_block"),
                Some("did you mean \"num_blocks\"?"),
            ),
            (r#"{"name":"a","num_blocks":"x"}"#, Some("num_blocks"), None),
            (r#"{"name":"a","num_blocks":-1}"#, Some("num_blocks"), None),
            (
                r#"{"name":"a","namespace":{"nsid":"x"}}"#,
                Some("namespace.nsid"),
                None,
            ),
            (
                r#"{"name":"a","namespace":{}}"#,
                Some("namespace.nsid"),
                Some("add it"),
            ),
            (
                r#"{"name":"a","namespace":{"nsid":1,"zzzzzzzzz":2}}"#,
                Some("namespace.zzzzzzzzz"),
                None,
            ),
            (r#"{"name":"a","name":"b"}"#, Some("name"), None),
            (r#"["a"]"#, Some("params"), None),
        ] {
            let raw = RawValue::from_string(text.to_owned()).unwrap();
            let error = decode::<P>("m", Some(&raw)).unwrap_err();
            assert_eq!(error.code, super::super::error::INVALID_PARAMS);
            let facts = error.data.unwrap();
            assert_eq!(
                (facts.field.as_deref(), facts.remedy.as_deref()),
                (field, remedy),
                "{text}: {}",
                facts.cause
            );
        }
    }

    #[test]
    fn no_params_means_none() {
        assert!(decode::<NoParams>("m", None).is_ok());
        let raw = RawValue::from_string("{}".into()).unwrap();
        let error = decode::<NoParams>("spdk_get_version", Some(&raw)).unwrap_err();
        assert_eq!(error.message, "spdk_get_version requires no parameters");
    }
}
