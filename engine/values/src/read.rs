//! Parses JSON into typed settings and parameters. An error names the value, the allowed values
//! and the nearest allowed word. serde's own texts ("invalid type: string, expected u16") never
//! reach a user.
//!
//! [`all`] parses a configuration and finds every wrong value; [`first`] stops at the first one.

use std::fmt;
use std::net::SocketAddr;

use serde::de::value::{MapAccessDeserializer, MapDeserializer, SeqDeserializer};
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Expected, IntoDeserializer, MapAccess, SeqAccess,
    Unexpected, Visitor,
};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_path_to_error::Segment;

use crate::address;
use crate::suggest::closest;

pub use nacre_units::read::*;

/// Why the parser refuses a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueError {
    /// The value has the wrong type or is out of range.
    Wrong {
        found: String,
        expected: String,
    },
    /// The value is not one of the allowed words.
    Word {
        found: String,
        allowed: &'static [&'static str],
    },
    Unknown {
        key: String,
        known: &'static [&'static str],
    },
    Missing {
        key: &'static str,
    },
    Twice {
        key: String,
    },
    /// The message of a value's own parser (a size, a time, an address), complete for the user.
    Message(String),
}

impl ValueError {
    /// The text that proposes a fix: the nearest allowed word or key, or to add the missing key.
    pub fn remedy(&self) -> Option<String> {
        let (word, words) = match self {
            Self::Word { found, allowed } => (found, allowed),
            Self::Unknown { key, known } => (key, known),
            Self::Missing { .. } => return Some("add it".into()),
            _ => return None,
        };
        let word = word.trim_matches('"').to_lowercase();
        closest(&word, words.iter().copied()).map(|close| format!("did you mean \"{close}\"?"))
    }
}

impl fmt::Display for ValueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wrong { found, expected } => write!(f, "{found} is not {expected}"),
            Self::Word { found, allowed } => {
                write!(f, "{found} is not {}", words(allowed))
            }
            Self::Unknown { key, .. } => write!(f, "\"{key}\" is not known here"),
            Self::Missing { key } => write!(f, "\"{key}\" is missing"),
            Self::Twice { key } => write!(f, "\"{key}\" is there twice"),
            Self::Message(text) => f.write_str(text),
        }
    }
}

/// Formats a list of words for a message: `"a", "b" or "c"`.
pub fn words(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => "anything".into(),
    }
}

impl std::error::Error for ValueError {}

impl de::Error for ValueError {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self::Message(text.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::Wrong {
            found: shown(found),
            expected: plain(&expected.to_string()),
        }
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        <Self as de::Error>::invalid_type(found, expected)
    }

    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self::Wrong {
            found: format!("a list of {length}"),
            expected: plain(&expected.to_string()),
        }
    }

    fn unknown_variant(found: &str, allowed: &'static [&'static str]) -> Self {
        Self::Word {
            found: format!("\"{found}\""),
            allowed,
        }
    }

    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        Self::Unknown {
            key: key.to_owned(),
            known,
        }
    }

    fn missing_field(key: &'static str) -> Self {
        Self::Missing { key }
    }

    fn duplicate_field(key: &'static str) -> Self {
        Self::Twice { key: key.into() }
    }
}

fn shown(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        Unexpected::Float(value) => format!("{value:?}"),
        Unexpected::Str(value) => format!("\"{value}\""),
        Unexpected::Char(value) => format!("\"{value}\""),
        Unexpected::Unit | Unexpected::Option => "null".into(),
        Unexpected::Seq => "a list".into(),
        Unexpected::Other(text) => text.to_owned(),
        _ => "a table".into(),
    }
}

