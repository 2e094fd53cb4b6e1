//! Methods of discovery: the unique name of the discovery subsystem, referrals to other discovery
//! subsystems, and the mDNS methods, which are refused.

use std::rc::Rc;

use nacre_nvmf::subsystems::{Referral, TargetError};
use nacre_nvmf::transport::Address;
use nacre_nvmf_wire::Nqn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::address::{AddressReply, TransportAddress};
use super::{check_target, key, refusal};
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::error::Errno;
use crate::rpc::{Changes, Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::subsystems::configured_nqn;
use crate::services::subsystems::place;
use crate::store::Change;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<SetNqn>()
        .add::<Add>()
        .add::<Remove>()
        .add::<GetReferrals>()
        .add::<PublishMdns>()
        .add::<StopMdns>();
}

struct SetNqn;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetNqnParams {
    /// An NQN. The well-known NQN means no unique name. Left out: nvmf.discovery_nqn applies.
    nqn: Option<String>,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    tgt_name: Option<String>,
}

impl Method<Engine> for SetNqn {
    const NAME: &'static str = "nvmf_discovery_set_nqn";
    const ABOUT: &'static str = "Names the discovery subsystem, beside its well-known name. Hosts that stayed connected by \
                                 another name cannot come back by that one.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = SetNqnParams;
    type Reply = bool;

    async fn apply(params: SetNqnParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        check_target(params.tgt_name.as_deref())?;
        let target = &engine.plane()?.target;
        let (nqn, change) = match params.nqn.as_deref() {
            None | Some("") => (configured_nqn(&engine), Change::remove(key::DISCOVERY_NQN)),
            Some(text) => {
                let nqn = Nqn::new(text).map_err(|error| {
                    RpcError::invalid_params(format!("\"{text}\": {error}")).field("nqn")
                })?;
                let record = json!({ "nqn": nqn.as_str() });
                let change = Change::put(key::DISCOVERY_NQN, Self::NAME, record);
                (Some(nqn), change)
            }
        };
        let before = target.unique_discovery_nqn();
        target.set_discovery_nqn(nqn).map_err(|error| {
            RpcError::invalid_params(error.to_string())
                .field("nqn")
                .remedy("choose a name that no subsystem has")
        })?;
        if let Err(refused) = engine.journal.commit(change).await {
            target.set_discovery_nqn(before).or_refuse()?;
            return Err(refused);
        }
        Ok(true)
    }
}

struct Add;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddParams {
    /// Address of the other discovery service or subsystem. It needs a port; 8009 is usual.
    address: TransportAddress,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    tgt_name: Option<String>,
    /// Hosts must use TLS at this address.
    #[serde(default)]
    secure_channel: bool,
    /// Left out: a discovery subsystem.
    subnqn: Option<String>,
    /// Nacre extension: subnqn is the unique name of a discovery subsystem.
    #[serde(default)]
    discovery: bool,
}

fn referral(
    address: &TransportAddress,
    subnqn: Option<&str>,
    discovery: bool,
    secure_channel: bool,
) -> Result<Referral, RpcError> {
    if address.trsvcid.as_deref().unwrap_or_default().is_empty() {
        return Err(refusal::failed(
            "Service ID is required.",
            "a port is needed, as of a listener",
        )
        .field("address.trsvcid")
        .remedy("add it; 8009 is usual for discovery"));
    }
    let (transport, ip) = address.parse("address")?;
    let subnqn = match subnqn {
        None | Some("") => Nqn::discovery(),
        Some(text) => Nqn::foreign(text).map_err(|error| {
            RpcError::invalid_params_text("Invalid subsystem NQN")
                .cause(error.to_string())
                .field("subnqn")
        })?,
    };
    Ok(Referral {
        transport,
        address: Address::Ip(ip),
        discovery: discovery || subnqn.is_discovery(),
        subnqn,
        secure_channel,
    })
}

fn key_of(referral: &Referral) -> String {
    key::referral(
        referral.transport,
        &place(&referral.address),
        &referral.subnqn,
    )
}

impl Method<Engine> for Add {
    const NAME: &'static str = "nvmf_discovery_add_referral";
    const ABOUT: &'static str =
        "Adds a referral: another discovery service, which the discovery log names to hosts.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = AddParams;
    type Reply = bool;

