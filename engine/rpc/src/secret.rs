//! The types of parameters and replies that contain a secret, and of the JSON around them. A secret
//! parameter is marked in the method's schema, so that the audit log omits its value. Replies are
//! not in the audit log.
//! no answers.

use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;
use zeroize::{Zeroize, Zeroizing};

/// The JSON Schema keyword for a value that can be sent and is never returned.
pub const WRITE_ONLY: &str = "writeOnly";

/// A secret that a client sends. Nothing prints it, and only [`SecretText::send`] serialises it.
#[derive(Clone)]
pub struct SecretText(Zeroizing<String>);

impl SecretText {
    /// The secret itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Serialises the secret into a request. Parameters name this function in `serialize_with`.
    pub fn send<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }

    /// As [`SecretText::send`], for a parameter that may be left out.
    pub fn send_some<S: Serializer>(secret: &Option<Self>, to: S) -> Result<S::Ok, S::Error> {
        match secret {
            Some(secret) => secret.send(to),
            None => to.serialize_none(),
        }
    }
}

impl From<Zeroizing<String>> for SecretText {
    fn from(text: Zeroizing<String>) -> Self {
        Self(text)
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl<'de> Deserialize<'de> for SecretText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|text| Self(Zeroizing::new(text)))
    }
}

impl JsonSchema for SecretText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "SecretText".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", WRITE_ONLY: true })
    }
}

/// A secret that a client asked for. Only the reply contains it.
#[derive(Clone)]
pub struct RevealedText(Zeroizing<String>);

impl From<Zeroizing<String>> for RevealedText {
    fn from(text: Zeroizing<String>) -> Self {
        Self(text)
    }
}

impl fmt::Debug for RevealedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl Serialize for RevealedText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl JsonSchema for RevealedText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "RevealedText".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string" })
    }
}

/// JSON that may contain a secret: zeroed when it is dropped, and never printed.
pub struct SecretJson(Option<Box<RawValue>>);

impl fmt::Debug for SecretJson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(JSON)")
    }
}

impl From<Box<RawValue>> for SecretJson {
    fn from(json: Box<RawValue>) -> Self {
        Self(Some(json))
    }
}

impl Deref for SecretJson {
    type Target = RawValue;

    fn deref(&self) -> &RawValue {
        self.0.as_deref().unwrap_or(RawValue::NULL)
    }
}

impl Drop for SecretJson {
    fn drop(&mut self) {
        if let Some(json) = self.0.take() {
            String::from(Box::<str>::from(json)).zeroize();
        }
    }
}

/// A JSON value whose strings are zeroed when it is dropped. `Debug` prints none of it.
#[derive(Clone, PartialEq)]
pub struct SecretValue(pub Value);

impl fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(JSON)")
    }
}

impl Drop for SecretValue {
    fn drop(&mut self) {
        zero(&mut self.0);
    }
}

fn zero(value: &mut Value) {
    match value {
        Value::String(text) => text.zeroize(),
        Value::Array(items) => items.iter_mut().for_each(zero),
        Value::Object(members) => members.values_mut().for_each(zero),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_a_value_are_zeroed() {
        let mut value = serde_json::json!({ "a": ["b", { "c": "d" }, 1], "e": "f" });
        zero(&mut value);
        assert_eq!(
            value,
            serde_json::json!({ "a": ["", { "c": "" }, 1], "e": "" })
        );
        let json = SecretJson::from(RawValue::from_string("[1]".into()).unwrap());
        assert_eq!(json.get(), "[1]");
        let value = SecretValue(serde_json::json!([1]));
        assert!(!format!("{json:?} {value:?}").contains('1'));
    }

    #[test]
    fn a_secret_is_read_and_never_shown() {
        let secret: SecretText = serde_json::from_str("\"hunter2\"").unwrap();
        assert_eq!(secret.reveal(), "hunter2");
        assert_eq!(format!("{secret:?}"), "(secret)");
        let schema = Value::from(schemars::schema_for!(SecretText));
        assert_eq!(schema[WRITE_ONLY], true);
        let revealed = RevealedText::from(Zeroizing::new("hunter2".to_owned()));
        assert_eq!(format!("{revealed:?}"), "(secret)");
        assert_eq!(serde_json::to_string(&revealed).unwrap(), "\"hunter2\"");
    }
}
