//! NVMe Qualified Names (Base 4.5): the names of hosts and subsystems.

use core::borrow::Borrow;
use core::fmt;
use core::ops::Deref;
use core::str::FromStr;
use std::sync::Arc;

/// The well-known name of the discovery subsystem.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

const UUID_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// A name that obeys the grammar, or another name in use ([`Nqn::foreign`]). Cheap to clone;
/// compares and hashes as its text.
///
/// ```text
///   nqn.2025-01.io.nacre:volumes.fast        nqn.yyyy-mm.reverse.domain[:anything]
///   nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nqn(Arc<str>);

/// Why a text is not an NQN.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NqnError {
    #[error("the name is empty")]
    Empty,
    #[error(
        "the name is {length} bytes long; at most {} are allowed",
        Nqn::MAX_BYTES
    )]
    TooLong { length: usize },
    #[error("the name is not terminated by a NUL within its {field_bytes} bytes")]
    NotTerminated { field_bytes: usize },
    #[error("the name is not UTF-8 (byte {offset})")]
    NotUtf8 { offset: usize },
    #[error("the name has a control character (byte {offset})")]
    Control { offset: usize },
    #[error("the name does not begin with \"nqn.\"")]
    NoPrefix,
    #[error("\"{found}\" is not a date: write nqn.yyyy-mm, the month you owned the domain")]
    Date { found: String },
    #[error("a domain in reverse order must follow the date, as in nqn.2025-01.com.example:name")]
    NoDomain,
    #[error(
        "\"{label}\" is not a label of a domain name: 1 to 63 letters, digits and inner hyphens"
    )]
    DomainLabel { label: String },
    #[error("nothing follows the colon")]
    EmptySuffix,
    #[error("\"{found}\" is not a UUID in 8-4-4-4-12 form, which must follow {UUID_PREFIX}")]
    Uuid { found: String },
}

impl Nqn {
    /// Without the terminating NUL.
    pub const MAX_BYTES: usize = 223;

    pub fn new(text: &str) -> Result<Self, NqnError> {
        validate(text)?;
        Ok(Self(Arc::from(text)))
    }

    /// Accepts any 1 to 223 bytes of printable text. Hosts and targets in use have names such as
    /// `testnqn`, or a UUID without hyphens; SPDK and the kernel's target serve them.
    pub fn foreign(text: &str) -> Result<Self, NqnError> {
        validate_text(text)?;
        Ok(Self(Arc::from(text)))
    }

    /// True for a name that obeys the grammar.
    pub fn is_well_formed(&self) -> bool {
        validate(&self.0).is_ok()
    }

    /// A [foreign](Nqn::foreign) name from a NUL-terminated field; ignores bytes after the NUL.
    pub fn from_field(field: &[u8]) -> Result<Self, NqnError> {
        let Some(end) = field.iter().position(|&byte| byte == 0) else {
            return Err(NqnError::NotTerminated {
                field_bytes: field.len(),
            });
        };
        match core::str::from_utf8(&field[..end]) {
            Ok(text) => Self::foreign(text),
            Err(error) => Err(NqnError::NotUtf8 {
                offset: error.valid_up_to(),
            }),
        }
    }

    /// The 256-byte, NUL-padded field of Connect data, Identify and the discovery log.
    pub fn to_field(&self) -> [u8; 256] {
        let mut field = [0; 256];
        field[..self.0.len()].copy_from_slice(self.0.as_bytes());
        field
    }

    /// The name made of a UUID.
    pub fn from_uuid(uuid: uuid::Uuid) -> Self {
        Self(Arc::from(format!("{UUID_PREFIX}{uuid}")))
    }

    /// The well-known name of every discovery subsystem.
    pub fn discovery() -> Self {
        Self(Arc::from(DISCOVERY_NQN))
    }

    /// A unique name of one discovery subsystem. It begins with the well-known name: SPDK's hosts
    /// recognise a discovery subsystem by that prefix, Linux hosts by the controller's type.
    pub fn unique_discovery(uuid: uuid::Uuid) -> Self {
        Self(Arc::from(format!("{DISCOVERY_NQN}:uuid:{uuid}")))
    }

    /// True for the well-known name only.
    pub fn is_discovery(&self) -> bool {
        &*self.0 == DISCOVERY_NQN
    }

