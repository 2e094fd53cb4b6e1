//! Errors of the in-memory transport's host side.

/// Why a host cannot connect to a loopback listener.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    #[error("nothing listens on loopback:{name}")]
    NoListener { name: String },
    #[error("this thread serves no loopback transport: connect from a core that does")]
    NoCore,
    #[error("the core has its {limit} connections already")]
    TooMany { limit: usize },
}
