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
}
