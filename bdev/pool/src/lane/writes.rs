//! Writes in place, first writes by the keeper's order, and unmaps.

use nacre_bdev::{Extents, Op, Status};
use nacre_bdev_pool_core::disks::Location;
use nacre_bdev_pool_core::format::data_checksum;
use nacre_bdev_pool_core::geometry::{PAGE, granules_of};
use nacre_bdev_pool_core::interface::Write;
use nacre_bdev_pool_core::map::EXTERNAL_UNIT;
use std::sync::atomic::Ordering;

use super::external::locate_external;
use super::parts;
use super::{Lane, Owner, Request};
use crate::map::Seen;
use crate::port::{RequestId, ToKeeper};

/// Consecutive blocks of the disk, and the bytes of the I/O that go there.
#[derive(Debug, Clone, Copy)]
struct WriteRun {
    at: Location,
    offset: usize,
    len: usize,
}

impl Lane {
    pub(super) fn begin_write(&mut self, job: usize, lba: u64, blocks: u32) {
        let per_unit = u64::from(self.geometry.granules_per_unit);
        let epoch = self.port.counts.enter(&self.shared.epoch, 1);
        let (mut at, end) = (lba, lba + u64::from(blocks));
        let mut run: Option<WriteRun> = None;
        while at < end {
            let place = at / per_unit;
            let first = (at % per_unit) as u32;
            let granules = (end.min((place + 1) * per_unit) - at) as u32;
            let offset = (at - lba) as usize * PAGE;
            at += u64::from(granules);
            let Some(unit) = self.unit_in_place(place, first, granules) else {
                self.send_write(job, place, first, granules, offset);
                continue;
            };
            let disk = self.locate(unit, first);
            let len = granules as usize * PAGE;
            match &mut run {
                Some(run)
                    if run.at.disk == disk.disk
                        && run.at.offset + run.len as u64 == disk.offset
                        && run.offset + run.len == offset =>
                {
                    run.len += len
                }
                _ => {
                    let new = WriteRun {
                        at: disk,
                        offset,
                        len,
                    };
                    if let Some(run) = run.replace(new) {
                        self.write_run(job, run, epoch);
                    }
                }
            }
        }
        if let Some(run) = run {
            self.write_run(job, run, epoch);
        }
        self.port.counts.leave(epoch);
    }

    /// The unit that these granules may be written to without a record.
    fn unit_in_place(&self, place: u64, first: u32, granules: u32) -> Option<u64> {
        let Seen::Known { entry, lsn } = self.map.get(place) else {
            return None;
        };
        let set = set_of(first, granules);
        let is_valid = entry.own.granules & set == set;
        // A recovery compares unsettled granules with the checksums of their record.
        let is_settled = lsn <= self.shared.settled.load(Ordering::SeqCst);
        // The epoch is entered: a volume that is read-only from now on waits for this write.
        let is_valid = is_valid && !self.map.is_read_only();
        let may_write = is_valid && is_settled && entry.own.is_exclusive(self.map.floor());
        may_write.then_some(entry.own.unit)
    }

    fn write_run(&mut self, job: usize, run: WriteRun, epoch: u64) {
        let data = parts::slice(&self.jobs[job].data, run.offset, run.len);
        let io = self.base_io(Op::Write, run.at, data);
        self.child(run.at.disk, io, Owner::Write { job }, Some(epoch));
    }

    fn send_write(&mut self, job: usize, place: u64, first: u32, granules: u32, offset: usize) {
        let data = &self.jobs[job].data;
        let sum = |at: u32| {
            let mut page = [0; PAGE];
            parts::copy_out(data, offset + at as usize * PAGE, &mut page);
            data_checksum(&page)
        };
        let write = Write {
            version: self.map.version,
            place,
            granules: set_of(first, granules),
            checksums: (0..granules).map(sum).collect(),
            // The layer flushes after the write.
            fua: false,
        };
        let serial = self.map.serial;
        let request = self.request(Request::new(job, place, first, granules, offset));
        self.outbox.push(ToKeeper::Write {
            request,
            serial,
            write,
        });
    }

