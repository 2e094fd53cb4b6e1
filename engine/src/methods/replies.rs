//! Values and errors that several families of methods share.

use uuid::Uuid;

use crate::rpc::RpcError;
use crate::rpc::error::Errno;

/// Ticks per second in replies: a tick is a nanosecond.
pub(crate) const TICK_RATE: u64 = 1_000_000_000;

/// Refuses the nil UUID, which hosts do not accept as an identity.
pub(crate) fn refuse_nil(uuid: Option<Uuid>) -> Result<(), RpcError> {
    if !uuid.is_some_and(|uuid| uuid.is_nil()) {
        Ok(())
    } else {
        Err(
            RpcError::errno(Errno::EINVAL, "the nil UUID identifies nothing")
                .field("uuid")
                .remedy("leave it out, or give another"),
        )
    }
}

pub(crate) fn no_device(name: &str) -> RpcError {
    RpcError::errno(Errno::ENODEV, format!("there is no bdev \"{name}\""))
        .field("name")
        .remedy("bdev_get_bdevs lists them")
}
