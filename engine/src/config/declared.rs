//! Parameters of objects declared in the configuration file ([[bdev]],
//! [[nvmf.subsystem]]). Both the check of a configuration and the creation of the objects use them.

use nacre_nvmf::subsystems::SubsystemConfig;
use nacre_nvmf_wire::Nqn;
use serde_json::Value;
use uuid::Uuid;

use super::settings::{Bdev, Subsystem};

/// Namespace of the UUIDs derived from device names. Declared devices have the same UUID at every
/// start, and on every machine with the same file.
const IDENTITIES: Uuid = Uuid::from_u128(0x0b5c_4a0e_7d1f_4c6a_9a52_6e61_6372_6500);

/// The UUID of a declared device.
pub fn uuid_of(declared: &Bdev) -> Uuid {
    let derived = || Uuid::new_v5(&IDENTITIES, declared.name.as_bytes());
    declared.uuid.unwrap_or_else(derived)
}

/// The configuration of the declared subsystem, for validation in advance.
pub fn config_of(declared: &Subsystem, nqn: &Nqn) -> SubsystemConfig {
    let default = SubsystemConfig::new(nqn.clone());
    let or = |given: &Option<String>, default: String| given.clone().unwrap_or(default);
    SubsystemConfig {
        serial_number: or(&declared.serial_number, default.serial_number.clone()),
        model_number: or(&declared.model_number, default.model_number.clone()),
        allow_any_host: declared.allow_any_host,
        ana_reporting: declared.ana_reporting,
        controller_model: declared.controller_model,
        min_cntlid: declared.min_cntlid,
        max_cntlid: declared.max_cntlid,
        ..default
    }
}

/// The parameters of the create method of a device whose keys they are.
pub fn params_of(declared: &Bdev) -> Value {
    let mut params = declared.params.clone();
    if !declared.name.is_empty() {
        params.insert("name".into(), declared.name.as_str().into());
    }
    if let Some(uuid) = declared.uuid {
        params.insert("uuid".into(), uuid.to_string().into());
    }
    Value::Object(params)
}
