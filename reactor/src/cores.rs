//! Sets of cores, parsed from lists or masks, and the pinning of threads to cores.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A set of cores: `0-3,8`, SPDK's `[0-3,8]`, or a mask such as `0x10f`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct CoreSet(BTreeSet<usize>);

/// The error of parsing a set of cores.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CoreSetError {
    #[error("no cores in \"{text}\": write for example 0-3,8 or 0xf")]
    Empty { text: String },
    #[error("\"{part}\" in \"{text}\" is not a core or a range: write for example 0-3,8 or 0xf")]
    NotACore { part: String, text: String },
    #[error("\"{text}\" is not a mask: write hexadecimal digits, for example 0xf")]
    NotAMask { text: String },
    #[error("range {first}-{last} runs backwards: write {last}-{first}")]
    Backwards { first: usize, last: usize },
    #[error("core {core} is above the largest that can be named, {max}")]
    TooLarge { core: usize, max: usize },
}

impl CoreSet {
    /// The largest core number in the affinity mask that this crate passes to the kernel.
    pub const MAX_CORE: usize = CpuSet::MAX_CPU - 1;

    /// Parses a list such as `0-3,8`, the same in brackets, or a mask that begins with `0x`.
    pub fn parse(text: &str) -> Result<Self, CoreSetError> {
        let trimmed = text.trim();
        if let Some(digits) = trimmed
            .strip_prefix("0x")
            .or_else(|| trimmed.strip_prefix("0X"))
        {
            return Self::from_hex(digits, text);
        }
        let bare = match trimmed.strip_prefix('[') {
            Some(rest) => rest
                .strip_suffix(']')
                .ok_or_else(|| CoreSetError::NotACore {
                    part: trimmed.to_owned(),
                    text: text.to_owned(),
                })?,
            None => trimmed,
        };
        Self::from_list(bare, text)
    }

    /// Parses SPDK's option `-m`: a list in brackets, otherwise a mask with or without `0x`.
    pub fn parse_mask(text: &str) -> Result<Self, CoreSetError> {
        let trimmed = text.trim();
        if trimmed.starts_with('[') || trimmed.starts_with("0x") || trimmed.starts_with("0X") {
            Self::parse(text)
        } else {
            Self::from_hex(trimmed, text)
        }
    }

    fn from_list(list: &str, text: &str) -> Result<Self, CoreSetError> {
        let mut cores = BTreeSet::new();
        if list.trim().is_empty() {
            return Err(CoreSetError::Empty {
                text: text.to_owned(),
            });
        }
        for part in list.split(',') {
            let wrong = || CoreSetError::NotACore {
                part: part.trim().to_owned(),
                text: text.to_owned(),
            };
            let number = |digits: &str| {
                let digits = digits.trim();
                if !digits.bytes().all(|b| b.is_ascii_digit()) {
                    return Err(wrong());
                }
                let core = digits.parse().map_err(|_| wrong())?;
                if core > Self::MAX_CORE {
                    return Err(CoreSetError::TooLarge {
                        core,
                        max: Self::MAX_CORE,
                    });
                }
                Ok(core)
            };
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            if first > last {
                return Err(CoreSetError::Backwards { first, last });
            }
            cores.extend(first..=last);
        }
        Ok(Self(cores))
    }

    fn from_hex(digits: &str, text: &str) -> Result<Self, CoreSetError> {
        let mut cores = BTreeSet::new();
        if digits.is_empty() {
            return Err(CoreSetError::NotAMask {
                text: text.to_owned(),
            });
        }
        for (nibble, digit) in digits.chars().rev().enumerate() {
            let bits = digit.to_digit(16).ok_or_else(|| CoreSetError::NotAMask {
                text: text.to_owned(),
            })?;
            for core in (0..4)
                .filter(|bit| bits >> bit & 1 == 1)
                .map(|bit| nibble * 4 + bit)
            {
                if core > Self::MAX_CORE {
                    return Err(CoreSetError::TooLarge {
                        core,
                        max: Self::MAX_CORE,
                    });
                }
                cores.insert(core);
            }
        }
        if cores.is_empty() {
            return Err(CoreSetError::Empty {
                text: text.to_owned(),
            });
        }
        Ok(Self(cores))
    }

    /// The cores that this thread may use: its affinity, as set by cgroups, taskset or systemd.
    pub fn allowed() -> std::io::Result<Self> {
        let set = sched_getaffinity(None)?;
        Ok((0..=Self::MAX_CORE)
            .filter(|&core| set.is_set(core))
            .collect())
    }

    pub fn contains(&self, core: usize) -> bool {
        self.0.contains(&core)
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        self.0.iter().copied()
    }

