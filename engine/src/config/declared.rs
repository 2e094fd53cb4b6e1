//! Parameters of bdevs that the configuration file declares (`[[bdev]]`). The check of a
//! configuration and the creation of the bdevs use them.

use serde_json::Value;
use uuid::Uuid;

use super::settings::Bdev;

/// Namespace of the UUIDs derived from names. So a declared bdev has the same UUID at every start,
/// and on every machine with the same file.
const IDENTITIES: Uuid = Uuid::from_u128(0x0b5c_4a0e_7d1f_4c6a_9a52_6e61_6372_6500);

/// The UUID of a declared bdev.
pub fn uuid_of(declared: &Bdev) -> Uuid {
    let derived = || Uuid::new_v5(&IDENTITIES, declared.name.as_bytes());
    declared.uuid.unwrap_or_else(derived)
}

/// The parameters of the create method of a bdev whose keys are these parameters.
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
