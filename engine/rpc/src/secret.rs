//! The type of a parameter that carries a secret. The schema says so, and the audit log reads it
//! there.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};
use zeroize::Zeroizing;

/// The word of JSON Schema for a value that may be given and is never returned.
pub const WRITE_ONLY: &str = "writeOnly";

/// A secret that a client sends. Nothing prints or serialises it.
#[derive(Clone)]
pub struct SecretText(Zeroizing<String>);

impl SecretText {
    /// The secret itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl<'de> Deserialize<'de> for SecretText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<SecretText, D::Error> {
        String::deserialize(deserializer).map(|text| SecretText(Zeroizing::new(text)))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_read_and_never_shown() {
        let secret: SecretText = serde_json::from_str("\"hunter2\"").unwrap();
        assert_eq!(secret.reveal(), "hunter2");
        assert_eq!(format!("{secret:?}"), "(secret)");
        let schema = serde_json::Value::from(schemars::schema_for!(SecretText));
        assert_eq!(schema[WRITE_ONLY], true);
    }
}
