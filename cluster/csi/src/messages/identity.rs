//! The messages of the service `csi.v1.Identity`.

use super::{BoolValue, Texts};

#[derive(Clone, PartialEq, prost::Message)]
pub struct GetPluginInfoResponse {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub vendor_version: String,
    #[prost(btree_map = "string, string", tag = "3")]
    pub manifest: Texts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum ServiceKind {
    Unknown = 0,
    Controller = 1,
    VolumeAccessibilityConstraints = 2,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Service {
    #[prost(enumeration = "ServiceKind", tag = "1")]
    pub kind: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum ExpansionKind {
    Unknown = 0,
    Online = 1,
    Offline = 2,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct VolumeExpansion {
    #[prost(enumeration = "ExpansionKind", tag = "1")]
    pub kind: i32,
}

#[derive(Clone, Copy, PartialEq, prost::Oneof)]
pub enum PluginFeature {
    #[prost(message, tag = "1")]
    Service(Service),
    #[prost(message, tag = "2")]
    VolumeExpansion(VolumeExpansion),
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PluginCapability {
    #[prost(oneof = "PluginFeature", tags = "1, 2")]
    pub feature: Option<PluginFeature>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct GetPluginCapabilitiesResponse {
    #[prost(message, repeated, tag = "1")]
    pub capabilities: Vec<PluginCapability>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ProbeResponse {
    #[prost(message, optional, tag = "1")]
    pub ready: Option<BoolValue>,
}
