//! Functions for serde's `deserialize_with`: a field of an integer type is read from a number, or
//! from text with a unit. A number that does not fit in the field's type is an error.

use std::fmt;

use serde::Deserializer;
use serde::de::{self, Unexpected, Visitor};

use crate::{size, time};

/// A size in bytes: a plain number, or text with a unit ([`size::parse_bytes`]).
pub fn bytes<'de, D: Deserializer<'de>, N: TryFrom<u64>>(from: D) -> Result<N, D::Error> {
    from.deserialize_any(Number::new(BYTES, size::parse_bytes))
}

/// Like [`bytes`], or null.
pub fn some_bytes<'de, D: Deserializer<'de>, N: TryFrom<u64>>(
    from: D,
) -> Result<Option<N>, D::Error> {
    from.deserialize_option(Optional(Number::new(BYTES, size::parse_bytes)))
}

/// A size in MiB: a plain number of MiB, or text with a unit that is a whole number of MiB.
pub fn mebibytes<'de, D: Deserializer<'de>, N: TryFrom<u64>>(from: D) -> Result<N, D::Error> {
    from.deserialize_any(Number::new(MEBIBYTES, size::parse_mebibytes))
}

/// Like [`mebibytes`], or null.
pub fn some_mebibytes<'de, D: Deserializer<'de>, N: TryFrom<u64>>(
    from: D,
) -> Result<Option<N>, D::Error> {
    from.deserialize_option(Optional(Number::new(MEBIBYTES, size::parse_mebibytes)))
}

/// A time in whole microseconds: a plain number, or text with a unit (`"100us"`). At most 100
/// years ([`time::LONGEST`]), as for every time here.
pub fn micros<'de, D: Deserializer<'de>, N: TryFrom<u64>>(from: D) -> Result<N, D::Error> {
    let expected = "a time: a number of microseconds, or with a unit, such as \"100us\"";
    from.deserialize_any(Number::time(expected, 1000))
}

/// A time in whole milliseconds: a plain number, or text with a unit (`"250ms"`).
pub fn millis<'de, D: Deserializer<'de>, N: TryFrom<u64>>(from: D) -> Result<N, D::Error> {
    from.deserialize_any(Number::time(MILLIS, 1_000_000))
}

/// Like [`millis`], or null.
pub fn some_millis<'de, D: Deserializer<'de>, N: TryFrom<u64>>(
    from: D,
) -> Result<Option<N>, D::Error> {
    from.deserialize_option(Optional(Number::time(MILLIS, 1_000_000)))
}

/// A time in whole hours: a plain number, or text with a unit (`"7d"`); or null.
pub fn some_hours<'de, D: Deserializer<'de>, N: TryFrom<u64>>(
    from: D,
) -> Result<Option<N>, D::Error> {
    let expected = "a time: a number of hours, or with a unit, such as \"7d\"";
    from.deserialize_option(Optional(Number::time(expected, 3_600_000_000_000)))
}

/// A time in whole seconds: a plain number, or text with a unit (`"10s"`).
pub fn seconds<'de, D: Deserializer<'de>, N: TryFrom<u64>>(from: D) -> Result<N, D::Error> {
    from.deserialize_any(Number::time(SECONDS, 1_000_000_000))
}

/// Like [`seconds`], or null.
pub fn some_seconds<'de, D: Deserializer<'de>, N: TryFrom<u64>>(
    from: D,
) -> Result<Option<N>, D::Error> {
    from.deserialize_option(Optional(Number::time(SECONDS, 1_000_000_000)))
}

const BYTES: &str = "a size, such as 4096 or \"64MiB\"";
const MEBIBYTES: &str = "a size: a number of MiB, or with a unit, such as \"2GiB\"";
const SECONDS: &str = "a time: a number of seconds, or with a unit, such as \"10s\"";
const MILLIS: &str = "a time: a number of milliseconds, or with a unit, such as \"250ms\"";

/// A number, or text that contains one.
struct Number<N> {
    expected: &'static str,
    read: Reading,
    number: std::marker::PhantomData<N>,
}

#[derive(Clone, Copy)]
enum Reading {
    Size(fn(&str) -> Result<u64, String>),
    /// A time, counted in units of this many nanoseconds.
    Time(u64),
}

impl<N> Number<N> {
    fn new(expected: &'static str, read: fn(&str) -> Result<u64, String>) -> Self {
        Self {
            expected,
            read: Reading::Size(read),
            number: std::marker::PhantomData,
        }
    }

    fn time(expected: &'static str, nanoseconds: u64) -> Self {
        Self {
            expected,
            read: Reading::Time(nanoseconds),
            number: std::marker::PhantomData,
        }
    }
}

/// A number, or null.
struct Optional<N>(Number<N>);

impl<'de, N: TryFrom<u64>> Visitor<'de> for Optional<N> {
    type Value = Option<N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_none<E>(self) -> Result<Option<N>, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Option<N>, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, from: D) -> Result<Option<N>, D::Error> {
        from.deserialize_any(self.0).map(Some)
    }
}

impl<N: TryFrom<u64>> Visitor<'_> for Number<N> {
    type Value = N;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<N, E> {
        if let Reading::Time(nanoseconds) = self.read {
            time::bounded(number, nanoseconds).map_err(E::custom)?;
        }
        number.try_into().map_err(|_| {
            let most = u64::MAX >> (64 - 8 * size_of::<N>().min(8));
            E::custom(format!("{number} is more than {most}"))
        })
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<N, E> {
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_) => Err(E::invalid_value(Unexpected::Signed(number), &self)),
        }
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<N, E> {
        let number = match self.read {
            Reading::Size(read) => read(text),
            Reading::Time(nanoseconds) => time::in_units(text, nanoseconds),
        };
        let number = number.map_err(E::custom)?;
        self.visit_u64(number)
    }
}
