//! The bodies of the fuzz targets `lldp`, `dcb` and `icmp`; ordinary tests replay their corpora.

use crate::dcb::{self, Dcb};
use crate::ethtool;
use crate::icmp::{self, Version};
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

/// Parses a received message; the first byte selects ICMP, ICMPv6, or ICMP after an IP header.
pub fn icmp(input: &[u8]) {
    let Some((which, bytes)) = input.split_first() else {
        return;
    };
    let (version, message) = match which % 3 {
        0 => (Version::V4, Some(bytes)),
        1 => (Version::V6, Some(bytes)),
        _ => (Version::V4, icmp::without_ip_header(bytes)),
    };
    let Some(message) = message else {
        return;
    };
    if let Some(reply) = icmp::reply(version, message) {
        // A reply answers the request with its data only.
        let request = icmp::request(version, reply.identifier, reply.sequence, reply.data.len());
        let is_ours = reply.data == &request[8..];
        assert_eq!(reply.answers(&request, false), is_ours);
        assert!(!reply.answers(&request[..4], true));
    }
}
