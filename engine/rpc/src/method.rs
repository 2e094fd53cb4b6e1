//! An RPC method: its name, the phases in which it may be called, its parameter and reply types
//! (the schema), and its implementation.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use schemars::JsonSchema;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_path_to_error::Segment;

use super::access::Class;
use super::error::{INVALID_PARAMS, RpcError};
use super::secret::SecretValue;
use nacre_engine_values::read::{self, Texts, ValueError};

/// The phases of the daemon in which a method may be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Only before `framework_start_init`.
    Startup,
    /// Only after `framework_start_init`.
    Runtime,
    Always,
}

/// The effect of a call on the configuration, stored data, or the behaviour of devices, hosts and
/// other machines. Log lines and counters of calls are no effects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changes {
    Nothing,
    /// Changes nothing without one of these parameters.
    With(&'static [&'static str]),
    Something,
}

impl Changes {
    /// True if a call with these parameters may change something.
    pub fn in_call(self, params: Option<&RawValue>) -> bool {
        match self {
            Self::Nothing => false,
            Self::Something => true,
            Self::With(names) => {
                let params = params.map_or("{}", RawValue::get);
                let given: BTreeMap<String, IgnoredAny> =
                    serde_json::from_str(params).unwrap_or_default();
                names.iter().any(|name| given.contains_key(*name))
            }
        }
    }

    /// The default effect of a class: [`Class::Read`] changes nothing, the others do.
    const fn of(class: Class) -> Self {
        match class {
            Class::Read => Self::Nothing,
            Class::Operate | Class::Admin | Class::Secret => Self::Something,
        }
    }
}

impl std::fmt::Display for Changes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nothing => f.write_str("Changes nothing."),
            Self::With(parameters) => {
                let names: Vec<String> = parameters.iter().map(|p| format!("`{p}`")).collect();
                write!(f, "Changes something only with {}.", names.join(" or "))
            }
            Self::Something => f.write_str("Changes something."),
        }
    }
}

/// How a call is ordered with other calls in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Runs in parallel with other reads, after every earlier exclusive call.
    Read,
    /// Runs alone among the `Read` and `Exclusive` calls, in order of arrival.
    Exclusive,
    /// Not ordered with other calls; may run for a long time.
    Free,
}

/// One method of the management socket. `C` is the state that methods act on.
pub trait Method<C: 'static>: 'static {
    const NAME: &'static str;
    /// One sentence that describes the method in the RPC reference.
    const ABOUT: &'static str;
    /// Determines which roles may call the method, and whether calls are audited. It has no
    /// default, so it cannot be forgotten.
    const CLASS: Class;
    /// The effect of a call, for the reference. Independent of the role: the audit log is for
    /// admins, and reading it changes nothing.
    const CHANGES: Changes = Changes::of(Self::CLASS);
    const WHEN: When = When::Runtime;
    const ORDER: Order = Order::Read;
    const ALIASES: &'static [&'static str] = &[];
    /// The JSON-RPC error code for invalid parameters, which differs between SPDK's modules.
    const UNDECODABLE: i32 = INVALID_PARAMS;
    type Params: DeserializeOwned + JsonSchema + 'static;
    type Reply: Serialize + JsonSchema + 'static;

    fn apply(
        params: Self::Params,
        engine: Rc<C>,
    ) -> impl Future<Output = Result<Self::Reply, RpcError>>;
}

/// The parameters of a method without any: a `params` member is refused, as in SPDK.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoParams {}

pub type Answer = Result<Box<RawValue>, RpcError>;
pub type CallFuture = Pin<Box<dyn Future<Output = Answer>>>;

/// A registered method with erased types.
pub struct MethodEntry<C> {
    pub name: &'static str,
    pub about: &'static str,
    pub when: When,
    pub order: Order,
    pub class: Class,
    pub changes: Changes,
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
    fn of<M: Method<C>>() -> Self {
        Self {
            name: M::NAME,
            about: M::ABOUT,
            when: M::WHEN,
            order: M::ORDER,
            class: M::CLASS,
            changes: M::CHANGES,
            aliases: M::ALIASES,
            params_schema: || schemars::schema_for!(M::Params),
            reply_schema: || schemars::schema_for!(M::Reply),
            call: |params, engine| {
                let params = decode::<M::Params>(M::NAME, params).map_err(|error| RpcError {
                    code: M::UNDECODABLE,
                    ..error
                })?;
                Ok(Box::pin(async move {
                    let reply = M::apply(params, engine).await?;
                    serde_json::value::to_raw_value(&reply).map_err(|e| {
                        RpcError::internal(format!("the reply does not serialise: {e}"))
                    })
                }))
            },
        }
    }

    /// Decodes the parameters and returns a future that runs the method. Invalid parameters fail
    /// here, with [`Method::UNDECODABLE`].
    pub fn call(&self, params: Option<&RawValue>, engine: Rc<C>) -> Result<CallFuture, RpcError> {
        (self.call)(params, engine)
    }

    /// True if the method may be called in this phase. `runtime` is false before
    /// `framework_start_init`.
    pub fn callable(&self, runtime: bool) -> bool {
        match self.when {
            When::Startup => !runtime,
            When::Runtime => runtime,
            When::Always => true,
        }
    }
}

/// All methods by name. Aliases refer to the same entry.
#[derive(Debug)]
pub struct Registry<C> {
    entries: Vec<MethodEntry<C>>,
    names: BTreeMap<&'static str, usize>,
}

impl<C: 'static> Default for Registry<C> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            names: BTreeMap::new(),
        }
    }
}

