//! The key `steward`: the brake on replacements.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

/// The value of the key `steward`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrakeKey {
    pub(crate) v: u64,
    /// Nothing that is lost is replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub brake: Option<Brake>,
    /// The nodes for whose absence an operator has answered, until they return.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excused: Vec<Uuid>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// The nodes that were gone when the brake was set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Brake {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    pub gone: Vec<Uuid>,
    pub of: usize,
}
