//! Converts errors of other crates to errors of RPC calls.
//!
//! Those errors and [`RpcError`] belong to other crates, so `From` cannot be implemented here.

use crate::rpc::RpcError;

/// An error that fails a call, as an [`RpcError`] with its code, field, cause and remedy.
pub trait Refusal {
    fn refusal(self) -> RpcError;
}

impl Refusal for RpcError {
    fn refusal(self) -> RpcError {
        self
    }
}

/// Converts the error of a result: `registry.delete(name).or_refuse()?`.
pub(crate) trait OrRefuse<T> {
    fn or_refuse(self) -> Result<T, RpcError>;
}

impl<T, E: Refusal> OrRefuse<T> for Result<T, E> {
    fn or_refuse(self) -> Result<T, RpcError> {
        self.map_err(Refusal::refusal)
    }
}
