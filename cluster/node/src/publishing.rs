//! The transactions by which operators and nodes change publications (`pub/V`) and exports
//! (`member/N/R`).

use std::collections::{BTreeMap, BTreeSet};

use nacre_cluster_core::slots::MAX_SLOTS;
use nacre_cluster_core::{ExportId, Holder, Incarnation, NodeId, VolumeId};
use nacre_cluster_etcd::{Copies, KeyValue, Prefix, Txn, TxnAnswer};

use crate::clock::seconds;
use crate::error::Error;
use crate::export::{Export, ExportState, MAX_DEVICE, Want};
use crate::keys::bytes;
use crate::operator::{ATTEMPTS, Operator};
use crate::publication::{MAX_HOSTS, MAX_NQN, Publication};
use crate::record;

/// The nodes that show a volume, in order of preference, 1 to 16, and the hosts that may use it, at
/// most [`MAX_HOSTS`] NQNs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PublishRequest {
    pub nodes: Vec<NodeId>,
    pub hosts: Vec<String>,
    pub any_host: bool,
}

impl PublishRequest {
    fn check(&self) -> Result<(), Error> {
        let invalid = |field, why: String| Err(Error::Invalid { field, why });
        if !(1..=MAX_SLOTS).contains(&self.nodes.len()) {
            return invalid("nodes", format!("name 1 to {MAX_SLOTS} nodes"));
        }
        let distinct: BTreeSet<NodeId> = self.nodes.iter().copied().collect();
        if distinct.len() < self.nodes.len() {
            return invalid("nodes", "name each node once".to_owned());
        }
        if self.hosts.len() > MAX_HOSTS {
            return invalid("hosts", format!("name at most {MAX_HOSTS} hosts"));
        }
        let is_nqn = |host: &&String| host.starts_with("nqn.") && host.len() <= MAX_NQN;
        match self.hosts.iter().find(|host| !is_nqn(host)) {
            Some(host) => invalid("hosts", format!("\"{host}\" is not an NQN")),
            None => Ok(()),
        }
    }
}

/// Deletes the publication of this revision. A copy that arrives late changes and notes nothing.
fn withdrawal(prefix: &Prefix, volume: VolumeId, revision: i64) -> Txn {
    let key = prefix.publication(volume);
    let txn = Txn::default().if_modified(&key, revision).delete(&key);
    let txn = txn.delete(&prefix.reservation(volume));
    txn.note_unpublished(prefix, volume)
}

/// A key of publications. `None`: it is no volume's.
fn decoded(prefix: &str, kv: &KeyValue) -> Option<Result<(VolumeId, Publication), Error>> {
    let volume = VolumeId(Prefix::id_after(prefix, &kv.key)?);
    Some(Publication::decode(kv).map(|publication| (volume, publication)))
}

impl Operator {
    pub(crate) async fn get(&self, key: &str) -> Result<Option<KeyValue>, Error> {
        self.client.get(key).await.map_err(Error::at(key))
    }

    pub(crate) async fn transact(&self, key: &str, txn: Txn) -> Result<TxnAnswer, Error> {
        let answer = self.client.transact(txn, Copies::Several).await;
        answer.map_err(Error::at(key))
    }

    async fn must_be_described(&self, node: NodeId) -> Result<(), Error> {
        let key = self.prefix.node(node);
        match self.get(&key).await? {
            Some(_) => Ok(()),
            None => Err(Error::NoNode { key, node }),
        }
    }

    /// Writes the publication of the volume. A node that showed the volume before keeps its slot.
    /// The volume's holder should be among the nodes: no other node takes the volume while the
    /// holder has a lease.
    pub async fn publish(
        &self,
        volume: VolumeId,
        request: &PublishRequest,
    ) -> Result<Publication, Error> {
        request.check()?;
        for node in &request.nodes {
            self.must_be_described(*node).await?;
        }
        let (key, record) = (
            self.prefix.publication(volume),
            self.prefix.core_volume(volume),
        );
        for _ in 0..ATTEMPTS {
            let found = self.get(&key).await?;
            let before = found.as_ref().map(Publication::decode).transpose()?;
            let mut next = before.clone().unwrap_or_else(|| Publication::new(volume));
            next.show_on(&request.nodes);
            next.hosts = request.hosts.clone();
            next.any_host = request.any_host;
            if before.as_ref() == Some(&next) {
                return Ok(next);
            }
            let txn = Txn::default()
                .if_modified(&key, found.map_or(0, |kv| kv.mod_revision))
                .if_not_created(&record, 0)
                .put(&key, next.encode())
                .read_on_failure(&record);
            // Reservations of hosts end with the publication.
            let txn = match before {
                Some(_) => txn,
                None => txn.delete(&self.prefix.reservation(volume)),
            };
            let answer = self.transact(&key, txn).await?;
            if answer.is_made {
                return Ok(next);
            }
            if answer.found.into_iter().next().flatten().is_none() {
                let key = record;
                return Err(Error::NoVolume { key, volume });
            }
        }
        Err(Error::Contended { key })
    }

