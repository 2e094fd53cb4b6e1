//! Setting up an io_uring with the best that the running kernel has.

use std::io;

use io_uring::{Builder, IoUring};

/// The ring with the best flags this kernel takes.
pub(crate) fn set_up(
    depth: u32,
    defer: bool,
) -> Result<(IoUring, &'static str), (String, io::Error)> {
    // A command and a cancel per slot; the kernel rounds up to a power of two. Completions get the
    // double of that by default.
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
        // A child of a fork must not share the queues.
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

/// Whether this process may use io_uring: the mode of use, or the kernel's error and its remedy.
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
