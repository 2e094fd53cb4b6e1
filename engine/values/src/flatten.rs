//! Structs (*tables*) whose JSON object also has the fields of a nested struct (its *part*).
//! serde's own `flatten` copies values before it reads them, and so loses the path of an error and
//! the conversion of quoted numbers.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use parking_lot::Mutex;
use serde::de::value::MapAccessDeserializer;
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, Visitor,
};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::read::{self, Texts, ValueError};

/// A struct whose fields are keys of the table around it. It refuses unknown fields, has a default
/// for each field, and serialises no field without a value. A field has one name for reading and
/// writing: the table would drop an alias.
pub trait Part: DeserializeOwned + Serialize {}

impl<T: DeserializeOwned + Serialize> Part for T {}

/// `flattened!(Table, field)` implements `Deserialize` and `Serialize` for a struct around a part.
/// The struct implements `Default`, derives both traits with `remote = "Self"`, and skips the field
/// of the part. Fields that the input lacks keep the value of `Default`. A field of the part
/// without a value is written as null, or left out with `flattened!(Table, field, without nulls)`.
#[macro_export]
macro_rules! flattened {
    ($table:ident, $part:ident) => {
        $crate::flattened!(@ $table, $part, fields);
    };
    ($table:ident, $part:ident, without nulls) => {
        $crate::flattened!(@ $table, $part, present);
    };
    (@ $table:ident, $part:ident, $written:ident) => {
        impl<'de> serde::Deserialize<'de> for $table {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let mut flattened = $crate::flatten::Flattened::new(&Self::default().$part);
                let table = Self::deserialize(flattened.without_part(from))?;
                Ok(Self {
                    $part: flattened.part(),
                    ..table
                })
            }
        }

        impl serde::Serialize for $table {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                struct Own<'a>(&'a $table);

                impl serde::Serialize for Own<'_> {
                    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                        $table::serialize(self.0, to)
                    }
                }

                let part = $crate::flatten::$written(&self.$part);
                $crate::flatten::serialize(&Own(self), part, to)
            }
        }
    };
}

/// Serialises a table: its own fields, then those of the part.
pub fn serialize<S: Serializer>(
    own: &impl Serialize,
    part: Map<String, Value>,
    to: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Whole<'a, O> {
        #[serde(flatten)]
        own: &'a O,
        #[serde(flatten)]
        part: Map<String, Value>,
    }

    Whole { own, part }.serialize(to)
}

/// Collects the fields of the part while a table is read.
pub struct Flattened<P> {
    given: Map<String, Value>,
    part: PhantomData<P>,
}

impl<P: Part> Flattened<P> {
    /// Fields that the table lacks have their value in `default`.
    pub fn new(default: &P) -> Self {
        Self {
            given: present(default),
            part: PhantomData,
        }
    }

    /// A deserializer for the derived function of the table. It passes on the table's own fields,
    /// and collects those of the part.
    pub fn without_part<'de, D: Deserializer<'de>>(&mut self, from: D) -> Members<'_, D, P> {
        Members { from, part: self }
    }

    /// The part, after the table was read.
    pub fn part(self) -> P {
        P::deserialize(Value::Object(self.given)).expect("each field was read before")
    }
}

/// All fields of the part; those without a value are null.
pub fn fields<P: Part>(part: &P) -> Map<String, Value> {
    let names = names::<P>().iter();
    let mut all: Map<_, _> = names.map(|name| ((*name).into(), Value::Null)).collect();
    all.extend(present(part));
    all
}

/// The fields of the part that have a value.
pub fn present(part: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(part) {
        Ok(Value::Object(fields)) => fields,
        _ => unreachable!("a part is a table of plain data"),
    }
}

/// The names of the fields: the refusal of an unknown one lists them.
fn names<P: Part>() -> &'static [&'static str] {
    let unknown = Map::from_iter([(String::new(), Value::Null)]);
    match read::first::<P>(&unknown.into(), Texts::Keep) {
        Err((_, ValueError::Unknown { known, .. })) => known,
        _ => unreachable!("a part refuses unknown fields"),
    }
}

