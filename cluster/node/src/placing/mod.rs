//! Places new replicas of a volume on pools of the cluster: reads the nodes and pools from the
//! store, chooses, and stores the choice.
//!
//! One transaction reserves the space in the pools (a *promise*), and writes an *export* for each
//! replica: the order to its node to create it. The transaction compares the keys of the chosen
//! pools and nodes. If one has changed since it was read, the choice is made again.

use std::collections::BTreeMap;

use nacre_cluster_core::placement::{Choice, PoolFacts, Site, Unplaced, Wish, choose};
use nacre_cluster_core::{ExportId, Holder, Incarnation, NodeId, PoolId, VolumeId};
use nacre_cluster_etcd::{Prefix, Txn};
use uuid::Uuid;

use crate::brake::BrakeKey;
use crate::error::{Error, Unmet};
use crate::export::{Export, PoolChoice, Resync, Want};
use crate::keys::{NodeKey, bytes};
use crate::operator::{ATTEMPTS, Operator};
use crate::pools::PoolKey;
use crate::record;
use crate::refused;

/// A request for replicas of a volume.
#[derive(Debug, Clone)]
pub struct Placing {
    pub volume: VolumeId,
    /// New ids for the exports, one for each replica. By them, a request that got no answer can be
    /// undone.
    pub export_ids: Vec<ExportId>,
    /// The number and size of the replicas, and the demands on their pools and nodes.
    pub wish: Wish,
    /// The nodes of replicas that stay.
    pub other_nodes: Vec<NodeId>,
    /// The reason for which the replicas replace others; `None`: they need no resync.
    pub resync: Option<Resync>,
    /// Pools not to use.
    pub left_out: Vec<PoolId>,
    /// The lvols of a snapshot: the first replicas are clones of some of them, each on the same
    /// pool. At least one is, if there are any.
    pub clone_of: Vec<CloneSource>,
    /// The daemon that places the replicas, to put them into the volume's record. Without its
    /// lease, nothing is placed. If its incarnation ends before the record names a replica, the
    /// export is removed.
    pub by: Holder,
}

/// An lvol of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CloneSource {
    pub node: NodeId,
    pub pool: PoolId,
    pub lvol: Uuid,
}

/// A replica for which a pool was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    pub node: NodeId,
    pub export_id: ExportId,
    pub export: Export,
}

/// The pools of new replicas.
struct Chosen {
    choices: Vec<Choice>,
    /// The lvols of which the first replicas are clones.
    sources: Vec<CloneSource>,
}

/// The nodes and pools of the cluster, with the revisions of their keys.
pub(crate) struct Facts {
    nodes: BTreeMap<NodeId, (NodeKey, i64)>,
    sites: Vec<Site>,
    keys: BTreeMap<PoolId, (PoolKey, i64)>,
    pools: Vec<PoolFacts>,
}

impl Operator {
    /// Reads the pools, nodes, leases and exports.
    pub(crate) async fn facts(&self) -> Result<Facts, Error> {
        let mut keys = BTreeMap::new();
        // Before the exports: a change after this is noticed by the transaction.
        let prefix = self.prefix.pools();
        for kv in self.list(&prefix).await? {
            // Nothing is placed on a pool whose key cannot be read.
            if let Some(pool) = Prefix::id_after(&prefix, &kv.key).map(PoolId)
                && let Ok(key) = PoolKey::decode(&kv)
            {
                keys.insert(pool, (key, kv.mod_revision));
            }
        }
        let mut nodes = BTreeMap::new();
        let prefix = self.prefix.nodes();
        for kv in self.list(&prefix).await? {
            if let Some(node) = Prefix::id_after(&prefix, &kv.key).map(NodeId)
                && let Ok(key) = NodeKey::decode(&kv)
            {
                nodes.insert(node, (key, kv.mod_revision));
            }
        }
        let leases = self.list(&self.prefix.leases()).await?;
        let live: BTreeMap<NodeId, Incarnation> = leases
            .iter()
            .filter_map(|kv| {
                let incarnation = Incarnation(kv.create_revision as u64);
                Some((self.prefix.node_of(&kv.key)?, incarnation))
            })
            .collect();
        let (mut replicas, mut filled) = (BTreeMap::new(), Vec::new());
        for (node, _, export) in self.exports(None).await? {
            *replicas.entry(node).or_insert(0_u64) += 1;
            let volume = export.volume();
            let place = export.place.filter(|_| export.resync.is_some());
            filled.extend(place.map(|place| (volume, PoolId(place.pool))));
        }
        let mut resyncs = BTreeMap::new();
        for (volume, pool) in filled {
            if self.is_served(volume, &live).await? {
                *resyncs.entry(pool).or_insert(0_u32) += 1;
            }
        }
        let site = |(node, (key, _)): (&NodeId, &(NodeKey, i64))| Site {
            node: *node,
            is_live: live.contains_key(node),
            is_avoided: key.is_avoided(),
            labels: key.description.labels.clone(),
            replicas: replicas.get(node).copied().unwrap_or(0),
        };
        let pool = |(id, (key, _)): (&PoolId, &(PoolKey, i64))| {
            key.facts(*id, resyncs.get(id).copied().unwrap_or(0))
        };
        Ok(Facts {
            sites: nodes.iter().map(site).collect(),
            pools: keys.iter().map(pool).collect(),
            nodes,
            keys,
        })
    }