impl<C: 'static> Registry<C> {
    /// Registers a method.
    ///
    /// # Panics
    /// If the name or an alias is already registered.
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

    /// Every name, including aliases.
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
    let value = match read::json(text) {
        Ok(value) => SecretValue(value),
        Err(Ok((place, error))) => return Err(refusal(&place, &error)),
        Err(Err(error)) => return Err(RpcError::invalid_params(error.to_string()).field("params")),
    };
    read::first(&value.0, Texts::Keep).map_err(|(place, error)| refusal(&place, &error))
}

/// The error for an invalid parameter: its name, its value, the allowed values, and the nearest
/// one.
fn refusal(place: &[Segment], error: &ValueError) -> RpcError {
    let key = match error {
        ValueError::Unknown { key, .. } | ValueError::Twice { key } => key.as_str(),
        ValueError::Missing { key } => key,
        _ => "",
    };
    // The path of a wrong key may be that of its object, or its own.
    let own = matches!(place.last(), Some(Segment::Map { key: last }) if last == key);
    let field = match (read::path(place), own || key.is_empty()) {
        (path, true) => path,
        (path, false) if path.is_empty() => key.to_owned(),
        (path, false) => format!("{path}.{key}"),
    };
    let cause = match error {
        // "Table" is TOML's word for it.
        ValueError::Wrong { found, expected } => {
            let json = |text: &str| match text {
                "a table" => "an object".to_owned(),
                other => other.to_owned(),
            };
            format!("{} is not {}", json(found), json(expected))
        }
        other => other.to_string(),
    };
    let refusal = RpcError::invalid_params(cause);
    let refusal = if field.is_empty() {
        refusal
    } else {
        refusal.field(field)
    };
    let known = || match error {
        ValueError::Unknown { known: [], .. } => None,
        ValueError::Unknown { known, .. } => Some(format!("known here: {}", known.join(", "))),
        _ => None,
    };
    match error.remedy().or_else(known) {
        Some(remedy) => refusal.remedy(remedy),
        None => refusal,
    }
}

#[cfg(test)]
mod tests {
    //! Goal: every error about parameters names the parameter. Method: decode tables.

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct P {
        name: String,
        num_blocks: Option<u64>,
        namespace: Option<Inner>,
        word: Option<Word>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Word {
        DarkGray,
        White,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Inner {
        nsid: u32,
    }

    #[test]
    fn the_field_at_fault_is_named() {
        for (text, field, cause, remedy) in [
            (r#"{}"#, "name", "\"name\" is missing", Some("add it")),
            (
                r#"{"name":"a","num_block":1}"#,
                "num_block",
                "\"num_block\" is not known here",
                Some("did you mean \"num_blocks\"?"),
            ),
            (
                r#"{"name":"a","num_blocks":"x"}"#,
                "num_blocks",
                "\"x\" is not a whole number of at least 0",
                None,
            ),
            (
                r#"{"name":"a","num_blocks":-1}"#,
                "num_blocks",
                "-1 is not a whole number of at least 0",
                None,
            ),
            (
                r#"{"name":"a","num_blocks":1.0}"#,
                "num_blocks",
                "1.0 is not a whole number of at least 0",
                None,
            ),
            (r#"{"name":7}"#, "name", "7 is not text in quotes", None),
            (
                r#"{"name":"a","namespace":{"nsid":"x"}}"#,
                "namespace.nsid",
                "\"x\" is not a whole number from 0 to 4294967295",
                None,
            ),
            (
                r#"{"name":"a","namespace":[1]}"#,
                "namespace",
                "a list is not an object",
                None,
            ),
            (
                r#"{"name":"a","namespace":{}}"#,
                "namespace.nsid",
                "\"nsid\" is missing",
                Some("add it"),
            ),
            (
                r#"{"name":"a","namespace":{"nsid":1,"zzzzzzzzz":2}}"#,
                "namespace.zzzzzzzzz",
                "\"zzzzzzzzz\" is not known here",
                Some("known here: nsid"),
            ),
            (
                r#"{"name":"a","word":"dark-grey"}"#,
                "word",
                "\"dark-grey\" is not \"dark-gray\" or \"white\"",
                Some("did you mean \"dark-gray\"?"),
            ),
            (
                r#"{"name":"a","word":7}"#,
                "word",
                "7 is not \"dark-gray\" or \"white\"",
                None,
            ),
            (
                r#"{"name":"a","name":"b"}"#,
                "name",
                "\"name\" is there twice",
                None,
            ),
            (
                r#"{"name":"a","namespace":{"nsid":1,"nsid":1}}"#,
                "namespace.nsid",
                "\"nsid\" is there twice",
                None,
            ),
            (
                r#"["a"]"#,
                "params",
                "parameters must be given by name, in an object",
                None,
            ),
        ] {
            let raw = RawValue::from_string(text.to_owned()).unwrap();
            let error = decode::<P>("m", Some(&raw)).unwrap_err();
            assert_eq!(error.code, INVALID_PARAMS);
            let facts = error.data.unwrap();
            assert_eq!(
                (
                    facts.field.as_deref(),
                    facts.cause.as_str(),
                    facts.remedy.as_deref()
                ),
                (Some(field), cause, remedy),
                "{text}: {}",
                facts.cause
            );
        }
    }

    #[test]
    fn parameters_are_refused_if_there_are_none() {
        assert!(decode::<NoParams>("m", None).is_ok());
        let raw = RawValue::from_string("{}".into()).unwrap();
        let error = decode::<NoParams>("spdk_get_version", Some(&raw)).unwrap_err();
        assert_eq!(error.message, "spdk_get_version requires no parameters");
    }
}
