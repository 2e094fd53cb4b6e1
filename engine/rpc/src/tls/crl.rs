//! Certificate revocation lists (RFC 5280, 5): the issuer and the dates of a list.
//!
//! ```text
//!   CertificateList { TBSCertList, .. }
//!   TBSCertList { version?, signature, issuer, thisUpdate, nextUpdate, .. }
//! ```
//!
//! rustls checks certificates against the lists, and verifies the signatures of the lists. It does
//! not show when a list ends. The log and `nacre doctor` do, before the clients of its authority
//! are refused.

use std::time::SystemTime;

use nacre_engine_values::time;

use crate::der::{INTEGER, Malformed, SEQUENCE, any, read};
use crate::subject::Subject;

const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// The parts of a list that rustls does not show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Dates<'a> {
    /// The name of the authority: the content of its `SEQUENCE`.
    pub(super) issuer: &'a [u8],
    /// thisUpdate: when the list was issued.
    pub(super) made: SystemTime,
    /// nextUpdate: when the authority issues another list. The list is valid until then.
    pub(super) until: SystemTime,
}

impl Dates<'_> {
    /// Reads a list in DER.
    pub(super) fn of_list(mut der: &[u8]) -> Result<Dates<'_>, Malformed> {
        let mut list = read(&mut der, SEQUENCE, "certificateList")?;
        let mut fields = read(&mut list, SEQUENCE, "tbsCertList")?;
        if fields.first() == Some(&INTEGER) {
            read(&mut fields, INTEGER, "version")?;
        }
        read(&mut fields, SEQUENCE, "signature")?;
        Ok(Dates {
            issuer: read(&mut fields, SEQUENCE, "issuer")?,
            made: moment(&mut fields, "thisUpdate")?,
            until: moment(&mut fields, "nextUpdate")?,
        })
    }
}

/// An authority for client certificates, and the end of its revocation list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revocation {
    /// The name of the authority (RFC 4514).
    pub authority: String,
    /// The end of its list's validity; `None`: there is no list.
    pub until: Option<SystemTime>,
}

impl Revocation {
    pub(super) fn of(name: &[u8], until: Option<SystemTime>) -> Self {
        let subject = Subject::of_name(name);
        let authority = subject.map_or_else(|_| "(no name)".to_owned(), |name| name.to_string());
        Self { authority, until }
    }

    /// The reason that clients with certificates of this authority are refused at `now`; `None`:
    /// they are not.
    pub fn problem(&self, now: SystemTime) -> Option<String> {
        let authority = &self.authority;
        match self.until {
            None => Some(format!("there is no revocation list of {authority}")),
            Some(until) if until <= now => {
                let until = time::moment(until);
                Some(format!(
                    "the revocation list of {authority} ended at {until}"
                ))
            }
            Some(_) => None,
        }
    }
}

/// `YYMMDDHHMMSSZ` until 2049, `YYYYMMDDHHMMSSZ` afterwards (RFC 5280, 4.1.2.5).
fn moment(input: &mut &[u8], field: &'static str) -> Result<SystemTime, Malformed> {
    let malformed = Malformed { field };
    let (tag, text) = any(input).ok_or(malformed)?;
    let text = std::str::from_utf8(text).map_err(|_| malformed)?;
    let (year, rest) = match tag {
        UTC_TIME => {
            let (year, rest) = text.split_at_checked(2).ok_or(malformed)?;
            let century = if year < "50" { "20" } else { "19" };
            (format!("{century}{year}"), rest)
        }
        GENERALIZED_TIME => {
            let (year, rest) = text.split_at_checked(4).ok_or(malformed)?;
            (year.to_owned(), rest)
        }
        _ => return Err(malformed),
    };
    let digits = rest.strip_suffix('Z').ok_or(malformed)?;
    if digits.len() != 10 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(malformed);
    }
    let [month, day, hour, minute, second] = [0, 2, 4, 6, 8].map(|at| &digits[at..at + 2]);
    let text = format!("{year}-{month}-{day}T{hour}:{minute}:{second}Z");
    time::parse_moment(&text).map_err(|_| malformed)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    fn der(tag: u8, content: &[u8]) -> Vec<u8> {
        let length = u8::try_from(content.len()).unwrap();
        [&[tag, length][..], content].concat()
    }

    fn list(version: &[u8], made: &[u8], until: &[u8]) -> Vec<u8> {
        let issuer = der(SEQUENCE, b"name");
        let fields = [version, &der(SEQUENCE, b""), &issuer, made, until].concat();
        der(SEQUENCE, &der(SEQUENCE, &fields))
    }

    #[test]
    fn dates_of_lists() {
        let at = |text: &str| time::parse_moment(text).unwrap();
        let utc = |text: &[u8]| der(UTC_TIME, text);
        let long = |text: &[u8]| der(GENERALIZED_TIME, text);
        let version = der(INTEGER, &[1]);
        let good = list(&version, &utc(b"991231235959Z"), &long(b"20500102030405Z"));
        let dates = Dates::of_list(&good).unwrap();
        assert_eq!(dates.issuer, b"name");
        assert_eq!(dates.made, at("1999-12-31T23:59:59Z"));
        assert_eq!(dates.until, at("2050-01-02T03:04:05Z"));
        let first = list(&[], &utc(b"490101000000Z"), &utc(b"491231000000Z"));
        assert_eq!(Dates::of_list(&first).unwrap().made, at("2049-01-01"));
        for wrong in [
            &b"2701010000Z"[..],
            b"270101000000",
            b"270101000000+0100",
            b"271301000000Z",
            b"27\xc3\xa901000000Z",
            b"2701010000x0Z",
            b"",
        ] {
            let list = list(&version, &utc(b"260101000000Z"), &utc(wrong));
            let refused = Dates::of_list(&list).unwrap_err();
            assert_eq!(refused.field, "nextUpdate", "{wrong:?}");
        }
        for length in 0..good.len() {
            assert!(Dates::of_list(&good[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn problems_of_lists() {
        let day = Duration::from_secs(24 * 3600);
        let name = [
            0x31, 12, 0x30, 10, 6, 3, 0x55, 4, 3, 0x0c, 3, b'T', b'o', b'p',
        ];
        let of = |until| Revocation::of(&name, until);
        assert_eq!(of(None).authority, "CN=Top");
        let now = UNIX_EPOCH + day;
        assert_eq!(of(Some(now + day)).problem(now), None);
        let ended = of(Some(now)).problem(now).unwrap();
        assert_eq!(
            ended,
            "the revocation list of CN=Top ended at 1970-01-02T00:00:00Z"
        );
        let none = of(None).problem(now).unwrap();
        assert_eq!(none, "there is no revocation list of CN=Top");
        assert_eq!(Revocation::of(b"?", None).authority, "(no name)");
    }
}
