//! Copies to and from memory that other cores or devices may change at the same time.

/// The C library's routines, called through pointers that the compiler cannot see through.
///
/// A Rust load or store, or an intrinsic known to the compiler, of bytes that another core writes
/// is a data race, which is undefined behaviour. These routines are written in assembly and stay
/// opaque to the compiler. To the machine each is a series of loads and stores; a race yields mixed
/// bytes and nothing worse.
pub(crate) mod opaque {
    use std::ffi::{c_int, c_void};
    use std::hint::black_box;

    type Move = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;
    type Set = unsafe extern "C" fn(*mut c_void, c_int, usize) -> *mut c_void;
    type Compare = unsafe extern "C" fn(*const c_void, *const c_void, usize) -> c_int;

    /// # Safety
    /// `from` is readable and `to` writable for `len` bytes. They may overlap.
    #[inline]
    pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        let routine: Move = black_box(libc::memmove);
        // SAFETY: upheld by the caller.
        unsafe { routine(to.cast(), from.cast(), len) };
    }

    /// # Safety
    /// `to` is writable for `len` bytes.
    #[inline]
    pub(crate) unsafe fn zero(to: *mut u8, len: usize) {
        let routine: Set = black_box(libc::memset);
        // SAFETY: upheld by the caller.
        unsafe { routine(to.cast(), 0, len) };
    }

    /// # Safety
    /// `a` and `b` are readable for `len` bytes.
    #[inline]
    pub(crate) unsafe fn equal(a: *const u8, b: *const u8, len: usize) -> bool {
        let routine: Compare = black_box(libc::memcmp);
        // SAFETY: upheld by the caller.
        unsafe { routine(a.cast(), b.cast(), len) == 0 }
    }
}

/// Non-temporal copies that bypass the caches. In assembly, for the reason given for [`opaque`].
#[cfg(target_arch = "x86_64")]
pub(crate) mod stream {
    use std::arch::asm;

    /// Bytes per loop iteration.
    const ROUND: usize = 256;

    /// True if [`copy`] can write `len` bytes to `to`.
    #[inline]
    pub(crate) fn is_possible(to: *mut u8, len: usize) -> bool {
        to.addr().is_multiple_of(64)
            && len.is_multiple_of(ROUND)
            && std::arch::is_x86_feature_detected!("avx")
    }

    /// # Safety
    ///
    /// `from` is readable and `to` writable for `len` bytes. [`is_possible`] returned true for `to`
    /// and `len`, which is not 0.
    #[inline]
    pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: upheld by the caller: reads and writes `len` bytes in whole rounds, with aligned
        // stores. The fence orders the non-temporal stores before anything that follows, like
        // ordinary stores.
        unsafe {
            asm!(
                "2:",
                "vmovdqu ymm0, [{from}]",
                "vmovdqu ymm1, [{from} + 32]",
                "vmovdqu ymm2, [{from} + 64]",
                "vmovdqu ymm3, [{from} + 96]",
                "vmovdqu ymm4, [{from} + 128]",
                "vmovdqu ymm5, [{from} + 160]",
                "vmovdqu ymm6, [{from} + 192]",
                "vmovdqu ymm7, [{from} + 224]",
                "vmovntdq [{to}], ymm0",
                "vmovntdq [{to} + 32], ymm1",
                "vmovntdq [{to} + 64], ymm2",
                "vmovntdq [{to} + 96], ymm3",
                "vmovntdq [{to} + 128], ymm4",
                "vmovntdq [{to} + 160], ymm5",
                "vmovntdq [{to} + 192], ymm6",
                "vmovntdq [{to} + 224], ymm7",
                "add {from}, {round}",
                "add {to}, {round}",
                "sub {left}, {round}",
                "jnz 2b",
                "sfence",
                "vzeroupper",
                from = inout(reg) from => _,
                to = inout(reg) to => _,
                left = inout(reg) len => _,
                round = const ROUND,
                out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
                out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                options(nostack),
            );
        }
    }
}