    /// Deletes the publication of the volume, and its reservation. False: it was not published.
    pub async fn unpublish(&self, volume: VolumeId) -> Result<bool, Error> {
        let key = self.prefix.publication(volume);
        let mut is_published = false;
        for _ in 0..ATTEMPTS {
            let Some(found) = self.get(&key).await? else {
                return Ok(is_published);
            };
            is_published = true;
            let txn = withdrawal(&self.prefix, volume, found.mod_revision);
            if self.transact(&key, txn).await?.is_made {
                return Ok(true);
            }
        }
        Err(Error::Contended { key })
    }

    pub async fn publications(&self) -> Result<BTreeMap<VolumeId, Publication>, Error> {
        let prefix = self.prefix.publications();
        let keys = self.list(&prefix).await?;
        keys.iter().filter_map(|kv| decoded(&prefix, kv)).collect()
    }

    /// Requests an export of the node's block device `device`, for a replica of the volume. The
    /// node answers in [`Export::is`]. `by` is the daemon that adds the replica to the volume's
    /// record: it ends its work with [`Operator::export_is_made`] or [`Operator::unexport_unused`].
    /// If its incarnation ends first, the node ends the export.
    pub async fn export(
        &self,
        node: NodeId,
        export_id: ExportId,
        volume: VolumeId,
        device: &str,
        by: Option<Holder>,
    ) -> Result<Export, Error> {
        if !(1..=MAX_DEVICE).contains(&device.len()) {
            let why = format!("name a device with 1 to {MAX_DEVICE} bytes");
            return Err(Error::Invalid {
                field: "device",
                why,
            });
        }
        self.must_be_described(node).await?;
        let key = self.prefix.export(node, export_id);
        let export = Export::new(volume, device, by);
        let txn = Txn::default()
            .if_created(&key, 0)
            .put(&key, bytes(&export))
            .read_on_failure(&key);
        let answer = self.transact(&key, txn).await?;
        if answer.is_made {
            return Ok(export);
        }
        match answer.found.into_iter().next().flatten() {
            Some(kv) => {
                let found = Export::decode(&kv)?;
                let is_same = (found.volume(), &*found.device) == (volume, device);
                if is_same && found.want == Want::There {
                    return Ok(found);
                }
                let device = found.device;
                Err(Error::ExportExists { key, device })
            }
            None => Err(Error::Contended { key }),
        }
    }

    /// Requests the end of the export: the node deletes the key after it. False: there is none.
    pub async fn unexport(&self, node: NodeId, export_id: ExportId) -> Result<bool, Error> {
        let change = |export: &mut Export| {
            export.unwanted(seconds());
            true
        };
        self.change_export(node, export_id, change).await
    }

    /// Removes [`Export::by`]: the volume's record names the export, which now ends with the
    /// replica.
    pub async fn export_is_made(&self, node: NodeId, export_id: ExportId) -> Result<(), Error> {
        let change = |export: &mut Export| {
            let is_change = export.by().is_some();
            export.is_made();
            is_change
        };
        self.change_export(node, export_id, change).await.map(drop)
    }

    /// Stores the export as `change` makes it, unless that returns false. False: there is none.
    pub(crate) async fn change_export(
        &self,
        node: NodeId,
        export_id: ExportId,
        change: impl Fn(&mut Export) -> bool,
    ) -> Result<bool, Error> {
        let key = self.prefix.export(node, export_id);
        for _ in 0..ATTEMPTS {
            let Some(kv) = self.get(&key).await? else {
                return Ok(false);
            };
            let mut export = Export::decode(&kv)?;
            if !change(&mut export) {
                return Ok(true);
            }
            let txn = Txn::default()
                .if_modified(&key, kv.mod_revision)
                .put(&key, bytes(&export));
            if self.transact(&key, txn).await?.is_made {
                return Ok(true);
            }
        }
        Err(Error::Contended { key })
    }

