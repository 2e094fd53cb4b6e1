//! Chooses the pools for new replicas of a volume. Pure: the caller reads the nodes and pools from
//! the store (etcd).
//!
//! ```text
//!   nodes  live, not avoided, no replica yet ─┐
//!   pools  online, class, room               ─┴▶ one pool per node ─▶ spread over labels
//!                                                ─▶ least used ─▶ by hash
//! ```
//!
//! The caller's copy of nodes and pools may be stale. So the transaction that reserves the space (a
//! *promise*) compares the keys of the chosen pools and nodes. If one has changed, the caller reads
//! them again and repeats the choice.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use crate::ids::{MAX_REPLICAS, NodeId, PoolId, VolumeId};
use crate::ranks::weight;

/// Most labels in [`Wish::spread`].
pub const MAX_SPREAD: usize = 8;
/// Most new replicas on one pool that are under resync at a time.
pub const MAX_RESYNCS: u32 = 2;
/// Most of a pool that may be in use, reserved or promised to thick replicas, in percent.
const FULL: u64 = 85;
/// Most that the sizes of all volumes of a pool may add up to when it gets a thin replica, in
/// percent of the pool.
const OVERCOMMIT: u64 = 200;
/// Steps of the search for a strict spread. Distinct labels of 128 nodes need a few hundred.
const STEPS: u32 = 50_000;

/// A node, as the store describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    pub node: NodeId,
    /// The node has a lease.
    pub is_live: bool,
    /// Cordoned, drained or evicted: the node gets no new replicas.
    pub is_avoided: bool,
    pub labels: BTreeMap<String, String>,
    /// Replicas on the node.
    pub replicas: u64,
}

/// A pool, as its node reports it, with its promises: the space for replicas that the node has not
/// made yet. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolFacts {
    pub id: PoolId,
    pub node: NodeId,
    pub class: Option<String>,
    pub is_online: bool,
    pub total: u64,
    pub free: u64,
    /// Free bytes that metadata and thick lvols keep.
    pub reserved: u64,
    /// The sum of the sizes of all volumes of the pool, thin and thick.
    pub provisioned: u64,
    pub promised_thin: u64,
    pub promised_thick: u64,
    /// New replicas on it that are under resync.
    pub resyncs: u32,
    /// A new replica on this pool failed, so replicas that need a resync avoid the pool for 1 to 60
    /// minutes ([`crate::repair::FailedPools`]).
    pub is_left_out: bool,
}

impl PoolFacts {
    /// Bytes in use, reserved, or promised to thick replicas.
    fn committed(&self) -> u64 {
        let used = self.total.saturating_sub(self.free);
        used.saturating_add(self.reserved)
            .saturating_add(self.promised_thick)
    }

    /// The sum of the sizes of all volumes that exist or are promised.
    fn provided(&self) -> u64 {
        self.provisioned
            .saturating_add(self.promised_thin)
            .saturating_add(self.promised_thick)
    }

    /// The size in bytes of the largest replica for which the pool has room. For a thick one: the
    /// space below 85 % of the pool. For a thin one: the rest of 200 % of the pool for the sizes of
    /// all volumes. Once the pool is 85 % full, the room for a thin one is 0.
    pub fn room(&self, thin: bool) -> u64 {
        let most = percent(self.total, FULL).saturating_sub(self.committed());
        if !thin || most == 0 {
            return most;
        }
        percent(self.total, OVERCOMMIT).saturating_sub(self.provided())
    }

    /// The part of its limits that is in use, in parts of 10,000.
    fn load(&self) -> u64 {
        let part = |of: u64, most: u64| {
            let part = u128::from(of) * 10_000 / u128::from(most.max(1));
            u64::try_from(part).unwrap_or(u64::MAX)
        };
        let full = part(self.committed(), percent(self.total, FULL));
        full.max(part(self.provided(), percent(self.total, OVERCOMMIT)))
    }
}

