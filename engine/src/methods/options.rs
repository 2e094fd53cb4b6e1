//! Options set before the data plane starts: `iobuf_set_options`, `bdev_set_options`.
//!
//! SPDK's values are accepted under SPDK's rules. A parameter's description says where its meaning
//! differs: buffers belong to one reactor each, not to a shared pool.

use std::rc::Rc;

use crate::plane::demand::IobufParams;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError, When};
use crate::services::Engine;
use crate::services::startup::BdevParams;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<IobufSetOptions>().add::<BdevSetOptions>();
}

struct IobufSetOptions;

/// Smallest pools that SPDK accepts.
const MIN_SMALL: u64 = 64;
const MIN_LARGE: u64 = 8;
/// Most buffers of a pool: 64 GiB of buffers of 4 KiB. Larger sums could overflow.
const MAX_BUFFERS: u64 = 1 << 24;
/// Most bytes of a buffer: no transfer is larger, see `nvmf.max_io_size`.
const MAX_BYTES: u64 = 16 << 20;

impl Method<Engine> for IobufSetOptions {
    const NAME: &'static str = "iobuf_set_options";
    const ABOUT: &'static str = "Sets number and size of the data buffers.";
    const CLASS: Class = Class::Admin;
    const WHEN: When = When::Startup;
    const ORDER: Order = Order::Exclusive;
    type Params = IobufParams;
    type Reply = bool;

    async fn apply(params: IobufParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let mut options = engine.options.borrow().iobuf.clone();
        params.merge(&mut options);
        let (small, large) = (MIN_SMALL..=MAX_BUFFERS, MIN_LARGE..=MAX_BUFFERS);
        for (field, value, bounds) in [
            ("small_pool_count", options.small_pool_count, small),
            ("large_pool_count", options.large_pool_count, large),
            (
                "small_bufsize",
                options.small_bufsize.into(),
                4096..=MAX_BYTES,
            ),
            (
                "large_bufsize",
                options.large_bufsize.into(),
                8192..=MAX_BYTES,
            ),
        ] {
            let cause = match value {
                _ if bounds.contains(&value) => continue,
                _ if value < *bounds.start() => format!("{value} is less than {}", bounds.start()),
                _ => format!("{value} is more than {}", bounds.end()),
            };
            return Err(RpcError::errno(Errno::EINVAL, cause).field(field));
        }
        engine.options.borrow_mut().iobuf = options;
        Ok(true)
    }
}

struct BdevSetOptions;

impl Method<Engine> for BdevSetOptions {
    const NAME: &'static str = "bdev_set_options";
    const ABOUT: &'static str = "Sets options of the block device layer.";
    const CLASS: Class = Class::Admin;
    const WHEN: When = When::Startup;
    const ORDER: Order = Order::Exclusive;
    type Params = BdevParams;
    type Reply = bool;

    async fn apply(params: BdevParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let mut options = engine.options.borrow().bdev.clone();
        params.merge(&mut options);
        // SPDK's rule: the pool must fill the caches of all threads and one more.
        let threads = 2;
        let (pool, cache) = (options.bdev_io_pool_size, options.bdev_io_cache_size);
        if u64::from(pool) < u64::from(cache) * threads {
            return Err(RpcError::invalid_params_text(format!(
                "Pool size {pool} too small for cache size {cache}"
            ))
            .cause(format!("the pool must hold at least {threads} caches"))
            .field("bdev_io_pool_size"));
        }
        engine.options.borrow_mut().bdev = options;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::TestDaemon;
    use crate::services::lifecycle::Phase;
    use serde_json::json;

    /// Goal: sizes beyond any memory are refused with the field's name and change nothing.
    #[test]
    fn buffer_sizes_are_bounded() {
        let daemon = TestDaemon::waiting();
        for (field, least, most) in [
            ("small_pool_count", 64_u64, 1_u64 << 24),
            ("large_pool_count", 8, 1 << 24),
            ("small_bufsize", 4096, 16 << 20),
            ("large_bufsize", 8192, 16 << 20),
        ] {
            let before = daemon.engine.options.borrow().iobuf.clone();
            for beyond in [0, least - 1, most + 1, 1 << 31] {
                let error = daemon.refused("iobuf_set_options", json!({ field: beyond }));
                let named = error.data.and_then(|d| d.field);
                assert_eq!(
                    (error.code, named.as_deref()),
                    (-22, Some(field)),
                    "{beyond}"
                );
            }
            assert_eq!(daemon.engine.options.borrow().iobuf, before);
            for within in [most, least] {
                let done = daemon.call("iobuf_set_options", json!({ field: within }));
                assert_eq!(done, true, "{field} {within}");
            }
        }
        let error = daemon.refused("iobuf_set_options", json!({ "large_pool_count": u64::MAX }));
        assert_eq!(error.code, -22);
    }

    /// Goal: a start that fails because of a bug ends like a refused one; its caller gets an error.
    #[test]
    fn a_start_that_fails_returns_an_error() {
        let daemon = TestDaemon::waiting();
        // Bypasses the limits of the method.
        daemon.engine.options.borrow_mut().iobuf.large_bufsize = 1 << 31;
        let error = daemon.refused("framework_start_init", json!(null));
        let message = error.to_string();
        for part in [
            "framework_initialization failed: ",
            "a buffer of 2147483648 bytes",
        ] {
            assert!(message.contains(part), "{message}");
        }
        daemon.run(daemon.engine.lifecycle.stopping());
        assert_ne!(daemon.engine.lifecycle.phase(), Phase::Runtime);
    }

    #[test]
    fn options_are_checked_and_saved() {
        let daemon = TestDaemon::waiting();
        assert_eq!(
            daemon.call("iobuf_set_options", json!({ "small_pool_count": 128 })),
            true
        );
        let error = daemon.refused("iobuf_set_options", json!({ "large_pool_count": 1 }));
        assert_eq!(
            (error.code, error.data.unwrap().field.unwrap().as_str()),
            (-22, "large_pool_count")
        );
        let error = daemon.refused("bdev_set_options", json!({ "bdev_io_pool_size": 100 }));
        assert_eq!(error.message, "Pool size 100 too small for cache size 256");
        assert_eq!(
            daemon.call("bdev_set_options", json!({ "bdev_io_cache_size": 16 })),
            true
        );
        daemon.call("framework_start_init", json!(null));
        assert_eq!(
            daemon.call("framework_get_config", json!({ "name": "iobuf" })),
            json!([{ "method": "iobuf_set_options", "params": {
                "small_pool_count": 128, "large_pool_count": 1024, "small_bufsize": 8192,
                "large_bufsize": 135168, "enable_numa": false,
            }}])
        );
        assert_eq!(
            daemon.call("framework_get_config", json!({ "name": "bdev" }))[0]["params"]["bdev_io_cache_size"],
            16
        );
    }
}
