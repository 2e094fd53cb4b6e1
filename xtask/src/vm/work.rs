//! The remaining tests of a run in virtual machines, which its guests share. Decides which kind of
//! guest to boot next.

use anyhow::Result;

use super::Machine;
use super::queue::Queue;
use crate::tally::Tally;

/// Machines that few tests need: one guest of each is enough. They boot first, because the tests
/// with drives take longest.
const RARE: [Machine; 2] = [Machine::Drives, Machine::NewerKernel];

/// Remaining tests and the results so far.
pub(super) struct Work {
    pub(super) queue: Queue,
    pub(super) tally: Tally,
    boots: u32,
    /// The running guests of [`RARE`].
    rare: Vec<Machine>,
    /// Number of running guests with the usual machine. They take waiting tests sooner than another
    /// guest boots.
    plain: usize,
    /// A test was returned to the queue. The running guests may not see it, because they go through
    /// their lists once.
    again: bool,
    /// Number of tests that were repeated because the emulator crashed the guest's kernel.
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
            rare: Vec::new(),
            plain: 0,
            again: false,
            stumbles: 0,
            empty_boots: 0,
        }
    }

    /// A guest that [`Work::next`] returned has ended.
    pub(super) fn over(&mut self, machine: Machine) {
        match machine {
            Machine::Plain => self.plain -= 1,
            _ => self.rare.retain(|running| *running != machine),
        }
    }

    /// Returns a taken test to the queue, for a guest that is not past it yet.
    pub(super) fn put_back(&mut self, name: &str) -> Result<()> {
        self.again = true;
        self.queue.put_back(name)
    }

    /// The next guest to boot, with the tests that wait for its kind. `None`: the running guests
    /// suffice.
    pub(super) fn next(&mut self) -> Option<Boot> {
        let wanted = |machine| self.queue.waiting(machine).len();
        let taken_by_others = if self.again { 0 } else { self.plain };
        let rare = RARE
            .into_iter()
            .find(|machine| !self.rare.contains(machine) && wanted(*machine) > 0);
        let machine = if let Some(machine) = rare {
            self.rare.push(machine);
            machine
        } else if wanted(Machine::Plain) > taken_by_others {
            self.plain += 1;
            self.again = false;
            Machine::Plain
        } else {
            return None;
        };
        self.boots += 1;
        let waiting = self.queue.waiting(machine).into_iter();
        Some(Boot {
            number: self.boots,
            machine,
            cases: waiting.map(str::to_owned).collect(),
        })
    }
}

/// A guest, and the tests that it may take.
pub(super) struct Boot {
    pub(super) number: u32,
    pub(super) machine: Machine,
    pub(super) cases: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::super::case::Case;
    use super::*;

    /// Goal: one guest at a time has drives, and one the newer kernel; a lane continues while tests
    /// wait.
    #[test]
    fn the_next_guest_matches_the_waiting_tests() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path();
        let cases = [
            ("010", Machine::Plain),
            ("020", Machine::Plain),
            ("600", Machine::Drives),
            ("610", Machine::Drives),
            ("118", Machine::NewerKernel),
        ];
        let cases = cases.map(|(name, machine)| Case {
            name: name.to_owned(),
            machine,
        });
        let mut work = Work::new(Queue::new(dir.to_owned(), cases.to_vec()));
        let next = |work: &mut Work| work.next().map(|b| (b.number, b.machine, b.cases));
        let drives = |number| {
            let cases = vec!["600".to_owned(), "610".to_owned()];
            Some((number, Machine::Drives, cases))
        };
        assert_eq!(next(&mut work), drives(1));
        let plain = |number, cases: &[&str]| {
            let cases = cases.iter().map(|case| (*case).to_owned());
            Some((number, Machine::Plain, cases.collect()))
        };
        let newer = |number| Some((number, Machine::NewerKernel, vec!["118".to_owned()]));
        assert_eq!(next(&mut work), newer(2));
        assert_eq!(next(&mut work), plain(3, &["010", "020"]));
        std::fs::create_dir(dir.join("010")).unwrap();
        assert_eq!(next(&mut work), None, "two guests take what is left");
        work.over(Machine::Plain);
        assert_eq!(next(&mut work), plain(4, &["020"]), "unless one died");
        // A guest with 020 ahead may be past 010 when that is put back.
        work.put_back("010").unwrap();
        std::fs::create_dir(dir.join("020")).unwrap();
        assert_eq!(next(&mut work), plain(5, &["010"]));
        std::fs::create_dir(dir.join("010")).unwrap();
        assert_eq!(next(&mut work), None);
        work.over(Machine::NewerKernel);
        assert_eq!(next(&mut work), newer(6));
        work.over(Machine::Drives);
        assert_eq!(next(&mut work), drives(7));
    }
}
