//! Goal: the filter lets a daemon work, refuses other calls, and ends no process.
//! Method: this test starts itself as a child, since a filter cannot be removed.

use std::io;
use std::net::{TcpListener, UdpSocket};
use std::process::Command;

use nacre_engine_sandbox::{Mode, Status, install, kernel_has_filters};
use rustix::net::{AddressFamily, SocketType};

/// Names the mode in the child.
const CHILD: &str = "NACRE_TEST_SANDBOX_CHILD";

fn child(mode: Mode, test: &str) {
    if !kernel_has_filters() {
        eprintln!("SKIPPED: {test}: this kernel has no seccomp filters");
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, mode.word())
        .output()
        .unwrap();
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{}\n{said}", output.status);
    assert!(said.contains("the child ended well"), "{said}");
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// The number of an error.
fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

fn ordinary_work() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    UdpSocket::bind("[::1]:0").map(drop).unwrap_or_default();
    let file = std::env::temp_dir().join(format!("nacre-sandbox-{}", std::process::id()));
    std::fs::write(&file, "text").unwrap();
    std::fs::rename(&file, file.with_extension("b")).unwrap();
    std::fs::remove_file(file.with_extension("b")).unwrap();
    let threads = (0..4)
        .map(|n| std::thread::spawn(move || n))
        .collect::<Vec<_>>();
    let sum: i32 = threads.into_iter().map(|one| one.join().unwrap()).sum();
    assert_eq!(sum, 6);
    rustix::process::test_kill_process(rustix::process::getpid()).unwrap();
}

#[test]
fn enforce_refuses_and_ends_no_process() {
    if !is_child() {
        return child(Mode::Enforce, "enforce_refuses_and_ends_no_process");
    }
    // A thread from before has the filter, too.
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let earlier = std::thread::spawn(move || {
        wait.recv().unwrap();
        errno(Command::new("true").status())
    });
    install(Mode::Enforce).unwrap();
    let status = Status::read().unwrap();
    assert!(status.no_new_privs && status.filters >= 2, "{status:?}");
    ordinary_work();

    assert_eq!(errno(Command::new("true").status()), Some(libc::EPERM));
    let families = [AddressFamily::from_raw(38), AddressFamily::PACKET];
    for family in families {
        let refused = rustix::net::socket(family, SocketType::DGRAM, None);
        assert_eq!(refused.err(), Some(rustix::io::Errno::PERM), "{family:?}");
    }
    let parent = rustix::process::getppid().unwrap();
    let signal = rustix::process::kill_process(parent, rustix::process::Signal::CONT);
    assert_eq!(signal.err(), Some(rustix::io::Errno::PERM));
    assert!(rustix::process::test_kill_process(parent).is_ok());
    for (call, number, error) in [
        ("ptrace", libc::SYS_ptrace, libc::EPERM),
        ("unshare", libc::SYS_unshare, libc::EPERM),
        ("bpf", libc::SYS_bpf, libc::EPERM),
        ("keyctl", libc::SYS_keyctl, libc::EPERM),
        ("clone3", libc::SYS_clone3, libc::ENOSYS),
        ("seccomp", libc::SYS_seccomp, libc::ENOSYS),
        ("a call of the future", 4000, libc::ENOSYS),
    ] {
        assert_eq!(raw(number), Some(error), "{call}");
    }
    go.send(()).unwrap();
    assert_eq!(earlier.join().unwrap(), Some(libc::EPERM), "another thread");
    eprintln!("the child ended well");
}

#[test]
fn log_refuses_nothing() {
    if !is_child() {
        return child(Mode::Log, "log_refuses_nothing");
    }
    install(Mode::Log).unwrap();
    assert!(Status::read().unwrap().filters >= 1);
    ordinary_work();
    assert!(Command::new("true").status().unwrap().success());
    eprintln!("the child ended well");
}

#[test]
fn off_installs_nothing() {
    let before = Status::read().unwrap();
    install(Mode::Off).unwrap();
    assert_eq!(Status::read().unwrap(), before);
}

/// Calls without arguments, so that the kernel would refuse them with another error.
fn raw(number: libc::c_long) -> Option<i32> {
    // SAFETY: all arguments are zero: no memory of ours is named, and each of these calls is
    // invalid without arguments. rustix has no call that takes any number.
    let answer = unsafe { libc::syscall(number, -1, 0, 0, 0, 0, 0) };
    (answer == -1)
        .then(|| io::Error::last_os_error().raw_os_error())
        .flatten()
}
