//! Errors of a rebuild of the store, and findings for the operator.

use std::fmt::Write;

use uuid::Uuid;

use crate::backup::BackupError;
use crate::error::Error;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RebuildError {
    #[error(
        "the nodes belong to different clusters: {}. Give the clusters different etcds, or stop the \
         daemons of one of them, and run the command again",
        clusters(found)
    )]
    TwoClusters {
        /// Each cluster with the names of its nodes.
        found: Vec<(Uuid, Vec<String>)>,
    },
    #[error(
        "no node has reported to etcd within {waited_s} s. Start the daemons of the cluster's \
             nodes with this etcd, and run the command again"
    )]
    NoNode { waited_s: u64 },
    #[error(
        "these nodes have not reported within {waited_s} s: {}. Start their daemons with this etcd \
         and run the command again, or name a node that never returns with --without",
        nodes.join(", ")
    )]
    Missing { nodes: Vec<String>, waited_s: u64 },
    #[error("node {name} cannot report: {why}. Then run the command again")]
    Refused { name: String, why: String },
    #[error("--without {name}: {why}")]
    Without { name: String, why: String },
    #[error("--{option} {name}: several volumes have this name. Name one by its id: {ids}")]
    SeveralVolumes {
        option: &'static str,
        name: String,
        ids: String,
    },
    #[error("--{option} {name}: no label and no copy has this volume; there are {known}")]
    NoVolume {
        option: &'static str,
        name: String,
        known: String,
    },
    #[error("nothing was written, because of:{}", listed(problems, notes))]
    Problems {
        problems: Vec<Problem>,
        notes: Vec<Note>,
    },
    #[error("{0}")]
    Backup(#[from] BackupError),
}

/// A reason to write nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error(
        "volume \"{volume}\": {first} and {second} both have the label of replica {replica}. Name \
         the device with the wrong data with --without, or leave the volume out with --skip"
    )]
    TwoDevices {
        volume: String,
        replica: Uuid,
        first: String,
        second: String,
    },
    #[error(
        "volume \"{volume}\": no node has a device with the label of replica {replica}, and no copy \
         names its device. Start the daemon that has it, name the replica with --without, or leave \
         the volume out with --skip"
    )]
    NoPlace { volume: String, replica: Uuid },
    #[error(
        "volume \"{volume}\" ({id}) on {devices}: the last copies do not have it. It was created \
         or deleted just before the loss, or after another restore. Take it with --volume {id}, or \
         leave it out with --skip {id}"
    )]
    Doubtful {
        volume: String,
        id: Uuid,
        devices: String,
    },
    #[error(
        "volume \"{volume}\" ({id}): its record in the copies is damaged, and no label of it was \
         found. Leave the volume out with --skip"
    )]
    NoFacts { volume: String, id: Uuid },
}

/// A finding that the operator should know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Note {
    #[error(
        "volume \"{volume}\" ({id}) on {devices}: left out, because it was deleted. --volume {id} \
         takes it"
    )]
    Deleted {
        volume: String,
        id: Uuid,
        devices: String,
    },
    #[error(
        "volume \"{volume}\" ({id}) on {devices}: left out, because no copy has it. --volume {id} \
         takes it"
    )]
    Foreign {
        volume: String,
        id: Uuid,
        devices: String,
    },
    #[error("volume \"{volume}\": left out, as --skip says")]
    Skipped { volume: String },
    #[error("{device}: its label cannot be read: {why}")]
    Unreadable { device: String, why: String },
    #[error(
        "volume \"{volume}\": {device} was not found. No node serves the volume until the device is \
         there"
    )]
    Absent { volume: String, device: String },
    #[error(
        "volume \"{volume}\": {device} has the label of a replica too, and is not used: the cluster \
         exports another device for it"
    )]
    Clone { volume: String, device: String },
    #[error(
        "volume \"{volume}\": no replica is in sync. `nacre volume thaw` serves it from one of them"
    )]
    Frozen { volume: String },
    #[error(
        "volume \"{volume}\": no copy has it, so its settings are the defaults, and it is not \
         published"
    )]
    NoCopy { volume: String },
    #[error("volume \"{from}\" ({id}) gets the name \"{to}\": another volume has its name")]
    Renamed { id: Uuid, from: String, to: String },
    #[error("node {node}: its copy is not used: {why}")]
    BadCopy { node: String, why: String },
    #[error("no node has a copy of the cluster's keys: publications and settings are lost")]
    NoCopies,
}

impl From<Error> for RebuildError {
    fn from(error: Error) -> Self {
        Self::Backup(error.into())
    }
}

fn clusters(found: &[(Uuid, Vec<String>)]) -> String {
    let of = |(id, nodes): &(Uuid, Vec<String>)| format!("{} is in {id}", nodes.join(", "));
    let all: Vec<String> = found.iter().map(of).collect();
    all.join("; ")
}

fn listed(problems: &[Problem], notes: &[Note]) -> String {
    let mut text = String::new();
    for problem in problems {
        let _ = write!(text, "\n  {problem}");
    }
    for note in notes {
        let _ = write!(text, "\n  (note) {note}");
    }
    text
}
