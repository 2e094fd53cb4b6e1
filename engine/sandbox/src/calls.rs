//! The lists for the daemon's seccomp filter: system calls that it may make, by purpose, and calls
//! that it never makes, which fail with EPERM.
//!
//! The lists come from the code, from its libraries (glibc, tokio, redb, libibverbs, librdmacm,
//! s2n-tls, AWS-LC), and from traces of daemons in the tests. A call that a newer C library may use
//! in place of a listed one is on the list, too. The mode `log` shows calls that are missing here.

use libc::c_long;

/// The number of a system call, and its name with the prefix `SYS_`.
pub type Call = (c_long, &'static str);

macro_rules! calls {
    ($($name:ident)*) => {
        &[$((libc::$name, stringify!($name))),*]
    };
}

/// Files and folders. The daemon's user and the service manager limit the paths.
const FILES: &[Call] = calls! {
    SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev
    SYS_preadv2 SYS_pwritev2 SYS_openat SYS_openat2 SYS_close SYS_close_range SYS_lseek SYS_dup
    SYS_dup3 SYS_fcntl SYS_flock SYS_fstat SYS_newfstatat SYS_statx SYS_statfs SYS_fstatfs
    SYS_faccessat SYS_faccessat2 SYS_readlinkat SYS_getdents64 SYS_getcwd SYS_mkdirat
    SYS_unlinkat SYS_renameat2 SYS_linkat SYS_symlinkat SYS_ftruncate SYS_truncate SYS_fallocate
    SYS_fadvise64 SYS_fsync SYS_fdatasync SYS_syncfs SYS_copy_file_range SYS_sendfile SYS_splice
    SYS_fchmod SYS_fchmodat SYS_fchown SYS_fchownat SYS_utimensat SYS_umask SYS_pipe2
};

/// DMA arenas, heaps, and libraries that are loaded when RDMA is first used.
const MEMORY: &[Call] = calls! {
    SYS_brk SYS_mmap SYS_munmap SYS_mremap SYS_mprotect SYS_madvise SYS_msync SYS_mincore
    SYS_mlock SYS_mlock2 SYS_munlock SYS_mbind SYS_get_mempolicy SYS_memfd_create SYS_mseal
};

/// Events, timers and clocks.
const WAITING: &[Call] = calls! {
    SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2 SYS_ppoll SYS_pselect6
    SYS_eventfd2 SYS_signalfd4 SYS_timerfd_create SYS_timerfd_settime SYS_timerfd_gettime
    SYS_inotify_init1 SYS_inotify_add_watch SYS_inotify_rm_watch SYS_clock_gettime
    SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday SYS_times
};

/// Threads and signals.
const THREADS: &[Call] = calls! {
    SYS_futex SYS_futex_waitv SYS_set_robust_list SYS_get_robust_list SYS_rseq
    SYS_set_tid_address SYS_membarrier SYS_gettid SYS_getpid SYS_getppid SYS_getcpu
    SYS_sched_yield SYS_sched_getaffinity SYS_sched_setaffinity SYS_sched_getparam
    SYS_sched_getscheduler SYS_sched_get_priority_max SYS_sched_get_priority_min SYS_getpriority
    SYS_setpriority SYS_exit SYS_exit_group SYS_restart_syscall SYS_rt_sigaction
    SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigpending SYS_rt_sigsuspend SYS_rt_sigtimedwait
    SYS_sigaltstack SYS_wait4 SYS_waitid
};

/// Sockets of the families that `socket` may name.
const SOCKETS: &[Call] = calls! {
    SYS_socket SYS_socketpair SYS_bind SYS_listen SYS_accept SYS_accept4 SYS_connect
    SYS_shutdown SYS_getsockname SYS_getpeername SYS_getsockopt SYS_setsockopt SYS_sendto
    SYS_recvfrom SYS_sendmsg SYS_recvmsg SYS_sendmmsg SYS_recvmmsg
};

/// Facts and limits of this process and of the machine.
const FACTS: &[Call] = calls! {
    SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getresuid SYS_getresgid SYS_getgroups
    SYS_getpgid SYS_getsid SYS_uname SYS_sysinfo SYS_getrusage SYS_capget SYS_prctl
    SYS_getrandom
};

/// io_uring. Devices are also reached by files and by `ioctl`, which the filter allows by its
/// arguments.
const DEVICES: &[Call] = calls! {
    SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register
};

/// Older forms of calls that are allowed, and calls that only this architecture has.
#[cfg(target_arch = "x86_64")]
const OLDER: &[Call] = calls! {
    SYS_open SYS_stat SYS_lstat SYS_access SYS_readlink SYS_mkdir SYS_rmdir SYS_unlink
    SYS_rename SYS_renameat SYS_link SYS_symlink SYS_chmod SYS_chown SYS_dup2 SYS_pipe SYS_poll
    SYS_select SYS_epoll_create SYS_epoll_wait SYS_eventfd SYS_inotify_init SYS_getdents
    SYS_sync_file_range SYS_getrlimit SYS_setrlimit SYS_arch_prctl SYS_time SYS_getpgrp
};

/// Older forms of calls that are allowed; the libc crate lacks these.
#[cfg(target_arch = "aarch64")]
const OLDER: &[Call] = &[
    (38, "SYS_renameat"),
    (84, "SYS_sync_file_range"),
    (163, "SYS_getrlimit"),
    (164, "SYS_setrlimit"),
];

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const OLDER: &[Call] = &[];

/// Calls that the libc crate lacks. Their numbers are the same on every architecture.
const NEWER: &[Call] = &[
    (452, "SYS_fchmodat2"),
    (453, "SYS_map_shadow_stack"),
    (454, "SYS_futex_wake"),
    (455, "SYS_futex_wait"),
    (456, "SYS_futex_requeue"),
];

/// The calls that are allowed with any arguments, except `mmap`, `mprotect` and `socket`, of which
/// the filter refuses some. The filter adds the other calls that depend on arguments, such as
/// `ioctl`.
pub fn allowed() -> impl Iterator<Item = Call> {
    let groups = [
        FILES, MEMORY, WAITING, THREADS, SOCKETS, FACTS, DEVICES, OLDER, NEWER,
    ];
    groups.into_iter().flatten().copied()
}

/// Calls that the daemon never makes, and that are useful to an attacker in it. Most concern other
/// programs and processes, namespaces, mounts, modules, users, clocks, or keys of the kernel.
pub const DENIED: &[Call] = calls! {
    SYS_execve SYS_execveat SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev
    SYS_pidfd_getfd SYS_kcmp SYS_unshare SYS_setns SYS_mount SYS_umount2 SYS_pivot_root
    SYS_chroot SYS_move_mount SYS_open_tree SYS_fsopen SYS_fsconfig SYS_fsmount
    SYS_mount_setattr SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load
    SYS_reboot SYS_swapon SYS_swapoff SYS_bpf SYS_perf_event_open SYS_userfaultfd SYS_keyctl
    SYS_add_key SYS_request_key SYS_setuid SYS_setgid SYS_setreuid SYS_setregid SYS_setresuid
    SYS_setresgid SYS_setgroups SYS_setfsuid SYS_setfsgid SYS_capset SYS_mknodat SYS_acct
    SYS_quotactl SYS_settimeofday SYS_clock_settime SYS_clock_adjtime SYS_adjtimex
    SYS_sethostname SYS_setdomainname SYS_syslog SYS_open_by_handle_at SYS_fanotify_init
    SYS_personality SYS_vhangup SYS_sched_setattr SYS_sched_setscheduler SYS_sched_setparam
};

/// More calls as in [`DENIED`], which exist on this architecture only.
#[cfg(target_arch = "x86_64")]
pub const DENIED_HERE: &[Call] = calls! {
    SYS_fork SYS_vfork SYS_mknod SYS_iopl SYS_ioperm SYS_modify_ldt SYS_kexec_file_load
    SYS_uselib
};

#[cfg(not(target_arch = "x86_64"))]
pub const DENIED_HERE: &[Call] = &[];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_call_is_on_two_lists() {
        let denied = DENIED.iter().chain(DENIED_HERE).copied();
        let mut seen = BTreeSet::new();
        for (number, name) in allowed().chain(denied) {
            assert!(seen.insert(number), "{name} ({number}) is there twice");
        }
    }
}
