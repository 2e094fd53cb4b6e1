//! The check of `nacre doctor` of certificate revocation lists: each authority has one, which does
//! not expire soon.

use super::{Finding, Scope};

/// A list that expires sooner gets a warning: daily lists are renewed before that.
const SOON_S: f64 = 12.0 * HOUR_S;
const HOUR_S: f64 = 3600.0;

/// The revocation list of an authority.
#[derive(Debug, Clone, Default)]
pub struct Revocation {
    /// The setting that names its file.
    pub file: String,
    pub authority: String,
    /// The reason why clients with certificates of the authority are refused; `None`: they are not.
    pub problem: Option<String>,
    /// Seconds until the list expires, 0 afterwards; `None`: there is no list, or it was not read.
    pub expires_in_s: Option<f64>,
}

pub fn checks(scope: &Scope, findings: &mut Vec<Finding>) {
    findings.extend(scope.revocations.iter().map(check));
}

fn check(list: &Revocation) -> Finding {
    const ID: &str = "tls.revocation";
    let remedy =
        "write a new list to the file, and send the daemon SIGHUP: `systemctl reload nacre`";
    let authority = &list.authority;
    let finding = match (&list.problem, list.expires_in_s) {
        (Some(problem), _) => {
            let evidence = format!("{problem}; clients are refused");
            Finding::fail(ID, evidence, remedy)
        }
        (None, Some(left)) if left < SOON_S => {
            let hours = (left / HOUR_S).ceil();
            let evidence = format!(
                "the revocation list of {authority} ends within {hours} h; then its clients are refused"
            );
            Finding::warn(ID, evidence, remedy)
        }
        (None, left) => {
            let days = (left.unwrap_or_default() / (24.0 * HOUR_S)).floor();
            let evidence = format!("the revocation list of {authority} ends in {days} days");
            Finding::pass(ID, evidence)
        }
    };
    finding.of(list.file.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn lists_that_end() {
        let of = |problem: Option<&str>, hours: f64| {
            let finding = check(&Revocation {
                file: "[rpc.tls] client_crl".into(),
                authority: "CN=Root".into(),
                problem: problem.map(str::to_owned),
                expires_in_s: Some(hours * HOUR_S),
            });
            assert_eq!(finding.subject.as_deref(), Some("[rpc.tls] client_crl"));
            (finding.status, finding.evidence)
        };
        let (status, evidence) = of(None, 49.0);
        assert_eq!(status, Status::Pass);
        assert_eq!(evidence, "the revocation list of CN=Root ends in 2 days");
        let (status, evidence) = of(None, 11.5);
        assert_eq!(status, Status::Warn);
        assert!(evidence.contains("CN=Root ends within 12 h"), "{evidence}");
        let (status, evidence) = of(Some("it ended"), 0.0);
        assert_eq!(status, Status::Fail);
        assert!(evidence.starts_with("it ended"), "{evidence}");
    }
}
