//! Resolves a command's data pointer, as the simulated controller does: PRP entries and lists, SGL
//! segments (Base 4.1).

use nacre_nvmf_wire::identify::controller::Sgls;
use nacre_nvmf_wire::sqe::Psdt;
use nacre_nvmf_wire::{Sqe, StatusCode};

use crate::memory::Iommu;

/// Address and length of memory pieces, in order.
pub(crate) type Pieces = Vec<(u64, usize)>;

/// The status to return for a bad data pointer, and a text about the driver's mistake.
pub(crate) type Refusal = (StatusCode, String);

/// Most descriptors of one command: more indicate a loop.
const DESCRIPTORS_MAX: usize = 4096;

/// Finds the `len` bytes of memory that a command's data pointer describes.
pub(crate) fn find(
    sqe: &Sqe,
    len: usize,
    page: u64,
    sgls: Sgls,
    iommu: &Iommu,
    pieces: &mut Pieces,
) -> Result<(), Refusal> {
    pieces.clear();
    match sqe.psdt() {
        Psdt::Prp => prps(sqe, len, page, iommu, pieces),
        Psdt::Sgl if sgls.intersects(Sgls::SUPPORTED | Sgls::SUPPORTED_DWORD) => {
            segments(sqe, len, sgls, iommu, pieces)
        }
        psdt => Err((
            StatusCode::INVALID_FIELD,
            format!("{psdt:?} is not supported"),
        )),
    }
}

fn qword(bytes: &[u8]) -> u64 {
    let mut qword = [0; 8];
    qword.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(qword)
}

fn unreachable(what: impl std::fmt::Display) -> Refusal {
    (StatusCode::DATA_TRANSFER_ERROR, format!("{what}"))
}

fn prps(
    sqe: &Sqe,
    len: usize,
    page: u64,
    iommu: &Iommu,
    pieces: &mut Pieces,
) -> Result<(), Refusal> {
    let (prp1, prp2) = (qword(&sqe.dptr), qword(&sqe.dptr[8..]));
    let misplaced = |what: &str, prp: u64| {
        let text = format!("{what} {prp:#x} is not where it may be");
        Err((StatusCode::PRP_OFFSET_INVALID, text))
    };
    if !prp1.is_multiple_of(4) {
        return misplaced("PRP1", prp1);
    }
    let first = ((page - prp1 % page) as usize).min(len);
    pieces.push((prp1, first));
    let mut left = len - first;
    if left == 0 {
        return match prp2 {
            0 => Ok(()),
            _ => Err((
                StatusCode::INVALID_FIELD,
                format!("PRP2 {prp2:#x} is set though PRP1 covers {len} bytes"),
            )),
        };
    }
    if left as u64 <= page {
        if !prp2.is_multiple_of(page) {
            return misplaced("PRP2", prp2);
        }
        pieces.push((prp2, left));
        return Ok(());
    }
    if !prp2.is_multiple_of(8) {
        return misplaced("the PRP list", prp2);
    }
    let mut at = prp2;
    while left > 0 {
        let mut entry = [0; 8];
        iommu.read(at, &mut entry).map_err(unreachable)?;
        let entry = u64::from_le_bytes(entry);
        let last_of_page = (at + 8).is_multiple_of(page);
        if last_of_page && left as u64 > page {
            if !entry.is_multiple_of(page) {
                return misplaced("the next PRP list", entry);
            }
            at = entry;
            continue;
        }
        if !entry.is_multiple_of(page) {
            return misplaced("a PRP list entry", entry);
        }
        let now = left.min(page as usize);
        pieces.push((entry, now));
        left -= now;
        at += 8;
    }
    Ok(())
}

