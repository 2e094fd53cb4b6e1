//! Reports failed authentications of hosts: as events, and as the latest failure of each host.

use nacre_nvmf::subsystems::AuthFailure;
use nacre_nvmf::tls::TlsFailure;

use crate::services::Engine;

/// Sends an event for each failed DH-HMAC-CHAP authentication, and for each failed TLS connection.
pub(super) fn report(engine: &Engine) {
    let Ok(plane) = engine.plane() else { return };
    for failure in plane.target.authentication.take_tls_failures() {
        report_tls(engine, failure);
    }
    for failure in plane.target.authentication.take_failures() {
        let AuthFailure {
            subsystem,
            host,
            peer,
            qid,
            reason,
            times,
        } = failure;
        let text =
            format!("host {host} at {peer} failed to authenticate itself to {subsystem}: {reason}");
        let facts = serde_json::json!({
            "subsystem": subsystem.as_str(), "host": host.as_str(), "peer": peer.to_string(),
            "qid": qid, "reason": reason.to_string(), "times": times,
        });
        let names = (subsystem.clone(), host.clone());
        engine
            .keyring
            .note_failure(names, peer.to_string(), reason.to_string());
        let key = (host.to_string(), format!("{subsystem} {reason}"));
        engine
            .notes
            .report_repeating("auth_failed", key, text, facts);
    }
}

fn report_tls(engine: &Engine, failure: TlsFailure) {
    let TlsFailure {
        peer,
        address,
        names,
        reason,
        times,
    } = failure;
    if let Some((host, subsystem)) = &names {
        let names = (subsystem.clone(), host.clone());
        engine
            .keyring
            .note_failure(names, peer.clone(), reason.clone());
    }
    let (host, subsystem) = names.unzip();
    let who = match &host {
        Some(host) => format!("host {host} at {peer}"),
        None => format!("a host at {peer}"),
    };
    let facts = serde_json::json!({
        "host": host.as_ref().map(|name| name.as_str()),
        "subsystem": subsystem.as_ref().map(|name| name.as_str()),
        "peer": peer, "reason": reason, "times": times,
    });
    let text = format!("{who} is not served over TLS: {reason}");
    engine
        .notes
        .report_repeating("tls_failed", (address, reason), text, facts);
}
