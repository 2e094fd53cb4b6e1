//! `[web]`: the administration page.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WebSettings {
    /// Texts of [`nacre_engine_web::endpoint::Endpoint`]; empty: no page.
    #[serde(deserialize_with = "one_or_many")]
    pub listen: Vec<String>,
    /// None: the daemon makes a certificate.
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

/// A text in place of a list of one.
fn one_or_many<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    struct Texts;

    impl<'de> serde::de::Visitor<'de> for Texts {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a list of addresses such as \"https://0.0.0.0:8443\"")
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Vec<String>, E> {
            Ok(vec![text.to_owned()])
        }

        fn visit_seq<A: serde::de::SeqAccess<'de>>(
            self,
            mut items: A,
        ) -> Result<Vec<String>, A::Error> {
            let mut all = Vec::new();
            while let Some(text) = items.next_element()? {
                all.push(text);
            }
            Ok(all)
        }
    }

    deserializer.deserialize_any(Texts)
}
