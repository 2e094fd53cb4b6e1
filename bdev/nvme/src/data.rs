//! Builds the data pointer of a command: PRP entries or SGL descriptors (NVMe Base 2.0, 4.1).
//!
//! ```text
//!   data                                data pointer
//!   one extent, at most two pages       PRP1, PRP2; the controller fetches no list
//!   more, controller supports SGLs      one data block descriptor, or a last segment of several
//!   more, controller has no SGLs        PRP1, PRP2 ─▶ PRP list
//!   not aligned for any of these        `None`: the caller copies through an aligned buffer
//! ```

use nacre_nvmf_wire::sqe::Psdt;

/// The host's memory page size in bytes (CC.MPS 0).
pub(crate) const PAGE: usize = 4096;
const PAGE_MASK: u64 = PAGE as u64 - 1;
/// Size in bytes of a PRP entry, and of an SGL descriptor.
const ENTRY: usize = 8;
const DESCRIPTOR: usize = 16;
/// SGL Identifier bytes: an SGL Data Block descriptor, and an SGL Last Segment descriptor.
const DATA_BLOCK: u64 = 0x00;
const LAST_SEGMENT: u64 = 0x30;

/// The controller's SGL support (Identify Controller, SGLS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SglSupport {
    No,
    /// SGLs whose data blocks have dword-aligned addresses and lengths.
    Dwords,
    Bytes,
}

/// An extent of memory: DMA address, and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub address: u64,
    pub len: u32,
}

/// A command's DPTR and PSDT fields, and the bytes of the PRP or SGL list that they refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pointer {
    pub dptr: [u64; 2],
    pub psdt: Psdt,
    pub list_bytes: usize,
}

impl Pointer {
    pub(crate) const NONE: Self = Self::prp(0, 0);

    pub(crate) const fn prp(prp1: u64, prp2: u64) -> Self {
        Self {
            dptr: [prp1, prp2],
            psdt: Psdt::Prp,
            list_bytes: 0,
        }
    }

    const fn sgl(address: u64, len: u32, identifier: u64, list_bytes: usize) -> Self {
        Self {
            dptr: [address, len as u64 | identifier << 56],
            psdt: Psdt::Sgl,
            list_bytes,
        }
    }
}

/// Most bytes of list that a command of at most `transfer` bytes needs: a power of two, 64 or
/// more. A transfer of at most 2 MiB needs at most a page.
pub(crate) fn list_bytes(transfer: usize) -> usize {
    // Wherever the data begins, the part after its first page touches at most this many pages.
    let entries = transfer.div_ceil(PAGE);
    (entries * ENTRY).max(64).next_power_of_two()
}

/// Describes one extent in at most two pages, the common case. `None` if the extent touches more
/// pages or if its address is not dword-aligned.
#[inline]
pub(crate) fn describe_short(part: Part) -> Option<Pointer> {
    let room = PAGE as u64 - (part.address & PAGE_MASK);
    let len = u64::from(part.len);
    let fits = len <= room + PAGE as u64 && part.address & 3 == 0;
    let second = if len > room { part.address + room } else { 0 };
    fits.then_some(Pointer::prp(part.address, second))
}

/// Describes `parts`, none of which is empty. Writes list entries to `list`, whose DMA address is
/// `list_address`. `None` if the caller must copy the data to an aligned buffer.
#[inline]
pub(crate) fn describe(
    parts: &[Part],
    support: SglSupport,
    list_address: u64,
    list: &mut [u8],
) -> Option<Pointer> {
    if let [part] = *parts
        && let Some(pointer) = describe_short(part)
    {
        return Some(pointer);
    }
    describe_long(parts, support, list_address, list)
}

