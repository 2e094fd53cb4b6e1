//! The key `resv/V` in etcd: the NVMe reservation of a volume, with its registrants. The holder
//! stores a change before it answers the host, and the next holder reads the key before it serves.

use nacre_cluster_core::{Holder, VolumeId};
use nacre_cluster_etcd::Txn;
use serde_json::Value;

use crate::error::{Error, damaged};
use crate::keys::check_format;
use crate::operator::{ATTEMPTS, Operator};
use crate::record;

impl Operator {
    /// The stored reservation; `None`: there is none.
    pub async fn reservation(&self, volume: VolumeId) -> Result<Option<Value>, Error> {
        let key = self.prefix.reservation(volume);
        let Some(found) = self.get(&key).await? else {
            return Ok(None);
        };
        let value = serde_json::from_slice(&found.value);
        let value = value.map_err(|error| damaged(&key, &error))?;
        check_format(&key, &value)?;
        Ok(Some(value))
    }

    /// Stores the reservation (`None`: deletes it), if `holder` holds the volume and its lease has
    /// not ended. Otherwise fails with [`Error::NotHolder`].
    pub async fn set_reservation(
        &self,
        volume: VolumeId,
        holder: Holder,
        reservation: Option<&Value>,
    ) -> Result<(), Error> {
        let key = self.prefix.reservation(volume);
        let record = self.prefix.core_volume(volume);
        for _ in 0..ATTEMPTS {
            let Some(found) = self.get(&record).await? else {
                let key = record;
                return Err(Error::NoVolume { key, volume });
            };
            let (_, now) = record::decode(&found.value).map_err(|why| why.at(&record))?;
            let Holder { node, incarnation } = holder;
            let lease = self.prefix.lease(node);
            if now.holder != Some(holder) {
                let key = record;
                return Err(Error::NotHolder { key, volume, node });
            }
            let txn = Txn::default()
                .if_modified(&record, found.mod_revision)
                .if_created(&lease, incarnation.0 as i64)
                .read_on_failure(&lease);
            let txn = match reservation {
                Some(value) => txn.put(&key, value.to_string().into_bytes()),
                None => txn.delete(&key),
            };
            let answer = self.transact(&key, txn).await?;
            if answer.is_made {
                return Ok(());
            }
            let lease_now = answer.found.into_iter().next().flatten();
            if lease_now.is_none_or(|kv| kv.create_revision as u64 != incarnation.0) {
                let key = lease;
                return Err(Error::NotHolder { key, volume, node });
            }
        }
        Err(Error::Contended { key })
    }
}