/// Plain English for serde's name of a type.
fn plain(expected: &str) -> String {
    let whole = |least: &dyn fmt::Display, most: &dyn fmt::Display| {
        format!("a whole number from {least} to {most}")
    };
    match expected {
        "u8" => whole(&u8::MIN, &u8::MAX),
        "u16" => whole(&u16::MIN, &u16::MAX),
        "u32" => whole(&u32::MIN, &u32::MAX),
        "u64" | "usize" => "a whole number of at least 0".into(),
        "i8" => whole(&i8::MIN, &i8::MAX),
        "i16" => whole(&i16::MIN, &i16::MAX),
        "i32" => whole(&i32::MIN, &i32::MAX),
        "i64" | "isize" => "a whole number".into(),
        "f32" | "f64" => "a number".into(),
        "a nonzero u8" => whole(&1, &u8::MAX),
        "a nonzero u16" => whole(&1, &u16::MAX),
        "a nonzero u32" => whole(&1, &u32::MAX),
        "a nonzero u64" | "a nonzero usize" => "a whole number of at least 1".into(),
        "a boolean" => "true or false".into(),
        "a string" | "a borrowed string" | "str" => "text in quotes".into(),
        "path string" => "a path in quotes".into(),
        "a sequence" => "a list".into(),
        "unit" | "option" => "null".into(),
        "a map" => "a table".into(),
        "IP address" | "IPv4 address" | "IPv6 address" => "an IP address".into(),
        "socket address" => address::ENDPOINT.into(),
        other if other.contains("UUID") => UUID.into(),
        other if other.starts_with("struct ") || other.starts_with("internally tagged") => {
            "a table".into()
        }
        other if other.starts_with("tuple ") || other.starts_with("an array of") => "a list".into(),
        other => other.to_owned(),
    }
}

/// The path to a value in a document: keys and indexes, outermost first.
pub type Place = Vec<Segment>;

/// Formats a path for a message: `nvmf.listener[0].port`. Indexes count from 0.
pub fn path(place: &[Segment]) -> String {
    let mut path = String::new();
    for segment in place {
        match segment {
            Segment::Seq { index } => path += &format!("[{index}]"),
            Segment::Map { key } | Segment::Enum { variant: key } => {
                if !path.is_empty() {
                    path.push('.');
                }
                path += key;
            }
            Segment::Unknown => path.push('?'),
        }
    }
    path
}

/// Parses JSON text. The outer `Err` holds `Err` for invalid JSON, and `Ok` for a duplicate
/// member of an object, with its path.
pub fn json(text: &str) -> Result<Value, Result<(Place, ValueError), serde_json::Error>> {
    let mut twice = None;
    let seed = Distinct {
        twice: &mut twice,
        place: &mut Place::new(),
    };
    let mut json = serde_json::Deserializer::from_str(text);
    let value = seed.deserialize(&mut json).map_err(Err)?;
    json.end().map_err(Err)?;
    match twice {
        None => Ok(value),
        Some((place, key)) => Err(Ok((place, ValueError::Twice { key }))),
    }
}

/// Builds a value and records the first duplicate member.
struct Distinct<'a> {
    twice: &'a mut Option<(Place, String)>,
    place: &'a mut Place,
}

impl Distinct<'_> {
    fn inner(&mut self) -> Distinct<'_> {
        Distinct {
            twice: self.twice,
            place: self.place,
        }
    }
}

impl<'de> DeserializeSeed<'de> for Distinct<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Distinct<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        loop {
            self.place.push(Segment::Seq { index: list.len() });
            let item = items.next_element_seed(self.inner())?;
            self.place.pop();
            match item {
                Some(item) => list.push(item),
                None => return Ok(list.into()),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut members: A) -> Result<Value, A::Error> {
        let mut object = serde_json::Map::new();
        while let Some(key) = members.next_key::<String>()? {
            self.place.push(Segment::Map { key: key.clone() });
            if object.contains_key(&key) && self.twice.is_none() {
                *self.twice = Some((self.place.clone(), key.clone()));
            }
            object.insert(key, members.next_value_seed(self.inner())?);
            self.place.pop();
        }
        Ok(object.into())
    }
}

/// Parses a value; fails with the first error and its path.
pub fn first<T: DeserializeOwned>(value: &Value, texts: Texts) -> Result<T, (Place, ValueError)> {
    serde_path_to_error::deserialize(Reader { value, texts }).map_err(|error| {
        let place = error.path().iter().cloned().collect();
        (place, error.into_inner())
    })
}

/// Parses a value of a type without required members. The list has the path and error of each
/// wrong member, which is left out, so it has its default. The result is `None` if the value as a
/// whole is wrong.
pub fn all<T: DeserializeOwned>(
    mut value: Value,
    texts: Texts,
) -> (Option<T>, Vec<(Place, ValueError)>) {
    let mut errors = Vec::new();
    loop {
        match first(&value, texts) {
            Ok(read) => return (Some(read), errors),
            Err((place, error)) => {
                let removed = remove(&mut value, &place);
                errors.push((place, error));
                if !removed {
                    return (None, errors);
                }
            }
        }
    }
}