    /// Requests the end of the export, unless the volume's record names it. `gave_up`: the daemon
    /// of [`Export::by`] itself asks. False: the record names it, that daemon still has its lease,
    /// there is no such export, or a backup is being restored.
    ///
    /// One transaction compares the record and that daemon's lease. So a daemon that was stopped
    /// and goes on cannot add the export to a record later: its lease has ended, and etcd refuses
    /// it. During a restore of a backup, records are absent, and so is `meta`, which the
    /// transaction demands.
    pub async fn unexport_unused(
        &self,
        node: NodeId,
        export_id: ExportId,
        gave_up: bool,
    ) -> Result<bool, Error> {
        let (key, meta) = (self.prefix.export(node, export_id), self.prefix.meta());
        for _ in 0..ATTEMPTS {
            let Some(kv) = self.get(&key).await? else {
                return Ok(false);
            };
            let mut export = Export::decode(&kv)?;
            if export.want == Want::Gone {
                return Ok(true);
            }
            let record_key = self.prefix.core_volume(export.volume());
            let record = self.get(&record_key).await?;
            let is_named = record.as_ref().map(|record| {
                let named = record::names_device(&record.value, &export_id.0.to_string());
                named.map_err(|why| why.at(&record_key))
            });
            if is_named.transpose()? == Some(true) {
                return Ok(false);
            }
            let mut txn = Txn::default()
                .if_not_created(&meta, 0)
                .if_modified(&key, kv.mod_revision)
                .if_modified(&record_key, record.map_or(0, |record| record.mod_revision))
                .read_on_failure(&meta);
            if let Some(by) = export.by().filter(|_| !gave_up) {
                let lease = self.prefix.lease(by.node);
                let found = self.get(&lease).await?;
                if found.is_some_and(|kv| kv.create_revision as u64 == by.incarnation.0) {
                    return Ok(false);
                }
                // A lease that is over never stands again.
                txn = txn.if_not_created(&lease, by.incarnation.0 as i64);
            }
            export.unwanted(seconds());
            let answer = self.transact(&key, txn.put(&key, bytes(&export))).await?;
            if answer.is_made {
                return Ok(true);
            }
            if answer.found.into_iter().next().flatten().is_none() {
                return Ok(false);
            }
        }
        Err(Error::Contended { key })
    }

    /// The exports of a volume, or of all volumes, without those whose keys cannot be read.
    pub async fn exports(
        &self,
        volume: Option<VolumeId>,
    ) -> Result<Vec<(NodeId, ExportId, Export)>, Error> {
        let mut exports = Vec::new();
        for kv in self.list(&self.prefix.all_exports()).await? {
            let Some((node, export_id)) = self.prefix.export_of(&kv.key) else {
                continue;
            };
            if let Ok(export) = Export::decode(&kv)
                && volume.is_none_or(|volume| export.volume() == volume)
            {
                exports.push((node, export_id, export));
            }
        }
        Ok(exports)
    }

    /// Those of the wanted exports that exist.
    pub async fn exports_of(
        &self,
        wanted: &[(NodeId, ExportId)],
    ) -> Result<Vec<(NodeId, ExportId, Export)>, Error> {
        let mut exports = Vec::new();
        for (node, export_id) in wanted.iter().copied() {
            if let Some(kv) = self.get(&self.prefix.export(node, export_id)).await? {
                exports.push((node, export_id, Export::decode(&kv)?));
            }
        }
        Ok(exports)
    }

    /// Writes the state of an export for its node, which needs the lease of this incarnation.
    /// `None`: an export that is no longer wanted has ended, and its key is deleted.
    pub async fn set_export_state(
        &self,
        node: NodeId,
        incarnation: Incarnation,
        export_id: ExportId,
        state: Option<&ExportState>,
    ) -> Result<(), Error> {
        let (key, lease) = (self.prefix.export(node, export_id), self.prefix.lease(node));
        for _ in 0..ATTEMPTS {
            let Some(kv) = self.get(&key).await? else {
                return match state {
                    Some(_) => Err(Error::NoExport { key }),
                    None => Ok(()),
                };
            };
            let mut export = Export::decode(&kv)?;
            let txn = Txn::default()
                .if_modified(&key, kv.mod_revision)
                .if_created(&lease, incarnation.0 as i64)
                .read_on_failure(&lease);
            let txn = match state {
                Some(state) => {
                    let before = export.clone();
                    export.report(state);
                    if export == before {
                        return Ok(());
                    }
                    txn.put(&key, bytes(&export))
                }
                None if export.want == Want::There => {
                    let device = export.device;
                    return Err(Error::ExportExists { key, device });
                }
                None => txn.delete(&key),
            };
            let answer = self.transact(&key, txn).await?;
            if answer.is_made {
                return Ok(());
            }
            let stands = answer.found.into_iter().next().flatten();
            if stands.is_none_or(|kv| kv.create_revision as u64 != incarnation.0) {
                let key = lease;
                return Err(Error::NoLease { key, node });
            }
        }
        Err(Error::Contended { key })
    }
}
