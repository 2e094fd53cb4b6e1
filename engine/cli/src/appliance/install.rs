//! `nacre appliance install`: writes the system of the USB disk that started this machine to
//! another disk.

use std::io::{self, BufRead, IsTerminal, Read};
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use nacre_engine_appliance::install::{Disk, InstallError, Installed, Installer, Kernel, Progress};
use nacre_engine_appliance::place::Places;
use nacre_engine_appliance::run::Programs;
use serde_json::json;

use super::super::{Failure, output};

/// Longest time for one program: `veritysetup` reads the root file system of a slow USB disk.
const PATIENCE: Duration = Duration::from_secs(1800);
/// Most bytes of a typed serial number.
const MOST_TYPED: u64 = 256;
/// Percent of a step between two lines of progress.
const PERCENT: u64 = 10;

#[derive(Debug, Args)]
pub(super) struct InstallArgs {
    /// The serial number of the disk; without it, the disks are listed
    #[arg(long, value_name = "SERIAL")]
    disk: Option<String>,
    /// Do not ask for the serial number again
    #[arg(long, requires = "disk")]
    yes: bool,
    /// Overwrite the disk although it holds data
    #[arg(long, requires = "disk")]
    force: bool,
    /// Print JSON for programs
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &InstallArgs, places: &Places) -> Result<(), Failure> {
    let programs = Programs::new(PATIENCE);
    let installer = Installer {
        places,
        run: &programs,
        open: &Kernel,
    };
    let Some(serial) = &args.disk else {
        return list(&installer.disks().map_err(failure)?, args.json);
    };
    let disk = installer.choose(serial, args.force).map_err(failure)?;
    if !args.yes {
        confirm(&disk)?;
    }
    let mut reporter = Reporter::default();
    let done = installer.install(serial, args.force, &mut |progress| {
        // JSON is one answer. A closed output does not end an installation.
        if let Some(line) = reporter.line(progress).filter(|_| !args.json) {
            let _ = output::line(&line);
        }
    });
    let done = done.map_err(failure)?;
    if args.json {
        return output::json(&json!({
            "serial": done.serial,
            "path": done.path,
            "version": done.version.to_string(),
            "bytes": done.bytes,
        }));
    }
    output::line(&summary(&done))?;
    output::line(
        "remove the USB disk and restart (`systemctl reboot`): the machine starts from this disk",
    )
}

/// The end of an installation, for people.
pub(crate) fn summary(done: &Installed) -> String {
    format!(
        "version {} is on disk {}; {} read back equal",
        done.version,
        done.serial,
        output::bytes(done.bytes)
    )
}

fn failure(error: InstallError) -> Failure {
    match error {
        InstallError::NotInstaller => Failure::Usage(error.to_string()),
        error => Failure::Failed(error.into()),
    }
}

fn list(disks: &[Disk], json: bool) -> Result<(), Failure> {
    if json {
        return output::json(&json!(disks));
    }
    let row = |disk: &Disk| {
        let state = match &disk.refusal {
            Some(refusal) => format!("cannot be chosen: {refusal}"),
            None if disk.contents.is_empty() => "empty".into(),
            None => format!("holds {}", disk.contents.join(", ")),
        };
        vec![
            disk.serial.clone(),
            disk.path.display().to_string(),
            disk.model.clone(),
            output::bytes(disk.bytes),
            state,
        ]
    };
    output::table(
        &["serial", "path", "model", "size", "contents"],
        disks.iter().map(row),
    )
}

fn confirm(disk: &Disk) -> Result<(), Failure> {
    output::line(&format!("{disk}: everything on it is lost"))?;
    for content in &disk.contents {
        output::line(&format!("  {content}"))?;
    }
    if !io::stdin().is_terminal() {
        let cause =
            "standard input is no terminal to confirm on; --yes installs without a question";
        return Err(Failure::Usage(cause.into()));
    }
    output::line("type the serial number to go on:")?;
    let mut typed = String::new();
    io::stdin().lock().take(MOST_TYPED).read_line(&mut typed)?;
    if typed.trim() != disk.serial {
        return Err(Failure::Failed(anyhow!(
            "the serial number {:?} is not {:?}: nothing was written",
            typed.trim(),
            disk.serial
        )));
    }
    Ok(())
}

/// Texts of progress: each step once, and each tenth of a step.
#[derive(Default)]
pub(crate) struct Reporter {
    last: Option<Progress>,
}

impl Reporter {
    pub(crate) fn line(&mut self, progress: Progress) -> Option<String> {
        let tenth = |progress: Progress| progress.percent().map(|percent| percent / PERCENT);
        let is_new = self
            .last
            .is_none_or(|last| last.step != progress.step || tenth(last) != tenth(progress));
        self.last = Some(progress);
        let text = progress.step.text();
        is_new.then(|| match progress.percent() {
            Some(percent) => format!("{text}: {percent} %"),
            None => text.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_engine_appliance::install::Step;

    /// Goal: a slow serial line gets a line per tenth. Method: reports of every percent.
    #[test]
    fn progress_is_a_line_per_tenth() {
        let mut reporter = Reporter::default();
        let mut lines = Vec::new();
        for (step, total) in [(Step::Check, 0), (Step::Copy, 200), (Step::Verify, 200)] {
            for done in 0..=total {
                lines.extend(reporter.line(Progress { step, done, total }));
            }
        }
        assert_eq!(lines.len(), 1 + 11 + 11);
        assert_eq!(lines[0], "checking the boot disk");
        assert_eq!(lines[1], "copying: 0 %");
        assert_eq!(lines[2], "copying: 10 %");
        assert_eq!(lines[22], "reading back: 100 %");
    }

    #[test]
    fn a_running_appliance_installs_nothing() {
        let root = tempfile::tempdir().unwrap();
        let args = InstallArgs {
            disk: Some("S1".into()),
            yes: true,
            force: true,
            json: false,
        };
        let refused = run(&args, &Places::below(root.path())).unwrap_err();
        assert!(matches!(refused, Failure::Usage(_)));
        assert!(refused.to_string().contains("boot entry"), "{refused}");
    }
}
