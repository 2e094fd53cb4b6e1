//! Compiles and installs the seccomp filter, from the lists in [`calls`](crate::calls) and rules
//! about arguments.
//!
//! In the mode `enforce` the filter has three programs, because one program has only two results:
//!
//! | program | its list | another call | the kernel logs |
//! |---|---|---|---|
//! | fall back | ENOSYS | allowed | nothing |
//! | refuse | EPERM | allowed | refused calls |
//! | allow | allowed; the calls of the others are on it, too | ENOSYS | refused calls |
//!
//! The kernel runs all three and takes the strictest result. Since Linux 5.11 it remembers the
//! numbers that a program always allows, so calls without rules about arguments cost nothing.
//!
//! The mode `log` has one program, which allows every call and logs those that `refuse` and `allow`
//! refuse, except mmap and mprotect of memory that is both written and run.

use std::collections::BTreeMap;
use std::io;

use libc::c_long;
use seccompiler::SeccompCmpOp::{Eq, MaskedEq, Ne};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use crate::calls::{DENIED, DENIED_HERE, allowed};
use crate::{Mode, SandboxError};

/// Installs the filter of a mode on all threads, and sets no_new_privs; nothing with [`Mode::Off`].
/// The filter stays until the process ends.
pub fn install(mode: Mode) -> Result<(), SandboxError> {
    let programs = match mode {
        Mode::Off => return Ok(()),
        Mode::Log => vec![(log()?, LOGGED)],
        // In this order: the last one does not allow seccomp(2).
        Mode::Enforce => vec![(fall_back()?, 0), (refuse()?, LOGGED), (allow()?, LOGGED)],
    };
    rustix::thread::set_no_new_privs(true).map_err(|errno| SandboxError::System {
        what: "no_new_privs",
        source: errno.into(),
    })?;
    let mut programs = programs.iter();
    programs.try_for_each(|(program, flags)| install_program(program, *flags))
}

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

const LOGGED: libc::c_ulong = libc::SECCOMP_FILTER_FLAG_LOG;

/// Refuses clone3 with ENOSYS. The C library tries clone3 for each thread, and uses clone if it is
/// missing. The flags of clone3 are in memory, where no filter sees them.
fn fall_back() -> Result<BpfProgram, BackendError> {
    let rules = Rules::from([(libc::SYS_clone3, Vec::new())]);
    let missing = SeccompAction::Errno(libc::ENOSYS as u32);
    program(rules, SeccompAction::Allow, missing)
}

/// Allows the calls of the daemon, and those that the other programs decide.
fn allow() -> Result<BpfProgram, BackendError> {
    let mut rules = needed()?;
    rules.insert(libc::SYS_clone3, Vec::new());
    for number in refusals()?.into_keys() {
        rules.insert(number, Vec::new());
    }
    let missing = SeccompAction::Errno(libc::ENOSYS as u32);
    program(rules, missing, SeccompAction::Allow)
}

fn refuse() -> Result<BpfProgram, BackendError> {
    let denied = SeccompAction::Errno(libc::EPERM as u32);
    program(refusals()?, SeccompAction::Allow, denied)
}

/// The denied calls, and the arguments with which others are denied.
fn refusals() -> Result<Rules, BackendError> {
    let denied = DENIED.iter().chain(DENIED_HERE);
    let mut rules: Rules = denied.map(|(number, _)| (*number, Vec::new())).collect();
    // A new process, and a thread in a new namespace.
    let mut clones = vec![all(&[(0, MaskedEq(THREAD), 0)])?];
    for flag in NAMESPACES {
        clones.push(all(&[(0, MaskedEq(flag), flag)])?);
    }
    rules.insert(libc::SYS_clone, clones);
    let others = FAMILIES.map(|family| (0, Ne, family as u64));
    rules.insert(libc::SYS_socket, vec![all(&others)?]);
    let own = u64::from(std::process::id());
    // Signal 0 asks whether a process exists.
    rules.insert(libc::SYS_kill, vec![all(&[(0, Ne, own), (1, Ne, 0)])?]);
    rules.insert(libc::SYS_tgkill, vec![all(&[(0, Ne, own)])?]);
    let limits_of_others = all(&[(0, Ne, own), (0, Ne, 0)])?;
    rules.insert(libc::SYS_prlimit64, vec![limits_of_others]);
    // No memory is both written and run.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let both = all(&[(2, MaskedEq(WRITE_AND_RUN), WRITE_AND_RUN)])?;
        rules.insert(call, vec![both]);
    }
    Ok(rules)
}

