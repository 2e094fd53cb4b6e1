//! Changes of DCB settings: `RTM_SETDCB` with `DCB_CMD_IEEE_SET`, `DCB_CMD_IEEE_DEL` (application
//! entries) or `DCB_CMD_SDCBX` (mode). [`apply`] sends a change, [`message`] only encodes it.
//!
//! The driver's result is not an NLMSG_ERROR but an attribute of the reply, see [`parse_status`].

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{
    App, Buffers, DCBMSG, DcbError, DcbxMode, Ets, Pfc, RTM_GETDCB, RTM_SETDCB, Selector, answer,
    attribute, command, error_of, ieee, request,
};
use crate::nlmsg::{NLM_F_REQUEST, Request, attribute_of, c_string};

/// NLA_F_NESTED, which the kernel requires for DCB_ATTR_DCB_APP_TRUST_TABLE.
pub(super) const NESTED: u16 = 0x8000;

/// A change of one setting of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Mode(DcbxMode),
    Ets(Ets),
    Pfc(Pfc),
    Buffers(Buffers),
    AddApps(Vec<App>),
    DeleteApps(Vec<App>),
    Trust(Vec<Selector>),
}

/// Applies one change. Needs CAP_NET_ADMIN.
///
/// In a request with several application entries, the kernel stops at the first one that fails and
/// keeps the ones before it. Therefore each entry has a request of its own, and a failure undoes
/// the earlier ones that changed something. Adding an existing entry and deleting a missing one
/// succeed.
pub fn apply(interface: &str, change: &Change) -> Result<(), DcbError> {
    let (apps, adds) = match change {
        Change::AddApps(apps) => (apps, true),
        Change::DeleteApps(apps) => (apps, false),
        _ => return send(interface, change).map(drop),
    };
    apply_entries(apps, adds, |app, adds| {
        let entry = vec![app];
        let change = if adds {
            Change::AddApps(entry)
        } else {
            Change::DeleteApps(entry)
        };
        send(interface, &change)
    })
}

/// Adds or deletes entries one by one. `send`: [`send`] for an entry.
fn apply_entries(
    apps: &[App],
    adds: bool,
    mut send: impl FnMut(App, bool) -> Result<bool, DcbError>,
) -> Result<(), DcbError> {
    let mut changed = Vec::new();
    for app in apps {
        match send(*app, adds) {
            Ok(true) => changed.push(*app),
            Ok(false) => {}
            Err(error) => {
                for app in changed {
                    let _ = send(app, !adds);
                }
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Sends one request. False: nothing changed. Adding an existing entry and deleting a missing one
/// succeed, because cards lose their tables at a reset.
fn send(interface: &str, change: &Change) -> Result<bool, DcbError> {
    let message = match change {
        Change::Ets(ets) => {
            let body = answer(interface, RTM_GETDCB, request(command::IEEE_GET, interface))?;
            let found = found_ets(&body).ok_or(DcbError::Malformed { field: "ets" })?;
            set(interface, ieee::ETS, &ets.over(found))
        }
        _ => message(interface, change),
    };
    let body = answer(interface, RTM_SETDCB, message)?;
    match (parse_status(&body, change), change) {
        (Some(Ok(())), _) => Ok(true),
        (Some(Err(Errno::EXIST)), Change::AddApps(_))
        | (Some(Err(Errno::NOENT)), Change::DeleteApps(_)) => Ok(false),
        (Some(Err(errno)), _) => Err(error_of(interface, errno)),
        (None, _) => Err(DcbError::Malformed { field: "status" }),
    }
}

/// `struct ieee_ets` in a reply to `DCB_CMD_IEEE_GET`.
fn found_ets(body: &[u8]) -> Option<[u8; 59]> {
    let ieee = attribute_of(body.get(DCBMSG..)?, attribute::IEEE)?;
    attribute_of(ieee, ieee::ETS)?.get(..59)?.try_into().ok()
}

/// Encodes a `DCB_CMD_IEEE_SET` of one IEEE object, such as DCB_ATTR_IEEE_ETS.
fn set(interface: &str, kind: u16, value: &[u8]) -> Vec<u8> {
    Request::new(RTM_SETDCB, NLM_F_REQUEST, &[0, command::IEEE_SET, 0, 0])
        .attribute(attribute::IFNAME, &c_string(interface))
        .nested(attribute::IEEE, |ieee| ieee.attribute(kind, value))
        .finish()
}

/// Parses the driver's result in a reply to `RTM_SETDCB`: one byte in DCB_ATTR_IEEE (or
/// DCB_ATTR_DCBX), 0 or a negative errno. `None`: the reply has no result.
pub fn parse_status(body: &[u8], change: &Change) -> Option<Result<(), Errno>> {
    let (kind, refused) = match change {
        Change::Mode(_) => (attribute::DCBX, Some(Errno::OPNOTSUPP)),
        _ => (attribute::IEEE, None),
    };
    let status = *attribute_of(body.get(DCBMSG..)?, kind)?.first()?;
    Some(match status {
        0 => Ok(()),
        code => Err(refused.unwrap_or_else(|| Errno::from_raw_os_error(256 - i32::from(code)))),
    })
}

/// Encodes the netlink request for a change.
pub fn message(interface: &str, change: &Change) -> Vec<u8> {
    let command = match change {
        Change::Mode(_) => command::SDCBX,
        Change::DeleteApps(_) => command::IEEE_DEL,
        _ => command::IEEE_SET,
    };
    let head = Request::new(RTM_SETDCB, NLM_F_REQUEST, &[0, command, 0, 0])
        .attribute(attribute::IFNAME, &c_string(interface));
    let put = |kind: u16, value: &[u8]| {
        head.clone()
            .nested(attribute::IEEE, |ieee| ieee.attribute(kind, value))
    };
    let request = match change {
        Change::Mode(mode) => head.attribute(attribute::DCBX, &[mode.0]),
        Change::Ets(ets) => put(ieee::ETS, &ets.to_bytes()),
        Change::Pfc(pfc) => put(ieee::PFC, &pfc.to_bytes()),
        Change::Buffers(buffers) => put(ieee::BUFFER, &buffers.to_bytes()),
        Change::AddApps(apps) | Change::DeleteApps(apps) => head.nested(attribute::IEEE, |ieee| {
            ieee.nested(ieee::APP_TABLE, |table| {
                apps.iter().fold(table, |table, app| {
                    table.attribute(app.selector.attribute(), &app.to_bytes())
                })
            })
        }),
        Change::Trust(order) => head.nested(attribute::IEEE, |ieee| {
            ieee.nested(ieee::APP_TRUST_TABLE | NESTED, |table| {
                order.iter().fold(table, |table, selector| {
                    table.attribute(selector.attribute(), &[selector.code()])
                })
            })
        }),
    };
    request.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a failure takes back the entries that this change made, and none that were there
    /// before. Method: of four entries the second exists, and the last one is refused.
    #[test]
    fn a_failure_undoes_own_entries_only() {
        let apps: Vec<App> = (1..=4).map(|dscp| App::dscp(dscp, 3)).collect();
        for adds in [true, false] {
            let mut sent = Vec::new();
            let done = apply_entries(&apps, adds, |app, as_added| {
                sent.push((app.value, as_added));
                match app.value {
                    2 => Ok(false),
                    4 => Err(DcbError::Permission),
                    _ => Ok(true),
                }
            });
            assert!(matches!(done, Err(DcbError::Permission)));
            let made = [1, 2, 3, 4].map(|value| (value, adds));
            let undone = [1, 3].map(|value| (value, !adds));
            assert_eq!(sent, [&made[..], &undone].concat());
        }
    }
}
