//! Get LBA Status (NVM Command Set 4.2.1): the allocated blocks of a namespace (ATYPE 02h). The
//! bdev lists them; it may answer later.

use std::ops::Range;
use std::sync::Arc;

use nacre_bdev::Bdev;
use nacre_bdev::listing::{AllocatedRanges, ListQuery};
use nacre_nvmf_wire::commands::lba_status::{
    DESCRIPTOR_BLOCKS, GetLbaStatus, LbaStatusDescriptor, LbaStatusHeader, action, condition,
};
use nacre_nvmf_wire::{Sqe, StatusCode};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::Controller;

impl Controller {
    /// The device, and the question for it.
    pub(super) fn lba_status(&self, sqe: &Sqe) -> Result<(Arc<dyn Bdev>, ListQuery), StatusCode> {
        let command = GetLbaStatus::parse(sqe);
        // The other actions are about blocks that may be unreadable, which no bdev tracks.
        if command.action != action::ALLOCATED {
            return Err(StatusCode::INVALID_FIELD.with_dnr());
        }
        let view = self.association.view();
        let bdev = &view.for_command(sqe.nsid())?.backing.bdev;
        let blocks = bdev.geometry().blocks;
        let end = match command.range_length {
            0 => Some(blocks),
            length => command.slba.checked_add(length.into()),
        };
        let range = end.map(|end| command.slba..end);
        let range = range.filter(|range| range.start < blocks && range.end <= blocks);
        let range = range.ok_or(StatusCode::LBA_OUT_OF_RANGE.with_dnr())?;
        let most = room(command.bytes());
        Ok((Arc::clone(bdev), ListQuery { range, most }))
    }
}

/// Descriptors for which a list of this length has room.
fn room(bytes: u64) -> usize {
    let behind = bytes.saturating_sub(LbaStatusHeader::SIZE as u64);
    behind as usize / LbaStatusDescriptor::SIZE
}

/// Writes the LBA Status Descriptor List, as far as the data has room for it.
pub(crate) fn write(found: &AllocatedRanges, data: &mut [u8]) {
    let most = room(data.len() as u64);
    let mut pieces = found.ranges.iter().flat_map(descriptors);
    let written: Vec<_> = pieces.by_ref().take(most).collect();
    let is_complete = found.is_complete && pieces.next().is_none();
    let header = LbaStatusHeader {
        count: U32::new(written.len() as u32),
        condition: if is_complete {
            condition::COMPLETE
        } else {
            condition::NO_ROOM
        },
        reserved5: [0; 3],
    };
    let bytes = header.as_bytes().iter().chain(written.as_bytes());
    for (to, from) in data.iter_mut().zip(bytes) {
        *to = *from;
    }
}

/// A range in pieces that fit a descriptor.
fn descriptors(range: &Range<u64>) -> impl Iterator<Item = LbaStatusDescriptor> {
    let end = range.end;
    let starts = (range.start..end).step_by(DESCRIPTOR_BLOCKS as usize);
    starts.map(move |at| LbaStatusDescriptor::allocated(at, (end - at).min(DESCRIPTOR_BLOCKS)))
}

#[cfg(test)]
mod tests {
    use zerocopy::FromBytes;

    use super::*;

    fn written(ranges: &[Range<u64>], is_complete: bool, bytes: usize) -> (u32, u8, Vec<u64>) {
        let mut data = vec![0; bytes];
        let found = AllocatedRanges {
            ranges: ranges.to_vec(),
            is_complete,
        };
        write(&found, &mut data);
        let (header, rest) = LbaStatusHeader::read_from_prefix(&data).unwrap();
        let descriptors = rest.chunks_exact(16).take(header.count.get() as usize);
        let starts = descriptors.map(|bytes| {
            let descriptor = LbaStatusDescriptor::read_from_bytes(bytes).unwrap();
            assert_eq!(descriptor.status, 2);
            descriptor.dslba.get()
        });
        (header.count.get(), header.condition, starts.collect())
    }

    /// Goal: no descriptor has more blocks than its field can say, and a list that is cut says so.
    #[test]
    fn lists_that_fit_and_that_do_not() {
        let (small, large) = (5..9, 16..(2 << 32) + 17);
        let both = [small.clone(), large.clone()];
        let pieces = [5, 16, (1 << 32) + 16, (2 << 32) + 16];
        assert_eq!(written(&both, true, 72), (4, 2, pieces.to_vec()));
        assert_eq!(written(&both, false, 72), (4, 1, pieces.to_vec()));
        assert_eq!(written(&both, true, 71), (3, 1, pieces[..3].to_vec()));
        assert_eq!(written(&[small], true, 8), (0, 1, vec![]));
        assert_eq!(written(&[], true, 8), (0, 2, vec![]));
        // The header does not fit.
        let mut data = [0xAA; 4];
        write(&AllocatedRanges::default(), &mut data);
        assert_eq!(data, [0; 4]);
    }
}
