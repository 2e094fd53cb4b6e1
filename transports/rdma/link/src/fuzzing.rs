//! The bodies of the fuzz targets `lldp` and `dcb`; ordinary tests replay their corpora.

use crate::dcb::{self, Dcb};
use crate::ethtool;
use crate::lldp;

/// Parses a frame: an accepted frame has no control characters in its text, and valid priorities.
pub fn lldp(input: &[u8]) {
    match lldp::parse(input) {
        Ok(neighbour) => {
            let texts = [
                Some(&neighbour.chassis),
                Some(&neighbour.port),
                neighbour.system_name.as_ref(),
                neighbour.system_description.as_ref(),
                neighbour.port_description.as_ref(),
            ];
            for text in texts.into_iter().flatten() {
                assert!(!text.contains(|c: char| c.is_control()), "{text:?}");
            }
            assert!(neighbour.apps.iter().all(|app| app.priority < 8));
            // An accepted frame has an end TLV.
            assert!(input.len() >= 16);
        }
        Err(refused) => assert!(!refused.to_string().is_empty()),
    }
}

/// Parses the body of a kernel's reply; the first byte selects the parser.
pub fn dcb(input: &[u8]) {
    let Some((which, body)) = input.split_first() else {
        return;
    };
    match which % 3 {
        0 => {
            if let Ok(dcb) = Dcb::parse(body) {
                for app in &dcb.apps {
                    assert!(dcb.apps.contains(app));
                }
                // Settings that were parsed can be encoded as changes.
                let changes = [dcb.ets.map(dcb::Change::Ets), dcb.pfc.map(dcb::Change::Pfc)];
                for change in changes.into_iter().flatten() {
                    assert!(dcb::message("eth0", &change).len().is_multiple_of(4));
                }
            }
        }
        1 => {
            dcb::parse_mode(body);
        }
        _ => {
            ethtool::parse_pause(body);
        }
    }
}