    /// True if the incarnation of the volume's holder has not ended. Otherwise no resync runs.
    async fn is_served(
        &self,
        volume: VolumeId,
        live: &BTreeMap<NodeId, Incarnation>,
    ) -> Result<bool, Error> {
        let record = self.get(&self.prefix.core_volume(volume)).await?;
        let record = record.and_then(|kv| record::decode(&kv.value).ok());
        let holder = record.and_then(|(_, record)| record.holder);
        Ok(holder.is_some_and(|holder| live.get(&holder.node) == Some(&holder.incarnation)))
    }

    /// Chooses a pool for each replica, reserves the space, and writes the exports. Fails with
    /// [`Error::NotPlaced`] if too few pools fit, and with [`Error::Braked`] for replacements of
    /// lost replicas while the brake is set.
    pub async fn place(&self, placing: &Placing) -> Result<Vec<Placed>, Error> {
        let key = self.prefix.pools();
        for _ in 0..ATTEMPTS {
            let brake = match placing.resync {
                Some(Resync::Lost) => Some(BrakeKey::read(self).await?),
                _ => None,
            };
            if let Some((BrakeKey { brake: Some(_), .. }, _)) = &brake {
                return Err(Error::Braked {
                    key: self.prefix.brake(),
                });
            }
            let mut facts = self.facts().await?;
            for pool in &mut facts.pools {
                pool.is_left_out = placing.left_out.contains(&pool.id);
            }
            let chosen = facts.choose(&key, placing)?;
            let (txn, placed) = self.promise(placing, &facts, &chosen);
            let txn = match &brake {
                Some((_, revision)) => txn.if_modified(&self.prefix.brake(), *revision),
                None => txn,
            };
            let answer = self.transact(&key, txn).await?;
            // Found: an earlier copy of the transaction was made.
            if answer.is_made || answer.found.into_iter().next().flatten().is_some() {
                return Ok(placed);
            }
            let lease = self.prefix.lease(placing.by.node);
            let found = self.get(&lease).await?;
            let stands = placing.by.incarnation.0;
            if found.is_none_or(|kv| kv.create_revision as u64 != stands) {
                let node = placing.by.node;
                return Err(Error::NoLease { key: lease, node });
            }
        }
        Err(Error::Contended { key })
    }

    fn promise(&self, placing: &Placing, facts: &Facts, chosen: &Chosen) -> (Txn, Vec<Placed>) {
        let Placing { wish, by, .. } = placing;
        let lease = self.prefix.lease(by.node);
        let mut txn = Txn::default().if_created(&lease, by.incarnation.0 as i64);
        let mut placed = Vec::new();
        for (at, (choice, export_id)) in chosen.choices.iter().zip(&placing.export_ids).enumerate()
        {
            let (export_id, source) = (*export_id, chosen.sources.get(at));
            let place = PoolChoice {
                source: source.map(|source| source.lvol),
                pool: choice.pool.0,
                bytes: wish.bytes,
                thin: wish.thin,
                class: wish.class.clone(),
                spread: wish.spread.clone(),
                strict: wish.strict,
            };
            let export = Export::placed(placing.volume, export_id, place, placing.resync, *by);
            let (pool, node) = (&facts.keys[&choice.pool], &facts.nodes[&choice.node]);
            let mut promised = pool.0.clone();
            promised.promise(export_id, wish.bytes, wish.thin);
            let of_pool = self.prefix.pool(choice.pool);
            let of_export = self.prefix.export(choice.node, export_id);
            txn = txn
                .if_modified(&of_pool, pool.1)
                .if_modified(&self.prefix.node(choice.node), node.1)
                .if_not_created(&self.prefix.lease(choice.node), 0)
                .if_created(&of_export, 0)
                .put(&of_pool, bytes(&promised))
                .put(&of_export, bytes(&export))
                .read_on_failure(&of_export);
            placed.push(Placed {
                node: choice.node,
                export_id,
                export,
            });
        }
        (txn, placed)
    }

