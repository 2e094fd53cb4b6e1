//! Lowers the daemon's limit on core dumps: its memory contains keys.
//!
//! The limit is 1 byte, not 0. A file of a core dump needs at least a page, so both mean no file.
//! But where the kernel gives core dumps to a program (`|/usr/lib/systemd/systemd-coredump` in
//! /proc/sys/kernel/core_pattern), it ignores every limit but 1, which ends the dump (core(5);
//! fs/coredump.c).

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

use crate::config::security::Security;

/// The limit without core dumps, in bytes.
const NONE: u64 = 1;

/// Lowers both limits, so that programs that the daemon starts cannot raise theirs. With
/// `core_dumps` in `[security]`, leaves them as they are.
pub(crate) fn limit(security: &Security) {
    if security.core_dumps {
        return;
    }
    // A limit of 0, as of LimitCORE=0 of a unit, may not be raised to 1.
    let now = getrlimit(Resource::Core).maximum;
    let most = Some(now.map_or(NONE, |now| now.min(NONE)));
    let wanted = Rlimit {
        current: most,
        maximum: most,
    };
    if let Err(error) = setrlimit(Resource::Core, wanted) {
        warn!(%error, "the limit on core dumps is as it was: a core dump would contain keys");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a core dump is written only if the configuration allows it.
    #[test]
    fn core_dumps_are_off_unless_allowed() {
        let before = getrlimit(Resource::Core);
        limit(&Security {
            core_dumps: true,
            ..Security::default()
        });
        assert_eq!(getrlimit(Resource::Core), before);
        limit(&Security::default());
        let now = getrlimit(Resource::Core);
        assert!(now.maximum.is_some_and(|most| most <= NONE), "{now:?}");
        assert_eq!(now.current, now.maximum);
    }
}