    /// The UUID of a name that is made of one.
    pub fn uuid(&self) -> Option<uuid::Uuid> {
        self.0.strip_prefix(UUID_PREFIX)?.parse().ok()
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn validate_text(text: &str) -> Result<(), NqnError> {
    if text.is_empty() {
        return Err(NqnError::Empty);
    }
    if text.len() > Nqn::MAX_BYTES {
        return Err(NqnError::TooLong { length: text.len() });
    }
    if let Some((offset, _)) = text.char_indices().find(|(_, char)| char.is_control()) {
        return Err(NqnError::Control { offset });
    }
    Ok(())
}

fn validate(text: &str) -> Result<(), NqnError> {
    validate_text(text)?;
    let rest = text.strip_prefix("nqn.").ok_or(NqnError::NoPrefix)?;
    if let Some(found) = text.strip_prefix(UUID_PREFIX) {
        return validate_uuid(found);
    }
    let (date, rest) = rest.split_once('.').unwrap_or((rest, ""));
    if !is_date(date.as_bytes()) {
        return Err(NqnError::Date {
            found: date.to_owned(),
        });
    }
    let (domain, suffix) = match rest.split_once(':') {
        Some((domain, suffix)) => (domain, Some(suffix)),
        None => (rest, None),
    };
    if domain.is_empty() {
        return Err(NqnError::NoDomain);
    }
    if let Some(label) = domain.split('.').find(|label| !is_label(label.as_bytes())) {
        return Err(NqnError::DomainLabel {
            label: label.to_owned(),
        });
    }
    match suffix {
        Some("") => Err(NqnError::EmptySuffix),
        _ => Ok(()),
    }
}

/// Accepts only the hyphenated form: `Uuid::from_str` would also take braces and a URN.
fn validate_uuid(found: &str) -> Result<(), NqnError> {
    let hyphens = [8, 13, 18, 23];
    let well_formed = found.len() == 36
        && found.bytes().enumerate().all(|(at, byte)| {
            if hyphens.contains(&at) {
                byte == b'-'
            } else {
                byte.is_ascii_hexdigit()
            }
        });
    if well_formed {
        Ok(())
    } else {
        Err(NqnError::Uuid {
            found: found.to_owned(),
        })
    }
}

/// `yyyy-mm` with a month that exists.
fn is_date(date: &[u8]) -> bool {
    let [y1, y2, y3, y4, b'-', m1, m2] = date else {
        return false;
    };
    let digits = [y1, y2, y3, y4, m1, m2]
        .iter()
        .all(|byte| byte.is_ascii_digit());
    digits && matches!((m1, m2), (b'0', b'1'..=b'9') | (b'1', b'0'..=b'2'))
}

/// A label of a domain name (RFC 1123: it may begin with a digit).
fn is_label(label: &[u8]) -> bool {
    let inner = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-';
    matches!(label, [first, .., last] if first.is_ascii_alphanumeric() && last.is_ascii_alphanumeric())
        && label.len() <= 63
        && label.iter().all(inner)
        || matches!(label, [only] if only.is_ascii_alphanumeric())
}

impl FromStr for Nqn {
    type Err = NqnError;

    fn from_str(text: &str) -> Result<Self, NqnError> {
        Self::new(text)
    }
}

impl TryFrom<&str> for Nqn {
    type Error = NqnError;

    fn try_from(text: &str) -> Result<Self, NqnError> {
        Self::new(text)
    }
}

impl TryFrom<String> for Nqn {
    type Error = NqnError;

    fn try_from(text: String) -> Result<Self, NqnError> {
        Self::new(&text)
    }
}

impl From<Nqn> for String {
    fn from(nqn: Nqn) -> Self {
        nqn.0.as_ref().to_owned()
    }
}

impl Deref for Nqn {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Nqn {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Nqn {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl PartialEq<str> for Nqn {
    fn eq(&self, other: &str) -> bool {
        &*self.0 == other
    }
}

impl PartialEq<&str> for Nqn {
    fn eq(&self, other: &&str) -> bool {
        &*self.0 == *other
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Names seen in the wild are accepted.
    #[test]
    fn good_names() {
        for name in [
            "nqn.2014-08.org.nvmexpress.discovery",
            "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
            "nqn.2014-08.org.nvmexpress:uuid:4C4C4544-0042-3510-8046-C7C04F485A32",
            "nqn.2014-08.org.nvmexpress:NVMf:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
            "nqn.2014-08.com.vmware:nvme:esx-01",
            "nqn.2016-06.io.spdk:cnode1",
            "nqn.2019-05.io.openebs:2d6f3a80-3b1b-4a4a-9b0e-0d6a4b2a5b1e",
            "nqn.1992-08.com.netapp:sn.d039ea000000:subsystem.s:with:colons",
            "nqn.2025-01.com.3m.x-y.a:\u{fc}ber",
            "nqn.2025-12.io.nacre",
        ] {
            assert_eq!(Nqn::new(name).map(String::from), Ok(name.to_owned()));
        }
    }

    /// Names that hosts and targets in use have.
    #[test]
    fn foreign_names() {
        let longest = "x".repeat(223);
        for name in [
            "testnqn",
            "a",
            "/var/lib/kubelet/a b",
            "nqn.2014-08.org.nvmexpress:uuid:07e4a0a641d54bff96b28a173dcfb6b5",
            "iqn.1993-08.org.debian:01:é",
            &longest,
        ] {
            let nqn = Nqn::foreign(name).unwrap();
            assert_eq!((nqn.as_str(), nqn.is_well_formed()), (name, false));
            assert_eq!(Nqn::from_field(&nqn.to_field()), Ok(nqn));
        }
        assert!(
            Nqn::foreign("nqn.2025-01.io.nacre:x")
                .unwrap()
                .is_well_formed()
        );
        for (name, error) in [
            ("", NqnError::Empty),
            (&*"x".repeat(224), NqnError::TooLong { length: 224 }),
            ("a\tb", NqnError::Control { offset: 1 }),
        ] {
            assert_eq!(Nqn::foreign(name), Err(error));
        }
    }

    /// Each rule has a name that breaks it and nothing else.
    #[test]
    fn bad_names() {
        let date = |found: &str| NqnError::Date {
            found: found.to_owned(),
        };
        let label = |label: &str| NqnError::DomainLabel {
            label: label.to_owned(),
        };
        let uuid = |found: &str| NqnError::Uuid {
            found: found.to_owned(),
        };
        let long = format!("nqn.2025-01.io.nacre:{}", "x".repeat(203));
        let long_label = "a".repeat(64);
        for (name, error) in [
            ("", NqnError::Empty),
            (&*long, NqnError::TooLong { length: 224 }),
            ("iqn.2025-01.io.nacre:x", NqnError::NoPrefix),
            ("NQN.2025-01.io.nacre:x", NqnError::NoPrefix),
            (
                "nqn.2025-01.io.nacre:x\ny",
                NqnError::Control { offset: 22 },
            ),
            ("nqn.", date("")),
            ("nqn.2025-13.io.nacre:x", date("2025-13")),
            ("nqn.2025-00.io.nacre:x", date("2025-00")),
            ("nqn.2025-1.io.nacre:x", date("2025-1")),
            ("nqn.20250-1.io.nacre:x", date("20250-1")),
            ("nqn.io.nacre:x", date("io")),
            ("nqn.2025-01", NqnError::NoDomain),
            ("nqn.2025-01.:x", NqnError::NoDomain),
            ("nqn.2025-01.io..nacre:x", label("")),
            ("nqn.2025-01.io.-nacre:x", label("-nacre")),
            ("nqn.2025-01.io.nacre-:x", label("nacre-")),
            ("nqn.2025-01.io.na_cre:x", label("na_cre")),
            (&format!("nqn.2025-01.{long_label}:x"), label(&long_label)),
            ("nqn.2025-01.io.nacre:", NqnError::EmptySuffix),
            ("nqn.2014-08.org.nvmexpress:uuid:", uuid("")),
            (
                "nqn.2014-08.org.nvmexpress:uuid:f81d4fae7dec11d0a76500a0c91e6bf6",
                uuid("f81d4fae7dec11d0a76500a0c91e6bf6"),
            ),
            (
                "nqn.2014-08.org.nvmexpress:uuid:g81d4fae-7dec-11d0-a765-00a0c91e6bf6",
                uuid("g81d4fae-7dec-11d0-a765-00a0c91e6bf6"),
            ),
        ] {
            assert_eq!(Nqn::new(name), Err(error), "{name}");
        }
        assert!(Nqn::new(&long[..223]).is_ok(), "223 bytes are allowed");
    }

    #[test]
    fn fields() {
        let mut field = [0u8; 256];
        assert_eq!(Nqn::from_field(&field), Err(NqnError::Empty));
        field[..20].copy_from_slice(b"nqn.2025-01.io.nacre");
        field[21] = b'!';
        assert_eq!(Nqn::from_field(&field).unwrap(), "nqn.2025-01.io.nacre");
        field[19] = 0xff;
        assert_eq!(
            Nqn::from_field(&field),
            Err(NqnError::NotUtf8 { offset: 19 })
        );
        field.fill(b'x');
        assert_eq!(
            Nqn::from_field(&field),
            Err(NqnError::NotTerminated { field_bytes: 256 })
        );
        field[224] = 0;
        assert_eq!(
            Nqn::from_field(&field),
            Err(NqnError::TooLong { length: 224 })
        );
    }

    #[test]
    fn uuids() {
        let uuid = uuid::uuid!("f81d4fae-7dec-11d0-a765-00a0c91e6bf6");
        let nqn = Nqn::from_uuid(uuid);
        assert_eq!(Nqn::new(&nqn), Ok(nqn.clone()));
        assert_eq!(nqn.uuid(), Some(uuid));
        assert_eq!(Nqn::discovery().uuid(), None);
        assert!(Nqn::new(DISCOVERY_NQN).unwrap().is_discovery());
        let unique = Nqn::unique_discovery(uuid);
        assert_eq!(Nqn::new(&unique), Ok(unique.clone()));
        assert!(unique.starts_with(DISCOVERY_NQN) && !unique.is_discovery());
    }

    proptest! {
        /// No bytes make it panic, and a name survives its field.
        #[test]
        fn any_field(field in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(nqn) = Nqn::from_field(&field) {
                prop_assert_eq!(Nqn::from_field(&nqn.to_field()), Ok(nqn));
            }
        }

        #[test]
        fn generated_names(
            name in "nqn\\.20[0-9]{2}-(0[1-9]|1[0-2])(\\.[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?){1,3}(:[ -~]{1,20})?",
        ) {
            let nqn = Nqn::new(&name);
            prop_assert!(nqn.is_ok() || name.starts_with(UUID_PREFIX), "{name}: {nqn:?}");
        }
    }
}
