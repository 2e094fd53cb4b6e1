//! The subject of an X.509 certificate, read from DER and from text (RFC 4514). It decides the role
//! of a client over TLS.
//!
//! ```text
//!   Certificate { TBSCertificate { version?, serial, algorithm, issuer, validity, subject, .. },
//!                 .. }
//!   subject = SEQUENCE of SET of SEQUENCE { type OID, value string }
//! ```
//!
//! The TLS handshake has verified a client's certificate before. This parser bounds its work, and
//! refuses unknown encodings. It reads the attributes of a multi-valued RDN as separate ones.

use std::fmt;
use std::str::FromStr;

use super::der::{INTEGER, Malformed, SEQUENCE, any, read};

const OID: u8 = 0x06;
const UTF8: u8 = 0x0c;
const PRINTABLE: u8 = 0x13;
const TELETEX: u8 = 0x14;
const IA5: u8 = 0x16;
const BMP: u8 = 0x1e;
const SET: u8 = 0x31;
const VERSION: u8 = 0xa0;

/// Most attributes, and most bytes of their types and values, because they appear in the log and in
/// the audit log.
const MAX_ATTRIBUTES: usize = 32;
const MAX_BYTES: usize = 1024;

/// The types of attributes with a short name: DER of the OID, name.
const TYPES: [(&[u8], &str); 10] = [
    (&[0x55, 4, 3], "CN"),
    (&[0x55, 4, 5], "serialNumber"),
    (&[0x55, 4, 6], "C"),
    (&[0x55, 4, 7], "L"),
    (&[0x55, 4, 8], "ST"),
    (&[0x55, 4, 10], "O"),
    (&[0x55, 4, 11], "OU"),
    (
        &[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 1],
        "UID",
    ),
    (
        &[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 25],
        "DC",
    ),
    (
        &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 1],
        "emailAddress",
    ),
];

/// The attributes of a certificate's subject, or those that `[rpc.tls.roles]` requires for a role.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Subject {
    /// Type and value, the most specific attribute first.
    attributes: Vec<(String, String)>,
}

/// The reason that a certificate has no usable subject.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubjectError {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("its subject has a value of ASN.1 type {tag}, which is no text")]
    NoText { tag: u8 },
    #[error("its subject is empty")]
    Empty,
    #[error("its subject has more than {MAX_ATTRIBUTES} attributes or {MAX_BYTES} bytes")]
    Long,
}

/// The error of a text that is not a [`Subject`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not a subject of a certificate")]
pub struct NoSubject(String);

impl Subject {
    /// How a user writes a subject, for error messages.
    pub const FORMS: &'static str =
        "write attributes as openssl prints them: \"CN=ops\" or \"CN=ops,O=Example\"";

    /// The subject of a certificate in DER.
    pub fn of_certificate(der: &[u8]) -> Result<Self, SubjectError> {
        let mut rest = der;
        let mut rest = read(&mut rest, SEQUENCE, "certificate")?;
        let mut fields = read(&mut rest, SEQUENCE, "tbsCertificate")?;
        if fields.first() == Some(&VERSION) {
            read(&mut fields, VERSION, "version")?;
        }
        read(&mut fields, INTEGER, "serialNumber")?;
        for field in ["signature", "issuer", "validity"] {
            read(&mut fields, SEQUENCE, field)?;
        }
        Self::of_name(read(&mut fields, SEQUENCE, "subject")?)
    }

    /// Reads a name from the content of its `SEQUENCE`.
    pub(crate) fn of_name(mut name: &[u8]) -> Result<Self, SubjectError> {
        let (mut attributes, mut bytes) = (Vec::new(), 0);
        while !name.is_empty() {
            let mut set = read(&mut name, SET, "subject")?;
            while !set.is_empty() {
                let mut pair = read(&mut set, SEQUENCE, "subject")?;
                let oid = read(&mut pair, OID, "attribute type")?;
                let (tag, value) = any(&mut pair).ok_or(Malformed {
                    field: "attribute value",
                })?;
                bytes += oid.len() + value.len();
                if attributes.len() == MAX_ATTRIBUTES || bytes > MAX_BYTES {
                    return Err(SubjectError::Long);
                }
                attributes.push((type_of(oid)?, text_of(tag, value)?));
            }
        }
        // A certificate has the most specific attribute last, the text of RFC 4514 first.
        attributes.reverse();
        if attributes.is_empty() {
            return Err(SubjectError::Empty);
        }
        Ok(Self { attributes })
    }

    /// True if this subject has each attribute of `wanted`.
    pub fn has_all_of(&self, wanted: &Self) -> bool {
        let mut wanted = wanted.attributes.iter();
        wanted.all(|attribute| self.attributes.contains(attribute))
    }
}

