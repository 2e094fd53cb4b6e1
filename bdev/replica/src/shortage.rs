//! Recognises errors from shortages of this process (memory, file descriptors). Such an error is no
//! failure of a replica's device.

use std::io::{Error, ErrorKind};

use rustix::io::Errno;

/// True when a queue to a device could not be opened because this process lacks memory or a
/// descriptor, or because other cores have all queues that the device grants.
pub(crate) fn is_shortage(error: &Error) -> bool {
    let kind = matches!(
        error.kind(),
        ErrorKind::OutOfMemory | ErrorKind::ResourceBusy
    );
    let errno = Errno::from_io_error(error);
    kind || matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortages_and_device_failures_differ() {
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS] {
            assert!(is_shortage(&errno.into()), "{errno}");
        }
        assert!(is_shortage(&ErrorKind::ResourceBusy.into()));
        for errno in [Errno::NODEV, Errno::IO, Errno::ACCESS, Errno::NOTCONN] {
            assert!(!is_shortage(&errno.into()), "{errno}");
        }
        assert!(!is_shortage(&Error::other("something else")));
    }
}
