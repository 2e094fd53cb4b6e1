//! The kinds of pages (1 GiB, 2 MiB, transparent, plain), the policy that selects them, and sizes
//! as text.

use std::fmt;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// The kinds of pages of an arena, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageKind {
    /// 1 GiB pages from the kernel's hugetlb pool.
    OneGiB,
    /// 2 MiB pages from the kernel's hugetlb pool.
    TwoMiB,
    /// Ordinary memory that the kernel backs with 2 MiB pages where possible (madvise).
    Transparent,
    /// Ordinary pages of the machine's base size.
    Plain,
}

impl PageKind {
    /// The page size in bytes.
    pub fn size(self) -> u64 {
        match self {
            Self::OneGiB => GIB,
            Self::TwoMiB | Self::Transparent => 2 * MIB,
            Self::Plain => base_page_size() as u64,
        }
    }

    /// True for pages of the hugetlb pool: they are never swapped, so they need no `mlock`.
    pub fn is_hugetlb(self) -> bool {
        matches!(self, Self::OneGiB | Self::TwoMiB)
    }

    /// `bytes` rounded up to whole pages; `None` if that exceeds `isize::MAX`.
    pub(crate) fn round_up(self, bytes: u64) -> Option<u64> {
        bytes
            .checked_next_multiple_of(self.size())
            .filter(|&b| b <= isize::MAX as u64)
    }
}

impl fmt::Display for PageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Transparent => write!(f, "transparent 2 MiB pages"),
            Self::Plain => write!(f, "plain {} pages", human(self.size())),
            _ => write!(f, "{} pages", human(self.size())),
        }
    }
}

/// The kinds of pages that an arena may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum HugepagePolicy {
    /// The best available: 1 GiB, else 2 MiB, else transparent, else plain. Skips kinds whose
    /// rounding would waste more than an eighth of the request, and more than 2 MiB.
    #[default]
    #[cfg_attr(feature = "serde", serde(rename = "auto"))]
    Auto,
    /// 2 MiB pages, or an error.
    #[cfg_attr(feature = "serde", serde(rename = "2M"))]
    TwoMiB,
    /// 1 GiB pages, or an error.
    #[cfg_attr(feature = "serde", serde(rename = "1G"))]
    OneGiB,
    /// Plain pages.
    #[cfg_attr(feature = "serde", serde(rename = "off"))]
    Off,
}

/// The machine's base page size, in bytes.
pub(crate) fn base_page_size() -> usize {
    rustix::param::page_size()
}

/// `bytes` in the largest binary unit: exact when it divides, else with one decimal.
pub(crate) fn human(bytes: u64) -> String {
    let units = [(1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")];
    match units.into_iter().find(|&(unit, _)| bytes >= unit) {
        Some((unit, name)) if bytes.is_multiple_of(unit) => format!("{} {name}", bytes / unit),
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: sizes in messages read like sizes. Method: a table.
    #[test]
    fn sizes_are_written_for_people() {
        let table = [
            (0, "0 B"),
            (512, "512 B"),
            (4096, "4 KiB"),
            (1536, "1.5 KiB"),
            (2 * MIB, "2 MiB"),
            (GIB, "1 GiB"),
            (GIB + GIB / 2, "1.5 GiB"),
            (1 << 40, "1 TiB"),
        ];
        for (bytes, text) in table {
            assert_eq!(human(bytes), text);
        }
    }

    /// Goal: rounding up neither loses bytes nor wraps. Method: edges per kind.
    #[test]
    fn rounding_up_is_exact_or_refused() {
        assert_eq!(PageKind::TwoMiB.round_up(1), Some(2 * MIB));
        assert_eq!(PageKind::TwoMiB.round_up(2 * MIB), Some(2 * MIB));
        assert_eq!(PageKind::OneGiB.round_up(GIB + 1), Some(2 * GIB));
        assert_eq!(PageKind::OneGiB.round_up(u64::MAX), None);
        assert_eq!(PageKind::OneGiB.round_up(i64::MAX as u64), None);
    }
}
