//! Aligned, zeroed heap memory behind a raw pointer that may be shared.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// An allocation accessed only by raw pointer. Moving a `Box` would assert unique access, which is
/// wrong while buffers point into the allocation.
pub(crate) struct Heap {
    base: NonNull<u8>,
    layout: Layout,
}

impl Heap {
    /// # Panics
    /// When `len` is 0 or `align` is no power of two.
    pub(crate) fn zeroed(len: usize, align: usize) -> Self {
        assert!(len > 0, "memory of no bytes");
        let layout = Layout::from_size_align(len, align).expect("a size that an address can name");
        // SAFETY: the layout is not of size 0.
        let base = unsafe { alloc_zeroed(layout) };
        Self {
            base: NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout)),
            layout,
        }
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated with this very layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}