    /// Requests that nodes enlarge the lvols of a volume's replicas to `to` bytes, and reserves the
    /// space. Skips devices that an operator chose. Changes nothing if a pool has no room.
    pub async fn grow_places(&self, volume: VolumeId, to: u64) -> Result<(), Error> {
        let key = self.prefix.pools();
        for _ in 0..ATTEMPTS {
            let facts = self.facts().await?;
            let mut txn = Txn::default();
            let mut is_done = true;
            for (node, export_id, mut export) in self.exports(Some(volume)).await? {
                let Some(place) = export.place.as_mut().filter(|place| place.bytes < to) else {
                    continue;
                };
                if export.want != Want::There {
                    continue;
                }
                is_done = false;
                let (id, by) = (PoolId(place.pool), to - place.bytes);
                place.bytes = to;
                let thin = place.thin;
                let room = facts
                    .pools
                    .iter()
                    .find(|pool| pool.id == id && pool.is_online);
                let room = room.map_or(0, |pool| pool.room(thin));
                let known = facts.keys.get(&id).filter(|_| room >= by);
                let Some((pool, revision)) = known else {
                    let name = facts.name(node);
                    let why = format!(
                        "the pool of the replica on node {name} has room for {room} bytes more, \
                         not for {by}"
                    );
                    let demand = Unmet::Room;
                    return Err(Error::NotPlaced { key, why, demand });
                };
                let (of_pool, of_export) =
                    (self.prefix.pool(id), self.prefix.export(node, export_id));
                let kv = self.get(&of_export).await?;
                let Some(kv) =
                    kv.filter(|kv| Export::decode(kv).is_ok_and(|now| now.want == Want::There))
                else {
                    continue;
                };
                let mut promised = pool.clone();
                promised.promise(export_id, by, thin);
                let mut now = Export::decode(&kv)?;
                now.place = export.place;
                txn = txn
                    .if_modified(&of_pool, *revision)
                    .if_modified(&of_export, kv.mod_revision)
                    .put(&of_pool, bytes(&promised))
                    .put(&of_export, bytes(&now));
            }
            if is_done || self.transact(&key, txn).await?.is_made {
                return Ok(());
            }
        }
        Err(Error::Contended { key })
    }

    /// Removes the mark of a resync from the export of a replica that is in sync. Placements no
    /// longer count that resync for its pool.
    pub async fn resync_is_done(&self, node: NodeId, export_id: ExportId) -> Result<(), Error> {
        let change = |export: &mut Export| export.resync.take().is_some();
        self.change_export(node, export_id, change).await.map(drop)
    }
}

impl Facts {
    fn choose(&self, key: &str, placing: &Placing) -> Result<Chosen, Error> {
        if placing.clone_of.is_empty() {
            return Ok(Chosen {
                choices: self.choose_around(key, placing, &[])?,
                sources: Vec::new(),
            });
        }
        let (clones, mut sources) = self.clone_choices(key, placing)?;
        // With fewer clones the other replicas may still be placed.
        let mut count = clones.len();
        loop {
            match self.choose_around(key, placing, &clones[..count]) {
                Err(_) if count > 1 => count -= 1,
                chosen => {
                    sources.truncate(count);
                    let choices = chosen?;
                    return Ok(Chosen { choices, sources });
                }
            }
        }
    }

    /// The pools of all replicas, of which the first are those of clones.
    fn choose_around(
        &self,
        key: &str,
        placing: &Placing,
        clones: &[Choice],
    ) -> Result<Vec<Choice>, Error> {
        let nodes: Vec<NodeId> = clones.iter().map(|choice| choice.node).collect();
        let mut rest = placing.wish.clone();
        rest.count = rest.count.saturating_sub(clones.len());
        rest.nodes.retain(|node| !nodes.contains(node));
        if let Some(first) = nodes.first()
            && rest.nodes.len() > rest.count
        {
            let why = format!(
                "the first replica is on node {}, which has the snapshot, so that the nodes named \
                 are too many",
                self.name(*first)
            );
            return Err(not_placed(key, why, Unmet::Request));
        }
        let mut choices = clones.to_vec();
        if rest.count > 0 || clones.is_empty() {
            let others: Vec<NodeId> = [&placing.other_nodes[..], &nodes].concat();
            let chosen = choose(placing.volume, &rest, &self.sites, &self.pools, &others);
            choices.extend(chosen.map_err(|refused| self.refusal(key, &refused))?);
        }
        Ok(choices)
    }

