//! Computes the keys of a cluster whose etcd was lost, from the reports of its nodes. No I/O.
//!
//! A volume's replicas and their states are known from two sources: the *label*, metadata at the
//! start of each replica, of which the last one that an in-sync replica wrote counts; and the
//! volume's *record* in the file in which a node keeps a copy of keys. The later of the two is
//! used.
//!
//! The new record of the volume has `restored` set, with the version of the source. The next holder
//! therefore reads the labels of all replicas that are not lost before it opens the volume, as
//! after a restore.

use std::collections::{BTreeMap, BTreeSet};

use nacre_cluster_core::NodeId;
use serde_json::{Value, json};
use uuid::Uuid;

use super::copy::CopiedRecord;
use super::error::{Note, Problem, RebuildError};
use super::facts::Found;
use super::reports::{NodeReports, id};
use super::volume;
use crate::backup::{Backup, SavedKey};
use crate::keys::Cluster;
use crate::snapshot::outlives_its_store;

/// Duration of leases, if no node has a copy with the cluster's.
const LEASE: std::time::Duration = std::time::Duration::from_secs(2);

/// The operator's decisions: the options of the command.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Lost for good: nodes, devices as `NODE:DEVICE`, and ids of replicas.
    pub without: Vec<String>,
    /// Volumes to include, by id or name, that no report shows to belong to the cluster.
    pub volumes: Vec<String>,
    /// Volumes to leave out, by id or name.
    pub skip: Vec<String>,
}

/// The computed keys. Use them only if `missing` and `problems` are empty and `refused` is `None`.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The keys, in the form of a backup of the cluster.
    pub backup: Backup,
    /// Number of nodes that have reported.
    pub nodes: usize,
    /// False: no report has a copy of the keys, so the list of all nodes is unknown.
    pub has_copy: bool,
    /// Nodes that are needed and have not reported: by name, or by id if no copy has the name.
    pub missing: Vec<String>,
    /// Number of replicas that their nodes have not found on any device.
    pub absent: usize,
    /// Facts for the operator that prevent nothing.
    pub notes: Vec<Note>,
    /// Problems that the operator must decide about first.
    pub problems: Vec<Problem>,
    /// An option that matches no node, device or volume, or several volumes. It may match one when
    /// a missing node reports.
    pub refused: Option<RebuildError>,
}

/// Computes the keys of the cluster `name` from the reports of all nodes. Fails if the nodes belong
/// to different clusters.
pub fn decide(
    name: &str,
    all: &BTreeMap<NodeId, Found>,
    options: &Options,
) -> Result<Plan, RebuildError> {
    let mut reports = NodeReports::new(all);
    let id = reports.cluster()?;
    let newest = reports.copies.first().map(|(_, copy)| *copy);
    let meta = newest.map(|copy| copy.meta.clone());
    let mut meta = match meta {
        Some(meta) => meta,
        None => Cluster::new(name, LEASE)?,
    };
    meta.id = id.unwrap_or(meta.id);
    meta.name = name.to_owned();
    let mut draft = Draft {
        refused: reports.name_lost(&options.without).err(),
        ..Draft::default()
    };
    reports.note_devices(&mut draft.notes);
    let chosen = reports.choose(options, &mut draft);
    for (volume, base) in &chosen {
        reports.add(*volume, *base, &mut draft);
    }
    reports.add_snapshots(&mut draft);
    let mut keys = vec![saved("meta".to_owned(), &json!(meta))];
    keys.extend(
        reports
            .nodes()
            .into_iter()
            .map(|(id, value)| saved(format!("node/{id}"), &value)),
    );
    keys.append(&mut draft.keys);
    keys.append(&mut draft.volumes);
    Ok(Plan {
        backup: Backup {
            id: meta.id,
            name: name.to_owned(),
            revision: 0,
            created: 0,
            keys,
        },
        nodes: all.len(),
        has_copy: !reports.copies.is_empty(),
        missing: reports.missing(&chosen),
        absent: draft.absent,
        notes: draft.notes,
        problems: draft.problems,
        refused: draft.refused,
    })
}

/// Volumes in order of their creation, each with its record in a node's copy.
type Chosen<'a> = Vec<(Uuid, Option<&'a CopiedRecord>)>;

/// The parts of a [`Plan`] while it is computed.
#[derive(Default)]
struct Draft {
    keys: Vec<SavedKey>,
    /// Records, in order of the volumes' creation.
    volumes: Vec<SavedKey>,
    names: BTreeSet<String>,
    absent: usize,
    notes: Vec<Note>,
    problems: Vec<Problem>,
    refused: Option<RebuildError>,
}

fn saved(key: String, value: &Value) -> SavedKey {
    let value = value.to_string();
    SavedKey { key, value }
}

