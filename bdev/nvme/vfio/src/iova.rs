//! Allocates I/O virtual addresses (IOVAs) from the ranges that the IOMMU translates.
//!
//! An IOVA is not the process's address of the memory: many IOMMUs translate only 39 bits, and some
//! ranges are reserved, for example for message signalled interrupts.

use std::ops::RangeInclusive;

/// The addresses of a device's memory, first and last byte included.
pub(crate) type Range = RangeInclusive<u64>;

/// The free ranges, in order of their addresses; no two touch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Iovas {
    usable: Vec<Range>,
    free: Vec<Range>,
}

/// First address that is allocated. The lower ones stay unmapped, so that a device's access to an
/// address that was never set (zero) fails.
const FIRST: u64 = 1 << 20;

/// Largest alignment: that of the largest page of the IOMMU.
const ALIGN_MAX: u64 = 1 << 30;

impl Iovas {
    pub(crate) fn new(usable: &[Range]) -> Self {
        let usable = normalised(usable);
        Self {
            free: usable.clone(),
            usable,
        }
    }

    /// Allocates the lowest free range of `bytes`, aligned so that the IOMMU can use large pages.
    pub(crate) fn take(&mut self, bytes: u64, page: u64) -> Option<u64> {
        let align = bytes.checked_next_power_of_two()?.clamp(page, ALIGN_MAX);
        // On a machine with few addresses, give up the alignment first.
        self.take_aligned(bytes, align)
            .or_else(|| self.take_aligned(bytes, page))
    }

    fn take_aligned(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let last_of = |start: u64| start.checked_add(bytes.checked_sub(1)?);
        for (at, range) in self.free.iter().enumerate() {
            let start = range.start().checked_next_multiple_of(align);
            let found = start.and_then(|start| Some((start, last_of(start)?)));
            let Some((start, last)) = found.filter(|(_, last)| last <= range.end()) else {
                continue;
            };
            let left = [
                (range.start() < &start).then(|| *range.start()..=start - 1),
                (&last < range.end()).then(|| last + 1..=*range.end()),
            ];
            self.free.splice(at..=at, left.into_iter().flatten());
            return Some(start);
        }
        None
    }

    /// Frees a range that [`Iovas::take`] allocated.
    pub(crate) fn give(&mut self, start: u64, bytes: u64) {
        self.free.push(start..=start + (bytes - 1));
        let free = std::mem::take(&mut self.free);
        // Addresses that became unusable meanwhile stay out.
        self.free = common(&normalised(&free), &self.usable);
    }

    /// Adds a drive for which fewer addresses are usable. Addresses in use stay: the kernel refuses
    /// a drive that cannot have them.
    pub(crate) fn restrict(&mut self, usable: &[Range]) {
        self.usable = common(&normalised(usable), &self.usable);
        self.free = common(&self.free, &self.usable);
    }

    pub(crate) fn usable(&self) -> &[Range] {
        &self.usable
    }
}

/// Sorts ranges, joins those that touch, and removes addresses below [`FIRST`].
fn normalised(ranges: &[Range]) -> Vec<Range> {
    let mut ranges: Vec<Range> = ranges
        .iter()
        .map(|range| (*range.start()).max(FIRST)..=*range.end())
        .filter(|range| !range.is_empty())
        .collect();
    ranges.sort_by_key(|range| *range.start());
    let mut joined: Vec<Range> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if *range.start() <= last.end().saturating_add(1) => {
                *last = *last.start()..=*last.end().max(range.end());
            }
            _ => joined.push(range),
        }
    }
    joined
}

fn common(left: &[Range], right: &[Range]) -> Vec<Range> {
    let both = |a: &Range, b: &Range| *a.start().max(b.start())..=*a.end().min(b.end());
    left.iter()
        .flat_map(|a| right.iter().map(move |b| both(a, b)))
        .filter(|range| !range.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;
    const MSI: Range = 0xfee0_0000..=0xfeef_ffff;

    /// A machine with this many bits: all addresses but those for interrupts.
    fn machine(bits: u32) -> Iovas {
        Iovas::new(&[0..=MSI.start() - 1, MSI.end() + 1..=(1 << bits) - 1])
    }

    #[test]
    fn ranges_are_aligned_disjoint_and_usable() {
        let mut iovas = machine(39);
        let mut taken: Vec<Range> = Vec::new();
        for bytes in [
            PAGE,
            1 << 30,
            2 << 20,
            3 * PAGE,
            1 << 30,
            (1 << 30) - PAGE,
            1 << 30,
            1 << 31,
        ] {
            let start = iovas.take(bytes, PAGE).unwrap();
            let range = start..=start + bytes - 1;
            let align = bytes.next_power_of_two().min(ALIGN_MAX);
            assert!(start.is_multiple_of(align), "{start:#x} for {bytes:#x}");
            assert!(start >= FIRST && *range.end() < 1 << 39);
            let apart = |other: &Range| range.end() < other.start() || other.end() < range.start();
            assert!(
                apart(&MSI) && taken.iter().all(apart),
                "{range:x?} {taken:x?}"
            );
            taken.push(range);
        }
        let fresh = machine(39);
        assert_ne!(iovas, fresh);
        for range in taken {
            iovas.give(*range.start(), range.end() - range.start() + 1);
        }
        assert_eq!(iovas, fresh, "what is given back joins what is free");
    }

    /// Goal: running out of addresses is an error, and not before: a merely preferred alignment is
    /// given up first.
    #[test]
    fn few_addresses_are_used_up() {
        let mut iovas = Iovas::new(&[FIRST + PAGE..=FIRST + 5 * PAGE - 1]);
        assert_eq!(iovas.take(5 * PAGE, PAGE), None);
        assert_eq!(iovas.take(4 * PAGE, PAGE), Some(FIRST + PAGE));
        assert_eq!(iovas.take(PAGE, PAGE), None);
        iovas.give(FIRST + PAGE, 4 * PAGE);
        assert_eq!(iovas.take(PAGE, PAGE), Some(FIRST + PAGE));
        assert_eq!(Iovas::new(&[]).take(PAGE, PAGE), None);
    }

    /// Goal: the last addresses do not overflow.
    #[test]
    fn all_64_bits() {
        let mut iovas = Iovas::new(&[u64::MAX - 2 * PAGE + 1..=u64::MAX]);
        let start = iovas.take(2 * PAGE, PAGE).unwrap();
        assert_eq!(start, u64::MAX - 2 * PAGE + 1);
        assert_eq!(iovas.take(PAGE, PAGE), None);
        iovas.give(start, 2 * PAGE);
        assert_eq!(iovas.take(1 << 63, PAGE), None);
        assert_eq!(iovas.take(u64::MAX, PAGE), None);
    }

    #[test]
    fn a_narrower_machine_restricts() {
        let mut iovas = machine(48);
        let low = iovas.take(1 << 30, PAGE).unwrap();
        iovas.restrict(&[0..=(1 << 31) - 1]);
        let next = iovas.take(1 << 29, PAGE).unwrap();
        assert!(next < 1 << 31);
        assert_eq!(iovas.take(1 << 31, PAGE), None);
        iovas.restrict(&[0..=(1 << 30) - 1]);
        iovas.give(low, 1 << 30);
        iovas.give(next, 1 << 29);
        assert_eq!(iovas, Iovas::new(&[0..=(1 << 30) - 1]));
    }
}
