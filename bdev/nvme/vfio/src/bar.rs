//! The mapped registers of a drive (BAR 0): loads and stores that are safe after the drive is
//! removed.
//!
//! A read of a removed drive returns all ones. A kernel may also remove the mapping, because the
//! function's memory was switched off or another process reset it. An access then ends in SIGBUS,
//! which would end the daemon with all its other drives. So a signal handler maps a page of ones in
//! place of the missing one, and the access continues: a read returns all ones, a write has no
//! effect. From then on every read of that drive returns [`GONE`].

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use nacre_bdev_nvme::GONE;
use parking_lot::{Mutex, MutexGuard};
use rustix::mm::{MapFlags, ProtFlags};

/// Mapped registers.
#[derive(Debug)]
pub(crate) struct Bar {
    base: NonNull<u8>,
    len: usize,
    guard: &'static Guard,
}

// SAFETY: the mapping belongs to the process, not to a thread. It maps a device, which every core
// may access, and is only accessed by volatile loads and stores of whole dwords.
unsafe impl Send for Bar {}
// SAFETY: as above: there is no state of ours behind a shared reference but atomics.
unsafe impl Sync for Bar {}

impl Bar {
    /// Maps `len` bytes at `offset` of a device's descriptor.
    pub(crate) fn map(device: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let guards = install()?;
        // SAFETY: no fixed address is passed, so no existing mapping changes.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                device,
                offset,
            )?
        };
        let base = NonNull::new(base.cast()).expect("a mapping is not at address 0");
        let mut bar = Self {
            base,
            len,
            guard: &NOBODY,
        };
        bar.guard = guards.take(base.addr().get(), len)?;
        Ok(bar)
    }

    /// # Panics
    /// When `offset` is not a multiple of 4 or lies past the end of the mapping.
    #[inline]
    fn dword(&self, offset: u32) -> NonNull<u32> {
        let at = offset as usize;
        assert!(
            at.is_multiple_of(4) && at + 4 <= self.len,
            "register {offset:#x} is not one of {} bytes",
            self.len
        );
        // SAFETY: inside the mapping, as was just checked.
        unsafe { self.base.add(at).cast() }
    }

    #[inline]
    pub(crate) fn read32(&self, offset: u32) -> u32 {
        let at = self.dword(offset);
        // SAFETY: the address is aligned and mapped as long as `self` lives. No reference to this
        // device memory exists. After a removal the handler has mapped a page in its place.
        let value = unsafe { at.as_ptr().read_volatile() };
        order_after_read();
        if self.guard.gone.load(Ordering::Relaxed) {
            return GONE;
        }
        value
    }

    #[inline]
    pub(crate) fn write32(&self, offset: u32, value: u32) {
        let at = self.dword(offset);
        order_before_write();
        // SAFETY: as in `read32`.
        unsafe { at.as_ptr().write_volatile(value) }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Unmaps the device. From now on every read returns [`GONE`] and a write has no effect.
    pub(crate) fn detach(&self) {
        // Set before the memory changes: a thread that reads the page of ones also sees this flag.
        self.guard.gone.store(true, Ordering::SeqCst);
        // SAFETY: replaces our own mapping, which lives as long as `self`, by fresh memory at the
        // same place. No references into it exist and accesses are volatile, so changing the memory
        // behind an address breaks no promise.
        let replaced = unsafe {
            rustix::mm::mmap_anonymous(
                self.base.as_ptr().cast(),
                self.len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED,
            )
        };
        if let Err(error) = replaced {
            tracing::error!(%error, "registers of a removed drive stay mapped; the kernel cannot release the drive");
        }
    }

    /// True if the device is gone: [`Bar::detach`] was called, or an access ended in SIGBUS.
    pub(crate) fn is_gone(&self) -> bool {
        self.guard.gone.load(Ordering::Relaxed)
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.guard.release();
        // SAFETY: `self` owns the mapping and is being dropped, so no other code reaches it. Pages
        // that the handler replaced lie inside the mapping.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        unmapped.expect("munmap of an own mapping succeeds");
    }
}