fn describe_long(
    parts: &[Part],
    support: SglSupport,
    list_address: u64,
    list: &mut [u8],
) -> Option<Pointer> {
    let dwords = |part: &Part| part.address & 3 == 0 && part.len & 3 == 0;
    let takes = match support {
        SglSupport::No => false,
        SglSupport::Dwords => parts.iter().all(dwords),
        SglSupport::Bytes => true,
    };
    match parts {
        [part] if takes => Some(Pointer::sgl(part.address, part.len, DATA_BLOCK, 0)),
        _ if takes && parts.len() * DESCRIPTOR <= list.len() => {
            for (part, place) in parts.iter().zip(list.chunks_exact_mut(DESCRIPTOR)) {
                let identifier = DATA_BLOCK << 56;
                place[..8].copy_from_slice(&part.address.to_le_bytes());
                place[8..].copy_from_slice(&(u64::from(part.len) | identifier).to_le_bytes());
            }
            let bytes = parts.len() * DESCRIPTOR;
            Some(Pointer::sgl(
                list_address,
                bytes as u32,
                LAST_SEGMENT,
                bytes,
            ))
        }
        _ => prp_list(parts, list_address, list),
    }
}

fn prp_list(parts: &[Part], list_address: u64, list: &mut [u8]) -> Option<Pointer> {
    let (first, rest) = parts.split_first()?;
    if first.address & 3 != 0 {
        return None;
    }
    let mut pages = 0;
    let mut second = 0;
    let mut places = list.chunks_exact_mut(ENTRY);
    let mut note = |address: u64| {
        if pages == 0 {
            second = address;
        }
        pages += 1;
        let place = places.next();
        place.map(|place| place.copy_from_slice(&address.to_le_bytes()))
    };
    let mut end = first.address + u64::from(first.len);
    let mut at = (first.address | PAGE_MASK) + 1;
    while at < end {
        note(at)?;
        at += PAGE as u64;
    }
    for part in rest {
        // Every entry but the first begins a page, and every entry but the last ends one.
        if end & PAGE_MASK != 0 || part.address & PAGE_MASK != 0 {
            return None;
        }
        end = part.address + u64::from(part.len);
        let mut at = part.address;
        while at < end {
            note(at)?;
            at += PAGE as u64;
        }
    }
    Some(match pages {
        0 | 1 => Pointer::prp(first.address, second),
        _ => Pointer {
            list_bytes: pages * ENTRY,
            ..Pointer::prp(first.address, list_address)
        },
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIST: u64 = 0x7000_0000;

    /// A controller's own interpretation: the addresses of all bytes, as runs.
    fn bytes_of(pointer: &Pointer, list: &[u8], total: usize) -> Vec<u64> {
        let word = |at: usize| u64::from_le_bytes(list[at..at + 8].try_into().unwrap());
        let mut bytes = Vec::new();
        if pointer.psdt == Psdt::Prp {
            let room = PAGE - (pointer.dptr[0] as usize & (PAGE - 1));
            bytes.extend((0..room.min(total) as u64).map(|at| pointer.dptr[0] + at));
            let pages = (total - bytes.len()).div_ceil(PAGE);
            for page in 0..pages {
                let address = match pages {
                    1 => pointer.dptr[1],
                    _ => {
                        assert_eq!(pointer.dptr[1], LIST);
                        word(page * ENTRY)
                    }
                };
                assert_eq!(address % PAGE as u64, 0, "entries name whole pages");
                let len = PAGE.min(total - bytes.len());
                bytes.extend((0..len as u64).map(|at| address + at));
            }
            return bytes;
        }
        let mut block = |address: u64, rest: u64| {
            assert_eq!(rest >> 56, DATA_BLOCK);
            bytes.extend((0..rest & 0xffff_ffff).map(|at| address + at));
        };
        match pointer.dptr[1] >> 56 {
            DATA_BLOCK => block(pointer.dptr[0], pointer.dptr[1]),
            identifier => {
                assert_eq!((identifier, pointer.dptr[0]), (LAST_SEGMENT, LIST));
                let len = (pointer.dptr[1] & 0xffff_ffff) as usize;
                assert_eq!((len, len % DESCRIPTOR), (pointer.list_bytes, 0));
                for at in (0..len).step_by(DESCRIPTOR) {
                    block(word(at), word(at + 8));
                }
            }
        }
        bytes
    }

    fn check(parts: &[Part], support: SglSupport, list_len: usize) -> Option<Pointer> {
        let total: usize = parts.iter().map(|part| part.len as usize).sum();
        let mut list = vec![0xee; list_len];
        let pointer = describe(parts, support, LIST, &mut list)?;
        let expected: Vec<u64> = parts
            .iter()
            .flat_map(|part| (0..u64::from(part.len)).map(|at| part.address + at))
            .collect();
        assert_eq!(bytes_of(&pointer, &list, total), expected, "{parts:x?}");
        Some(pointer)
    }

    /// Goal: one extent is described correctly for every start and length. Method: every dword of a
    /// page as the beginning and lengths around every limit, against a model of the controller.
    #[test]
    fn one_extent_at_every_offset() {
        let transfer = 5 * PAGE;
        for offset in (0..PAGE as u64).step_by(4) {
            let address = 0x10_0000 + offset;
            for pages in 0..5u32 {
                for more in [4, 512, 4092, 4096] {
                    let len = pages * PAGE as u32 + more;
                    let part = Part { address, len };
                    let list = list_bytes(transfer);
                    let prp = check(&[part], SglSupport::No, list).unwrap();
                    assert_eq!(prp.psdt, Psdt::Prp);
                    let sgl = check(&[part], SglSupport::Dwords, list).unwrap();
                    assert_eq!(sgl.list_bytes, 0, "one extent needs no list with SGLs");
                }
            }
        }
    }

    /// What PRPs cannot say is not said wrong.
    #[test]
    fn odd_addresses() {
        for len in [512, 3 * PAGE as u32] {
            let odd = [Part {
                address: 0x1001,
                len,
            }];
            assert_eq!(check(&odd, SglSupport::No, 4096), None);
            assert_eq!(check(&odd, SglSupport::Dwords, 4096), None);
            assert!(check(&odd, SglSupport::Bytes, 4096).is_some());
        }
        let halves = [0x1000, 0x5000].map(|address| Part { address, len: 512 });
        assert_eq!(check(&halves, SglSupport::No, 4096), None);
        assert_eq!(
            check(&halves, SglSupport::Dwords, 4096).unwrap().list_bytes,
            32
        );
        let pages = [0x1800, 0x5000].map(|address| Part { address, len: 2048 });
        assert!(check(&pages, SglSupport::No, 4096).is_some());
    }

    proptest! {
        /// Any two extents are described correctly or not at all; a list of the size for the
        /// transfer is long enough.
        #[test]
        fn two_extents(
            first in 0u64..16384, one in 1u32..20000, second in 0u64..16384, two in 1u32..20000,
            support in prop::sample::select(&[SglSupport::No, SglSupport::Dwords, SglSupport::Bytes][..]),
        ) {
            let parts = [
                Part { address: 0x10_0000 + first, len: one },
                Part { address: 0x90_0000 + second, len: two },
            ];
            let list = list_bytes((one + two) as usize);
            let said = check(&parts, support, list).is_some();
            let aligned = first % 4 == 0 && (first + u64::from(one)).is_multiple_of(PAGE as u64)
                && second.is_multiple_of(PAGE as u64);
            let dwords = (first | u64::from(one) | second | u64::from(two)) % 4 == 0;
            prop_assert_eq!(said, match support {
                SglSupport::No => aligned,
                SglSupport::Dwords => aligned || dwords,
                SglSupport::Bytes => true,
            });
            let one = &parts[..1];
            prop_assert_eq!(check(one, SglSupport::No, list).is_some(), first % 4 == 0);
        }
    }
}
