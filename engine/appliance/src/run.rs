//! Runs programs of the system, by [`nacre_engine_values::run`]; for tests, runners that record the
//! command lines instead.

pub use nacre_engine_values::run::{Programs, Run, RunError};

#[cfg(test)]
pub(crate) mod testing {
    use std::cell::RefCell;
    use std::os::unix::process::ExitStatusExt;
    use std::path::{Path, PathBuf};
    use std::process::{Command, ExitStatus};

    use super::*;

    /// Records each command line; fails each that contains a given text.
    #[derive(Default)]
    pub(crate) struct Recorder {
        pub lines: RefCell<Vec<String>>,
        pub failing: Option<&'static str>,
    }

    /// Copies the machine's disk before each command: a boot after a power failure there has it.
    pub(crate) struct Cuts {
        root: PathBuf,
        copies: RefCell<Vec<(String, tempfile::TempDir)>>,
    }

    impl Cuts {
        pub(crate) fn of(root: &Path) -> Self {
            Self {
                root: root.to_owned(),
                copies: RefCell::default(),
            }
        }

        pub(crate) fn taken(&self) -> Vec<(String, tempfile::TempDir)> {
            std::mem::take(&mut self.copies.borrow_mut())
        }
    }

    impl Run for Cuts {
        fn run(&self, program: &str, arguments: &[&str]) -> Result<String, RunError> {
            let copy = tempfile::tempdir().unwrap();
            let mut command = Command::new("cp");
            let status = command.arg("-a").arg(self.root.join(".")).arg(copy.path());
            assert!(status.status().unwrap().success());
            let line = [&[program], arguments].concat().join(" ");
            self.copies.borrow_mut().push((line, copy));
            Ok(String::new())
        }
    }

    impl Recorder {
        pub(crate) fn taken(&self) -> Vec<String> {
            std::mem::take(&mut self.lines.borrow_mut())
        }
    }

    impl Run for Recorder {
        fn run(&self, program: &str, arguments: &[&str]) -> Result<String, RunError> {
            let line = [&[program], arguments].concat().join(" ");
            let fails = self.failing.is_some_and(|part| line.contains(part));
            self.lines.borrow_mut().push(line);
            if fails {
                return Err(RunError::Failed {
                    program: program.to_owned(),
                    status: ExitStatus::from_raw(256),
                    text: "refused".into(),
                });
            }
            Ok(String::new())
        }
    }
}
