//! The ioctls of VFIO (linux/vfio.h), and eventfds for its interrupts.
//!
//! Unsafe, because safe code cannot make an ioctl. The argument of each request here is a number, a
//! descriptor, a string, or a structure that begins with its own length (`argsz`). The kernel
//! accesses no byte of a structure beyond that length.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use vfio_bindings::bindings::vfio as abi;

/// `_IO(';', 100 + n)`.
const fn request(n: u32) -> libc::Ioctl {
    ((abi::VFIO_TYPE as libc::Ioctl) << 8) | (abi::VFIO_BASE + n) as libc::Ioctl
}

/// Requests that take a number, or nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Plain {
    ApiVersion,
    CheckExtension(u32),
    SetIommu(u32),
    DeviceReset,
}

/// Makes a request that takes a number, or nothing. Returns the kernel's result.
pub(crate) fn plain(fd: BorrowedFd<'_>, what: Plain) -> io::Result<i32> {
    let (number, argument) = match what {
        Plain::ApiVersion => (request(0), 0),
        Plain::CheckExtension(extension) => (request(1), extension),
        Plain::SetIommu(kind) => (request(2), kind),
        Plain::DeviceReset => (request(11), 0),
    };
    // SAFETY: the descriptor is borrowed and so open, and the argument of these requests is a
    // number: the kernel reads and writes no memory of ours.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), number, libc::c_ulong::from(argument)) };
    checked(answer)
}

/// Adds an IOMMU group to a container (VFIO_GROUP_SET_CONTAINER).
pub(crate) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let number: libc::c_int = container.as_raw_fd();
    // SAFETY: both descriptors are borrowed and so open; the kernel reads one int from the pointer,
    // which is to a live local.
    let answer = unsafe { libc::ioctl(group.as_raw_fd(), request(4), &raw const number) };
    checked(answer).map(drop)
}

/// Opens a PCI function of a group by its address (VFIO_GROUP_GET_DEVICE_FD).
pub(crate) fn device(group: BorrowedFd<'_>, address: &str) -> io::Result<OwnedFd> {
    let name = CString::new(address)?;
    // SAFETY: the descriptor is borrowed and so open; the kernel reads a string that ends with a
    // zero, as a CString does, and it outlives the call.
    let answer = unsafe { libc::ioctl(group.as_raw_fd(), request(6), name.as_ptr()) };
    let fd = checked(answer)?;
    // SAFETY: the kernel just made this descriptor for us, and no other code knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Requests whose argument is a structure that begins with `argsz`, which the kernel reads and may
/// fill.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Structured {
    GroupStatus,
    RegionInfo,
    IrqInfo,
    SetIrqs,
    IommuInfo,
    MapDma,
    UnmapDma,
}

/// Makes a request with a structure; sets `argsz` to its length. The kernel replaces `argsz` by the
/// length that it needs, and writes nothing past the end of `argument`.
pub(crate) fn structured(
    fd: BorrowedFd<'_>,
    what: Structured,
    argument: &mut Argument,
) -> io::Result<()> {
    let number = match what {
        Structured::GroupStatus => request(3),
        Structured::RegionInfo => request(8),
        Structured::IrqInfo => request(9),
        Structured::SetIrqs => request(10),
        Structured::IommuInfo => request(12),
        Structured::MapDma => request(13),
        Structured::UnmapDma => request(14),
    };
    argument.set_u32(0, argument.len() as u32);
    let at = argument.0.as_mut_ptr();
    // SAFETY: the descriptor is borrowed and so open. `at` points to `argsz` (just set) bytes that
    // are initialised, aligned for any of the structures, and borrowed exclusively; the kernel
    // reads and writes no more than `argsz` of them. MapDma also passes an address to pin: it takes
    // pages of this process for a device, which is memory that a hook received for that
    // (`container`), and frees none.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), number, at) };
    checked(answer).map(drop)
}

fn checked(answer: i32) -> io::Result<i32> {
    match answer {
        -1 => Err(io::Error::last_os_error()),
        answer => Ok(answer),
    }
}

/// A structure of linux/vfio.h as bytes; fields are accessed by their offset.
#[derive(Debug)]
pub(crate) struct Argument(Vec<u64>);

impl Argument {
    /// A structure of at least `bytes` bytes, all zero.
    pub(crate) fn new(bytes: usize) -> Self {
        Self(vec![0; bytes.div_ceil(8)])
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len() * 8
    }

    /// Reads the 32-bit word at byte offset `at`, a multiple of 4; 0 beyond the end.
    pub(crate) fn u32(&self, at: usize) -> u32 {
        let word = self.0.get(at / 8).copied().unwrap_or(0).to_ne_bytes();
        let bytes = [0, 1, 2, 3].map(|byte| word[at % 8 / 4 * 4 + byte]);
        u32::from_ne_bytes(bytes)
    }

    /// Reads the 64-bit word at byte offset `at`, a multiple of 8; 0 beyond the end.
    pub(crate) fn u64(&self, at: usize) -> u64 {
        self.0.get(at / 8).copied().unwrap_or(0)
    }

