//! `bdev_examine`, `bdev_wait_for_examine`: Nacre never examines devices on its own, so both return
//! at once.

use std::rc::Rc;

use nacre_bdev::module::ByName;

use crate::rpc::error::Errno;
use crate::rpc::{Changes, Class, Method, NoParams, Registry, RpcError};
use crate::services::Engine;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<Examine>().add::<WaitForExamine>();
}

struct Examine;

impl Method<Engine> for Examine {
    const NAME: &'static str = "bdev_examine";
    const ABOUT: &'static str =
        "Has modules look at a device; only where bdev_set_options turned bdev_auto_examine off.";
    const CLASS: Class = Class::Operate;
    const CHANGES: Changes = Changes::Nothing;
    type Params = ByName;
    type Reply = bool;

    async fn apply(_: ByName, engine: Rc<Engine>) -> Result<bool, RpcError> {
        if engine.options.borrow().bdev.bdev_auto_examine {
            return Err(RpcError::errno(
                Errno::EINVAL,
                "devices are examined by themselves (bdev_auto_examine)",
            ));
        }
        Ok(true)
    }
}

struct WaitForExamine;

impl Method<Engine> for WaitForExamine {
    const NAME: &'static str = "bdev_wait_for_examine";
    const ABOUT: &'static str = "Answers once every device has been examined.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = bool;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.plane()?.bdevs.wait_for_examine();
        Ok(true)
    }
}
