//! Versions of the image: two to four numbers with dots. systemd and systemd-boot order these the
//! same way.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(Vec<u32>);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("version {0:?}: not two to four numbers with dots, such as 1.2.0")]
pub struct VersionError(String);

impl FromStr for Version {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, VersionError> {
        let refuse = || VersionError(text.chars().take(40).collect());
        let numbers: Option<Vec<u32>> = text.split('.').take(5).map(number).collect();
        match numbers {
            Some(numbers) if (2..=4).contains(&numbers.len()) => Ok(Self(numbers)),
            _ => Err(refuse()),
        }
    }
}

/// One spelling for each number: two versions are equal only if their texts are.
fn number(text: &str) -> Option<u32> {
    let is_short = (1..=6).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    let is_plain = text == "0" || !text.starts_with('0');
    if is_short && is_plain {
        text.parse().ok()
    } else {
        None
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, number) in self.0.iter().enumerate() {
            let dot = if at == 0 { "" } else { "." };
            write!(f, "{dot}{number}")?;
        }
        Ok(())
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_have_one_spelling_and_an_order() {
        let texts = ["0.1", "0.1.0", "0.2.0", "0.10.0", "1.0.0.1", "10.0"];
        let versions: Vec<Version> = texts.iter().map(|t| t.parse().unwrap()).collect();
        assert!(versions.is_sorted());
        for (version, text) in versions.iter().zip(texts) {
            assert_eq!(version.to_string(), text);
        }
        for bad in [
            "",
            "1",
            "1.",
            ".1",
            "1..2",
            "1.2.3.4.5",
            "01.2",
            "1.2-rc1",
            "1.-2",
            "1.1234567",
            "+1.2",
            "1.2\n",
            "1.٣",
        ] {
            assert!(bad.parse::<Version>().is_err(), "{bad:?}");
        }
    }
}
