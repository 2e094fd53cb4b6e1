//! Parameters of devices declared in the configuration file ([[bdev]]). Both the check of a
//! configuration and the creation of the devices use them.

use serde_json::Value;
use uuid::Uuid;

use super::settings::Bdev;

/// Namespace of the UUIDs derived from device names. Declared devices have the same UUID at every
/// start, and on every machine with the same file.
const IDENTITIES: Uuid = Uuid::from_u128(0x0b5c_4a0e_7d1f_4c6a_9a52_6e61_6372_6500);

/// The UUID of a declared device.
pub fn uuid_of(declared: &Bdev) -> Uuid {
    let derived = || Uuid::new_v5(&IDENTITIES, declared.name.as_bytes());
    declared.uuid.unwrap_or_else(derived)
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