/// The fields of the type around the part, then those of the part. Each pair of lists is joined
/// once, because serde names known fields by lists that stay in memory.
fn joined(own: &'static [&'static str], part: &'static [&'static str]) -> &'static [&'static str] {
    type Names = &'static [&'static str];
    static JOINED: Mutex<BTreeMap<(Names, Names), Names>> = Mutex::new(BTreeMap::new());
    let mut joined = JOINED.lock();
    joined
        .entry((own, part))
        .or_insert_with(|| [own, part].concat().leak())
}

/// The deserializer that [`Flattened::without_part`] returns.
pub struct Members<'a, D, P> {
    from: D,
    part: &'a mut Flattened<P>,
}

impl<'de, D: Deserializer<'de>, P: Part> Deserializer<'de> for Members<'_, D, P> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.deserialize_struct("", &[], visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let divide = Divide {
            visitor,
            own: fields,
            part: self.part,
        };
        self.from.deserialize_struct(name, fields, divide)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

struct Divide<'a, V, P> {
    visitor: V,
    own: &'static [&'static str],
    part: &'a mut Flattened<P>,
}

impl<'de, V: Visitor<'de>, P: Part> Visitor<'de> for Divide<'_, V, P> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.visitor.expecting(f)
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<V::Value, A::Error> {
        self.visitor.visit_map(OwnMembers {
            members,
            own: self.own,
            names: names::<P>(),
            part: self.part,
        })
    }
}

struct OwnMembers<'a, A, P> {
    members: A,
    own: &'static [&'static str],
    names: &'static [&'static str],
    part: &'a mut Flattened<P>,
}

impl<'de, A: MapAccess<'de>, P: Part> MapAccess<'de> for OwnMembers<'_, A, P> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        mut seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        let (own, names) = (self.own, self.names);
        while let Some(key) = self.members.next_key_seed(KeySeed { seed, own, names })? {
            let key = match key {
                Key::Own(key) => return Ok(Some(key)),
                Key::OfPart(key, unused) => {
                    seed = unused;
                    key
                }
            };
            let one = P::deserialize(MapAccessDeserializer::new(OneMember {
                key: Some(key.clone()),
                members: &mut self.members,
            }))?;
            // The other fields of `one` have the defaults of the part, not those of the table.
            if let Some(value) = present(&one).remove(&key) {
                self.part.given.insert(key, value);
            }
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.members.next_value_seed(seed)
    }
}

/// Reads a key with the seed, unless it is a field of the part.
struct KeySeed<K> {
    seed: K,
    own: &'static [&'static str],
    names: &'static [&'static str],
}

enum Key<K, V> {
    Own(V),
    OfPart(String, K),
}

impl<'de, K: DeserializeSeed<'de>> DeserializeSeed<'de> for KeySeed<K> {
    type Value = Key<K, K::Value>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        let key = String::deserialize(from)?;
        if self.names.contains(&key.as_str()) {
            return Ok(Key::OfPart(key, self.seed));
        }
        let read = self.seed.deserialize(key.as_str().into_deserializer());
        // The type around the part refuses only keys that it does not know.
        let unknown = |_: D::Error| de::Error::unknown_field(&key, joined(self.own, self.names));
        read.map(Key::Own).map_err(unknown)
    }
}