    /// The pools of the replicas that are clones, at least one: those on the nodes that are named
    /// first. More than one only as long as each is in another failure domain, and each named node
    /// gets its replica. The error is the reason of the first one.
    fn clone_choices(
        &self,
        key: &str,
        placing: &Placing,
    ) -> Result<(Vec<Choice>, Vec<CloneSource>), Error> {
        let (wish, clone_of) = (&placing.wish, &placing.clone_of);
        let is_named = |source: &CloneSource| wish.nodes.contains(&source.node);
        let (named, others): (Vec<_>, Vec<_>) = clone_of.iter().partition(|one| is_named(one));
        let (mut choices, mut sources) = (Vec::<Choice>::new(), Vec::new());
        let mut refused = None;
        for source in named.into_iter().chain(others) {
            let open = wish.nodes.iter();
            let open = open.filter(|node| choices.iter().all(|choice| choice.node != **node));
            let room = wish.count.saturating_sub(choices.len());
            let is_free = is_named(source) || room > open.count();
            let is_apart = choices
                .iter()
                .all(|choice| self.are_apart(wish, choice.node, source.node));
            let is_wanted = choices.is_empty() || (room > 0 && is_free && is_apart);
            if !is_wanted {
                continue;
            }
            match self.clone_choice(key, wish, source) {
                Ok(choice) => {
                    choices.push(choice);
                    sources.push(*source);
                }
                Err(error) => {
                    refused.get_or_insert(error);
                }
            }
        }
        match refused {
            Some(error) if choices.is_empty() => Err(error),
            _ => Ok((choices, sources)),
        }
    }

    /// True for two nodes in different failure domains.
    fn are_apart(&self, wish: &Wish, one: NodeId, other: NodeId) -> bool {
        let label = |node: NodeId, label: &String| {
            let site = self.sites.iter().find(|site| site.node == node);
            site.and_then(|site| site.labels.get(label))
        };
        let mut labels = wish.spread.iter();
        one != other
            && labels.all(|name| match (label(one, name), label(other, name)) {
                (Some(one), Some(other)) => one != other,
                _ => true,
            })
    }

    /// The pool of the snapshot, if a replica may be made there.
    fn clone_choice(&self, key: &str, wish: &Wish, source: &CloneSource) -> Result<Choice, Error> {
        let CloneSource { node, pool, .. } = *source;
        let name = self.name(node);
        let site = self.sites.iter().find(|site| site.node == node);
        let refuse = |why: String, demand| Err(not_placed(key, why, demand));
        match site {
            Some(site) if site.is_live && !site.is_avoided => {}
            Some(site) if site.is_live => {
                let why = format!("node {name}, which has the snapshot, gets no new replicas");
                return refuse(why, Unmet::Nodes);
            }
            _ => {
                let why = format!("node {name}, which has the snapshot, has no lease");
                return refuse(why, Unmet::Nodes);
            }
        }
        let found = self
            .pools
            .iter()
            .find(|one| one.id == pool && one.node == node);
        let Some(facts) = found.filter(|one| one.is_online) else {
            let why = format!("the pool of the snapshot on node {name} is not online");
            return refuse(why, Unmet::Pools);
        };
        if wish.class.is_some() && facts.class != wish.class {
            let class = wish.class.clone().unwrap_or_default();
            let why = format!(
                "the pool of the snapshot on node {name} is not of class \"{class}\", and the first \
                 replica shares its space"
            );
            return refuse(why, Unmet::Request);
        }
        let room = facts.room(wish.thin);
        if room < wish.bytes {
            let bytes = wish.bytes;
            let why = format!(
                "the pool of the snapshot on node {name} has room for {room} bytes, not for {bytes}"
            );
            return refuse(why, Unmet::Room);
        }
        Ok(Choice { node, pool })
    }

    fn name(&self, node: NodeId) -> String {
        let known = self.nodes.get(&node);
        known.map_or_else(
            || node.0.to_string(),
            |(key, _)| key.description.name.clone(),
        )
    }

    fn refusal(&self, key: &str, unplaced: &Unplaced) -> Error {
        Error::NotPlaced {
            key: key.to_owned(),
            why: refused::text(unplaced, |node| self.name(node)),
            demand: refused::kind(unplaced),
        }
    }
}

fn not_placed(key: &str, why: String, demand: Unmet) -> Error {
    let key = key.to_owned();
    Error::NotPlaced { key, why, demand }
}

#[cfg(test)]
mod tests;
