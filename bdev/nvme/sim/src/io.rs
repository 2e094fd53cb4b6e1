//! Executes the I/O commands (NVM 3.2) of the simulated controller on the stored blocks.

use nacre_nvmf_wire::commands::io::{
    CopyCommand, CopyFormat, DatasetManagement, DsmRange, ReadWrite, WriteZeroes,
};
use nacre_nvmf_wire::identify::controller::Oncs;
use nacre_nvmf_wire::identify::nsid;
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::{Sqe, StatusCode};

use crate::data;
use crate::executor::Executor;

/// Most bytes of descriptors in a Dataset Management or Copy command.
const LIST_MAX: usize = 256 * 40;

const OUT_OF_RANGE: StatusCode = StatusCode::LBA_OUT_OF_RANGE.with_dnr();
const INVALID_FIELD: StatusCode = StatusCode::INVALID_FIELD.with_dnr();

impl Executor {
    pub(crate) fn io(&mut self, sqe: &Sqe) -> StatusCode {
        let offered = match sqe.opcode {
            io::FLUSH | io::READ | io::WRITE => Oncs::empty(),
            io::COMPARE => Oncs::COMPARE,
            io::WRITE_ZEROES => Oncs::WRITE_ZEROES,
            io::DATASET_MANAGEMENT => Oncs::DATASET_MANAGEMENT,
            io::VERIFY => Oncs::VERIFY,
            io::COPY => Oncs::COPY,
            _ => Oncs::all(),
        };
        if !self.config.oncs.contains(offered) {
            return self.mistake(sqe, StatusCode::INVALID_OPCODE, "not offered");
        }
        if sqe.opcode == io::FLUSH && sqe.nsid() == nsid::BROADCAST {
            self.namespaces.values_mut().for_each(|ns| ns.flush());
            return StatusCode::SUCCESS;
        }
        if matches!(sqe.nsid(), 0 | nsid::BROADCAST) {
            let status = StatusCode::INVALID_NAMESPACE_OR_FORMAT;
            return self.mistake(sqe, status, "no namespace");
        }
        if !self
            .namespaces
            .get(&sqe.nsid())
            .is_some_and(|ns| ns.attached)
        {
            return StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
        }
        let outcome = match sqe.opcode {
            io::FLUSH => self.flush(sqe),
            io::READ | io::COMPARE | io::VERIFY => self.read_like(sqe),
            io::WRITE => self.write_data(sqe),
            io::WRITE_ZEROES => self.write_zeroes(sqe),
            io::DATASET_MANAGEMENT => self.dataset_management(sqe),
            _ => self.copy(sqe),
        };
        outcome.err().unwrap_or(StatusCode::SUCCESS)
    }

    /// Executes a fused pair. Returns the status of each half.
    pub(crate) fn compare_and_write(
        &mut self,
        compare: &Sqe,
        write: &Sqe,
    ) -> (StatusCode, StatusCode) {
        let (first, second) = (ReadWrite::parse(compare), ReadWrite::parse(write));
        let together = compare.opcode == io::COMPARE
            && write.opcode == io::WRITE
            && compare.nsid() == write.nsid()
            && (first.slba, first.blocks) == (second.slba, second.blocks);
        if !together || !self.config.fused_compare_and_write {
            let status = self.mistake(compare, INVALID_FIELD, "no pair that can be fused");
            return (status, StatusCode::ABORTED_FAILED_FUSED);
        }
        let own = self.namespaces.get(&compare.nsid());
        let most = own.and_then(|namespace| namespace.config.nawupf);
        if first.blocks > u32::from(most.unwrap_or(self.config.limits.acwu)) {
            let status = StatusCode::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr();
            let status = self.mistake(compare, status, "more than ACWU or NACWU");
            return (status, StatusCode::ABORTED_FAILED_FUSED);
        }
        self.stats.fused += 1;
        match self.io(compare) {
            StatusCode::SUCCESS => (StatusCode::SUCCESS, self.io(write)),
            status => (status, StatusCode::ABORTED_FAILED_FUSED),
        }
    }

    fn mistake(&mut self, sqe: &Sqe, status: StatusCode, what: &str) -> StatusCode {
        self.violations.note(format!("{what}: {sqe:?}"));
        status.with_dnr()
    }