    pub(crate) fn set_u32(&mut self, at: usize, value: u32) {
        let mut word = self.0[at / 8].to_ne_bytes();
        word[at % 8 / 4 * 4..][..4].copy_from_slice(&value.to_ne_bytes());
        self.0[at / 8] = u64::from_ne_bytes(word);
    }

    pub(crate) fn set_u64(&mut self, at: usize, value: u64) {
        self.0[at / 8] = value;
    }

    /// The offset of the capability with this id, in the chain that starts at offset `first`.
    /// `None` if the chain lacks it, or is malformed.
    pub(crate) fn capability(&self, first: u32, id: u32) -> Option<usize> {
        let mut at = first as usize;
        // Each header takes 8 bytes, so a chain that is longer than the whole goes round in
        // circles.
        for _ in 0..self.0.len() {
            if at == 0 || at + 8 > self.len() || !at.is_multiple_of(4) {
                return None;
            }
            if self.u32(at) & 0xffff == id {
                return Some(at);
            }
            at = self.u32(at + 4) as usize;
        }
        None
    }
}

/// Longest structure that the kernel may ask for.
const ANSWER_MAX: u32 = 64 << 10;

/// Reads a structure of `bytes` bytes, and the capabilities that follow it: if the kernel reports
/// that it needs more bytes, asks again with that length. `fill` sets the input fields.
pub(crate) fn query(
    fd: BorrowedFd<'_>,
    what: Structured,
    bytes: usize,
    fill: impl Fn(&mut Argument),
) -> io::Result<Argument> {
    let mut argument = Argument::new(bytes);
    fill(&mut argument);
    structured(fd, what, &mut argument)?;
    let wanted = argument.u32(0);
    if wanted as usize <= argument.len() {
        return Ok(argument);
    }
    if wanted > ANSWER_MAX {
        return Err(io::Error::other(format!("an answer of {wanted} bytes")));
    }
    let mut argument = Argument::new(wanted as usize);
    fill(&mut argument);
    structured(fd, what, &mut argument)?;
    Ok(argument)
}

/// Creates an eventfd, which the kernel signals at an interrupt.
pub(crate) fn event() -> io::Result<OwnedFd> {
    use rustix::event::{EventfdFlags, eventfd};
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Clears an eventfd. Returns true if it was signalled.
pub(crate) fn clear_event(event: BorrowedFd<'_>) -> bool {
    let mut count = [0; 8];
    matches!(rustix::io::read(event, &mut count), Ok(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the numbers are those of linux/vfio.h. Method: as strace shows them.
    #[test]
    fn numbers_of_requests() {
        assert_eq!(request(0), 0x3b64);
        assert_eq!(request(14), 0x3b72);
    }

    #[test]
    fn field_offsets_match_the_kernel() {
        let mut argument = Argument::new(21);
        assert_eq!(argument.len(), 24);
        argument.set_u32(4, 7);
        argument.set_u32(0, 5);
        argument.set_u64(8, u64::MAX - 1);
        assert_eq!((argument.u32(0), argument.u32(4)), (5, 7));
        assert_eq!((argument.u64(8), argument.u64(16)), (u64::MAX - 1, 0));
        assert_eq!((argument.u32(24), argument.u64(4096)), (0, 0));
    }

    /// Goal: a chain of capabilities is followed, and a broken one ends. Method: made up answers.
    #[test]
    fn chains_of_capabilities() {
        let mut argument = Argument::new(64);
        argument.set_u32(24, 1 | 1 << 16);
        argument.set_u32(28, 40);
        argument.set_u32(40, 3);
        assert_eq!(argument.capability(24, 1), Some(24));
        assert_eq!(argument.capability(24, 3), Some(40));
        assert_eq!(argument.capability(24, 2), None);
        assert_eq!(argument.capability(0, 1), None);
        argument.set_u32(44, 24);
        assert_eq!(argument.capability(24, 2), None, "a circle");
        argument.set_u32(44, 4096);
        assert_eq!(argument.capability(24, 2), None, "beyond the end");
        argument.set_u32(44, 41);
        assert_eq!(argument.capability(24, 2), None, "not aligned");
    }

    /// Goal: the kernel's refusals arrive. Method: requests to something that is no VFIO.
    #[test]
    fn refusals_are_errors() {
        use std::os::fd::AsFd;
        let null = std::fs::File::open("/dev/null").unwrap();
        let refused = |error: io::Error| error.raw_os_error() == Some(libc::ENOTTY);
        assert!(refused(plain(null.as_fd(), Plain::ApiVersion).unwrap_err()));
        assert!(refused(device(null.as_fd(), "0000:00:00.0").unwrap_err()));
        assert!(refused(
            set_container(null.as_fd(), null.as_fd()).unwrap_err()
        ));
        let answer = query(null.as_fd(), Structured::IommuInfo, 24, |_| ());
        assert!(refused(answer.unwrap_err()));
    }

    #[test]
    fn events_fire_once() {
        use std::os::fd::AsFd;
        let event = event().unwrap();
        assert!(!clear_event(event.as_fd()));
        rustix::io::write(&event, &1_u64.to_ne_bytes()).unwrap();
        assert!(clear_event(event.as_fd()));
        assert!(!clear_event(event.as_fd()));
    }
}
