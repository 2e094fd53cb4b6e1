//! The check of `nacre doctor` for hosts that must use secure channel concatenation (TLS with a key
//! that DH-HMAC-CHAP generates). Each such host must find a listener and algorithms for it.

use super::{Finding, Scope};

/// A host whose entry in the configuration has `concat`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConcatHost {
    pub subsystem: String,
    pub host: String,
    /// The subsystem has a TCP listener with `tls = "allow"`.
    pub has_listener: bool,
    /// The target allows a Diffie-Hellman group other than null.
    pub has_group: bool,
    /// The target allows SHA-256 or SHA-384.
    pub has_hash: bool,
}

pub(crate) fn checks(scope: &Scope, findings: &mut Vec<Finding>) {
    findings.extend(scope.concat_hosts.iter().map(check));
}

fn check(host: &ConcatHost) -> Finding {
    const ID: &str = "host.concat";
    let ConcatHost {
        subsystem,
        host: nqn,
        ..
    } = host;
    let who = format!("host {nqn} of {subsystem} must use secure channel concatenation");
    let obstacle = if !host.has_listener {
        Some((
            "no TCP listener of the subsystem takes both a connection in clear and TLS",
            "set tls = \"allow\" on a TCP listener of the subsystem",
        ))
    } else if !host.has_group {
        Some((
            "the null group is the only one allowed",
            "add a group to [nvmf] dhchap_dhgroups: \"ffdhe3072\"",
        ))
    } else if !host.has_hash {
        Some((
            "TLS has no suite for SHA-512, the only hash function allowed",
            "add \"sha256\" or \"sha384\" to [nvmf] dhchap_digests",
        ))
    } else {
        None
    };
    match obstacle {
        None => Finding::pass(ID, who),
        Some((cause, remedy)) => Finding::fail(ID, format!("{who}, and {cause}"), remedy),
    }
    .of(nqn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn each_obstacle_has_a_remedy() {
        let good = ConcatHost {
            subsystem: "nqn.2026-01.org.example:s".into(),
            host: "nqn.2026-01.org.example:h".into(),
            has_listener: true,
            has_group: true,
            has_hash: true,
        };
        let [mut clear, mut null, mut sha512] = [0; 3].map(|_| good.clone());
        clear.has_listener = false;
        null.has_group = false;
        sha512.has_hash = false;
        for (host, status, remedy) in [
            (good, Status::Pass, ""),
            (clear, Status::Fail, "tls = \"allow\""),
            (null, Status::Fail, "dhchap_dhgroups"),
            (sha512, Status::Fail, "dhchap_digests"),
        ] {
            let finding = check(&host);
            assert_eq!(finding.status, status, "{finding:?}");
            assert!(finding.remedy.unwrap_or_default().contains(remedy));
        }
    }
}