/// Logs calls that the others would refuse, except clone3 and memory that is both written and run.
fn log() -> Result<BpfProgram, BackendError> {
    let mut rules = needed()?;
    rules.insert(libc::SYS_clone3, Vec::new());
    let thread = all(&[(0, MaskedEq(THREAD | NAMESPACES.iter().sum::<u64>()), THREAD)])?;
    rules.insert(libc::SYS_clone, vec![thread]);
    let mut families = Vec::new();
    for family in FAMILIES {
        families.push(all(&[(0, Eq, family as u64)])?);
    }
    rules.insert(libc::SYS_socket, families);
    let own = u64::from(std::process::id());
    let to_this_process = || all(&[(0, Eq, own)]);
    rules.insert(libc::SYS_tgkill, vec![to_this_process()?]);
    let asks = all(&[(1, Eq, 0)])?;
    rules.insert(libc::SYS_kill, vec![to_this_process()?, asks]);
    let of_this_process = all(&[(0, Eq, 0)])?;
    let own_limits = vec![of_this_process, to_this_process()?];
    rules.insert(libc::SYS_prlimit64, own_limits);
    program(rules, SeccompAction::Log, SeccompAction::Allow)
}

/// The allowed calls, with the kinds of ioctl.
fn needed() -> Result<Rules, BackendError> {
    let mut rules: Rules = allowed().map(|(number, _)| (number, Vec::new())).collect();
    let mut requests = Vec::new();
    for kind in IOCTL_KINDS {
        requests.push(all(&[(1, MaskedEq(0xff00), u64::from(*kind) << 8)])?);
    }
    for request in IOCTLS {
        requests.push(all(&[(1, Eq, *request)])?);
    }
    rules.insert(libc::SYS_ioctl, requests);
    Ok(rules)
}

const THREAD: u64 = libc::CLONE_THREAD as u64;
/// Flags of clone(2) for new namespaces.
const NAMESPACES: [u64; 7] = [
    libc::CLONE_NEWNS as u64,
    libc::CLONE_NEWCGROUP as u64,
    libc::CLONE_NEWUTS as u64,
    libc::CLONE_NEWIPC as u64,
    libc::CLONE_NEWUSER as u64,
    libc::CLONE_NEWPID as u64,
    libc::CLONE_NEWNET as u64,
];
const WRITE_AND_RUN: u64 = (libc::PROT_WRITE | libc::PROT_EXEC) as u64;

const FAMILIES: [libc::c_int; 4] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
];

/// The second byte of a request: block devices, RDMA (`linux/rdma/ib_user_ioctl_cmds.h`), VFIO and
/// iommufd, network interfaces.
const IOCTL_KINDS: &[u8] = &[0x12, 0x1b, b';', 0x89];

/// Requests of C libraries: isatty, the size of a terminal, FIONBIO, FIONREAD, FIOCLEX, FIONCLEX.
const IOCTLS: &[u64] = &[0x5401, 0x5413, 0x5421, 0x541b, 0x5451, 0x5450];

/// A rule with which a call has to comply entirely: number of an argument, comparison, value.
fn all(conditions: &[(u8, SeccompCmpOp, u64)]) -> Result<SeccompRule, BackendError> {
    // The kernel reads these arguments as 32 bits.
    let each = conditions.iter().map(|(argument, is, value)| {
        SeccompCondition::new(*argument, SeccompCmpArgLen::Dword, is.clone(), *value)
    });
    SeccompRule::new(each.collect::<Result<_, _>>()?)
}

fn program(
    rules: Rules,
    other: SeccompAction,
    listed: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    let here = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, other, listed, here)?.try_into()
}

fn install_program(program: &BpfProgram, flags: libc::c_ulong) -> Result<(), SandboxError> {
    let too_long = || io::Error::from_raw_os_error(libc::EINVAL);
    let length = u16::try_from(program.len()).map_err(|_| SandboxError::Install(too_long()))?;
    let header = Header {
        length,
        filter: program.as_ptr(),
    };
    let flags = flags | libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: `header` has the layout of sock_fprog (linux/filter.h) and points to `length`
    // instructions of `program`, which is borrowed for the call; seccompiler's sock_filter has the
    // kernel's layout. The kernel copies them and writes no memory of ours. seccompiler's own
    // function has other flags, and rustix has no such call.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const header,
        )
    };
    match answer {
        0 => Ok(()),
        // TSYNC answers with the first thread that it could not change.
        thread @ 1.. => Err(SandboxError::Thread(thread)),
        _ => Err(SandboxError::Install(io::Error::last_os_error())),
    }
}

/// `sock_fprog`.
#[repr(C)]
struct Header {
    length: libc::c_ushort,
    filter: *const seccompiler::sock_filter,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel takes 4096 instructions for one program.
    #[test]
    fn the_programs_fit() {
        for program in [allow(), refuse(), fall_back(), log()] {
            let length = program.unwrap().len();
            assert!((10..4096).contains(&length), "{length}");
        }
    }
}