/// The short name of an attribute type, or its OID with dots.
fn type_of(oid: &[u8]) -> Result<String, SubjectError> {
    if let Some((_, name)) = TYPES.iter().find(|(known, _)| *known == oid) {
        return Ok((*name).to_owned());
    }
    let malformed = || {
        let field = "attribute type";
        SubjectError::Malformed(Malformed { field })
    };
    let (mut arcs, mut arc) = (Vec::new(), 0_u64);
    for byte in oid {
        if arc > u64::MAX >> 7 {
            return Err(malformed());
        }
        arc = arc << 7 | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            if arcs.is_empty() {
                let first = (arc / 40).min(2);
                arcs.extend([first, arc - 40 * first]);
            } else {
                arcs.push(arc);
            }
            arc = 0;
        }
    }
    if oid.last().is_none_or(|byte| byte & 0x80 != 0) {
        return Err(malformed());
    }
    let arcs: Vec<String> = arcs.iter().map(ToString::to_string).collect();
    Ok(arcs.join("."))
}

fn text_of(tag: u8, value: &[u8]) -> Result<String, SubjectError> {
    let field = "attribute value";
    let malformed = SubjectError::Malformed(Malformed { field });
    match tag {
        UTF8 | PRINTABLE | IA5 => String::from_utf8(value.to_vec()).map_err(|_| malformed),
        TELETEX => Ok(value.iter().map(|byte| char::from(*byte)).collect()),
        BMP => {
            let (units, rest) = value.as_chunks::<2>();
            let units = units.iter().map(|unit| u16::from_be_bytes(*unit));
            let text: Result<String, _> = char::decode_utf16(units).collect();
            match text {
                Ok(text) if rest.is_empty() => Ok(text),
                _ => Err(malformed),
            }
        }
        tag => Err(SubjectError::NoText { tag }),
    }
}

/// Characters that are escaped anywhere in a value. RFC 4514 requires this for all but `=`.
const SPECIAL: &str = "\"+,;<>\\=";

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (kind, value)) in self.attributes.iter().enumerate() {
            if at > 0 {
                f.write_str(",")?;
            }
            write!(f, "{kind}=")?;
            let last = value.chars().count().saturating_sub(1);
            for (at, letter) in value.chars().enumerate() {
                match letter {
                    '#' if at == 0 => f.write_str("\\#")?,
                    ' ' if at == 0 || at == last => f.write_str("\\ ")?,
                    letter if SPECIAL.contains(letter) => write!(f, "\\{letter}")?,
                    letter if letter.is_control() => {
                        let mut bytes = [0; 4];
                        for byte in letter.encode_utf8(&mut bytes).bytes() {
                            write!(f, "\\{byte:02x}")?;
                        }
                    }
                    letter => write!(f, "{letter}")?,
                }
            }
        }
        Ok(())
    }
}

impl FromStr for Subject {
    type Err = NoSubject;

    fn from_str(text: &str) -> Result<Self, NoSubject> {
        let attributes = attributes(text).filter(|all| !all.is_empty());
        let attributes = attributes.ok_or_else(|| NoSubject(text.to_owned()))?;
        Ok(Self { attributes })
    }
}

fn attributes(text: &str) -> Option<Vec<(String, String)>> {
    let (mut all, mut bytes) = (Vec::new(), text.bytes().peekable());
    while bytes.peek().is_some() {
        let (mut kind, mut value) = (Vec::new(), Vec::new());
        loop {
            match bytes.next()? {
                b'=' => break,
                byte if byte.is_ascii_alphanumeric() || byte == b'.' => kind.push(byte),
                b' ' if kind.is_empty() => {}
                _ => return None,
            }
        }
        // The number of bytes up to the last one that is no plain space.
        let mut kept = 0;
        loop {
            match bytes.next() {
                None => break,
                Some(b',' | b'+') => {
                    // A separator needs another attribute after it.
                    bytes.peek()?;
                    break;
                }
                Some(b'\\') => {
                    value.push(escaped(&mut bytes)?);
                    kept = value.len();
                }
                Some(b' ') => value.push(b' '),
                Some(byte) => {
                    value.push(byte);
                    kept = value.len();
                }
            }
        }
        value.truncate(kept);
        let kind = String::from_utf8(kind)
            .ok()
            .filter(|kind| !kind.is_empty())?;
        let known = TYPES
            .iter()
            .find(|(_, name)| name.eq_ignore_ascii_case(&kind));
        let kind = known.map_or(kind, |(_, name)| (*name).to_owned());
        let value = String::from_utf8(value)
            .ok()
            .filter(|value| !value.is_empty())?;
        all.push((kind, value));
    }
    Some(all)
}