fn percent(of: u64, percent: u64) -> u64 {
    let part = u128::from(of) * u128::from(percent) / 100;
    u64::try_from(part).unwrap_or(u64::MAX)
}

/// The new replicas that a volume needs, and the demands on their nodes and pools.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wish {
    pub count: usize,
    /// Size of each replica, with the metadata at its start.
    pub bytes: u64,
    pub thin: bool,
    /// Only pools of this class.
    pub class: Option<String>,
    /// Labels of nodes: replicas go to nodes with different values. The most important label is the
    /// first.
    pub spread: Vec<String>,
    /// True: the values must differ. False: they differ as far as the nodes allow.
    pub strict: bool,
    /// Each of these nodes gets one of the replicas.
    pub nodes: Vec<NodeId>,
    /// The replicas need a resync, so they avoid pools that do not meet [`Demand::Idle`].
    pub is_resync: bool,
}

/// A demand on a node and its pools, in the order in which [`choose`] checks them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Demand {
    /// The node has a lease.
    Live,
    /// The node is not cordoned, drained or evicted.
    Admitted,
    /// The node has none of the volume's other replicas.
    Free,
    /// The node has a pool that is online.
    Pool,
    /// One of these pools has this class.
    Class(String),
    /// One of these pools has room for the replica.
    Room {
        bytes: u64,
        /// The most room in a pool that meets the demands before this one.
        most: u64,
    },
    /// One of these pools has fewer than [`MAX_RESYNCS`] resyncs, and is not left out
    /// ([`PoolFacts::is_left_out`]).
    Idle,
    /// The node has a value of this label that no other replica's node has.
    Spread(String),
}

/// The reason why there is no placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unplaced {
    /// Too few nodes meet this demand and those before it, or a node that the wish names does not.
    Unmet {
        demand: Demand,
        /// Number of nodes that meet it. For [`Demand::Spread`]: the most that the search has
        /// chosen together.
        nodes: usize,
        wanted: usize,
        /// The node that the wish names and that does not meet the demand.
        node: Option<NodeId>,
    },
    /// The wish is for no replica, for more than a volume may have, or names more nodes than
    /// replicas.
    Count { wanted: usize, nodes: usize },
}

/// The pool that was chosen for one replica, and its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    pub node: NodeId,
    pub pool: PoolId,
}

/// A node that meets all demands but the spread, with its best pool.
struct Candidate<'a> {
    site: &'a Site,
    pool: &'a PoolFacts,
    rank: (u64, u64, NodeId),
}

/// Chooses a pool for each replica of the wish. `kept`: the nodes of the volume's other replicas.
pub fn choose(
    volume: VolumeId,
    wish: &Wish,
    sites: &[Site],
    pools: &[PoolFacts],
    kept: &[NodeId],
) -> Result<Vec<Choice>, Unplaced> {
    let named: BTreeSet<NodeId> = wish.nodes.iter().copied().collect();
    if !(1..=MAX_REPLICAS).contains(&wish.count) || named.len() > wish.count {
        return Err(Unplaced::Count {
            wanted: wish.count,
            nodes: named.len(),
        });
    }
    let candidates = candidates(volume, wish, sites, pools, kept, &named)?;
    let kept: Vec<&Site> = sites.iter().filter(|s| kept.contains(&s.node)).collect();
    let chosen = if wish.strict && !wish.spread.is_empty() {
        strict(wish, &candidates, &kept, &named)?
    } else {
        balanced(wish, &candidates, &kept, &named)
    };
    Ok(chosen
        .into_iter()
        .map(|candidate| Choice {
            node: candidate.site.node,
            pool: candidate.pool.id,
        })
        .collect())
}

