//! Reads: runs of granules that adjoin on the disk, and zeroes.

use std::sync::Arc;

use nacre_bdev::{Claim, Op, Status};
use nacre_bdev_pool_core::disks::Location;
use nacre_bdev_pool_core::geometry::PAGE;
use nacre_bdev_pool_core::map;

use super::external::{EXTERNAL_DISK, locate_external};
use super::parts::{self, Part};
use super::{Lane, Owner, Request};
use crate::map::Seen;
use crate::port::ToKeeper;

/// Granules with the same source.
#[derive(Debug, Clone, Copy)]
struct ReadRun {
    /// `None`: zeroes.
    disk: Option<Location>,
    granules: u32,
}

/// A step of a read.
#[derive(Debug, Clone, Copy)]
enum Piece {
    Run(ReadRun),
    /// Granules of one place that is not loaded.
    Unknown {
        place: u64,
        first: u32,
        granules: u32,
    },
    Damaged {
        granules: u32,
    },
    /// Granules of one place, some of them of an external device that is not there.
    Missing {
        place: u64,
        first: u32,
        granules: u32,
    },
}

impl Lane {
    pub(super) fn begin_read(&mut self, job: usize, lba: u64, blocks: u32) {
        let epoch = self.port.counts.enter(&self.shared.epoch, 1);
        let pieces = self.pieces(lba, blocks);
        if let [Piece::Run(ReadRun { disk: Some(at), .. })] = pieces.as_slice() {
            let data = std::mem::take(&mut self.jobs[job].data);
            let io = self.base_io(Op::Read, *at, data);
            let held = (at.disk != EXTERNAL_DISK).then_some(epoch);
            self.child(at.disk, io, Owner::Read { job }, held);
        } else {
            let mut data = std::mem::take(&mut self.jobs[job].data);
            let mut offset = 0;
            for piece in pieces {
                let len = piece.granules() as usize * PAGE;
                let part = Part {
                    data: parts::split_front(&mut data, len),
                    offset,
                };
                self.begin_piece(job, part, piece, epoch);
                offset += len;
            }
        }
        self.port.counts.leave(epoch);
    }

    /// Reads a range of one place whose leaf was loaded into the buffers of a part. The keeper may
    /// change the leaf at this moment: then the part waits again.
    pub(super) fn read_place_again(&mut self, job: usize, part: usize, lba: u64, granules: u32) {
        if self.map.is_gone() {
            self.jobs[job].status = Status::Gone;
            return;
        }
        let epoch = self.port.counts.enter(&self.shared.epoch, 1);
        let pieces = self.pieces(lba, granules);
        if let [piece @ Piece::Unknown { .. }] = pieces.as_slice() {
            self.load(job, part, *piece);
            return self.port.counts.leave(epoch);
        }
        // The keeper shows the device before it answers.
        if matches!(pieces.as_slice(), [Piece::Missing { .. }]) {
            self.jobs[job].status = Status::Gone;
            return self.port.counts.leave(epoch);
        }
        let part = &mut self.jobs[job].parts[part];
        let mut data = std::mem::take(&mut part.data);
        let mut offset = part.offset;
        for piece in pieces {
            let len = piece.granules() as usize * PAGE;
            let part = Part {
                data: parts::split_front(&mut data, len),
                offset,
            };
            self.begin_piece(job, part, piece, epoch);
            offset += len;
        }
        self.port.counts.leave(epoch);
    }

    fn begin_piece(&mut self, job: usize, mut part: Part, piece: Piece, epoch: u64) {
        match piece {
            Piece::Run(ReadRun { disk: None, .. }) => {
                if !parts::zero(&mut part.data) {
                    self.jobs[job].status = Status::DeviceError;
                }
                self.jobs[job].parts.push(part);
            }
            Piece::Run(ReadRun { disk: Some(at), .. }) => {
                let data = std::mem::take(&mut part.data);
                self.jobs[job].parts.push(part);
                let part = self.jobs[job].parts.len() - 1;
                let io = self.base_io(Op::Read, at, data);
                let held = (at.disk != EXTERNAL_DISK).then_some(epoch);
                self.child(at.disk, io, Owner::Part { job, part }, held);
            }
            Piece::Unknown { .. } | Piece::Missing { .. } => {
                let at = self.jobs[job].parts.len();
                self.jobs[job].parts.push(part);
                self.load(job, at, piece);
            }
            Piece::Damaged { .. } => {
                self.jobs[job].parts.push(part);
                self.jobs[job].status = Status::ReadError;
            }
        }
    }

