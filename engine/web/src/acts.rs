//! Acts of users on the page that are no calls: set-up, sign-in, sign-out, the own password, an
//! upload. Each is for the audit log, as a call is.

use std::net::SocketAddr;

use nacre_engine_rpc::{Role, RpcError};

/// What a user did, or tried to do.
#[derive(Debug, Clone)]
pub struct Act {
    /// The name in the audit log, beside those of RPC methods.
    pub name: &'static str,
    /// The account, if there is one of this name. Another name may be a password in the wrong
    /// field.
    pub account: Option<String>,
    /// The API token of a program, in place of an account.
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

/// Keeps a record of acts.
pub trait Trail {
    /// Returns when the record is written, or could not be.
    fn note(&self, act: Act) -> impl Future<Output = ()>;
}