/// Removes the innermost table member on the path `place`.
fn remove(value: &mut Value, place: &[Segment]) -> bool {
    let Some(last) = place.iter().rposition(|s| matches!(s, Segment::Map { .. })) else {
        return false;
    };
    let mut at = value;
    for segment in &place[..last] {
        let inner = match segment {
            Segment::Map { key } => at.get_mut(key.as_str()),
            Segment::Seq { index } => at.get_mut(*index),
            _ => None,
        };
        match inner {
            Some(inner) => at = inner,
            None => return false,
        }
    }
    let Segment::Map { key } = &place[last] else {
        return false;
    };
    at.as_object_mut()
        .is_some_and(|table| table.remove(key.as_str()).is_some())
}

/// How the parser treats quoted text where a number or boolean is expected, and the reverse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Texts {
    /// Converts the text `"8"` to the number 8, and the number 8 to the text `"8"`. Converts `yes`,
    /// `on` and `1` to true, and `no`, `off` and `0` to false. Environment variables are text, and
    /// files may quote numbers.
    Read,
    /// Refuses a value of another type, as RPC calls do.
    Keep,
}

struct Reader<'a> {
    value: &'a Value,
    texts: Texts,
}

impl<'a> Reader<'a> {
    /// The text, if it may be parsed as another type.
    fn text(&self) -> Option<&'a str> {
        match self.texts {
            Texts::Read => self.value.as_str().map(str::trim),
            Texts::Keep => None,
        }
    }
}

macro_rules! integers {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
            if let Some(text) = self.text() {
                if let Ok(number) = text.parse() {
                    return visitor.visit_u64(number);
                }
                if let Ok(number) = text.parse() {
                    return visitor.visit_i64(number);
                }
            }
            self.deserialize_any(visitor)
        }
    )*};
}

impl<'de> Deserializer<'de> for Reader<'de> {
    type Error = ValueError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        let texts = self.texts;
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(number), _) => visitor.visit_u64(number),
                (_, Some(number)) => visitor.visit_i64(number),
                _ => visitor.visit_f64(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Array(items) => {
                let items = items.iter().map(|value| Reader { value, texts });
                visitor.visit_seq(SeqDeserializer::new(items))
            }
            Value::Object(table) => {
                let members = table.iter();
                let members = members.map(|(key, value)| (key.as_str(), Reader { value, texts }));
                visitor.visit_map(MapDeserializer::new(members))
            }
        }
    }

    integers! {
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        match self.text().and_then(|text| text.parse().ok()) {
            Some(number) => visitor.visit_f64(number),
            None => self.deserialize_any(visitor),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        let text = self.text().map(str::to_ascii_lowercase);
        match text.as_deref() {
            Some("true" | "yes" | "on" | "1") => visitor.visit_bool(true),
            Some("false" | "no" | "off" | "0") => visitor.visit_bool(false),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        match (self.texts, self.value) {
            (Texts::Read, Value::Number(number)) => visitor.visit_string(number.to_string()),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        match self.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, ValueError> {
        visitor.visit_newtype_struct(self)
    }

    /// A table only: derived code would accept a list of its members in order.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ValueError> {
        match self.value {
            Value::Array(_) => Err(de::Error::invalid_type(Unexpected::Seq, &visitor)),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        allowed: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ValueError> {
        match self.value {
            Value::String(text) => visitor.visit_enum(text.as_str().into_deserializer()),
            // A word with data.
            Value::Object(table) => {
                let texts = self.texts;
                let members = table.iter();
                let members = members.map(|(key, value)| (key.as_str(), Reader { value, texts }));
                let members = MapAccessDeserializer::new(MapDeserializer::new(members));
                members.deserialize_enum(name, allowed, visitor)
            }
            other => Err(ValueError::Word {
                found: match other {
                    Value::Array(_) => "a list".into(),
                    other => other.to_string(),
                },
                allowed,
            }),
        }
    }

    serde::forward_to_deserialize_any! {
        char bytes byte_buf unit unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, ValueError> for Reader<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

const UUID: &str = "a UUID, such as 6a3f2d1e-5b4c-4d3e-8f2a-1b0c9d8e7f6a";

/// An optional listening address: text with an IP address and a port.
pub fn endpoint<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(from)?;
    let read = address::endpoint(&text).map_err(de::Error::custom)?;
    Ok(Some(read))
}

/// An optional UUID, as text.
pub fn some_uuid<'de, D: Deserializer<'de>>(from: D) -> Result<Option<uuid::Uuid>, D::Error> {
    let text = String::deserialize(from)?;
    let read = uuid::Uuid::parse_str(text.trim()).map(Some);
    read.map_err(|_| de::Error::invalid_value(Unexpected::Str(&text), &UUID))
}