impl<'a> NodeReports<'a> {
    /// Selects the volumes of the cluster. Adds a note or problem for each other volume.
    fn choose(&self, options: &Options, draft: &mut Draft) -> Chosen<'a> {
        let newest = self.copies.first().map(|(found, _)| &found.volumes);
        let mut all: BTreeSet<Uuid> = self.places.keys().copied().collect();
        all.extend(newest.into_iter().flatten());
        for (_, copy) in &self.copies {
            all.extend(copy.volumes.keys());
        }
        let mut chosen = Vec::new();
        let mut unused: BTreeSet<(&'static str, &String)> = BTreeSet::new();
        unused.extend(options.volumes.iter().map(|name| ("volume", name)));
        unused.extend(options.skip.iter().map(|name| ("skip", name)));
        let named_volumes = all.into_iter().map(|id| {
            let base = self.base(id);
            (id, base, self.name_of_volume(id, base))
        });
        let named_volumes: Vec<_> = named_volumes.collect();
        for (option, text) in &unused {
            let of_name = named_volumes.iter().filter(|(.., name)| name == *text);
            let ids: Vec<String> = of_name.map(|(id, ..)| id.to_string()).collect();
            if ids.len() > 1 {
                draft
                    .refused
                    .get_or_insert_with(|| RebuildError::SeveralVolumes {
                        option,
                        name: (*text).clone(),
                        ids: ids.join(", "),
                    });
            }
        }
        let mut names = Vec::new();
        for (id, base, name) in named_volumes {
            let is_taken = named(&mut unused, "volume", &options.volumes, &name, id);
            let is_skipped = named(&mut unused, "skip", &options.skip, &name, id);
            names.push(name.clone());
            if is_skipped {
                draft.notes.push(Note::Skipped { volume: name });
            } else if is_taken || self.is_of_cluster(id) {
                chosen.push((id, base));
            } else if self.places.contains_key(&id) && self.is_doubtful(id) {
                draft.problems.push(Problem::Doubtful {
                    devices: self.devices_of(id),
                    volume: name,
                    id,
                });
            } else if self.places.contains_key(&id) {
                draft.notes.push(self.left_out(id, name));
            }
        }
        if let Some((option, name)) = unused.into_iter().next() {
            let known = if names.is_empty() {
                "none".to_owned()
            } else {
                names.join(", ")
            };
            let name = name.clone();
            let refused = RebuildError::NoVolume {
                option,
                name,
                known,
            };
            draft.refused.get_or_insert(refused);
        }
        chosen.sort_by_key(|(id, base)| (base.map_or(i64::MAX, |base| base.order), *id));
        chosen
    }

    /// Adds the keys of a volume, or the problem that prevents them.
    fn add(&self, id: Uuid, base: Option<&CopiedRecord>, draft: &mut Draft) {
        let name = self.name_of_volume(id, base);
        let made = match volume::rebuild(self, id, &name, base) {
            Ok(made) => made,
            Err(problem) => return draft.problems.push(problem),
        };
        let mut record = made.record;
        draft.absent += made.absent;
        draft.notes.extend(made.notes);
        if base.is_none() {
            let volume = name.clone();
            draft.notes.push(Note::NoCopy { volume });
        }
        let mut own = name.clone();
        if !draft.names.insert(own.clone()) {
            let cut: String = name.chars().take(200).collect();
            own = format!("{cut}-{}", &id.to_string()[..8]);
            draft.names.insert(own.clone());
            let (from, to) = (name, own.clone());
            draft.notes.push(Note::Renamed { id, from, to });
        }
        record["name"] = own.clone().into();
        draft.keys.push(SavedKey {
            key: format!("name/{own}"),
            value: id.to_string(),
        });
        for (node, export) in made.exports {
            let key = format!("member/{node}/{}", export.0);
            draft.keys.push(saved(key, &export.1));
        }
        let mut copies = self.copies.iter();
        if let Some(publication) = copies.find_map(|(_, copy)| {
            let is_concerned = copy.volumes.contains_key(&id);
            is_concerned.then(|| copy.publications.get(&id))
        }) {
            let publication = publication.map(|value| saved(format!("pub/{id}"), value));
            draft.keys.extend(publication);
        }
        draft.volumes.push(saved(format!("vol/{id}"), &record));
    }

    /// Adds the snapshots, each as the newest copy with it has it. Nodes report the lvols that are
    /// missing later.
    fn add_snapshots(&self, draft: &mut Draft) {
        let mut added = BTreeSet::new();
        for (_, copy) in &self.copies {
            for (id, value) in &copy.snapshots {
                let saved = saved(format!("snap/{id}"), value);
                if added.insert(*id) && outlives_its_store(&saved.value) {
                    draft.keys.push(saved);
                }
            }
        }
    }

    /// The names of the nodes that have not reported.
    fn missing(&self, chosen: &Chosen<'_>) -> Vec<String> {
        let mut awaited: BTreeSet<Uuid> = BTreeSet::new();
        if let Some((_, newest)) = self.copies.first() {
            awaited.extend(newest.nodes.keys());
        }
        for (volume, base) in chosen {
            let places = self.places.get(volume).map_or(&[][..], Vec::as_slice);
            let replicas = base.iter().flat_map(|base| base.replicas());
            // A device may have moved to another node.
            let absent = replicas.filter(|replica| {
                let of = id(&replica["id"]);
                !places.iter().any(|place| Some(place.label.replica) == of)
            });
            awaited.extend(absent.filter_map(|replica| id(&replica["node"])));
        }
        let is_missing = |node: &Uuid| !self.has_reported(*node) && !self.lost.nodes.contains(node);
        let missing = awaited.into_iter().filter(is_missing);
        let reported: BTreeSet<String> = self.all.keys().map(|id| self.name_of(id.0)).collect();
        let shown = |node: Uuid| {
            let name = self.name_of(node);
            if reported.contains(&name) {
                return format!("{name} with the former id {node}");
            }
            name
        };
        missing.map(shown).collect()
    }
}

/// True if `list` has the volume's name or id. Removes these from `unused`.
fn named<'a>(
    unused: &mut BTreeSet<(&'static str, &'a String)>,
    option: &'static str,
    list: &'a [String],
    name: &str,
    id: Uuid,
) -> bool {
    let is_it = |text: &&String| text.as_str() == name || **text == id.to_string();
    let mut is_named = false;
    for text in list.iter().filter(is_it) {
        unused.remove(&(option, text));
        is_named = true;
    }
    is_named
}