    /// Checks a range of blocks, and returns its length in bytes.
    fn range(&mut self, sqe: &Sqe, lba: u64, blocks: u32) -> Result<usize, StatusCode> {
        // The namespace exists: the command was routed to it.
        let namespace = &self.namespaces[&sqe.nsid()];
        let format = namespace.config.current();
        let holds = namespace.holds(lba, blocks.into());
        let protected = namespace.config.protection != 0 && format.metadata == 8;
        let action = sqe.cdw12.get() >> 29 & 1 != 0;
        if format.metadata != 0 && !(protected && action) {
            return Err(self.mistake(sqe, INVALID_FIELD, "metadata without a place for it"));
        }
        if !holds {
            return Err(OUT_OF_RANGE);
        }
        Ok(blocks as usize * format.block_size as usize)
    }

    /// Checks a limit of 2^n pages of CAP.MPSMIN, 0 for none.
    pub(crate) fn limit(
        &mut self,
        sqe: &Sqe,
        bytes: usize,
        exponent: u8,
        name: &str,
    ) -> Result<(), StatusCode> {
        let page = 4096usize << self.config.pages.0;
        if exponent > 0 && bytes > page << exponent {
            let what = format!("{bytes} bytes are more than {name}");
            return Err(self.mistake(sqe, INVALID_FIELD, &what));
        }
        Ok(())
    }

    fn check_writable(&self, sqe: &Sqe) -> Result<(), StatusCode> {
        if self.namespaces[&sqe.nsid()].config.write_protected {
            Err(StatusCode::NAMESPACE_IS_WRITE_PROTECTED.with_dnr())
        } else {
            Ok(())
        }
    }

    fn note_boundary(&mut self, sqe: &Sqe, range: &ReadWrite) {
        let boundary = u64::from(self.namespaces[&sqe.nsid()].config.noiob);
        if boundary > 0 && range.slba % boundary + u64::from(range.blocks) > boundary {
            self.stats.boundary_crossings += 1;
        }
    }

    fn flush(&mut self, sqe: &Sqe) -> Result<(), StatusCode> {
        if let Some(namespace) = self.namespaces.get_mut(&sqe.nsid()) {
            namespace.flush();
        }
        Ok(())
    }

    fn read_like(&mut self, sqe: &Sqe) -> Result<(), StatusCode> {
        let range = ReadWrite::parse(sqe);
        let bytes = self.range(sqe, range.slba, range.blocks)?;
        let verify = sqe.opcode == io::VERIFY;
        if verify {
            self.limit(sqe, bytes, self.config.limits.vsl, "VSL")?
        } else {
            self.limit(sqe, bytes, self.config.mdts, "MDTS")?
        }
        self.note_boundary(sqe, &range);
        if !verify {
            let outcome = self.locate(sqe, bytes);
            self.checked(sqe, outcome)?;
        }
        let namespace = &self.namespaces[&sqe.nsid()];
        if !namespace.is_readable(range.slba, range.blocks.into()) {
            return Err(StatusCode::UNRECOVERED_READ_ERROR.with_dnr());
        }
        let stored = namespace.read(range.slba, range.blocks.into());
        let outcome = match sqe.opcode {
            io::READ => data::scatter(&self.iommu, &self.pieces, stored),
            io::COMPARE => {
                self.buffer.resize(bytes, 0);
                let outcome = data::gather(&self.iommu, &self.pieces, &mut self.buffer);
                if outcome.is_ok() && self.buffer != stored {
                    return Err(StatusCode::COMPARE_FAILURE);
                }
                outcome
            }
            _ => Ok(()),
        };
        self.checked(sqe, outcome)
    }

    /// True if written data stays in the cache. Counts writes with FUA.
    fn volatile(&mut self, fua: bool) -> bool {
        self.stats.fua += u64::from(fua);
        self.config.volatile_cache && self.features.cache && !fua
    }

    fn write_data(&mut self, sqe: &Sqe) -> Result<(), StatusCode> {
        let range = ReadWrite::parse(sqe);
        let bytes = self.range(sqe, range.slba, range.blocks)?;
        self.limit(sqe, bytes, self.config.mdts, "MDTS")?;
        self.check_writable(sqe)?;
        self.note_boundary(sqe, &range);
        let outcome = self.locate(sqe, bytes);
        self.checked(sqe, outcome)?;
        let volatile = self.volatile(range.fua);
        let Some(namespace) = self.namespaces.get_mut(&sqe.nsid()) else {
            return Ok(());
        };
        let into = namespace.write(range.slba, range.blocks.into(), volatile);
        let outcome = data::gather(&self.iommu, &self.pieces, into);
        self.checked(sqe, outcome)
    }

