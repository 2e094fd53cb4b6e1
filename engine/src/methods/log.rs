//! `log_*`: levels, flags and timestamps of the log, changed at run time.

use std::collections::BTreeMap;
use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::log_flags::UnknownFlag;
use crate::config::settings::LogLevel;
use crate::rpc::error::INTERNAL_ERROR;
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError, When};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<SetLevel>()
        .add::<GetLevel>()
        .add::<SetPrintLevel>()
        .add::<GetPrintLevel>()
        .add::<SetFlag>()
        .add::<ClearFlag>()
        .add::<GetFlags>()
        .add::<EnableTimestamps>();
}

/// SPDK's names of the levels.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[allow(clippy::upper_case_acronyms)]
enum SpdkLevel {
    ERROR,
    WARNING,
    NOTICE,
    INFO,
    DEBUG,
}

impl From<LogLevel> for SpdkLevel {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warning => Self::WARNING,
            LogLevel::Notice => Self::NOTICE,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
        }
    }
}

impl From<SpdkLevel> for LogLevel {
    fn from(level: SpdkLevel) -> Self {
        match level {
            SpdkLevel::ERROR => Self::Error,
            SpdkLevel::WARNING => Self::Warning,
            SpdkLevel::NOTICE => Self::Notice,
            SpdkLevel::INFO => Self::Info,
            SpdkLevel::DEBUG => Self::Debug,
        }
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct LevelParams {
    /// The lowest level of lines that are written.
    level: SpdkLevel,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct FlagParams {
    /// As in `log_get_flags`; `all` means every flag.
    flag: String,
}

impl From<UnknownFlag> for RpcError {
    fn from(unknown: UnknownFlag) -> Self {
        Self::invalid_params_text("invalid log flag")
            .cause(unknown.to_string())
            .remedy(unknown.remedy())
            .field("flag")
    }
}

struct SetLevel;

impl Method<Engine> for SetLevel {
    const NAME: &'static str = "log_set_level";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str =
        "Sets the level of the log, and of lines printed to standard error.";
    const CLASS: Class = Class::Operate;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = LevelParams;
    type Reply = bool;

    async fn apply(params: LevelParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.logs.set_level(params.level.into());
        Ok(true)
    }
}

struct GetLevel;

impl Method<Engine> for GetLevel {
    const NAME: &'static str = "log_get_level";
    const ABOUT: &'static str = "Returns the level of the log.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    type Params = NoParams;
    type Reply = SpdkLevel;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<SpdkLevel, RpcError> {
        Ok(engine.logs.level().into())
    }
}

struct SetPrintLevel;

impl Method<Engine> for SetPrintLevel {
    const NAME: &'static str = "log_set_print_level";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Sets the level of lines printed to standard error.";
    const CLASS: Class = Class::Operate;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = LevelParams;
    type Reply = bool;

    async fn apply(params: LevelParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.logs.set_print_level(params.level.into());
        Ok(true)
    }
}

struct GetPrintLevel;

impl Method<Engine> for GetPrintLevel {
    const NAME: &'static str = "log_get_print_level";
    const ABOUT: &'static str = "Returns the level of lines printed to standard error.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    type Params = NoParams;
    type Reply = SpdkLevel;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<SpdkLevel, RpcError> {
        Ok(engine.logs.print_level().into())
    }
}

struct SetFlag;

impl Method<Engine> for SetFlag {
    const NAME: &'static str = "log_set_flag";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Logs one part of the program at debug level.";
    const CLASS: Class = Class::Operate;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = FlagParams;
    type Reply = bool;

    async fn apply(params: FlagParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.logs.set_flag(&params.flag, true)?;
        Ok(true)
    }
}

struct ClearFlag;

impl Method<Engine> for ClearFlag {
    const NAME: &'static str = "log_clear_flag";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Ends what `log_set_flag` began.";
    const CLASS: Class = Class::Operate;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = FlagParams;
    type Reply = bool;

    async fn apply(params: FlagParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.logs.set_flag(&params.flag, false)?;
        Ok(true)
    }
}

struct GetFlags;

impl Method<Engine> for GetFlags {
    const NAME: &'static str = "log_get_flags";
    const ABOUT: &'static str = "Lists the flags and whether they are set.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    type Params = NoParams;
    type Reply = BTreeMap<&'static str, bool>;

    async fn apply(
        _: NoParams,
        engine: Rc<Engine>,
    ) -> Result<BTreeMap<&'static str, bool>, RpcError> {
        Ok(engine.logs.flags())
    }
}

struct EnableTimestamps;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct EnableTimestampsParams {
    /// True: each line begins with its time.
    enabled: bool,
}

impl Method<Engine> for EnableTimestamps {
    const NAME: &'static str = "log_enable_timestamps";
    const ABOUT: &'static str = "Puts the time of day before each line of the log, or not.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Exclusive;
    type Params = EnableTimestampsParams;
    type Reply = bool;

    async fn apply(params: EnableTimestampsParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.logs.set_timestamps(params.enabled);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::test_daemon;
    use serde_json::json;

    #[test]
    fn levels_and_flags_change_live() {
        let daemon = test_daemon();
        assert_eq!(daemon.call("log_get_level", json!(null)), "NOTICE");
        assert_eq!(
            daemon.call("log_set_level", json!({ "level": "DEBUG" })),
            true
        );
        assert_eq!(
            daemon.call("log_set_print_level", json!({ "level": "ERROR" })),
            true
        );
        assert_eq!(daemon.call("log_get_level", json!(null)), "DEBUG");
        assert_eq!(daemon.call("log_get_print_level", json!(null)), "ERROR");
        assert_eq!(
            daemon
                .refused("log_set_level", json!({ "level": "LOUD" }))
                .data
                .unwrap()
                .field
                .as_deref(),
            Some("level")
        );
        assert_eq!(daemon.call("log_set_flag", json!({ "flag": "nvmf" })), true);
        assert_eq!(daemon.call("log_get_flags", json!(null))["nvmf"], true);
        assert_eq!(
            daemon.call("log_clear_flag", json!({ "flag": "nvmf" })),
            true
        );
        assert_eq!(daemon.call("log_get_flags", json!(null))["nvmf"], false);
        let error = daemon.refused("log_set_flag", json!({ "flag": "nvmff" }));
        assert_eq!(
            (error.code, error.message.as_str()),
            (-32602, "invalid log flag")
        );
    }
}