fn segments(
    sqe: &Sqe,
    len: usize,
    sgls: Sgls,
    iommu: &Iommu,
    pieces: &mut Pieces,
) -> Result<(), Refusal> {
    let mut total = 0;
    let mut seen = 0;
    // The current segment: address, remaining descriptors, and whether it is the last segment.
    let mut segment: Option<(u64, u32, bool)> = None;
    let mut descriptor = sqe.dptr;
    loop {
        seen += 1;
        if seen > DESCRIPTORS_MAX {
            return Err((
                StatusCode::INVALID_NUMBER_OF_SGL_DESCRIPTORS,
                format!("more than {DESCRIPTORS_MAX} SGL descriptors"),
            ));
        }
        let address = qword(&descriptor);
        let bytes =
            u32::from_le_bytes([descriptor[8], descriptor[9], descriptor[10], descriptor[11]]);
        if descriptor[12..15] != [0; 3] {
            let text = "an SGL descriptor with reserved bytes".to_owned();
            return Err((StatusCode::INVALID_FIELD, text));
        }
        let ends_segment = segment.is_none_or(|(_, left, _)| left == 0);
        let in_last = segment.is_none_or(|(_, _, last)| last);
        match descriptor[15] {
            // Data block.
            0x00 => {
                let dword = sgls.contains(Sgls::SUPPORTED_DWORD);
                if dword && !(address.is_multiple_of(4) && bytes.is_multiple_of(4)) {
                    let text = format!("an SGL data block of {bytes} at {address:#x}");
                    return Err((StatusCode::SGL_DATA_BLOCK_GRANULARITY_INVALID, text));
                }
                if bytes == 0 {
                    let text = "an SGL data block of no bytes".to_owned();
                    return Err((StatusCode::DATA_SGL_LENGTH_INVALID, text));
                }
                let used = (bytes as usize).min(len - total);
                pieces.push((address, used));
                total += bytes as usize;
                if total > len && !sgls.contains(Sgls::LONGER_THAN_DATA) {
                    let text = format!("an SGL of {total} bytes or more for {len}");
                    return Err((StatusCode::DATA_SGL_LENGTH_INVALID, text));
                }
                if ends_segment && !in_last {
                    let text = "a segment that ends without the next".to_owned();
                    return Err((StatusCode::INVALID_SGL_SEGMENT_DESCRIPTOR, text));
                }
            }
            // Segment, last segment.
            kind @ (0x20 | 0x30) => {
                let misplaced = !ends_segment || (segment.is_some() && in_last);
                if misplaced || bytes == 0 || !bytes.is_multiple_of(16) {
                    let text = format!("an SGL segment of {bytes} bytes, misplaced: {misplaced}");
                    return Err((StatusCode::INVALID_SGL_SEGMENT_DESCRIPTOR, text));
                }
                segment = Some((address, bytes / 16, kind == 0x30));
            }
            kind => {
                let text = format!("an SGL descriptor of type {kind:#x}");
                return Err((StatusCode::SGL_DESCRIPTOR_TYPE_INVALID, text));
            }
        }
        match &mut segment {
            Some((at, left, _)) if *left > 0 => {
                iommu.read(*at, &mut descriptor).map_err(unreachable)?;
                *at += 16;
                *left -= 1;
            }
            _ => break,
        }
    }
    if total < len {
        let text = format!("an SGL of {total} bytes for {len}");
        return Err((StatusCode::DATA_SGL_LENGTH_INVALID, text));
    }
    Ok(())
}

/// Copies `bytes` to the pieces.
pub(crate) fn scatter(iommu: &Iommu, pieces: &Pieces, bytes: &[u8]) -> Result<(), Refusal> {
    let mut rest = bytes;
    for &(address, len) in pieces {
        let (now, later) = rest.split_at(len.min(rest.len()));
        iommu.write(address, now).map_err(unreachable)?;
        rest = later;
    }
    Ok(())
}

/// Copies from the pieces; `into` has their total length.
pub(crate) fn gather(iommu: &Iommu, pieces: &Pieces, into: &mut [u8]) -> Result<(), Refusal> {
    let mut rest = into;
    for &(address, len) in pieces {
        let (now, later) = rest.split_at_mut(len);
        iommu.read(address, now).map_err(unreachable)?;
        rest = later;
    }
    Ok(())
}
