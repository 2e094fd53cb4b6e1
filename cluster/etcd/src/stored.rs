//! The JSON of a volume's record in etcd. A value has the fields of [`VolumeRecord`], the fields
//! that the cluster adds, and fields of later versions of Nacre, which a change keeps.

use nacre_bdev_replica::model::VolumeRecord;
use nacre_bdev_replica::store::StoreError;
use serde_json::Value;
use uuid::Uuid;

use crate::client::KeyValue;
use crate::error::Error;
use crate::keep_unknown::keep_unknown;
use crate::lessee::CLOSED;

/// Version of the records' format. A record of a later version is refused.
pub(crate) const FORMAT: u64 = 1;

/// A record that was read.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub(crate) record: VolumeRecord,
    /// The whole value, with the fields that `record` lacks.
    pub(crate) value: Value,
    /// The revision of the last change.
    pub(crate) revision: i64,
}

pub(crate) fn bytes(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn plain(record: &VolumeRecord) -> Value {
    serde_json::to_value(record).expect("a record is plain data")
}

/// The value of a changed record. Keeps the fields of `stored` that this version does not know.
/// `op` identifies the change, so that its sender recognises it after a missing answer.
pub(crate) fn encode(record: &VolumeRecord, op: Uuid, stored: Option<&Stored>) -> Value {
    let mut value = plain(record);
    if let Some(stored) = stored {
        keep_unknown(&stored.value, &plain(&stored.record), &mut value);
    }
    value["v"] = FORMAT.into();
    value["op"] = op.to_string().into();
    value
}

/// Parses a record. Fails if it is malformed, of another volume, or of a later version. The record
/// of a volume whose control has closed it has no holder.
pub(crate) fn decode(kv: &KeyValue) -> Result<Stored, StoreError> {
    let key = String::from_utf8_lossy(&kv.key).into_owned();
    let damaged = |what: String| Error::Damaged {
        key: key.clone(),
        what,
    };
    let value: Value =
        serde_json::from_slice(&kv.value).map_err(|error| damaged(error.to_string()))?;
    if let Some(found) = value["v"].as_u64().filter(|version| *version > FORMAT) {
        return Err(StoreError::Newer { path: key, found });
    }
    let mut record: VolumeRecord =
        serde_json::from_value(value.clone()).map_err(|error| damaged(error.to_string()))?;
    if !key.ends_with(&record.id.to_string()) {
        return Err(damaged(format!("it has the record of volume {}", record.id)).into());
    }
    if value[CLOSED] == true {
        // Its control made its last change, without a holder.
        record.holder = None;
    }
    Ok(Stored {
        record,
        value,
        revision: kv.mod_revision,
    })
}
