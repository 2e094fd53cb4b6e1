//! Checks that the daemon's sandbox (capabilities and system call filter) can be installed here.

use nacre_engine_sandbox::Mode;

use super::{Finding, Scope};

/// The configured sandbox, if the configuration is known.
#[derive(Debug, Clone)]
pub struct Sandbox {
    pub mode: Mode,
    /// The kernel can filter system calls.
    pub kernel: bool,
    /// Parts that a running daemon could not set up.
    pub problems: Vec<String>,
}

pub(crate) fn checks(scope: &Scope, findings: &mut Vec<Finding>) {
    findings.extend(scope.sandbox.as_ref().map(check));
}

fn check(sandbox: &Sandbox) -> Finding {
    const ID: &str = "security.sandbox";
    const ENFORCE: &str = "set [security] sandbox = \"enforce\" and restart the daemon";
    if !sandbox.problems.is_empty() {
        let evidence = sandbox.problems.join("; ");
        let remedy =
            "correct the cause and restart the daemon, or set [security] sandbox = \"off\"";
        return Finding::warn(ID, evidence, remedy);
    }
    match sandbox.mode {
        Mode::Off => Finding::warn(ID, "off: the daemon gives up nothing", ENFORCE),
        _ if !sandbox.kernel => Finding::warn(
            ID,
            "this kernel cannot filter system calls",
            "use a kernel with CONFIG_SECCOMP_FILTER",
        ),
        Mode::Log => {
            let evidence = "log: nothing is refused";
            let remedy = format!("if `dmesg | grep type=1326` shows no line of nacre, {ENFORCE}");
            Finding::warn(ID, evidence, remedy)
        }
        Mode::Enforce => Finding::pass(ID, "enforce"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn each_mode_has_its_finding() {
        let of = |mode, kernel, problems: &[&str]| {
            let problems = problems.iter().map(|&p| p.to_owned()).collect();
            let finding = check(&Sandbox {
                mode,
                kernel,
                problems,
            });
            (finding.status, finding.evidence)
        };
        assert_eq!(of(Mode::Enforce, true, &[]).0, Status::Pass);
        for (mode, kernel, problems, says) in [
            (Mode::Off, true, &[][..], "off"),
            (Mode::Log, true, &[], "nothing is refused"),
            (Mode::Enforce, false, &[], "this kernel"),
            (Mode::Log, false, &[], "this kernel"),
            (Mode::Enforce, true, &["seccomp(2): no"], "seccomp(2): no"),
        ] {
            let (status, evidence) = of(mode, kernel, problems);
            assert_eq!(status, Status::Warn, "{evidence}");
            assert!(evidence.contains(says), "{evidence}");
        }
    }
}
