//! Chooses the blocks of the next I/O for one lane: sequential or random, of one size or several.

use nacre_random::Random;

use super::job::{Area, Job};

/// The range of one I/O, in units ([`Job::unit_blocks`]) from the start of its lane's area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub unit: u64,
    pub units: u32,
}

/// Generates the operations and block ranges of one area.
#[derive(Debug)]
pub(crate) struct Access {
    random: Random,
    is_random: bool,
    /// A random number below this makes the next I/O a read.
    read_below: u64,
    always_read: bool,
    units: u64,
    /// Smallest number of units per I/O.
    least: u32,
    /// Units by which the largest I/O exceeds the smallest.
    spread: u32,
    next: u64,
}

impl Access {
    pub(crate) fn new(job: &Job, area: Area, block_size: u32, lane: u64) -> Self {
        let unit = job.unit_blocks(block_size);
        let (min, max) = (job.sizes.min / block_size, job.sizes.max / block_size);
        let percent = u64::from(job.read_percent());
        Self {
            random: Random::new(job.seed ^ lane.wrapping_mul(0xa076_1d64_78bd_642f)),
            is_random: job.options.rw.is_random(),
            read_below: (u64::MAX / 100) * percent,
            always_read: percent >= 100,
            units: area.blocks / u64::from(unit),
            least: min / unit,
            spread: (max - min) / unit,
            next: 0,
        }
    }

    /// True if the next I/O is a read.
    #[inline]
    pub(crate) fn reads(&mut self) -> bool {
        self.always_read || (self.read_below > 0 && self.random.draw() < self.read_below)
    }

    #[inline]
    /// The range of the next I/O.
    pub(crate) fn next(&mut self) -> Place {
        let units = match self.spread {
            0 => self.least,
            spread => self.least + self.random.below(u64::from(spread) + 1) as u32,
        };
        let room = self.units - u64::from(units) + 1;
        let unit = if self.is_random {
            self.random.below(room)
        } else {
            let unit = if self.next < room { self.next } else { 0 };
            self.next = unit + u64::from(units);
            unit
        };
        Place { unit, units }
    }

    /// The range that follows `place`, with the same size; wraps around at the end of the area.
    #[inline]
    pub(crate) fn after(&self, place: Place) -> Place {
        let units = u64::from(place.units);
        let unit = place.unit + units;
        Place {
            unit: if unit + units <= self.units { unit } else { 0 },
            ..place
        }
    }

    /// Size of the area in units.
    pub(crate) fn units(&self) -> u64 {
        self.units
    }

    /// Size of the largest I/O in units.
    pub(crate) fn largest(&self) -> u32 {
        self.least + self.spread
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::job_with;
    use super::super::job::{Rw, Sizes};
    use super::*;

    fn access(rw: Rw, mix: u8, min: u32, max: u32, blocks: u64) -> Access {
        let job = Job {
            sizes: Sizes { min, max },
            seed: 7,
            ..job_with(|options| (options.rw, options.mix) = (rw, mix))
        };
        Access::new(&job, Area { first: 0, blocks }, 512, 0)
    }

    /// Goal: every place is inside the area, and enough tries reach every unit.
    #[test]
    fn random_places_cover_the_area() {
        let mut access = access(Rw::RandRead, 0, 4096, 4096, 64 * 8);
        let mut met = [0u32; 64];
        for _ in 0..10_000 {
            let place = access.next();
            assert_eq!(place.units, 1);
            met[place.unit as usize] += 1;
        }
        assert!(met.iter().all(|&n| (80..=240).contains(&n)), "{met:?}");
    }

    #[test]
    fn several_sizes_stay_inside() {
        let mut access = access(Rw::RandWrite, 0, 512, 8192, 100);
        let mut sizes = [0u32; 17];
        for _ in 0..10_000 {
            let place = access.next();
            assert!(place.unit + u64::from(place.units) <= 100);
            sizes[place.units as usize] += 1;
            let after = access.after(place);
            assert!(after.unit + u64::from(after.units) <= 100);
        }
        assert!(
            sizes[0] == 0 && sizes[1..].iter().all(|&n| n > 400),
            "{sizes:?}"
        );
    }

    #[test]
    fn sequential_access_wraps_around() {
        let mut access = access(Rw::Write, 0, 1024, 1024, 7);
        let units: Vec<u64> = (0..5).map(|_| access.next().unit).collect();
        assert_eq!(units, [0, 1, 2, 0, 1]);
    }

    #[test]
    fn mixes() {
        for (rw, mix, expected) in [
            (Rw::RandRead, 0, 10_000..=10_000),
            (Rw::RandWrite, 100, 0..=0),
            (Rw::RandRw, 70, 6_800..=7_200),
            (Rw::RandRw, 0, 0..=0),
            (Rw::Rw, 100, 10_000..=10_000),
        ] {
            let mut access = access(rw, mix, 512, 512, 8);
            let reads = (0..10_000).filter(|_| access.reads()).count();
            assert!(expected.contains(&reads), "{rw} {mix}: {reads}");
        }
    }
}