/// Makes earlier stores to memory visible before the device sees the register write. x86 keeps the
/// order of stores, so only the compiler needs a fence there.
#[inline]
fn order_before_write() {
    std::sync::atomic::fence(Ordering::Release);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier: it changes neither registers nor memory. Rust's fences order among
    // processors only; they do not cover a device.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
}

/// Orders later loads from memory after the register read, so they see the device's stores.
#[inline]
fn order_after_read() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as in `order_before_write`.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
    std::sync::atomic::fence(Ordering::Acquire);
}

/// Upper bound of drives that a process can open at once.
const GUARDS: usize = 1024;

/// One mapping that the handler knows. The fields are atomics, because a signal handler cannot take
/// a lock.
#[derive(Debug)]
struct Guard {
    /// Odd while `len` and the address change.
    version: AtomicUsize,
    base: AtomicUsize,
    /// 0: this entry is free.
    len: AtomicUsize,
    gone: AtomicBool,
}

impl Guard {
    const fn new() -> Self {
        Self {
            version: AtomicUsize::new(0),
            base: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            gone: AtomicBool::new(false),
        }
    }

    fn set(&self, base: usize, len: usize) {
        // `Guards::change` is locked, so only one thread changes entries.
        self.version.fetch_add(1, Ordering::SeqCst);
        self.base.store(base, Ordering::SeqCst);
        self.len.store(len, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    fn release(&self) {
        if let Some(Ok(guards)) = GUARDS_SET.get() {
            let _change = guards.change();
            self.set(0, 0);
        }
    }

    /// True if `address` lies in this mapping. Code that accesses a mapping holds its `Bar`, so its
    /// guard does not change during the check. A changing guard belongs to another mapping.
    fn covers(&self, address: usize) -> bool {
        let before = self.version.load(Ordering::SeqCst);
        let (base, len) = (
            self.base.load(Ordering::SeqCst),
            self.len.load(Ordering::SeqCst),
        );
        let after = self.version.load(Ordering::SeqCst);
        before == after && before.is_multiple_of(2) && address.wrapping_sub(base) < len
    }
}

static NOBODY: Guard = Guard::new();
static GUARD: [Guard; GUARDS] = [const { Guard::new() }; GUARDS];
/// Descriptor of a page of ones, for the handler.
static ONES: AtomicI32 = AtomicI32::new(-1);
static PAGE: AtomicUsize = AtomicUsize::new(0);

struct Guards {
    change: Mutex<()>,
    /// The previous handler of SIGBUS.
    previous: libc::sigaction,
    _ones: OwnedFd,
}

static GUARDS_SET: OnceLock<Result<Guards, i32>> = OnceLock::new();

impl Guards {
    fn change(&self) -> MutexGuard<'_, ()> {
        // A panic while the lock is held leaves no partial state, so poisoning is ignored.
        self.change.lock()
    }

    fn take(&self, base: usize, len: usize) -> io::Result<&'static Guard> {
        let _change = self.change();
        let free = |guard: &&Guard| guard.len.load(Ordering::SeqCst) == 0;
        let guard = GUARD.iter().find(free).ok_or_else(|| {
            io::Error::other(format!("{GUARDS} drives are open, which is the limit"))
        })?;
        guard.gone.store(false, Ordering::SeqCst);
        guard.set(base, len);
        Ok(guard)
    }
}

/// Installs the signal handler once per process, before the first mapping.
fn install() -> io::Result<&'static Guards> {
    let set =
        GUARDS_SET.get_or_init(|| guards().map_err(|e| e.raw_os_error().unwrap_or(libc::EIO)));
    set.as_ref()
        .map_err(|&code| io::Error::from_raw_os_error(code))
}