/// The byte after a backslash: itself, or two hexadecimal digits.
fn escaped(bytes: &mut impl Iterator<Item = u8>) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let first = bytes.next()?;
    match digit(first) {
        None => Some(first),
        Some(high) => u8::try_from(high << 4 | digit(bytes.next()?)?).ok(),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: subjects are read from certificates and from text, and damaged ones refused.

    use super::*;
    use crate::tls::files::tests::{OPS_CERT, certificate};

    fn name(attributes: &[(&[u8], u8, &[u8])]) -> Vec<u8> {
        let mut all = Vec::new();
        for (oid, tag, value) in attributes {
            let element = |tag: u8, content: &[u8]| {
                let mut bytes = vec![tag, u8::try_from(content.len()).unwrap()];
                bytes.extend_from_slice(content);
                bytes
            };
            let pair = [element(OID, oid), element(*tag, value)].concat();
            all.extend(element(SET, &element(SEQUENCE, &pair)));
        }
        all
    }

    #[test]
    fn the_subject_of_a_real_certificate() {
        let der = certificate(OPS_CERT);
        let subject = Subject::of_certificate(&der).unwrap();
        assert_eq!(subject.to_string(), "CN=ops,O=Nacre tests");
        // No prefix of it is accepted, and no damaged byte makes the parser fail otherwise.
        let end = der.windows(3).rposition(|bytes| bytes == b"ops").unwrap() + 3;
        for length in 0..end {
            assert!(Subject::of_certificate(&der[..length]).is_err(), "{length}");
        }
        for at in 0..der.len() {
            let mut damaged = der.clone();
            damaged[at] ^= 0xff;
            let _ = Subject::of_certificate(&damaged);
        }
    }

    #[test]
    fn attributes_of_every_kind() {
        let cn = &[0x55, 4, 3][..];
        for (attributes, text) in [
            (
                vec![
                    (&[0x55, 4, 10][..], PRINTABLE, &b"Ex, Inc."[..]),
                    (cn, UTF8, b"a=b"),
                ],
                "CN=a\\=b,O=Ex\\, Inc.",
            ),
            (vec![(cn, BMP, &[0, b'x', 0x20, 0xac][..])], "CN=x\u{20ac}"),
            (vec![(cn, TELETEX, &[0xe9][..])], "CN=\u{e9}"),
            (vec![(cn, IA5, b"#a \n")], "CN=\\#a \\0a"),
            (vec![(cn, UTF8, b" a ")], "CN=\\ a\\ "),
            (
                vec![(&[0x2a, 0x86, 0x48, 1][..], UTF8, b"x")],
                "1.2.840.1=x",
            ),
        ] {
            let subject = Subject::of_name(&name(&attributes)).unwrap();
            assert_eq!(subject.to_string(), text);
            assert_eq!(text.parse::<Subject>().unwrap(), subject);
        }
        let refused =
            |attributes: &[(&[u8], u8, &[u8])]| Subject::of_name(&name(attributes)).unwrap_err();
        let malformed = |field| SubjectError::Malformed(Malformed { field });
        let (value, kind) = (malformed("attribute value"), malformed("attribute type"));
        assert_eq!(refused(&[]), SubjectError::Empty);
        assert_eq!(refused(&[(cn, 4, b"x")]), SubjectError::NoText { tag: 4 });
        assert_eq!(refused(&[(cn, UTF8, &[0xff])]), value);
        assert_eq!(refused(&[(cn, BMP, &[0])]), value);
        assert_eq!(refused(&[(&[0x80], UTF8, b"x")]), kind);
        assert_eq!(refused(&[(&[0xff; 12], UTF8, b"x")]), kind);
        assert_eq!(
            refused(&vec![(cn, UTF8, &b"x"[..]); MAX_ATTRIBUTES + 1]),
            SubjectError::Long
        );
        assert_eq!(
            refused(&vec![(cn, UTF8, &[b'x'; 100][..]); 11]),
            SubjectError::Long
        );
    }

    #[test]
    fn texts_are_read() {
        for (text, shown) in [
            ("cn=ops", "CN=ops"),
            ("CN=ops , o=x", "CN=ops,O=x"),
            ("CN=a+OU=b", "CN=a,OU=b"),
            ("CN=\\c3\\a9", "CN=\u{e9}"),
        ] {
            assert_eq!(text.parse::<Subject>().unwrap().to_string(), shown);
        }
        for text in [
            "", "ops", "CN=", "=x", "CN=a,", "CN=a,x", "C N=a", "CN=a\\", "CN=\\c3", "CN=a\\4",
        ] {
            assert_eq!(text.parse::<Subject>(), Err(NoSubject(text.to_owned())));
        }
    }
}