/// The nodes that meet all demands but the spread, the least used first.
fn candidates<'a>(
    volume: VolumeId,
    wish: &Wish,
    sites: &'a [Site],
    pools: &'a [PoolFacts],
    kept: &[NodeId],
    named: &BTreeSet<NodeId>,
) -> Result<Vec<Candidate<'a>>, Unplaced> {
    let must_be_enough = |demand: Demand, found: &BTreeSet<NodeId>| {
        let unmet = named.difference(found).next().copied();
        if found.len() >= wish.count && unmet.is_none() {
            return Ok(());
        }
        Err(Unplaced::Unmet {
            demand,
            nodes: found.len(),
            wanted: wish.count,
            node: unmet,
        })
    };
    let mut left: Vec<&Site> = sites.iter().collect();
    type Check<'a> = &'a dyn Fn(&Site) -> bool;
    let of_sites: [(Demand, Check<'_>); 3] = [
        (Demand::Live, &|site| site.is_live),
        (Demand::Admitted, &|site| !site.is_avoided),
        (Demand::Free, &|site| !kept.contains(&site.node)),
    ];
    for (demand, is_met) in of_sites {
        left.retain(|site| is_met(site));
        must_be_enough(demand, &left.iter().map(|site| site.node).collect())?;
    }
    let nodes: BTreeMap<NodeId, &Site> = left.iter().map(|site| (site.node, *site)).collect();
    let mut fitting: Vec<&PoolFacts> = pools.iter().collect();
    fitting.retain(|pool| nodes.contains_key(&pool.node) && pool.is_online);
    let of = |pools: &[&PoolFacts]| pools.iter().map(|pool| pool.node).collect();
    must_be_enough(Demand::Pool, &of(&fitting))?;
    if let Some(class) = &wish.class {
        fitting.retain(|pool| pool.class.as_ref() == Some(class));
        must_be_enough(Demand::Class(class.clone()), &of(&fitting))?;
    }
    let most = fitting.iter().map(|pool| pool.room(wish.thin)).max();
    fitting.retain(|pool| pool.room(wish.thin) >= wish.bytes);
    let room = Demand::Room {
        bytes: wish.bytes,
        most: most.unwrap_or(0),
    };
    must_be_enough(room, &of(&fitting))?;
    if wish.is_resync {
        fitting.retain(|pool| pool.resyncs < MAX_RESYNCS && !pool.is_left_out);
        must_be_enough(Demand::Idle, &of(&fitting))?;
    }
    let all: u64 = sites.iter().map(|site| site.replicas).sum();
    let mut best: BTreeMap<NodeId, Candidate<'_>> = BTreeMap::new();
    for pool in fitting {
        let site = nodes[&pool.node];
        let held = site.replicas * 10_000 / all.max(1);
        let hash = weight(volume.0, pool.id.0);
        let rank = (pool.load().max(held), hash, site.node);
        let candidate = Candidate { site, pool, rank };
        let known = best.get(&site.node);
        if known.is_none_or(|known| candidate.rank < known.rank) {
            best.insert(site.node, candidate);
        }
    }
    let mut best: Vec<Candidate<'_>> = best.into_values().collect();
    best.sort_by_key(|candidate| candidate.rank);
    Ok(best)
}

/// Chooses the named nodes, and then one node after the other: each time the one whose labels have
/// the rarest values so far.
fn balanced<'a, 'b>(
    wish: &Wish,
    candidates: &'a [Candidate<'b>],
    kept: &[&'b Site],
    named: &BTreeSet<NodeId>,
) -> Vec<&'a Candidate<'b>> {
    let mut chosen: Vec<&Candidate<'_>> = Vec::new();
    let must = |candidate: &&Candidate<'_>| named.contains(&candidate.site.node);
    chosen.extend(candidates.iter().filter(must));
    while chosen.len() < wish.count {
        let is_free = |one: &&Candidate<'_>| chosen.iter().all(|c| c.site.node != one.site.node);
        let uses = |candidate: &&Candidate<'_>| {
            let sites = chosen
                .iter()
                .map(|one| one.site)
                .chain(kept.iter().copied());
            let sites: Vec<&Site> = sites.collect();
            let of = |label: &String| {
                let value = candidate.site.labels.get(label);
                let same = sites.iter().filter(|site| site.labels.get(label) == value);
                same.count()
            };
            let uses: Vec<usize> = wish.spread.iter().map(of).collect();
            (uses, candidate.rank)
        };
        let Some(next) = candidates.iter().filter(is_free).min_by_key(uses) else {
            break;
        };
        chosen.push(next);
    }
    chosen
}