fn guards() -> io::Result<Guards> {
    use rustix::fs::{MemfdFlags, memfd_create};
    let page = rustix::param::page_size();
    let ones = memfd_create("nacre-ones", MemfdFlags::CLOEXEC)?;
    let written = rustix::io::write(&ones, &vec![0xff; page])?;
    if written != page {
        return Err(io::Error::other(
            "the page of ones was not written completely",
        ));
    }
    // Set both before installing the handler, which reads them.
    ONES.store(ones.as_fd().as_raw_fd(), Ordering::SeqCst);
    PAGE.store(page, Ordering::SeqCst);
    // SAFETY: zero is a valid value of this structure of numbers and of a handler that may be
    // absent.
    let (mut action, mut previous): (libc::sigaction, libc::sigaction) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    action.sa_sigaction = on_bus_error as *const () as usize;
    // Run on the thread's alternate stack if it has one (SA_ONSTACK), with the fault address
    // (SA_SIGINFO).
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: both pointers are to live structures; the handler does only async-signal-safe work
    // (below).
    let answer = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, &raw mut previous) };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Guards {
        change: Mutex::new(()),
        previous,
        _ones: ones,
    })
}

/// Runs in interrupted code: it takes no lock, allocates nothing, and makes one system call.
/// POSIX's list of safe functions lacks mmap, but Linux's mmap, a plain system call, is safe.
extern "C" fn on_bus_error(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a valid structure, which has an address
    // for SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    let page = PAGE.load(Ordering::SeqCst);
    if let Some(guard) = GUARD.iter().find(|guard| guard.covers(address)) {
        // Set before the page is mapped: a thread that reads the page of ones also sees this flag.
        guard.gone.store(true, Ordering::SeqCst);
        // SAFETY: errno belongs to this thread, which runs the handler.
        let errno = unsafe { *libc::__errno_location() };
        // SAFETY: replaces one page inside a live mapping of registers: the interrupted code holds
        // its `Bar`. No references into the mapping exist and accesses are volatile, so changing
        // the memory behind the address is sound. The page is private: no device sees writes to it.
        let mapped = unsafe {
            libc::mmap(
                (address & !(page - 1)) as *mut libc::c_void,
                page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_FIXED,
                ONES.load(Ordering::SeqCst),
                0,
            )
        };
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = errno };
        if mapped != libc::MAP_FAILED {
            return;
        }
    }
    // SAFETY: the arguments come unchanged from the kernel.
    unsafe { pass_on(signal, info, context) }
}

