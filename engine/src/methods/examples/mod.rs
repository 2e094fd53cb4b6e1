//! Example calls of the RPC methods: each method's first one is in docs/reference/rpc.md.
//!
//! `examples.json` is one session with a daemon from its start. A test makes the calls in
//! order and compares the replies, so an example in the reference is a call that works. Examples of
//! `cluster_*` go to a second daemon, which is a node of a cluster on a real etcd.
//! `NACRE_WRITE_EXAMPLES=1 cargo test -p nacre-engine --lib examples` rewrites the replies.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// Stands in examples for the omitted rest of an array, object or text.
pub const REST: &str = "…";

const EXAMPLES: &str = include_str!("examples.json");

/// A call, or a wait until a call returns a given reply.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Example {
    pub call: String,
    #[serde(default)]
    pub params: Value,
    #[serde(default)]
    pub answer: Value,
    /// `code` and `message` of a refusal; null for a successful call.
    #[serde(default)]
    pub error: Value,
    /// The reply depends on the machine or the time: the test compares only its shape.
    #[serde(default)]
    pub varies: bool,
    /// The call prepares a later example and is not one itself.
    #[serde(default)]
    pub hidden: bool,
    /// A node of a cluster gets the call: the daemon "ant" of the cluster "lab".
    #[serde(default)]
    pub cluster: bool,
    /// Random values of the reply: JSON pointer, and the text that stands for the value from then
    /// on, in parameters and replies.
    #[serde(default)]
    pub bind: BTreeMap<String, String>,
    /// Repeat the call until the reply has this value at this JSON pointer.
    #[serde(default)]
    pub until: Option<(String, Value)>,
}

/// The calls in their order.
///
/// # Panics
/// When `examples.json` is malformed: it is part of the program.
pub fn all() -> Vec<Example> {
    serde_json::from_str(EXAMPLES).expect("examples.json is well-formed")
}

/// The example of a method among `examples`.
pub fn of<'a>(examples: &'a [Example], method: &str) -> Option<&'a Example> {
    let shown = |e: &&Example| e.call == method && !e.hidden && e.until.is_none();
    examples.iter().find(shown)
}

#[cfg(test)]
mod tests;
