//! Acts of users on the page that are no RPC calls: set-up, sign-in, sign-out, a change of the own
//! password, an upload. Each has a record in the audit log, as calls have.

use std::net::SocketAddr;

use nacre_engine_rpc::{Role, RpcError};

/// An act of a user, or the attempt.
#[derive(Debug, Clone)]
pub struct Act {
    /// Name of the act in the audit log, where it stands in the place of a method.
    pub name: &'static str,
    /// The account, if it exists. Another name is not recorded: it may be a password typed into the
    /// wrong field.
    pub account: Option<String>,
    /// Name of the API token of a program, instead of an account.
    pub api_token: Option<String>,
    pub role: Option<Role>,
    pub address: SocketAddr,
    pub outcome: Result<(), RpcError>,
}

impl Act {
    pub const SET_UP: &'static str = "page_set_up";
    pub const SIGN_IN: &'static str = "page_sign_in";
    pub const SIGN_OUT: &'static str = "page_sign_out";
    pub const PASSWORD: &'static str = "page_password";
    pub const UPLOAD: &'static str = "page_upload";
}

/// Writes the records of acts.
pub trait Trail {
    /// Writes a record. Returns when that is done, or has failed.
    fn note(&self, act: Act) -> impl Future<Output = ()>;
}
