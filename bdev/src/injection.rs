//! Error injection: rules that make commands of a queue fail, for tests of failing devices and
//! paths. Remote controllers and local drives use the same rules. A queue without rules does not
//! look them up.

use std::collections::BTreeMap;
use std::time::Duration;

/// What happens to the next commands of one opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Injection {
    /// Status code type and status code, of which 3 and 8 bits are used.
    pub sct: u8,
    pub sc: u8,
    /// Number of commands; each queue counts its own.
    pub count: u32,
    /// `None`: the device executes the command, and its success is replaced by the status. With a
    /// delay, the command is not sent, and completes with the status after the delay.
    pub unsent: Option<Duration>,
}

/// The rules of one queue, by opcode.
#[derive(Debug, Default)]
pub struct Injections(BTreeMap<u8, Injection>);

impl Injections {
    /// Sets the rule of an opcode; `None` removes the rule.
    pub fn set(&mut self, opcode: u8, injection: Option<Injection>) {
        match injection {
            Some(injection) => drop(self.0.insert(opcode, injection)),
            None => drop(self.0.remove(&opcode)),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Counts a command that is not to be sent. Returns its status code type and status code, and
    /// the delay of its completion.
    pub fn withhold(&mut self, opcode: u8) -> Option<(u8, u8, Duration)> {
        let rule = self.0.get_mut(&opcode).filter(|rule| rule.count > 0)?;
        let delay = rule.unsent?;
        rule.count -= 1;
        Some((rule.sct & 7, rule.sc, delay))
    }

    /// Counts a command that has succeeded. Returns the status code type and status code that
    /// replace its success.
    pub fn fail(&mut self, opcode: u8) -> Option<(u8, u8)> {
        let rule = self.0.get_mut(&opcode).filter(|rule| rule.count > 0)?;
        if rule.unsent.is_some() {
            return None;
        }
        rule.count -= 1;
        Some((rule.sct & 7, rule.sc))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a rule holds for its opcode and its number of commands, in one of two ways.
    #[test]
    fn rules() {
        let mut rules = Injections::default();
        let failing = Injection {
            sct: 11,
            sc: 33,
            count: 2,
            unsent: None,
        };
        rules.set(2, Some(failing));
        assert_eq!(rules.withhold(2), None);
        assert_eq!(rules.fail(1), None);
        // SPDK keeps three bits of the type.
        assert_eq!(
            (rules.fail(2), rules.fail(2)),
            (Some((3, 33)), Some((3, 33)))
        );
        assert_eq!(rules.fail(2), None);
        let delay = Duration::from_micros(5);
        let unsent = Some(delay);
        rules.set(2, Some(Injection { unsent, ..failing }));
        assert_eq!(rules.fail(2), None);
        assert_eq!(rules.withhold(2), Some((3, 33, delay)));
        rules.set(2, None);
        assert_eq!(rules.withhold(2), None);
        assert!(rules.is_empty());
    }
}
