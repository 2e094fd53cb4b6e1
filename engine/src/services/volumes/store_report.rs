//! The volume store in etcd, as input of `nacre doctor`.

use std::path::Path;

use anyhow::Context;
use nacre_cluster_etcd::{Client, Owner, Prefix};

use super::etcd::{endpoints, prefix, this_node};
use super::holder;
use crate::config::Settings;
use crate::doctor::volume_store as doctor;

/// Queries every member of etcd, with a connection of its own. Blocks. `None`: the store is not in
/// etcd. The caller adds the facts of the cluster.
pub(in crate::services) fn store_for_doctor(
    settings: &Settings,
    dir: Option<&Path>,
) -> Option<doctor::VolumeStoreReport> {
    if !settings.store.is_etcd() {
        return None;
    }
    let found = examine(settings, dir);
    Some(found.unwrap_or_else(|error| doctor::VolumeStoreReport {
        prefix: settings.store.prefix.clone().unwrap_or_default(),
        problem: Some(format!("{error:#}")),
        members: Vec::new(),
        owner: doctor::Owner::Unknown("not asked".to_owned()),
        cluster: None,
    }))
}

fn examine(settings: &Settings, dir: Option<&Path>) -> anyhow::Result<doctor::VolumeStoreReport> {
    let of_cluster = settings.cluster.name.as_deref();
    let prefix = match of_cluster.map(Prefix::new) {
        Some(prefix) => prefix.context("cluster.name is invalid")?,
        None => prefix(&settings.store)?,
    };
    let endpoints = endpoints(&settings.store)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (members, owner) = runtime.block_on(async {
        let client = Client::new(&endpoints)?;
        let members = client.members().await;
        let owner = Owner::read(&client, &prefix).await;
        anyhow::Ok((members, owner))
    })?;
    let members = members.into_iter().map(|member| doctor::Member {
        endpoint: member.endpoint,
        took: member.took,
        status: member.status.map(|status| doctor::MemberStatus {
            loses_data: status.loses_data(),
            version: status.version,
            has_leader: status.has_leader,
            size: status.size,
            in_use: status.in_use,
            quota: status.quota,
            errors: status.errors,
        }),
    });
    let owner = match owner {
        // All nodes use it.
        Ok(None) if of_cluster.is_some() => doctor::Owner::Cluster,
        Err(error) => doctor::Owner::Unknown(error.to_string()),
        Ok(None) => doctor::Owner::Nobody,
        Ok(Some(owner)) => match dir.and_then(holder::known).map(this_node) {
            Some(node) if owner.node.is_same(&node) => doctor::Owner::Ours,
            _ => doctor::Owner::Other(owner.node.to_string()),
        },
    };
    Ok(doctor::VolumeStoreReport {
        prefix: prefix.to_string(),
        problem: None,
        members: members.collect(),
        owner,
        cluster: None,
    })
}
