//! The remaining tests of a run, shared by its guests: decides which kind of guest to boot next.

use anyhow::Result;

use super::Hardware;
use super::queue::Queue;
use crate::tally::Tally;

/// Remaining tests and the results so far.
pub(super) struct Work {
    pub(super) queue: Queue,
    pub(super) tally: Tally,
    boots: u32,
    /// True while the one guest with drives runs; few tests need it.
    drives: bool,
    /// Number of running guests without drives. They take waiting tests sooner than another guest
    /// boots.
    plain: usize,
    /// A test was returned to the queue. The running guests may not see it, because they go through
    /// their lists once.
    again: bool,
    pub(super) stumbles: u32,
    /// Consecutive boots that ran nothing.
    pub(super) empty_boots: u32,
}

impl Work {
    pub(super) fn new(queue: Queue) -> Self {
        Self {
            queue,
            tally: Tally::default(),
            boots: 0,
            drives: false,
            plain: 0,
            again: false,
            stumbles: 0,
            empty_boots: 0,
        }
    }

    /// A guest that `next` returned has ended.
    pub(super) fn over(&mut self, hardware: Hardware) {
        match hardware {
            Hardware::Drives | Hardware::EmptyDrives => self.drives = false,
            Hardware::Plain => self.plain -= 1,
        }
    }

    /// Returns a taken test to the queue, for a guest that is not past it yet.
    pub(super) fn put_back(&mut self, name: &str) -> Result<()> {
        self.again = true;
        self.queue.put_back(name)
    }

    /// The next guest to boot. Tests with drives go first, because they take longest.
    pub(super) fn next(&mut self) -> Option<Boot> {
        let wanted = |hardware| self.queue.waiting(hardware).len();
        let taken_by_others = if self.again { 0 } else { self.plain };
        let hardware = if !self.drives && wanted(Hardware::Drives) > 0 {
            self.drives = true;
            Hardware::Drives
        } else if wanted(Hardware::Plain) > taken_by_others {
            self.plain += 1;
            self.again = false;
            Hardware::Plain
        } else {
            return None;
        };
        self.boots += 1;
        let waiting = self.queue.waiting(hardware).into_iter();
        Some(Boot {
            number: self.boots,
            hardware,
            cases: waiting.map(str::to_owned).collect(),
        })
    }
}

/// A guest, and the tests that it may take.
pub(super) struct Boot {
    pub(super) number: u32,
    pub(super) hardware: Hardware,
    pub(super) cases: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::super::case::Case;
    use super::*;

    /// Goal: one guest at a time has drives; a lane continues while tests wait.
    #[test]
    fn the_next_guest_matches_the_waiting_tests() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path();
        let cases = [
            ("010", Hardware::Plain),
            ("020", Hardware::Plain),
            ("600", Hardware::Drives),
            ("610", Hardware::Drives),
        ];
        let cases = cases.map(|(name, hardware)| Case {
            name: name.to_owned(),
            hardware,
        });
        let mut work = Work::new(Queue::new(dir.to_owned(), cases.to_vec()));
        let next = |work: &mut Work| work.next().map(|b| (b.number, b.hardware, b.cases));
        let drives = |number| {
            let cases = vec!["600".to_owned(), "610".to_owned()];
            Some((number, Hardware::Drives, cases))
        };
        assert_eq!(next(&mut work), drives(1));
        let plain = |number, cases: &[&str]| {
            let cases = cases.iter().map(|case| (*case).to_owned());
            Some((number, Hardware::Plain, cases.collect()))
        };
        assert_eq!(next(&mut work), plain(2, &["010", "020"]));
        std::fs::create_dir(dir.join("010")).unwrap();
        assert_eq!(next(&mut work), None, "two guests take what is left");
        work.over(Hardware::Plain);
        assert_eq!(next(&mut work), plain(3, &["020"]), "unless one died");
        // A guest with 020 ahead may be past 010 when that is put back.
        work.put_back("010").unwrap();
        std::fs::create_dir(dir.join("020")).unwrap();
        assert_eq!(next(&mut work), plain(4, &["010"]));
        std::fs::create_dir(dir.join("010")).unwrap();
        assert_eq!(next(&mut work), None);
        work.over(Hardware::Drives);
        assert_eq!(next(&mut work), drives(5));
    }
}
