//! Creates an io_uring with the best setup flags that the running kernel supports.

use std::io;

use io_uring::{Builder, IoUring};

/// Creates a ring for `depth` I/Os and returns it with the name of its mode. The modes are tried
/// from best to plainest; `defer` false skips those with `IORING_SETUP_DEFER_TASKRUN`. The error
/// has the failed system call, with a remedy if one is known, and the kernel's error.
pub(crate) fn set_up(
    depth: u32,
    defer: bool,
) -> Result<(IoUring, &'static str), (String, io::Error)> {
    // One command and one cancel per I/O; the kernel rounds up to a power of two. The completion
    // queue has twice as many entries by default.
    let entries = depth * 2;
    type Setup = fn(&mut Builder) -> &mut Builder;
    let modes: [(&str, Setup); 5] = [
        ("defer_taskrun+no_sqarray", |b| {
            b.setup_single_issuer()
                .setup_defer_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all();
            b.setup_coop_taskrun().setup_no_sqarray()
        }),
        ("defer_taskrun", |b| {
            b.setup_single_issuer()
                .setup_defer_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all();
            b.setup_coop_taskrun()
        }),
        ("coop_taskrun+single_issuer", |b| {
            b.setup_single_issuer()
                .setup_coop_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all()
        }),
        ("coop_taskrun", |b| {
            b.setup_coop_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all()
        }),
        ("plain", |b| b),
    ];
    let skip = if defer { 0 } else { 2 };
    let mut refused = None;
    for (mode, flags) in &modes[skip..] {
        let mut builder = IoUring::builder();
        // A forked child must not share the rings.
        builder.dontfork();
        flags(&mut builder);
        match builder.build(entries) {
            Ok(uring) => return Ok((uring, mode)),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => refused = Some(e),
            Err(e) => return Err((format!("io_uring_setup({entries}){}", remedy(&e)), e)),
        }
    }
    let refused = refused.unwrap_or_else(|| io::Error::from_raw_os_error(libc::EINVAL));
    Err((format!("io_uring_setup({entries})"), refused))
}

/// Checks whether this process may use io_uring. Returns the name of the best mode, or the
/// kernel's error, with a remedy if one is known.
pub fn probe() -> Result<&'static str, String> {
    match set_up(1, true) {
        Ok((_ring, mode)) => Ok(mode),
        Err((what, error)) => Err(format!("{what}: {error}")),
    }
}

fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            " (forbidden: see `sysctl kernel.io_uring_disabled`, and the seccomp profile if this is a container)"
        }
        Some(libc::ENOSYS) => " (the kernel has no io_uring, or a seccomp profile hides it)",
        Some(libc::ENOMEM) => " (locked-memory limit: raise it with `ulimit -l` or LimitMEMLOCK=)",
        Some(libc::EMFILE) => " (too many open files: raise `ulimit -n` or LimitNOFILE=)",
        _ => "",
    }
}