    pub fn first(&self) -> Option<usize> {
        self.0.first().copied()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Hexadecimal without `0x`, as SPDK prints cpumasks.
    pub fn mask(&self) -> String {
        let Some(&last) = self.0.last() else {
            return "0".to_owned();
        };
        let digit = |nibble: usize| {
            let bits = (0..4)
                .filter(|bit| self.contains(nibble * 4 + bit))
                .map(|bit| 1 << bit);
            char::from_digit(bits.sum(), 16).unwrap_or('0')
        };
        (0..=last / 4).rev().map(digit).collect()
    }
}

impl FromIterator<usize> for CoreSet {
    fn from_iter<I: IntoIterator<Item = usize>>(cores: I) -> Self {
        Self(cores.into_iter().collect())
    }
}

impl FromStr for CoreSet {
    type Err = CoreSetError;

    fn from_str(text: &str) -> Result<Self, CoreSetError> {
        Self::parse(text)
    }
}

impl fmt::Display for CoreSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cores = self.0.iter().copied().peekable();
        let mut separator = "";
        while let Some(first) = cores.next() {
            let mut last = first;
            while let Some(next) = cores.next_if_eq(&(last + 1)) {
                last = next;
            }
            match last - first {
                0 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

/// Binds the calling thread to `core`.
pub(crate) fn pin_to(core: usize) -> std::io::Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    Ok(sched_setaffinity(None, &set)?)
}

/// The NUMA node of a core; `None` if the kernel reports none.
pub fn numa_node(core: usize) -> Option<u32> {
    let entries = std::fs::read_dir(format!("/sys/devices/system/cpu/cpu{core}")).ok()?;
    entries
        .filter_map(|entry| {
            entry
                .ok()?
                .file_name()
                .to_str()?
                .strip_prefix("node")?
                .parse()
                .ok()
        })
        .next()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Goal: every spelling that SPDK and people use, and a named error for every wrong one.
    #[test]
    fn spellings() {
        let set = |cores: &[usize]| Ok(cores.iter().copied().collect::<CoreSet>());
        assert_eq!(CoreSet::parse("0-3,8"), set(&[0, 1, 2, 3, 8]));
        assert_eq!(CoreSet::parse(" [0-3, 8] "), set(&[0, 1, 2, 3, 8]));
        assert_eq!(CoreSet::parse("[0-3]"), set(&[0, 1, 2, 3]));
        assert_eq!(CoreSet::parse("0x3"), set(&[0, 1]));
        assert_eq!(CoreSet::parse("0X10f"), set(&[0, 1, 2, 3, 8]));
        assert_eq!(CoreSet::parse("3"), set(&[3]));
        assert_eq!(CoreSet::parse_mask("3"), set(&[0, 1]));
        assert_eq!(CoreSet::parse_mask("[3]"), set(&[3]));
        assert_eq!(CoreSet::parse_mask("0x10"), set(&[4]));

        let not_a_core = |part: &str, text: &str| {
            Err(CoreSetError::NotACore {
                part: part.into(),
                text: text.into(),
            })
        };
        assert_eq!(
            CoreSet::parse(""),
            Err(CoreSetError::Empty { text: "".into() })
        );
        assert_eq!(
            CoreSet::parse("[]"),
            Err(CoreSetError::Empty { text: "[]".into() })
        );
        assert_eq!(
            CoreSet::parse("0x0"),
            Err(CoreSetError::Empty { text: "0x0".into() })
        );
        assert_eq!(CoreSet::parse("0,,1"), not_a_core("", "0,,1"));
        assert_eq!(CoreSet::parse("+1"), not_a_core("+1", "+1"));
        assert_eq!(CoreSet::parse("a-3"), not_a_core("a-3", "a-3"));
        assert_eq!(CoreSet::parse("[0-3"), not_a_core("[0-3", "[0-3"));
        assert_eq!(
            CoreSet::parse("0xg"),
            Err(CoreSetError::NotAMask { text: "0xg".into() })
        );
        assert_eq!(
            CoreSet::parse("3-1"),
            Err(CoreSetError::Backwards { first: 3, last: 1 })
        );
        assert_eq!(
            CoreSet::parse("0-99999999"),
            Err(CoreSetError::TooLarge {
                core: 99_999_999,
                max: CoreSet::MAX_CORE
            })
        );
    }

    proptest! {
        /// Goal: what we print, as a list or as a mask, reads back as the same set.
        #[test]
        fn prints_what_it_parses(cores in prop::collection::btree_set(0..=CoreSet::MAX_CORE, 1..40)) {
            let set: CoreSet = cores.into_iter().collect();
            prop_assert_eq!(&CoreSet::parse(&set.to_string()).unwrap(), &set);
            prop_assert_eq!(&CoreSet::parse_mask(&set.mask()).unwrap(), &set);
        }

        /// Goal: no text makes the parser panic.
        #[test]
        fn never_panics(text in ".{0,40}") {
            let _ = CoreSet::parse(&text);
            let _ = CoreSet::parse_mask(&text);
        }
    }
}
