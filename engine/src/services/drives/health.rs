//! Reports the health of drives and failed commands, as events.

use nacre_bdev_nvme::{Event, HealthAlert, HealthEvent, ResetReason, Timeout, TimeoutAction};
use nacre_nvmf_wire::opcode;
use serde_json::json;
use tracing::{info, warn};

use crate::services::Engine;

/// Reports the events of a controller except for state changes.
pub(super) fn report(engine: &Engine, name: &str, event: &Event) {
    match event {
        Event::Health(event) => {
            let kind = if event.raised {
                "nvme_health_warning"
            } else {
                "nvme_health_good"
            };
            let facts = json!({ "alert": event.alert.name() });
            let text = format!("{name}: {}", text(event));
            if event.raised {
                warn!("{text}")
            } else {
                info!("{text}")
            }
            engine.notes.report(kind, name.to_owned(), text, facts);
        }
        Event::Reset { reason } => {
            let text = format!("{name}: the controller is reset, {}", why(*reason));
            let facts = json!({ "reason": reason.name() });
            engine
                .notes
                .report("nvme_reset", name.to_owned(), text, facts);
        }
        Event::NamespaceLimits { nsid, changes } => {
            let facts = json!({ "nsid": nsid, "changes": changes });
            let text = format!(
                "{name}n{nsid}: other limits than before: {changes}; what exceeds them fails until it is reopened"
            );
            engine
                .notes
                .report("nvme_limits", name.to_owned(), text, facts);
        }
        Event::Timeout(timeout) => {
            let facts = json!({
                "qid": timeout.qid, "cid": timeout.cid, "opcode": timeout.opcode,
                "waited_ms": timeout.waited.as_millis() as u64, "action": timeout.action.name(),
            });
            let text = format!("{name}: {}", late(timeout));
            engine
                .notes
                .report("nvme_timeout", name.to_owned(), text, facts);
        }
        _ => {}
    }
}

fn text(event: &HealthEvent) -> String {
    let is = |raised: &str, good: &str| {
        if event.raised {
            raised.to_owned()
        } else {
            good.to_owned()
        }
    };
    match event.alert {
        HealthAlert::Temperature { celsius, threshold } => format!(
            "{celsius} °C, {} {threshold} °C",
            is("at or above", "below")
        ),
        HealthAlert::PercentageUsed { percent, threshold } => format!(
            "{percent} % of its rated life is used, {} {threshold} %",
            is("at or above", "below")
        ),
        HealthAlert::Spare { percent, threshold } => format!(
            "{percent} % of its spare is left, {} {threshold} %",
            is("at or below", "above")
        ),
        HealthAlert::Critical { warnings } => format!(
            "{} (critical warning {warnings:#04x})",
            is("it warns", "it warns no more")
        ),
        HealthAlert::MediaErrors { new } => {
            format!("{new} media errors since it was attached")
        }
    }
}

fn why(reason: ResetReason) -> &'static str {
    match reason {
        ResetReason::UserRequest => "as a user requested it",
        ResetReason::Timeout => "as it does not answer a command",
        ResetReason::ControllerFatal => "as it reports a fatal error (CSTS.CFS)",
        ResetReason::ProtocolError => "as it answered an unknown command",
        ResetReason::AdminFailed => "as it refused a command that the driver needs",
    }
}

fn late(timeout: &Timeout) -> String {
    let name = match timeout.qid {
        0 => opcode::admin::name(timeout.opcode),
        _ => opcode::io::name(timeout.opcode),
    };
    let what = name.map_or_else(|| format!("command {:#04x}", timeout.opcode), str::to_owned);
    let then = match timeout.action {
        TimeoutAction::None => "it is waited for",
        TimeoutAction::Abort => "it is aborted",
        TimeoutAction::ResetQueue => "its queue is recreated",
        TimeoutAction::ResetController => "the controller is reset",
    };
    format!(
        "{what} on queue {} was not answered within {:.1} s: {then}",
        timeout.qid,
        timeout.waited.as_secs_f64()
    )
}
