//! The set-up code of the administration page. The machine shows it on its own screen; a user who
//! types it into the page may create the first account.

use std::fmt;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// 32 letters and digits without pairs that look alike.
const LETTERS: &[u8; 32] = b"23456789ABCDEFGHJKLMNPQRSTUVWXYZ";
/// 12 of 32 letters are 60 bits, too many to guess, because wrong codes cause delays.
const LENGTH: usize = 12;
const GROUP: usize = 4;

#[derive(Clone)]
pub(crate) struct SetupCode(Zeroizing<String>);

impl fmt::Debug for SetupCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SetupCode")
    }
}

impl SetupCode {
    pub(crate) fn random() -> Result<Self, getrandom::Error> {
        let mut bytes = Zeroizing::new([0; LENGTH]);
        getrandom::fill(&mut *bytes)?;
        let letters = bytes
            .iter()
            .map(|byte| char::from(LETTERS[usize::from(byte % 32)]));
        Ok(Self(Zeroizing::new(letters.collect())))
    }

    /// The code in groups of letters, for display.
    pub(crate) fn shown(&self) -> Zeroizing<String> {
        let mut shown = Zeroizing::new(String::with_capacity(LENGTH + LENGTH / GROUP));
        for (at, letter) in self.0.chars().enumerate() {
            if at > 0 && at % GROUP == 0 {
                shown.push('-');
            }
            shown.push(letter);
        }
        shown
    }

    /// True if the text is the code, regardless of case, spaces and hyphens.
    pub(crate) fn is(&self, typed: &str) -> bool {
        let typed: Zeroizing<String> = Zeroizing::new(
            typed
                .chars()
                .filter(|letter| !matches!(letter, ' ' | '-'))
                .map(|letter| letter.to_ascii_uppercase())
                .collect(),
        );
        typed.as_bytes().ct_eq(self.0.as_bytes()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_typed_as_people_type() {
        let code = SetupCode::random().unwrap();
        assert_eq!(format!("{code:?}"), "SetupCode");
        let shown = code.shown();
        assert_eq!(shown.len(), 14);
        assert!(code.is(&shown) && code.is(&shown.to_lowercase()));
        assert!(code.is(&shown.replace('-', " ")));
        assert!(!code.is("") && !code.is(&shown[1..]) && !code.is(&format!("{}A", *shown)));
        assert!(!code.is(&SetupCode::random().unwrap().shown()));
        let letters: std::collections::BTreeSet<_> = LETTERS.iter().collect();
        assert_eq!(letters.len(), 32);
    }
}
