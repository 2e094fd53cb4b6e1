//! Reads the elements of DER (X.690) that names, certificates and revocation lists are made of.
//!
//! It bounds its work and refuses what it does not know. Signatures are checked elsewhere.

pub(crate) const INTEGER: u8 = 0x02;
pub(crate) const SEQUENCE: u8 = 0x30;

/// An element is missing, or of another type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is not DER at \"{field}\"")]
pub struct Malformed {
    pub field: &'static str,
}

/// The next element; `None` if it is not DER.
pub(crate) fn any<'a>(input: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (&tag, rest) = input.split_first()?;
    let (&first, rest) = rest.split_first()?;
    // The short form, or one to three bytes of length, without leading zeros.
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81..=0x83 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(first - 0x80))?;
            let length = bytes.iter().fold(0, |sum, b| sum << 8 | usize::from(*b));
            let shortest = if bytes.len() == 1 {
                0x80
            } else {
                1 << (8 * (bytes.len() - 1))
            };
            (length >= shortest).then_some((length, rest))?
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    *input = rest;
    Some((tag, content))
}

/// The content of the next element, which must have this tag.
pub(crate) fn read<'a>(
    input: &mut &'a [u8],
    expected: u8,
    field: &'static str,
) -> Result<&'a [u8], Malformed> {
    match any(input) {
        Some((tag, content)) if tag == expected => Ok(content),
        _ => Err(Malformed { field }),
    }
}
