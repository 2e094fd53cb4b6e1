//! The names of a host's keys, as the file, a method's parameters and a reply have them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Names of the keys of an allowed host; `None`: no such key.
///
/// The only declaration: the parameters of nvmf_subsystem_add_host, the hosts that
/// nvmf_get_subsystems lists and `[[nvmf.subsystem.host]]` have these names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HostKeyNames {
    /// Name of the key with which the host authenticates itself (DH-HMAC-CHAP); see
    /// `keyring_file_add_key`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhchap_key: Option<String>,
    /// Name of the key with which the controller authenticates itself to the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhchap_ctrlr_key: Option<String>,
    /// Name of the pre-shared key with which the host must use TLS 1.3; see `keyring_file_add_key`.
    /// TCP listeners need `secure_channel`, or `tls` in their options.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub psk: Option<String>,
    /// The host must make a key for TLS when it authenticates itself (secure channel concatenation,
    /// `nvme connect --concat`), and use it for all its queues. Needs `dhchap_key`, no `psk`, and a
    /// TCP listener with `tls: "allow"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concat: Option<bool>,
}

impl HostKeyNames {
    /// True if the host must make the key of TLS by authentication.
    pub fn must_concat(&self) -> bool {
        self.concat.unwrap_or(false)
    }
}
