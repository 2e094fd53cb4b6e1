//! The fixed attributes of a subsystem.

use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::fabrics::ConnectData;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Largest controller id (NVMe-oF: FFF0h and above are reserved).
pub const MAX_CNTLID: u16 = 0xffef;

/// The controller model of a subsystem.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum ControllerModel {
    /// A controller is created for each association, and deleted with it.
    #[default]
    Dynamic,
    /// The controllers exist permanently, one for each id of the range. An association uses one.
    Static,
}

impl ControllerModel {
    /// CNTLID of the subsystem's entries in the discovery log.
    pub fn discovery_cntlid(self) -> u16 {
        match self {
            Self::Dynamic => ConnectData::CNTLID_DYNAMIC,
            Self::Static => ConnectData::CNTLID_STATIC_ANY,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubsystemKind {
    Nvm,
    Discovery,
}

/// The fixed attributes of a subsystem.
#[derive(Debug, Clone)]
pub struct SubsystemConfig {
    pub nqn: Nqn,
    /// Up to 20 printable ASCII characters.
    pub serial_number: String,
    /// Up to 40 printable ASCII characters.
    pub model_number: String,
    /// Most namespaces, and the largest NSID.
    pub max_namespaces: u32,
    pub allow_any_host: bool,
    pub ana_reporting: bool,
    pub controller_model: ControllerModel,
    /// The range of controller ids, within 1 to FFEFh.
    pub min_cntlid: u16,
    pub max_cntlid: u16,
}

/// The options of a new subsystem; `None`: the default.
///
/// The only declaration of these options: the parameters of the RPC method that creates a
/// subsystem, and the keys of `[[nvmf.subsystem]]`, have these names, ranges and descriptions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SubsystemOptions {
    /// At most 20 printable ASCII characters; default: derived from the NQN.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial_number: Option<String>,
    /// At most 40 printable ASCII characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_number: Option<String>,
    /// True: every host may connect. Default false: only hosts that nvmf_subsystem_add_host adds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_any_host: Option<bool>,
    /// Report ANA states to hosts, so that they choose among paths; default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ana_reporting: Option<bool>,
    /// Nacre extension: `dynamic` (default) or `static`. Static: each id of the range is one
    /// controller; hosts connect to any of them (FFFEh) or to one id, and keep it. Linux hosts only
    /// connect dynamically and are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_model: Option<ControllerModel>,
    /// Lowest controller id. Targets that share a subsystem need separate ranges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_cntlid: Option<u16>,
    /// Highest controller id, at most and by default 65519.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cntlid: Option<u16>,
}

impl SubsystemOptions {
    /// Allowed range of each number.
    pub const RANGES: &[(&str, u64, u64)] = &[
        ("min_cntlid", 1, MAX_CNTLID as u64),
        ("max_cntlid", 1, MAX_CNTLID as u64),
    ];

    /// The range of controller ids, unchecked.
    pub fn cntlids(&self) -> (u16, u16) {
        (
            self.min_cntlid.unwrap_or(1),
            self.max_cntlid.unwrap_or(MAX_CNTLID),
        )
    }
}

impl SubsystemConfig {
    pub const DEFAULT_MAX_NAMESPACES: u32 = 32;

    pub fn new(nqn: Nqn) -> Self {
        Self {
            nqn,
            serial_number: "00000000000000000000".to_string(),
            model_number: "Nacre NVMe-oF controller".to_string(),
            max_namespaces: Self::DEFAULT_MAX_NAMESPACES,
            allow_any_host: false,
            ana_reporting: false,
            controller_model: ControllerModel::default(),
            min_cntlid: 1,
            max_cntlid: MAX_CNTLID,
        }
    }

    /// A subsystem with these options.
    pub fn with(nqn: Nqn, options: SubsystemOptions) -> Self {
        let default = Self::new(nqn);
        let (min_cntlid, max_cntlid) = options.cntlids();
        Self {
            serial_number: options.serial_number.unwrap_or(default.serial_number),
            model_number: options.model_number.unwrap_or(default.model_number),
            allow_any_host: options.allow_any_host.unwrap_or(default.allow_any_host),
            ana_reporting: options.ana_reporting.unwrap_or(default.ana_reporting),
            controller_model: options.controller_model.unwrap_or(default.controller_model),
            min_cntlid,
            max_cntlid,
            ..default
        }
    }
}