/// Chooses nodes that differ in each label of the spread.
fn strict<'a, 'b>(
    wish: &Wish,
    candidates: &'a [Candidate<'b>],
    kept: &[&'b Site],
    named: &BTreeSet<NodeId>,
) -> Result<Vec<&'a Candidate<'b>>, Unplaced> {
    // Named nodes first: all of them must be in the result.
    let mut order: Vec<&Candidate<'_>> = candidates.iter().collect();
    order.sort_by_key(|candidate| !named.contains(&candidate.site.node));
    let mut search = Search {
        wish,
        order: &order,
        named: named.len(),
        steps: STEPS,
        best: 0,
    };
    let mut chosen = Vec::new();
    let mut sites = kept.to_vec();
    if search.run(&mut chosen, &mut sites, 0) {
        return Ok(chosen);
    }
    let label = search.scarcest(kept);
    Err(Unplaced::Unmet {
        demand: Demand::Spread(label),
        nodes: search.best,
        wanted: wish.count,
        node: None,
    })
}

struct Search<'s, 'a, 'b> {
    wish: &'s Wish,
    order: &'s [&'a Candidate<'b>],
    named: usize,
    steps: u32,
    /// The most nodes that the search has chosen together.
    best: usize,
}

impl<'a, 'b> Search<'_, 'a, 'b> {
    /// Adds nodes to `chosen`, from position `from` of the order on. True: it has all replicas.
    fn run(
        &mut self,
        chosen: &mut Vec<&'a Candidate<'b>>,
        sites: &mut Vec<&'b Site>,
        from: usize,
    ) -> bool {
        self.best = self.best.max(chosen.len());
        if chosen.len() == self.wish.count {
            return true;
        }
        // A named node is at its place in the order, or the choice fails.
        let end = if chosen.len() < self.named {
            (from + 1).min(self.order.len())
        } else {
            self.order.len()
        };
        for at in from..end {
            if self.steps == 0 {
                return false;
            }
            self.steps -= 1;
            let candidate = self.order[at];
            if !self.differs(candidate.site, sites) {
                continue;
            }
            chosen.push(candidate);
            sites.push(candidate.site);
            if self.run(chosen, sites, at + 1) {
                return true;
            }
            chosen.pop();
            sites.pop();
        }
        false
    }

    /// True if the node has each label of the spread, with another value than the sites.
    fn differs(&self, site: &Site, sites: &[&Site]) -> bool {
        let mut labels = self.wish.spread.iter();
        labels.all(|label| {
            let value = site.labels.get(label);
            value.is_some() && sites.iter().all(|other| other.labels.get(label) != value)
        })
    }

    /// The label with the fewest values that are not in use.
    fn scarcest(&self, kept: &[&Site]) -> String {
        let values = |label: &&String| {
            let of = |site: &Site| site.labels.get(*label).cloned();
            let used: BTreeSet<_> = kept.iter().filter_map(|site| of(site)).collect();
            let all = self.order.iter().filter_map(|one| of(one.site));
            all.filter(|value| !used.contains(value))
                .collect::<BTreeSet<_>>()
                .len()
        };
        let label = self.wish.spread.iter().min_by_key(values);
        label.cloned().unwrap_or_default()
    }
}

/// The UUID of the lvol that a node makes for a replica.
pub fn lvol_of(replica: Uuid) -> Uuid {
    const MARK: [u8; 16] = *b"placed replica  ";
    let mut bytes = replica.into_bytes();
    bytes
        .iter_mut()
        .zip(MARK)
        .for_each(|(byte, mark)| *byte ^= mark);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

#[cfg(test)]
mod tests;
