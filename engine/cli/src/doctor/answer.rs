//! `nacre doctor --answer`: the other end of `nacre doctor --peer`.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

use crate::{Failure, output};
use nacre_engine_doctor::peer::{ANSWER_PORT, Responder, count, here};
use nacre_engine_values::address::{ScopedIp, shown};

/// Answers one session on `address`, and fails if none was complete within `time`.
pub(super) fn run(address: &ScopedIp, time: Duration) -> Result<(), Failure> {
    if address.ip.is_unspecified() || address.ip.is_multicast() {
        return Err(Failure::Usage(format!(
            "--answer {address}: name one address of this machine, the one that the other machine has as --peer"
        )));
    }
    let at = address.socket(ANSWER_PORT).map_err(anyhow::Error::from)?;
    let responder =
        Responder::bind(at).with_context(|| format!("cannot listen on {}", shown(&at)))?;
    let limit = humantime::format_duration(time);
    output::line(&format!(
        "answers `nacre doctor --peer {address}` of another machine for {limit}; TCP and UDP port {ANSWER_PORT}"
    ))?;
    let served = responder.serve(Instant::now() + time, &here, &count);
    match served.map_err(anyhow::Error::from)? {
        Some(peer) => output::line(&format!("answered {}", ScopedIp::from(&peer))),
        None => Err(Failure::Failed(anyhow!(
            "no `nacre doctor --peer {address}` came within {limit}; do packet filters admit TCP and UDP {ANSWER_PORT}?"
        ))),
    }
}