    async fn apply(params: AddParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        check_target(params.tgt_name.as_deref())?;
        let plane = engine.plane()?;
        let referral = referral(
            &params.address,
            params.subnqn.as_deref(),
            params.discovery,
            params.secure_channel,
        )?;
        // Idempotent, because configurations are loaded more than once.
        if plane.target.referrals().contains(&referral) {
            return Ok(true);
        }
        plane.target.add_referral(referral.clone()).or_refuse()?;
        let stored = engine
            .journal
            .commit(Change::put(
                key_of(&referral),
                Self::NAME,
                json!(describe(&referral)),
            ))
            .await;
        if let Err(refused) = stored {
            plane.target.remove_referral(&referral).or_refuse()?;
            return Err(refused);
        }
        Ok(true)
    }
}

struct Remove;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RemoveReferralParams {
    /// Address of the referral.
    address: TransportAddress,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    tgt_name: Option<String>,
    /// NQN of the referral; default: the well-known discovery NQN.
    subnqn: Option<String>,
}

impl Method<Engine> for Remove {
    const NAME: &'static str = "nvmf_discovery_remove_referral";
    const ABOUT: &'static str = "Takes a referral back.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = RemoveReferralParams;
    type Reply = bool;

    async fn apply(params: RemoveReferralParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        check_target(params.tgt_name.as_deref())?;
        let plane = engine.plane()?;
        let wanted = referral(&params.address, params.subnqn.as_deref(), false, false)?;
        let same = |r: &Referral| key_of(r) == key_of(&wanted);
        if !plane.target.referrals().iter().any(same) {
            return Err(TargetError::NoReferral {
                address: wanted.address.to_string(),
            }
            .refusal());
        }
        engine
            .journal
            .commit(Change::remove(key_of(&wanted)))
            .await?;
        plane.target.remove_referral(&wanted).or_refuse()?;
        Ok(true)
    }
}

struct GetReferrals;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct TargetParams {
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    tgt_name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ReferralReply {
    address: AddressReply,
    secure_channel: bool,
    subnqn: String,
    /// Present only for a discovery subsystem with a unique name.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    discovery: bool,
}

fn describe(referral: &Referral) -> ReferralReply {
    ReferralReply {
        address: AddressReply::new(referral.transport, &referral.address),
        secure_channel: referral.secure_channel,
        subnqn: referral.subnqn.to_string(),
        discovery: referral.discovery && !referral.subnqn.is_discovery(),
    }
}

impl Method<Engine> for GetReferrals {
    const NAME: &'static str = "nvmf_discovery_get_referrals";
    const ABOUT: &'static str = "Lists the referrals.";
    const CLASS: Class = Class::Read;
    type Params = TargetParams;
    type Reply = Vec<ReferralReply>;

    async fn apply(
        params: TargetParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<ReferralReply>, RpcError> {
        check_target(params.tgt_name.as_deref())?;
        Ok(engine
            .plane()?
            .target
            .referrals()
            .iter()
            .map(describe)
            .collect())
    }
}

fn no_mdns(params: &TargetParams) -> Result<bool, RpcError> {
    check_target(params.tgt_name.as_deref())?;
    Err(
        RpcError::errno(Errno::ENOTSUP, "this program does not speak mDNS").remedy(
            "let the machine's own responder publish _nvme-disc._tcp, as with avahi-publish",
        ),
    )
}

struct PublishMdns;

impl Method<Engine> for PublishMdns {
    const NAME: &'static str = "nvmf_publish_mdns_prr";
    const ABOUT: &'static str = "Refused: there is no mDNS here.";
    const CLASS: Class = Class::Admin;
    const CHANGES: Changes = Changes::Nothing;
    type Params = TargetParams;
    type Reply = bool;

    async fn apply(params: TargetParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        no_mdns(&params)
    }
}

struct StopMdns;

impl Method<Engine> for StopMdns {
    const NAME: &'static str = "nvmf_stop_mdns_prr";
    const ABOUT: &'static str = "Refused: there is no mDNS here.";
    const CLASS: Class = Class::Admin;
    const CHANGES: Changes = Changes::Nothing;
    type Params = TargetParams;
    type Reply = bool;

    async fn apply(params: TargetParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        no_mdns(&params)
    }
}
