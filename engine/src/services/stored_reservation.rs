//! The stored form of a reservation, and the search for a present namespace's reservation.

use std::sync::Arc;

use nacre_nvmf::subsystems::reservation::{
    HeldReservation, Registrant, Reservation, ReservationState,
};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::commands::reservation::ReservationType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::subsystems::find_namespace;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;

/// Method name in the record of a stored reservation.
pub const RESTORE: &str = "nvmf_ns_restore_reservation";

/// A reservation in stored form. Field names are those of SPDK's file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StoredReservation {
    /// True, except in the store of a cluster: others are not stored.
    pub(super) ptpl: bool,
    /// 1 to 6; 0 or left out means no reservation.
    #[serde(default)]
    rtype: u8,
    /// The holder's key.
    #[serde(default)]
    crkey: u64,
    /// UUID of the namespace. Another namespace does not load this reservation.
    #[schemars(with = "String")]
    pub bdev_uuid: Uuid,
    /// Host identifier of the holder; one of the registrants if all registrants hold it.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "uuid_or_nothing"
    )]
    #[schemars(with = "Option<String>")]
    holder_uuid: Option<Uuid>,
    /// The registrants: `rkey`, the key, and `host_uuid`, the host identifier.
    #[serde(default)]
    registrants: Vec<KeptRegistrant>,
    /// Number of changes of the registrants; left out: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    generation: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
struct KeptRegistrant {
    rkey: u64,
    /// Host identifier of the registrant.
    #[schemars(with = "String")]
    host_uuid: Uuid,
}

/// Parses a UUID; none if it is empty or missing. SPDK writes an empty holder if all registrants
/// hold the reservation.
fn uuid_or_nothing<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Uuid>, D::Error> {
    match Option::<String>::deserialize(from)?.as_deref() {
        None | Some("") => Ok(None),
        Some(text) => text.parse().map(Some).map_err(serde::de::Error::custom),
    }
}

impl StoredReservation {
    /// The same without `generation`, which SPDK's file does not have.
    pub(super) fn without_generation(self) -> Self {
        Self {
            generation: None,
            ..self
        }
    }

    pub fn belongs_to(&self, uuid: Uuid) -> Result<(), String> {
        if self.bdev_uuid == uuid {
            Ok(())
        } else {
            Err(format!(
                "it holds the reservation of namespace {}, and this one is {uuid}",
                self.bdev_uuid
            ))
        }
    }

    pub fn of(state: &ReservationState, uuid: Uuid) -> Self {
        let registrants = state.registrants.iter().map(|r| KeptRegistrant {
            rkey: r.key,
            host_uuid: Uuid::from_bytes(r.host),
        });
        let first = state.registrants.first().map(|r| r.host);
        let holder = state.held.and_then(|held| held.holder.or(first));
        Self {
            ptpl: state.ptpl,
            rtype: state.held.map_or(0, |held| held.kind as u8),
            crkey: holder.and_then(|host| state.key_of(&host)).unwrap_or(0),
            bdev_uuid: uuid,
            holder_uuid: holder.map(Uuid::from_bytes),
            registrants: registrants.collect(),
            generation: Some(state.generation),
        }
    }

    pub fn state(&self) -> Result<ReservationState, String> {
        let kind = match self.rtype {
            0 => None,
            number => Some(
                ReservationType::from_u8(number)
                    .ok_or_else(|| format!("there is no type {number}"))?,
            ),
        };
        let held = kind.map(|kind| HeldReservation {
            kind,
            holder: match kind {
                ReservationType::WriteExclusiveAllRegistrants
                | ReservationType::ExclusiveAccessAllRegistrants => None,
                _ => self.holder_uuid.map(Uuid::into_bytes),
            },
        });
        let registrants = self.registrants.iter().map(|r| Registrant {
            host: r.host_uuid.into_bytes(),
            key: r.rkey,
        });
        let state = ReservationState {
            registrants: registrants.collect(),
            held,
            generation: self.generation.unwrap_or(0),
            ptpl: self.ptpl,
        };
        state.checked().map_err(str::to_owned)
    }
}

/// The reservation of a namespace that exists and has this UUID.
pub fn find(
    engine: &Engine,
    nqn: &Nqn,
    nsid: u32,
    uuid: Uuid,
) -> Result<Arc<Reservation>, RpcError> {
    let subsystem = engine.plane()?.target.subsystem(nqn).or_refuse()?;
    let entry = find_namespace(&subsystem, nsid)?;
    if entry.namespace.ids.uuid != uuid {
        return Err(RpcError::errno(
            Errno::ENOENT,
            format!("namespace {nsid} of {nqn} is another one now"),
        ));
    }
    Ok(Arc::clone(&entry.namespace.reservation))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a file in SPDK's own format is read.
    #[test]
    fn reads_a_file_of_spdk() {
        let text = r#"{ "ptpl": true, "rtype": 1, "crkey": 161, "bdev_uuid": "00000000-0000-0000-0000-000000000005",
            "holder_uuid": "01010101-0101-0101-0101-010101010101",
            "registrants": [{ "rkey": 161, "host_uuid": "01010101-0101-0101-0101-010101010101" }] }"#;
        let kept: StoredReservation = serde_json::from_str(text).unwrap();
        let state = kept.state().unwrap();
        assert!(state.holds(&[1; 16]) && state.key_of(&[1; 16]) == Some(161));
        let damaged = StoredReservation {
            rtype: 7,
            ..kept.clone()
        };
        assert!(damaged.state().is_err());
        let empty = StoredReservation {
            holder_uuid: None,
            ..kept
        };
        assert!(empty.state().is_err());
        // All registrants hold the reservation.
        let text = text.replace(r#""rtype": 1"#, r#""rtype": 5"#).replace(
            r#""holder_uuid": "01010101-0101-0101-0101-010101010101""#,
            r#""holder_uuid": """#,
        );
        let kept: StoredReservation = serde_json::from_str(&text).unwrap();
        let state = kept.state().unwrap();
        assert!(state.holds(&[1; 16]) && !state.holds(&[2; 16]));
        assert!(
            serde_json::from_str::<StoredReservation>(&text.replace(r#""""#, r#""me""#)).is_err()
        );
    }
}
