//! The errors of setting up the sandbox, or of reading its state.

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("the process has {0} threads already: capabilities belong to a thread")]
    Threads(usize),
    #[error("{what}: {source}")]
    System {
        what: &'static str,
        source: io::Error,
    },
    #[error("the filter cannot be compiled: {0}")]
    Compile(#[from] seccompiler::BackendError),
    #[error("seccomp(2): {0}; is CONFIG_SECCOMP_FILTER in this kernel?")]
    Install(io::Error),
    #[error("seccomp(2): thread {0} has another filter")]
    Thread(libc::c_long),
}
