//! `bdev_nvme_get_discovery_info`.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::Serialize;

use super::find;
use crate::rpc::{Class, Method, NoParams, RpcError};
use crate::services::Engine;
use crate::services::remotes::discovery::{DiscoveredPath, Discovery, SubsystemAddress};

pub(super) struct GetDiscoveryInfo;

#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct DiscoveryInfo {
    name: String,
    trid: SubsystemAddress,
    /// Discovery services that the log names, this one among them.
    referrals: Vec<Referral>,
    /// Nacre extension, as the next ones: the state of the connection, in the words of
    /// `bdev_nvme_get_controllers`.
    state: &'static str,
    /// Why it is not connected, or why its log could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// The paths that are attached for it.
    paths: Vec<AttachedPath>,
    /// The paths that could not be attached, and those that are not listed but have the last copy
    /// of a volume.
    refused: Vec<RefusedPath>,
    /// Records of the log that could not be parsed, and are skipped.
    malformed_records: usize,
    /// Records of the log after the first 1024, which are not read.
    unread_records: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Referral {
    trid: SubsystemAddress,
}

#[derive(Debug, Serialize, JsonSchema)]
struct AttachedPath {
    controller: String,
    trid: SubsystemAddress,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RefusedPath {
    trid: SubsystemAddress,
    why: String,
}

impl Method<Engine> for GetDiscoveryInfo {
    const NAME: &'static str = "bdev_nvme_get_discovery_info";
    const ABOUT: &'static str =
        "Lists the discovery services that this daemon follows, and the paths attached for each.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Vec<DiscoveryInfo>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<DiscoveryInfo>, RpcError> {
        let info = |one: &Rc<Discovery>| DiscoveryInfo {
            name: one.name.clone(),
            trid: one.place.clone(),
            referrals: {
                let referrals = one.referrals.borrow();
                let referral = |place: &SubsystemAddress| Referral {
                    trid: place.clone(),
                };
                referrals.iter().map(referral).collect()
            },
            state: one.state_word(),
            error: one.problem(),
            paths: {
                let mut listed = one.listed.borrow().clone();
                listed.retain(|listed| find(&engine, listed).is_some());
                let path = |listed: &DiscoveredPath| AttachedPath {
                    controller: listed.name.clone(),
                    trid: listed.place.clone(),
                };
                listed.iter().map(path).collect()
            },
            refused: {
                let refused = one.refused.borrow();
                let path = |(place, why): &(SubsystemAddress, String)| RefusedPath {
                    trid: place.clone(),
                    why: why.clone(),
                };
                refused.iter().map(path).collect()
            },
            malformed_records: one.malformed.borrow().0,
            unread_records: one.unread.get(),
        };
        Ok(engine.remotes.discoveries.list().iter().map(info).collect())
    }
}