    /// Asks the keeper for the leaf of a piece that a part waits for.
    fn load(&mut self, job: usize, part: usize, piece: Piece) {
        let (Piece::Unknown {
            place,
            first,
            granules,
        }
        | Piece::Missing {
            place,
            first,
            granules,
        }) = piece
        else {
            return;
        };
        let load = Request::new(job, place, first, granules, 0);
        let request = self.request(Request { part, ..load });
        let map = self.map_id();
        self.outbox.push(ToKeeper::Load {
            request,
            map,
            place,
        });
    }

    /// The sources of a range, in order.
    fn pieces(&mut self, lba: u64, blocks: u32) -> Vec<Piece> {
        loop {
            let external = self.map.external();
            let pieces = self.pieces_with(lba, blocks, external.as_ref());
            // Entries and their device are of one time.
            let now = self.map.external();
            if now.as_ref().map(Arc::as_ptr) == external.as_ref().map(Arc::as_ptr) {
                return pieces;
            }
        }
    }

    fn pieces_with(&mut self, lba: u64, blocks: u32, external: Option<&Arc<Claim>>) -> Vec<Piece> {
        let per_unit = u64::from(self.geometry.granules_per_unit);
        let mut pieces = Vec::new();
        // The start of the last unit.
        let mut known: Option<(u64, Location)> = None;
        let (mut at, end) = (lba, lba + u64::from(blocks));
        while at < end {
            let place = at / per_unit;
            let first = (at % per_unit) as u32;
            let granules = (end.min((place + 1) * per_unit) - at) as u32;
            at += u64::from(granules);
            let entry = match self.map.get(place) {
                Seen::Known { entry, .. } => entry,
                Seen::Damaged => {
                    pieces.push(Piece::Damaged { granules });
                    continue;
                }
                Seen::Unknown => {
                    pieces.push(Piece::Unknown {
                        place,
                        first,
                        granules,
                    });
                    continue;
                }
            };
            let end = first + granules;
            let is_external = |part: map::Part| {
                let needs = |granule| part.granules >> granule & 1 == 1;
                part.is_external() && (first..end).any(needs)
            };
            let needs_external = entry.parts().any(is_external);
            if needs_external && !external.is_some_and(|claim| self.open_external(claim)) {
                pieces.push(Piece::Missing {
                    place,
                    first,
                    granules,
                });
                continue;
            }
            for granule in first..end {
                let mut sources = entry.parts();
                let source = sources.find(|part| part.granules >> granule & 1 == 1);
                let disk = source.map(|part| {
                    if part.is_external() {
                        return locate_external(&self.geometry, place, granule);
                    }
                    let start = match known {
                        Some((unit, start)) if unit == part.unit => start,
                        _ => known.insert((part.unit, self.locate(part.unit, 0))).1,
                    };
                    Location {
                        offset: start.offset + u64::from(granule) * PAGE as u64,
                        ..start
                    }
                });
                add(&mut pieces, disk);
            }
        }
        pieces
    }
}

impl Piece {
    fn granules(&self) -> u32 {
        match self {
            Self::Run(run) => run.granules,
            Self::Unknown { granules, .. }
            | Self::Missing { granules, .. }
            | Self::Damaged { granules } => *granules,
        }
    }
}

/// Adds a granule to the last run, or begins one.
fn add(pieces: &mut Vec<Piece>, disk: Option<Location>) {
    if let Some(Piece::Run(run)) = pieces.last_mut() {
        let adjoins = match (run.disk, disk) {
            (Some(at), Some(next)) => {
                let end = at.offset + u64::from(run.granules) * PAGE as u64;
                at.disk == next.disk && end == next.offset
            }
            (None, None) => true,
            _ => false,
        };
        if adjoins {
            run.granules += 1;
            return;
        }
    }
    pieces.push(Piece::Run(ReadRun { disk, granules: 1 }));
}
