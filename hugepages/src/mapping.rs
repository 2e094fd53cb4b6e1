//! One anonymous mapping with pages of one kind on one NUMA node (`mmap`, `mbind`, `madvise`,
//! `mlock`). An arena has one such mapping, as has the memory of a RAM disk.

use std::ffi::c_void;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous, munlock, munmap};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::pages::PageKind;
use crate::register::Regions;

/// Memory of one kind of pages, initially zero, unmapped on drop.
///
/// Provides only its address. The layers above decide which code may touch which bytes:
/// [`crate::ArenaSlice`] (one owner per byte) and [`crate::Shared`] (like device memory).
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    pub regions: Arc<Regions>,
}

// SAFETY: the mapping belongs to the process, not to a thread, and no method of it touches the
// bytes through a shared reference.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// The system call that failed, and its errno.
pub(crate) type Failure = (&'static str, Errno);

impl Mapping {
    /// Maps `len` bytes, a multiple of the page size of `kind`. Neither populated nor locked yet.
    pub(crate) fn new(kind: PageKind, len: usize, node: Option<u32>) -> Result<Self, Failure> {
        let mapping = match kind {
            PageKind::OneGiB => Self::map(len, MapFlags::HUGETLB | MapFlags::HUGE_1GB)?,
            PageKind::TwoMiB => Self::map(len, MapFlags::HUGETLB | MapFlags::HUGE_2MB)?,
            PageKind::Plain => Self::map(len, MapFlags::empty())?,
            PageKind::Transparent => Self::map_aligned(len, kind.size() as usize)?,
        };
        if kind == PageKind::Transparent {
            mapping
                .advise(Advice::LinuxHugepage)
                .map_err(|e| ("madvise", e))?;
        }
        // After fork(), copy-on-write must not replace pages that a device uses.
        mapping
            .advise(Advice::LinuxDontFork)
            .map_err(|e| ("madvise", e))?;
        // Exclude gigabytes of user data from core dumps. Old kernels may not support this.
        let _ = mapping.advise(Advice::LinuxDontDump);
        if let Some(node) = node {
            mapping.bind(node, kind).map_err(|e| ("mbind", e))?;
        }
        Ok(mapping)
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Populates every page. An unavailable page is an error, not a SIGBUS.
    pub(crate) fn populate(&self, page: usize) -> Result<(), Errno> {
        match self.advise(Advice::LinuxPopulateWrite) {
            // Linux before 5.14.
            Err(Errno::INVAL) => self.populate_by_read(page),
            other => other,
        }
    }

    /// Makes the kernel write a zero into each page, which fails where a direct access would raise
    /// SIGBUS.
    fn populate_by_read(&self, page: usize) -> Result<(), Errno> {
        let zero =
            File::open("/dev/zero").map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
        for at in (0..self.len).step_by(page) {
            // SAFETY: `at` is inside the mapping, which is writable, zero and not yet shared:
            // populating precedes handing the mapping out.
            let byte = unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(at), 1) };
            zero.read_exact_at(byte, 0)
                .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
        }
        Ok(())
    }

    /// Populates every page and locks it in memory.
    pub(crate) fn lock(&self) -> Result<(), Errno> {
        raise_memlock();
        // SAFETY: `mlock` changes no contents, and the range is ours.
        let result = unsafe { mlock(self.at(0), self.len) };
        if result.is_err() {
            // A failed mlock may have locked a part.
            // SAFETY: as above.
            let _ = unsafe { munlock(self.at(0), self.len) };
        }
        result
    }

    /// Returns whole pages in `range` to the system; they read as zero from then on.
    ///
    /// # Errors
    /// If the memory is locked, or of a kind that the kernel does not release in parts.
    pub(crate) fn release(&self, range: Range<usize>) -> Result<(), Errno> {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range outside mapping"
        );
        // SAFETY: inside the mapping (just checked). The contents become zero without a Rust store:
        // only `Shared` calls this, and no Rust reference to its bytes exists.
        unsafe { madvise(self.at(range.start), range.len(), Advice::LinuxDontNeed) }
    }

    fn map(len: usize, flags: MapFlags) -> Result<Self, Failure> {
        // SAFETY: a new private mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | flags,
            )
        };
        let base = base.map_err(|e| ("mmap", e))?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(("mmap", Errno::NOMEM))?;
        Ok(Self {
            base,
            len,
            regions: Arc::new(Regions::new(base, len)),
        })
    }

    /// A plain mapping that starts at a multiple of `align`, so that whole huge pages fit.
    fn map_aligned(len: usize, align: usize) -> Result<Self, Failure> {
        let wide = len.checked_add(align).ok_or(("mmap", Errno::NOMEM))?;
        let wide = Self::map(wide, MapFlags::empty())?;
        let head = wide.base.as_ptr().align_offset(align);
        let tail = wide.len - head - len;
        // SAFETY: `head <= align`, so it is inside the mapping.
        let base = unsafe { wide.base.add(head) };
        let end = wide.at(head + len);
        let start = wide.at(0);
        // From here on the three parts are unmapped separately.
        std::mem::forget(wide);
        let mapping = Self {
            base,
            len,
            regions: Arc::new(Regions::new(base, len)),
        };
        for (at, bytes) in [(start, head), (end, tail)] {
            if bytes > 0 {
                // SAFETY: a part of the new mapping, outside the part that `mapping` keeps.
                unsafe { munmap(at, bytes) }.map_err(|e| ("munmap", e))?;
            }
        }
        Ok(mapping)
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is ours, and no advice used here changes its contents.
        unsafe { madvise(self.at(0), self.len, advice) }
    }

    /// Sets the NUMA policy. Huge pages come strictly from the node's pool. Other pages prefer the
    /// node: remote memory is better than an OOM kill.
    fn bind(&self, node: u32, kind: PageKind) -> Result<(), Errno> {
        let mut mask = [0 as libc::c_ulong; 16];
        let bits = libc::c_ulong::BITS;
        let word = mask.get_mut((node / bits) as usize).ok_or(Errno::INVAL)?;
        *word = 1 << (node % bits);
        let policy = if kind.is_hugetlb() {
            libc::MPOL_BIND
        } else {
            libc::MPOL_PREFERRED
        };
        // The kernel reads one bit less than the given number (mbind(2), bugs).
        let bits = mask.len() as u64 * u64::from(bits) + 1;
        // SAFETY: the range is ours; `mask` has as many bits as stated. Neither rustix nor libc
        // wraps this call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.len,
                policy,
                mask.as_ptr(),
                bits,
                0,
            )
        };
        match result {
            0 => Ok(()),
            _ => match Errno::from_io_error(&std::io::Error::last_os_error()) {
                // A kernel without NUMA has one node, and all memory is on it.
                Some(Errno::NOSYS) if node == 0 => Ok(()),
                error => Err(error.unwrap_or(Errno::INVAL)),
            },
        }
    }

    fn at(&self, offset: usize) -> *mut c_void {
        self.base.as_ptr().wrapping_add(offset).cast()
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({:p}+{:#x})", self.base, self.len)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.regions.unregister_all();
        // SAFETY: created by `mmap`; every user keeps it alive through an `Arc`. The call cannot
        // fail on a whole mapping.
        let _ = unsafe { munmap(self.at(0), self.len) };
    }
}

/// Raises the soft memlock limit to the hard limit, which needs no privilege. The plan relies on
/// this ([`crate::system::Memlock`]).
fn raise_memlock() {
    let Rlimit { current, maximum } = getrlimit(Resource::Memlock);
    if current != maximum {
        // On failure the limit stays unchanged, and mlock reports it.
        let _ = setrlimit(
            Resource::Memlock,
            Rlimit {
                current: maximum,
                maximum,
            },
        );
    }
}

#[cfg(test)]
impl Mapping {
    /// The number of resident base pages.
    pub(crate) fn resident(&self) -> usize {
        let mut present = vec![0u8; self.len / crate::pages::base_page_size()];
        // SAFETY: the range is mapped and `present` has a byte per page of it.
        let result = unsafe { libc::mincore(self.at(0), self.len, present.as_mut_ptr()) };
        assert_eq!(result, 0);
        present.iter().filter(|&&p| p & 1 == 1).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::{MIB, base_page_size};

    /// Goal: both ways of populating populate all pages. Method: mincore before and after.
    #[test]
    fn populating_takes_every_page() {
        let page = base_page_size();
        for by_read in [false, true] {
            let mapping = Mapping::new(PageKind::Plain, 16 * page, None).unwrap();
            assert_eq!(mapping.resident(), 0);
            if by_read {
                mapping.populate_by_read(page).unwrap();
            } else {
                mapping.populate(page).unwrap();
            }
            assert_eq!(mapping.resident(), 16);
            mapping.release(page..3 * page).unwrap();
            assert_eq!(mapping.resident(), 14);
        }
    }

    /// Goal: a transparent mapping starts at a huge page boundary.
    #[test]
    fn transparent_mappings_are_aligned() {
        for _ in 0..8 {
            let mapping = Mapping::new(PageKind::Transparent, 2 * MIB as usize, Some(0)).unwrap();
            assert!(
                mapping
                    .base()
                    .as_ptr()
                    .addr()
                    .is_multiple_of(2 * MIB as usize)
            );
            assert_eq!(mapping.len(), 2 * MIB as usize);
        }
    }

    /// Goal: an invalid node is an error, not memory elsewhere.
    #[test]
    fn a_missing_node_is_refused() {
        for node in [1023, 1024, u32::MAX] {
            let error = Mapping::new(PageKind::Plain, base_page_size(), Some(node)).err();
            assert_eq!(error, Some(("mbind", Errno::INVAL)), "node {node}");
        }
    }

    /// Goal: fork() does not copy memory that a device may use. Method: the mapping's VmFlags
    /// ("dc", proc_pid_smaps(5)).
    #[test]
    fn children_and_dumps_exclude_mappings() {
        let mapping = Mapping::new(PageKind::Plain, base_page_size(), None).unwrap();
        let address = mapping.base().as_ptr().addr();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        // The kernel shows neighbours with the same flags as one mapping.
        let mut lines = smaps.lines().skip_while(|line| {
            let range = line
                .split(' ')
                .next()
                .and_then(|range| range.split_once('-'));
            let range = range.map(|(from, to)| [from, to].map(|at| usize::from_str_radix(at, 16)));
            !matches!(range, Some([Ok(from), Ok(to)]) if (from..to).contains(&address))
        });
        let flags = lines
            .find_map(|l| l.strip_prefix("VmFlags:"))
            .expect("the mapping has flags");
        let flags: Vec<&str> = flags.split_whitespace().collect();
        assert!(flags.contains(&"dc") && flags.contains(&"dd"), "{flags:?}");
    }
}
