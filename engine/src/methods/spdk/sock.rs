//! `sock_*`: the sockets of NVMe/TCP. The only implementation is the kernel's, under SPDK's name
//! for it.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rpc::error::Errno;
use crate::rpc::{Changes, Class, Method, NoParams, Order, Registry, RpcError, When};
use crate::services::Engine;
use crate::services::startup::{POSIX, SockOptions, SockParams};
use crate::values::flattened;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<GetDefaultImpl>()
        .add::<SetDefaultImpl>()
        .add::<GetSockOptions>()
        .add::<SetSockOptions>();
}

/// Implementations whose options SPDK always saves. They cannot be selected, so their options have
/// no effect.
const IGNORED_IMPLS: [&str; 2] = ["ssl", "uring"];

/// Largest socket buffer that a call may request, in bytes.
const MAX_BUFFER: u32 = 1 << 30;

/// The call that restores the options.
pub const SET_SOCK_OPTIONS: &str = SetSockOptions::NAME;

fn known(impl_name: &str) -> Result<(), RpcError> {
    match impl_name {
        POSIX => Ok(()),
        other => Err(RpcError::invalid_params(format!(
            "there are no sockets of the kind \"{other}\""
        ))
        .field("impl_name")
        .remedy(format!("\"{POSIX}\" is the one there is"))),
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ImplParams {
    /// `posix`.
    impl_name: String,
}

#[derive(Debug, Serialize, JsonSchema)]
struct DefaultImpl {
    impl_name: &'static str,
}

struct GetDefaultImpl;

impl Method<Engine> for GetDefaultImpl {
    const NAME: &'static str = "sock_get_default_impl";
    const ABOUT: &'static str = "Names the kind of sockets that are used.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    type Params = NoParams;
    type Reply = DefaultImpl;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<DefaultImpl, RpcError> {
        Ok(DefaultImpl { impl_name: POSIX })
    }
}

struct SetDefaultImpl;

impl Method<Engine> for SetDefaultImpl {
    const NAME: &'static str = "sock_set_default_impl";
    const ABOUT: &'static str = "Chooses the kind of sockets: posix, the one there is.";
    const CLASS: Class = Class::Admin;
    const CHANGES: Changes = Changes::Nothing;
    const WHEN: When = When::Startup;
    const ORDER: Order = Order::Exclusive;
    type Params = ImplParams;
    type Reply = bool;

    async fn apply(params: ImplParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        known(&params.impl_name).map(|()| true)
    }
}

struct GetSockOptions;

impl Method<Engine> for GetSockOptions {
    const NAME: &'static str = "sock_impl_get_options";
    const ABOUT: &'static str = "Returns the options of sockets.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    type Params = ImplParams;
    type Reply = SockOptions;

    async fn apply(params: ImplParams, engine: Rc<Engine>) -> Result<SockOptions, RpcError> {
        known(&params.impl_name)?;
        Ok(engine.options.borrow().sock.clone())
    }
}

struct SetSockOptions;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
struct SetSockOptionsParams {
    /// `posix`.
    impl_name: String,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    options: SockParams,
}

flattened!(SetSockOptionsParams, options);

impl Method<Engine> for SetSockOptions {
    const NAME: &'static str = "sock_impl_set_options";
    const ABOUT: &'static str = "Sets the options of sockets. Options of `ssl` and `uring` are accepted, as SPDK saves them, and have no effect.";
    const CLASS: Class = Class::Admin;
    const WHEN: When = When::Startup;
    const ORDER: Order = Order::Exclusive;
    type Params = SetSockOptionsParams;
    type Reply = bool;

    async fn apply(params: SetSockOptionsParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        if IGNORED_IMPLS.contains(&params.impl_name.as_str()) {
            return Ok(true);
        }
        known(&params.impl_name)?;
        let given = params.options;
        for (field, asked, why) in [
            (
                "enable_quickack",
                given.enable_quickack == Some(true),
                "acknowledgements are the kernel's business here",
            ),
            (
                "enable_placement_id",
                given.enable_placement_id.is_some_and(|id| id != 0),
                "connections are placed by the load of the cores",
            ),
            (
                "tls_version",
                given.tls_version.is_some_and(|version| version != 0),
                "there is no TLS yet",
            ),
            (
                "enable_ktls",
                given.enable_ktls == Some(true),
                "there is no TLS yet",
            ),
        ] {
            if asked {
                return Err(RpcError::errno(Errno::ENOTSUP, why)
                    .field(field)
                    .remedy("leave it out"));
            }
        }
        let mut sock = engine.options.borrow().sock.clone();
        for (field, asked, size) in [
            (
                "recv_buf_size",
                given.recv_buf_size,
                &mut sock.recv_buf_size,
            ),
            (
                "send_buf_size",
                given.send_buf_size,
                &mut sock.send_buf_size,
            ),
        ] {
            let Some(bytes) = asked else { continue };
            if bytes > MAX_BUFFER {
                let cause = format!("{bytes} is more than {MAX_BUFFER}");
                return Err(RpcError::errno(Errno::EINVAL, cause).field(field));
            }
            *size = bytes;
        }
        engine.options.borrow_mut().sock = sock;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use crate::methods::testing::{TestDaemon, test_daemon};
    use serde_json::json;

    const SET: &str = "sock_impl_set_options";

    /// Goal: options set before the start are listed, saved, and applied to the transport's
    /// sockets.
    #[test]
    fn options_are_set_listed_and_saved() {
        let daemon = TestDaemon::waiting();
        let posix = json!({ "impl_name": "posix" });
        assert_eq!(daemon.call("sock_get_default_impl", json!(null)), posix);
        assert_eq!(daemon.call("sock_set_default_impl", posix.clone()), true);
        let before = daemon.call("sock_impl_get_options", posix.clone());
        assert_eq!(
            (&before["recv_buf_size"], &before["send_buf_size"]),
            (&json!(0), &json!(0))
        );
        let set = json!({
            "impl_name": "posix", "recv_buf_size": 262144, "send_buf_size": 131072,
            "enable_recv_pipe": true, "enable_quickack": false, "enable_placement_id": 0,
            "enable_zerocopy_send_server": true, "enable_zerocopy_send_client": false,
            "zerocopy_threshold": 0, "tls_version": 0, "enable_ktls": false,
        });
        assert_eq!(daemon.call(SET, set), true, "the line of SPDK");
        daemon.call("framework_start_init", json!(null));
        let now = daemon.call("sock_impl_get_options", posix);
        assert_eq!(
            (&now["recv_buf_size"], &now["send_buf_size"]),
            (&json!(262144), &json!(131072))
        );
        let saved = daemon.call("framework_get_config", json!({ "name": "sock" }));
        assert_eq!(
            saved,
            json!([{ "method": SET, "params": {
                "impl_name": "posix", "recv_buf_size": 262144, "send_buf_size": 131072,
            }}])
        );
        assert_eq!(
            daemon.refused(SET, saved[0]["params"].clone()).code,
            -1,
            "too late"
        );
    }

    #[test]
    fn unsupported_options_are_refused() {
        let daemon = TestDaemon::waiting();
        for (params, code, field) in [
            (json!({ "impl_name": "pigeon" }), -32602, "impl_name"),
            (
                json!({ "impl_name": "posix", "enable_quickack": true }),
                -95,
                "enable_quickack",
            ),
            (
                json!({ "impl_name": "posix", "enable_placement_id": 1 }),
                -95,
                "enable_placement_id",
            ),
            (
                json!({ "impl_name": "posix", "tls_version": 13 }),
                -95,
                "tls_version",
            ),
            (
                json!({ "impl_name": "posix", "enable_ktls": true }),
                -95,
                "enable_ktls",
            ),
            (
                json!({ "impl_name": "posix", "recv_buf_size": u32::MAX }),
                -22,
                "recv_buf_size",
            ),
        ] {
            let refused = daemon.refused(SET, params.clone());
            let facts = refused.data.unwrap();
            assert_eq!(
                (refused.code, facts.field.as_deref()),
                (code, Some(field)),
                "{params}"
            );
        }
        let other = json!({ "impl_name": "ssl" });
        assert_eq!(daemon.call(SET, other.clone()), true);
        assert_eq!(
            daemon.refused("sock_set_default_impl", other.clone()).code,
            -32602
        );
        assert_eq!(daemon.refused("sock_impl_get_options", other).code, -32602);
    }

    #[test]
    fn default_options_are_not_saved() {
        let saved = test_daemon().call("framework_get_config", json!({ "name": "sock" }));
        assert_eq!(saved, json!([]));
    }
}
