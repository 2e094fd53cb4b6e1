//! The queue of waiting tests, shared by all guests. A guest takes a test by creating a folder of
//! its name, which succeeds once. So the load stays balanced until the end, and a healthy guest
//! never reboots.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Machine;
use super::case::Case;

pub(super) struct Queue {
    /// The folder that contains the folders of taken tests.
    pub(super) dir: PathBuf,
    cases: Vec<Case>,
    /// Tests without a result yet.
    open: BTreeSet<String>,
}

impl Queue {
    pub(super) fn new(dir: PathBuf, cases: Vec<Case>) -> Self {
        let open = cases.iter().map(|case| case.name.clone()).collect();
        Self { dir, cases, open }
    }

    /// Tests that no guest has taken, in order.
    pub(super) fn waiting(&self, machine: Machine) -> Vec<&str> {
        let wanted = self.cases.iter().filter(|case| case.machine == machine);
        let names = wanted.map(|case| case.name.as_str());
        names
            .filter(|name| self.open.contains(*name) && !self.taken(name).exists())
            .collect()
    }

    /// Records that a test has a result.
    pub(super) fn ended(&mut self, name: &str) {
        self.open.remove(name);
    }

    /// Returns a taken test to the queue, for another guest.
    pub(super) fn put_back(&self, name: &str) -> Result<()> {
        let taken = self.taken(name);
        std::fs::remove_dir(&taken).with_context(|| format!("removing {}", taken.display()))
    }

    /// Stops the guests from taking more tests; they finish the current ones.
    pub(super) fn close(&self) {
        for case in &self.cases {
            // Taken tests have a folder already. Any other failure only costs time.
            let _ = std::fs::create_dir(self.taken(&case.name));
        }
    }

    /// Tests without a result, once no guest is left.
    pub(super) fn rest(self) -> BTreeSet<String> {
        self.open
    }

    fn taken(&self, name: &str) -> PathBuf {
        Path::new(&self.dir).join(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_test_is_taken_once_and_none_is_lost() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path();
        let cases = ["010", "020", "600"].map(|name| Case {
            name: name.to_owned(),
            machine: if name == "600" {
                Machine::Drives
            } else {
                Machine::Plain
            },
        });
        let mut queue = Queue::new(dir.to_owned(), cases.to_vec());
        assert_eq!(queue.waiting(Machine::Plain), ["010", "020"]);
        assert_eq!(queue.waiting(Machine::Drives), ["600"]);
        // As a guest does.
        std::fs::create_dir(dir.join("010")).unwrap();
        assert_eq!(queue.waiting(Machine::Plain), ["020"]);
        queue.put_back("010").unwrap();
        assert_eq!(queue.waiting(Machine::Plain), ["010", "020"]);
        assert!(queue.put_back("010").is_err(), "it was not taken");
        queue.ended("010");
        assert_eq!(queue.waiting(Machine::Plain), ["020"]);
        queue.close();
        assert!(std::fs::create_dir(dir.join("600")).is_err());
        assert!(queue.waiting(Machine::Plain).is_empty());
        assert_eq!(Vec::from_iter(queue.rest()), ["020", "600"]);
    }
}
