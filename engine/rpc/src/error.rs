//! [`RpcError`]: the error of a refused call, with SPDK's code and message, and [`Facts`]: field,
//! cause and remedy.

use serde::{Deserialize, Serialize};

pub const PARSE_ERROR: i32 = -32700;
pub const INVALID_REQUEST: i32 = -32600;
pub const METHOD_NOT_FOUND: i32 = -32601;
pub const INVALID_PARAMS: i32 = -32602;
pub const INTERNAL_ERROR: i32 = -32603;
/// SPDK's own code: the method exists but is not callable in this state.
pub const INVALID_STATE: i32 = -1;
/// The cause with INVALID_STATE while the daemon starts.
pub const STARTING: &str = "the daemon is starting";

/// The `error` member of an answer. Code and message are SPDK's; `data` is ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message} (code {code}){}", .data.as_ref().map(|d| format!(": {d}")).unwrap_or_default())]
pub struct RpcError {
    pub code: i32,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Box<Facts>>,
}

/// The error's field, cause and remedy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// The parameter at fault, as a path (`namespace.bdev_name`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    pub cause: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl std::fmt::Display for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(field) = &self.field {
            write!(f, "{field}: ")?;
        }
        write!(f, "{}", self.cause)?;
        if let Some(remedy) = &self.remedy {
            write!(f, "; {remedy}")?;
        }
        Ok(())
    }
}

/// The errno values that methods return (negated), by their usual names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Errno {
    EPERM = 1,
    ENOENT = 2,
    EIO = 5,
    EAGAIN = 11,
    ENOMEM = 12,
    EACCES = 13,
    EBUSY = 16,
    EEXIST = 17,
    ENODEV = 19,
    EINVAL = 22,
    EFBIG = 27,
    ENOSPC = 28,
    ENOTSUP = 95,
    EADDRINUSE = 98,
    ETIMEDOUT = 110,
    EALREADY = 114,
}

impl RpcError {
    fn new(code: i32, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            data: None,
        }
    }

    /// `-errno` with the C library's text for it, as SPDK answers device and object errors.
    pub fn errno(errno: Errno, cause: impl Into<String>) -> Self {
        Self::os(errno as i32, cause)
    }

    /// Like [`RpcError::errno`], for an error number from the kernel.
    pub fn os(errno: i32, cause: impl Into<String>) -> Self {
        let text = std::io::Error::from_raw_os_error(errno).to_string();
        let message = text.split(" (os error").next().unwrap_or(&text).to_owned();
        Self::new(-errno, message).cause(cause)
    }

    /// The same facts under another code.
    pub fn renumbered(self, errno: Errno) -> Self {
        Self {
            data: self.data,
            ..Self::errno(errno, "")
        }
    }

    /// An I/O error of the kernel about `what`, with its errno.
    pub fn io(what: &str, error: &std::io::Error) -> Self {
        Self::os(
            error.raw_os_error().unwrap_or(Errno::EIO as i32),
            format!("{what}: {error}"),
        )
    }

    pub fn parse(cause: impl Into<String>) -> Self {
        Self::new(PARSE_ERROR, "Parse error").cause(cause)
    }

    pub fn invalid_request(cause: impl Into<String>) -> Self {
        Self::new(INVALID_REQUEST, "Invalid request").cause(cause)
    }

    pub fn method_not_found(cause: impl Into<String>) -> Self {
        Self::new(METHOD_NOT_FOUND, "Method not found").cause(cause)
    }

    pub fn invalid_params(cause: impl Into<String>) -> Self {
        Self::new(INVALID_PARAMS, "Invalid parameters").cause(cause)
    }

    /// Like [`RpcError::invalid_params`], with SPDK's specific text in place of the general one.
    pub fn invalid_params_text(message: impl Into<String>) -> Self {
        Self::new(INVALID_PARAMS, message)
    }

    pub fn internal(cause: impl Into<String>) -> Self {
        Self::new(INTERNAL_ERROR, "Internal error").cause(cause)
    }

    pub fn invalid_state(message: impl Into<String>) -> Self {
        Self::new(INVALID_STATE, message)
    }

    pub fn cause(mut self, cause: impl Into<String>) -> Self {
        self.data.get_or_insert_default().cause = cause.into();
        self
    }

    pub fn field(mut self, field: impl Into<String>) -> Self {
        self.data.get_or_insert_default().field = Some(field.into());
        self
    }

    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.data.get_or_insert_default().remedy = Some(remedy.into());
        self
    }
}

/// An error with its causes, each once: the text of many errors already contains that of their
/// cause.
pub fn causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    //! Goal: the bytes that scripts match on equal SPDK's.

    use super::*;

    /// Goal: each cause appears once, whether or not an error's text contains it.
    #[test]
    fn each_cause_appears_once() {
        use anyhow::Context;
        let io = || std::io::Error::from_raw_os_error(Errno::ENOENT as i32);
        #[derive(Debug, thiserror::Error)]
        #[error("lock /x: {source}")]
        struct Full {
            source: std::io::Error,
        }
        #[derive(Debug, thiserror::Error)]
        #[error("lock /x")]
        struct Silent {
            source: std::io::Error,
        }
        let expected = "the state: lock /x: No such file or directory (os error 2)";
        let full = Err::<(), _>(Full { source: io() }).context("the state");
        let silent = Err::<(), _>(Silent { source: io() }).context("the state");
        for error in [full, silent] {
            assert_eq!(causes(&error.unwrap_err()), expected);
        }
    }

    #[test]
    fn errno_texts_are_the_c_librarys() {
        for (errno, code, text) in [
            (Errno::ENODEV, -19, "No such device"),
            (Errno::EEXIST, -17, "File exists"),
            (Errno::EINVAL, -22, "Invalid argument"),
            (Errno::ETIMEDOUT, -110, "Connection timed out"),
            (Errno::EPERM, -1, "Operation not permitted"),
            (Errno::ENOTSUP, -95, "Operation not supported"),
        ] {
            let error = RpcError::errno(errno, "x");
            assert_eq!((error.code, error.message.as_str()), (code, text));
        }
    }

    #[test]
    fn facts_accompany_code_and_message() {
        let error = RpcError::invalid_params("not a power of two")
            .field("block_size")
            .remedy("use 512 or 4096");
        assert_eq!(
            serde_json::to_string(&error).unwrap(),
            r#"{"code":-32602,"message":"Invalid parameters","data":{"field":"block_size","cause":"not a power of two","remedy":"use 512 or 4096"}}"#
        );
    }
}
