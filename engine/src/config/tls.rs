//! Settings of the TLS listeners for management and metrics, `[rpc.tls]` and `[metrics.tls]`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::rpc::Role;
use crate::values::read;

/// The TLS listener of the management protocol.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RpcTls {
    /// None: no listener.
    #[serde(deserialize_with = "read::endpoint")]
    pub listen: Option<SocketAddr>,
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
    /// Certificates that sign those of clients.
    pub client_ca: Option<PathBuf>,
    /// Revocation lists of `client_ca`. None: no certificate is revoked.
    pub client_crl: Option<PathBuf>,
    /// Roles of clients by the subject of their certificate: texts of
    /// [`crate::rpc::subject::Subject`].
    pub roles: BTreeMap<String, Role>,
}

/// TLS of the HTTP endpoints.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsTls {
    /// None: plain HTTP.
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
    /// None: clients need no certificate.
    pub client_ca: Option<PathBuf>,
    /// As in [`RpcTls`].
    pub client_crl: Option<PathBuf>,
}