    fn write_zeroes(&mut self, sqe: &Sqe) -> Result<(), StatusCode> {
        let zeroes = WriteZeroes::parse(sqe);
        let bytes = self.range(sqe, zeroes.slba, zeroes.blocks)?;
        self.limit(sqe, bytes, self.config.limits.wzsl, "WZSL")?;
        self.check_writable(sqe)?;
        let deac = self.namespaces.get(&sqe.nsid()).map(|n| n.config.deac);
        if zeroes.deallocate && deac == Some(false) {
            return Err(self.mistake(sqe, INVALID_FIELD, "DEAC where DLFEAT does not offer it"));
        }
        let volatile = self.volatile(zeroes.fua);
        if let Some(namespace) = self.namespaces.get_mut(&sqe.nsid()) {
            let into = namespace.write(zeroes.slba, zeroes.blocks.into(), volatile);
            into.fill(0);
        }
        Ok(())
    }

    fn dataset_management(&mut self, sqe: &Sqe) -> Result<(), StatusCode> {
        let command = DatasetManagement::parse(sqe);
        let mut list = [0; LIST_MAX];
        let list = &mut list[..command.data_bytes()];
        self.take_data(sqe, list)?;
        let ranges = DsmRange::list(list);
        let config = &self.config;
        let total: u64 = ranges.iter().map(|range| u64::from(range.nlb.get())).sum();
        let longest = ranges.iter().map(|range| range.nlb.get()).max();
        let beyond = |most: u64, is: u64| most > 0 && is > most;
        if beyond(config.limits.dmrl.into(), ranges.len() as u64)
            || beyond(config.limits.dmrsl.into(), longest.unwrap_or(0).into())
            || beyond(config.limits.dmsl, total)
        {
            return Err(self.mistake(sqe, INVALID_FIELD, "more than DMRL, DMRSL or DMSL"));
        }
        if command.deallocate {
            self.check_writable(sqe)?;
        }
        let volatile = self.volatile(false);
        let Some(namespace) = self.namespaces.get_mut(&sqe.nsid()) else {
            return Ok(());
        };
        let parts = || {
            ranges
                .iter()
                .map(|range| (range.slba.get(), range.nlb.get()))
        };
        if parts().any(|(lba, blocks)| !namespace.holds(lba, blocks.into())) {
            return Err(OUT_OF_RANGE);
        }
        if command.deallocate && !namespace.config.ignores_advice {
            parts().for_each(|(lba, blocks)| namespace.deallocate(lba, blocks.into(), volatile));
        }
        Ok(())
    }

    fn copy(&mut self, sqe: &Sqe) -> Result<(), StatusCode> {
        let command = CopyCommand::parse(sqe).map_err(|error| error.status())?;
        if command.format != CopyFormat::Format0 {
            return Err(self.mistake(sqe, INVALID_FIELD, "a format that OCFS does not have"));
        }
        let mut list = [0; LIST_MAX];
        let list = &mut list[..command.data_bytes()];
        self.take_data(sqe, list)?;
        self.check_writable(sqe)?;
        let config = &self.namespaces[&sqe.nsid()].config;
        let (mssrl, mcl, msrc) = (u32::from(config.mssrl), config.mcl, config.msrc);
        let total: u32 = command.sources(list).map(|(_, blocks)| blocks).sum();
        let longest = command.sources(list).map(|(_, blocks)| blocks).max();
        if longest.unwrap_or(0) > mssrl || total > mcl || command.ranges > msrc {
            let status = StatusCode::COMMAND_SIZE_LIMIT_EXCEEDED;
            return Err(self.mistake(sqe, status, "more than MSSRL, MCL or MSRC"));
        }
        self.range(sqe, command.sdlba, total)?;
        for (lba, blocks) in command.sources(list) {
            self.range(sqe, lba, blocks)?;
            if !self.namespaces[&sqe.nsid()].is_readable(lba, blocks.into()) {
                return Err(StatusCode::UNRECOVERED_READ_ERROR.with_dnr());
            }
        }
        let volatile = self.volatile(command.fua);
        let Some(namespace) = self.namespaces.get_mut(&sqe.nsid()) else {
            return Ok(());
        };
        let mut to = command.sdlba;
        for (lba, blocks) in command.sources(list) {
            namespace.copy(lba, to, blocks.into(), volatile);
            to += u64::from(blocks);
        }
        Ok(())
    }
}