    /// The keeper has appended the record of a write.
    pub(super) fn write_data(&mut self, request: RequestId, unit: u64, copy: u16) {
        let Some(write) = self.requests.get(request as usize) else {
            return;
        };
        let (first, granules, offset) = (write.first, write.granules, write.offset);
        let data = &self.jobs[write.job].data;
        let data = parts::slice(data, offset, granules as usize * PAGE);
        // A unit lies on one disk.
        let base = self.locate(unit, 0);
        let of = |granule: u32| Location {
            offset: base.offset + u64::from(granule) * PAGE as u64,
            ..base
        };
        let Some(write) = self.requests.get(request as usize) else {
            return;
        };
        let mut writes = vec![self.base_io(Op::Write, of(first), data)];
        for granule in granules_of(copy) {
            let mut sources = write.sources.iter();
            let source = sources.find(|(of, _)| *of == granule);
            let Some((_, Some(buf))) = source else {
                continue;
            };
            let mut data = Extents::new();
            data.push(buf.clone());
            writes.push(self.base_io(Op::Write, of(granule), data));
        }
        for io in writes {
            self.child(base.disk, io, Owner::Data { request }, None);
        }
    }

    pub(super) fn data_ended(&mut self, request: RequestId, status: Status) {
        let Some(write) = self.requests.get_mut(request as usize) else {
            return;
        };
        if write.status.is_ok() {
            write.status = status;
        }
        write.left -= 1;
        if write.left == 0 {
            let is_ok = write.status.is_ok();
            write.sources.clear();
            self.outbox.push(ToKeeper::DataWritten { request, is_ok });
        }
    }

    /// Reads granules that the write copies.
    pub(super) fn read_source(&mut self, request: RequestId, unit: u64, granules: u16) {
        let Some(write) = self.requests.get_mut(request as usize) else {
            return;
        };
        let place = write.place;
        if unit == EXTERNAL_UNIT {
            let device = self.map.external();
            if !device.is_some_and(|device| self.open_external(&device)) {
                return self.source_missing(request);
            }
        }
        let count = granules.count_ones() as usize;
        let bufs: Vec<_> = (0..count)
            .map_while(|_| self.memory.acquire(PAGE))
            .collect();
        if bufs.len() < count {
            self.starved.push((request, unit, granules));
            return;
        }
        let Some(write) = self.requests.get_mut(request as usize) else {
            return;
        };
        write
            .sources
            .extend(granules_of(granules).map(|granule| (granule, None)));
        for (granule, buf) in granules_of(granules).zip(bufs) {
            let mut data = Extents::new();
            data.push(buf);
            let at = match unit {
                EXTERNAL_UNIT => locate_external(&self.geometry, place, granule),
                unit => self.locate(unit, granule),
            };
            let io = self.base_io(Op::Read, at, data);
            self.child(at.disk, io, Owner::Source { request, granule }, None);
        }
    }

    /// Nothing can be read for a write: the external device is not there.
    fn source_missing(&mut self, request: RequestId) {
        if let Some(write) = self.requests.get_mut(request as usize) {
            write.status = Status::Gone;
            let sums = None;
            self.outbox.push(ToKeeper::SourceRead { request, sums });
        }
    }

    pub(super) fn source_ended(
        &mut self,
        request: RequestId,
        granule: u32,
        status: Status,
        mut data: Extents,
    ) {
        let Some(write) = self.requests.get_mut(request as usize) else {
            return;
        };
        if write.status.is_ok() {
            write.status = status;
        }
        let source = write.sources.iter_mut().find(|(of, _)| *of == granule);
        if let Some((_, source)) = source {
            *source = data.pop();
        }
        write.left -= 1;
        if write.left > 0 {
            return;
        }
        let sum = |(_, buf): &(u32, Option<_>)| {
            buf.as_ref()
                .map(|buf: &nacre_hugepages::Buf| data_checksum(buf))
        };
        let sums = if write.status.is_ok() {
            write.sources.iter().map(sum).collect()
        } else {
            None
        };
        self.outbox.push(ToKeeper::SourceRead { request, sums });
    }

    pub(super) fn begin_unmap(&mut self, job: usize, lba: u64, blocks: u64) {
        let per_unit = u64::from(self.geometry.granules_per_unit);
        let per_leaf = per_unit * u64::from(self.geometry.units_per_leaf);
        let (mut at, end) = (lba, lba + blocks);
        while at < end {
            let granules = end.min((at / per_leaf + 1) * per_leaf) - at;
            let first = at;
            at += granules;
            // A crash may undo the record that emptied the leaf, until it is settled.
            let settled = self.shared.settled.load(Ordering::SeqCst);
            let empty_since = self.map.empty_since(first / per_unit);
            if empty_since.is_some_and(|lsn| lsn <= settled) {
                continue;
            }
            let request = self.request(Request::new(job, first / per_unit, 0, 0, 0));
            let map = self.map_id();
            self.outbox.push(ToKeeper::Unmap {
                request,
                map,
                first,
                granules,
            });
        }
    }
}

/// The set of `granules` granules from `first` on.
fn set_of(first: u32, granules: u32) -> u16 {
    (((1u32 << granules) - 1) << first) as u16
}