/// Passes a signal for a foreign address to the previous handler.
///
/// # Safety
///
/// The arguments are those of a signal handler.
unsafe fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = match GUARDS_SET.get() {
        Some(Ok(guards)) => &guards.previous,
        // The handler is installed and the previous one not yet recorded: use the default action.
        _ => {
            default(signal);
            return;
        }
    };
    match previous.sa_sigaction {
        // Ignoring the signal would repeat the failed access forever; the kernel does not allow it
        // either.
        libc::SIG_DFL | libc::SIG_IGN => default(signal),
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: the kernel returned this as a handler with SA_SIGINFO, so it is a function of
            // this type.
            let handler: Handler = unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: as above, of the older type.
            let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

/// Restores the default action. The access repeats after the handler returns, and then ends the
/// process.
fn default(signal: libc::c_int) {
    // SAFETY: `signal` may be called in a handler, and SIG_DFL refers to no memory.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    /// A file in place of a device. Truncating it removes its pages, and accesses then end in
    /// SIGBUS.
    fn device(pages: u64) -> OwnedFd {
        let fd = memfd_create("device", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, pages * 4096).unwrap();
        fd
    }

    #[test]
    fn registers_are_dwords_of_the_device() {
        let fd = device(2);
        let bar = Bar::map(fd.as_fd(), 0, 8192).unwrap();
        bar.write32(0x1004, 0x1234_5678);
        assert_eq!(bar.read32(0x1004), 0x1234_5678);
        let mut bytes = [0; 4];
        rustix::io::pread(&fd, &mut bytes, 0x1004).unwrap();
        assert_eq!(bytes, 0x1234_5678_u32.to_le_bytes());
        assert!(!bar.is_gone());
    }

    #[test]
    fn registers_outside_or_unaligned_are_refused() {
        let fd = device(1);
        let bar = Bar::map(fd.as_fd(), 0, 4096).unwrap();
        assert_eq!(bar.read32(4092), 0);
        for offset in [4096, 4094, 2, u32::MAX - 3] {
            let read =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bar.read32(offset)));
            assert!(read.is_err(), "{offset}");
        }
    }

    /// Goal: every thread reads a vanished device as all ones, and a write does not revive it;
    /// another device is unaffected. Method: files that shrink under their mappings.
    #[test]
    fn bus_errors_survive() {
        let (fd, other) = (device(4), device(1));
        let bar = Bar::map(fd.as_fd(), 0, 4 * 4096).unwrap();
        let healthy = Bar::map(other.as_fd(), 0, 4096).unwrap();
        bar.write32(0x1c, 1);
        healthy.write32(0x1c, 5);
        ftruncate(&fd, 0).unwrap();
        // The first access is a write: a doorbell.
        bar.write32(0x3000, 9);
        assert!(bar.is_gone());
        std::thread::scope(|scope| {
            for thread in 0..4_u32 {
                let bar = &bar;
                scope.spawn(move || {
                    for round in 0..100 {
                        let at = thread * 0x1000 + round * 4;
                        bar.write32(at, round);
                        assert_eq!(bar.read32(at), GONE);
                    }
                });
            }
        });
        assert_eq!(bar.read32(0x1c), GONE);
        assert_eq!(healthy.read32(0x1c), 5);
        assert!(!healthy.is_gone());
        drop(bar);
        // The guard is free for the next mapping, which starts clean.
        let next = Bar::map(other.as_fd(), 0, 4096).unwrap();
        assert!(!next.is_gone());
        assert_eq!(next.read32(0x1c), 5);
    }

    /// Goal: a released device reads as gone, and its memory is unmapped, while other threads still
    /// hold the registers.
    #[test]
    fn a_released_device_is_gone() {
        let fd = device(2);
        let bar = Bar::map(fd.as_fd(), 0, 8192).unwrap();
        bar.write32(0x1c, 1);
        bar.detach();
        assert!(bar.is_gone());
        bar.write32(0x1c, 2);
        assert_eq!((bar.read32(0x1c), bar.read32(0x1ffc)), (GONE, GONE));
        let mut bytes = [0; 4];
        rustix::io::pread(&fd, &mut bytes, 0x1c).unwrap();
        assert_eq!(bytes, 1_u32.to_le_bytes());
        let mapped = std::fs::read_to_string("/proc/self/maps").unwrap();
        let base = format!("{:x}-", bar.base.addr());
        let line = mapped.lines().find(|line| line.starts_with(&base));
        assert!(!line.unwrap_or_default().contains("device"), "{line:?}");
    }

    /// Goal: bus errors outside of drive registers still end the process. Method: a child process
    /// opens a drive and then causes such an error.
    #[test]
    fn unrelated_bus_errors_end_the_process() {
        const CHILD: &str = "NACRE_VFIO_BUS_ERROR_CHILD";
        if std::env::var_os(CHILD).is_some() {
            let fd = device(1);
            let _bar = Bar::map(fd.as_fd(), 0, 4096).unwrap();
            let file = device(1);
            // SAFETY: no fixed address is passed.
            let at = unsafe {
                let protection = ProtFlags::READ;
                rustix::mm::mmap(
                    std::ptr::null_mut(),
                    4096,
                    protection,
                    MapFlags::SHARED,
                    &file,
                    0,
                )
            };
            ftruncate(&file, 0).unwrap();
            // SAFETY: mapped and aligned. The access to the missing page is the purpose of the
            // test.
            let value = unsafe { at.unwrap().cast::<u32>().read_volatile() };
            unreachable!("read {value}");
        }
        use std::os::unix::process::ExitStatusExt;
        let name = "bar::tests::unrelated_bus_errors_end_the_process";
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
    }
}