/// A table of one member, whose key is read already.
struct OneMember<'a, A> {
    key: Option<String>,
    members: &'a mut A,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for OneMember<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        let key = self.key.take();
        key.map(|key| seed.deserialize(key.into_deserializer()))
            .transpose()
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.members.next_value_seed(seed)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    struct Inner {
        #[serde(skip_serializing_if = "Option::is_none")]
        depth: Option<u16>,
        #[serde(skip_serializing_if = "Option::is_none")]
        word: Option<String>,
        limit: u8,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields, remote = "Self")]
    struct Outer {
        port: u16,
        list: Vec<u8>,
        #[serde(skip)]
        inner: Inner,
    }

    impl Default for Outer {
        fn default() -> Self {
            Self {
                port: 0,
                list: Vec::new(),
                inner: Inner {
                    word: Some("default".into()),
                    limit: 3,
                    ..Inner::default()
                },
            }
        }
    }

    flattened!(Outer, inner);

    /// Goal: fields of either type are read in any order, quoted numbers included, and a default
    /// stays where a field is missing or null. Method: tables and their values.
    #[test]
    fn both_types_are_read() {
        let table = json!({ "depth": "8", "list": ["1", 2], "word": null, "port": 4420 });
        let (place, outer) = match read::first::<Outer>(&table, Texts::Read) {
            Ok(outer) => (String::new(), outer),
            Err((place, error)) => panic!("{}: {error}", read::path(&place)),
        };
        assert_eq!(place, "");
        let expected = Outer {
            port: 4420,
            list: vec![1, 2],
            inner: Inner {
                depth: Some(8),
                word: Some("default".into()),
                limit: 3,
            },
        };
        assert_eq!(outer, expected);
        let shown = json!({
            "port": 4420, "list": [1, 2], "depth": 8, "word": "default", "limit": 3,
        });
        assert_eq!(json!(outer), shown);
        let shown = json!({
            "port": 0, "list": [], "depth": null, "word": "default", "limit": 3,
        });
        assert_eq!(json!(Outer::default()), shown);
        let limited: Outer = serde_json::from_value(json!({ "limit": 4, "depth": 1 })).unwrap();
        assert_eq!((limited.inner.limit, limited.inner.depth), (4, Some(1)));
    }

    /// Goal: a table without nulls has only the fields with a value. Method: one with none, and one
    /// with one.
    #[test]
    fn nulls_are_left_out() {
        #[derive(Default, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields, remote = "Self")]
        struct Record {
            port: u16,
            #[serde(skip)]
            inner: Inner,
        }

        flattened!(Record, inner, without nulls);

        let mut record = Record::default();
        assert_eq!(json!(record), json!({ "port": 0, "limit": 0 }));
        record.inner.depth = Some(2);
        let shown = json!({ "port": 0, "limit": 0, "depth": 2 });
        assert_eq!(json!(record), shown);
        let read: Record = serde_json::from_value(shown).unwrap();
        assert_eq!(read.inner, record.inner);
    }

    /// Goal: an error has the place and the words that it has without flattening. Method: wrong
    /// fields of either type.
    #[test]
    fn errors_have_their_place() {
        for (table, place, said) in [
            (
                json!({ "depth": 70_000 }),
                "depth",
                "70000 is not a whole number from 0 to 65535",
            ),
            (
                json!({ "depth": 1, "list": [1, "x"] }),
                "list[1]",
                "\"x\" is not a whole number from 0 to 255",
            ),
            (
                json!({ "word": [] }),
                "word",
                "a list is not text in quotes",
            ),
            (
                json!({ "colour": 1 }),
                "colour",
                "\"colour\" is not known here",
            ),
            (json!([1]), "", "a list is not a table"),
        ] {
            let (at, error) = read::first::<Outer>(&table, Texts::Read).unwrap_err();
            assert_eq!(
                (read::path(&at).as_str(), error.to_string().as_str()),
                (place, said)
            );
        }
    }

    /// Goal: the refusal of an unknown field knows the fields of both types. Method: a field that
    /// neither has, and misspelt ones of each.
    #[test]
    fn the_fields_of_both_types_are_known() {
        let refusal = |key: &str| {
            let table = json!({ key: 1 });
            read::first::<Outer>(&table, Texts::Read).unwrap_err().1
        };
        let ValueError::Unknown { known, .. } = refusal("colour") else {
            panic!("not refused as unknown");
        };
        assert_eq!(known, ["port", "list", "depth", "word", "limit"]);
        for (key, nearest) in [("prt", "\"port\""), ("dept", "\"depth\"")] {
            let remedy = refusal(key).remedy().unwrap_or_default();
            assert!(remedy.contains(nearest), "{key}: {remedy}");
        }
    }
}
