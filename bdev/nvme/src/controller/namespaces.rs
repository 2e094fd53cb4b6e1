//! Lists the namespaces of a controller, reads their Identify data, and reports changes.

use std::sync::Arc;

use nacre_bdev::{BLOCK_SIZES, Limits, Op};
use nacre_nvmf_wire::commands::admin::Identify;
use nacre_nvmf_wire::identify::controller::{FUSES_COMPARE_AND_WRITE, Oncs};
use nacre_nvmf_wire::identify::namespace::{NSATTR_WRITE_PROTECTED, Nsfeat, dlfeat};
use nacre_nvmf_wire::identify::{
    self, IdentifyNamespace, NamespaceList, NsIdDescriptor, cns, descriptors,
};
use nacre_nvmf_wire::registers::Version;
use nacre_reactor::CoreHandle;
use uuid::Uuid;
use zerocopy::FromBytes;

use super::Controller;
use super::commands::Commands;
use crate::device::NvmeBdev;
use crate::error::ControlError;
use crate::event::Event;
use crate::info::UnusableNamespace;
use crate::namespace::{Namespace, NamespaceProperties};
use crate::properties::Properties;

/// Most namespaces of a controller.
const NAMESPACES_MAX: usize = 1024;
/// Most blocks of a command's NLB field.
const NLB_MAX: u64 = 1 << 16;

/// DPS: the type of protection information, 0 for none.
const DPS_TYPE: u8 = 0b111;
/// Bytes of protection information per block with a 16-bit guard.
const PROTECTION_BYTES: u16 = 8;

/// Properties of a namespace, as the controller reports them.
struct Found {
    properties: NamespaceProperties,
    blocks: u64,
    read_only: bool,
}

impl Controller {
    /// Lists the namespaces. Reports new and removed ones, and changed sizes.
    pub(super) async fn find_namespaces(&self, core: &CoreHandle) -> Result<(), ControlError> {
        let properties = self.shared.properties();
        let commands = self.commands(core);
        let mut unusable = Vec::new();
        let nsids = commands.active_namespaces(&properties).await?;
        let known: Vec<u32> = self.namespaces.lock().keys().copied().collect();
        for nsid in known.into_iter().filter(|nsid| !nsids.contains(nsid)) {
            self.drop_namespace(nsid);
        }
        for nsid in nsids {
            match commands.read_namespace(&properties, nsid).await? {
                Ok(found) => self.take_namespace(found),
                Err(reason) => {
                    self.drop_namespace(nsid);
                    if let Some(reason) = reason {
                        tracing::warn!(
                            controller = self.name(),
                            nsid,
                            reason,
                            "NVMe namespace cannot be used"
                        );
                        unusable.push(UnusableNamespace { nsid, reason });
                    }
                }
            }
        }
        *self.shared.unusable.lock() = unusable;
        Ok(())
    }

    fn take_namespace(&self, found: Found) {
        let nsid = found.properties.nsid;
        let known = self.namespaces.lock().get(&nsid).cloned();
        if let Some(bdev) = known {
            if is_same(&bdev.namespace().properties(), &found.properties) {
                let changes = bdev.namespace().update(found.properties);
                if !changes.is_empty() {
                    let changes = changes.join(", ");
                    tracing::warn!(
                        controller = self.name(),
                        nsid,
                        changes,
                        "NVMe namespace has other limits"
                    );
                    self.send_event(Event::NamespaceLimits { nsid, changes });
                }
                if bdev.namespace().refresh(found.blocks, found.read_only) {
                    self.send_event(Event::NamespaceResized(bdev));
                }
                return;
            }
            // The namespace was reformatted, or replaced by another one with the same identifier.
            self.drop_namespace(nsid);
        }
        let namespace = Namespace::new(found.properties, found.blocks, found.read_only);
        let bdev = Arc::new(NvmeBdev::new(Arc::clone(&self.shared), namespace));
        self.namespaces.lock().insert(nsid, Arc::clone(&bdev));
        self.send_event(Event::NamespaceAdded(bdev));
    }

    pub(super) fn drop_namespace(&self, nsid: u32) {
        let gone = self.namespaces.lock().remove(&nsid);
        if let Some(bdev) = gone {
            bdev.namespace().set_gone();
            self.send_event(Event::NamespaceRemoved(bdev));
        }
    }
}

impl Commands<'_> {
    async fn active_namespaces(self, properties: &Properties) -> Result<Vec<u32>, ControlError> {
        if properties.version < Version::new(1, 1, 0) {
            return Ok((1..=properties.info.nn).take(NAMESPACES_MAX).collect());
        }
        let mut page = vec![0; identify::SIZE];
        let sqe = Identify::new(cns::ACTIVE_NAMESPACES).to_sqe(0, 0);
        self.ask(sqe, &[], &mut page).await?;
        let list = NamespaceList::ref_from_bytes(&page);
        let mut nsids: Vec<u32> = list.map_or(Vec::new(), |list| list.iter().collect());
        // A controller may list a namespace twice, or out of order.
        nsids.sort_unstable();
        nsids.dedup();
        Ok(nsids)
    }

    /// Reads a namespace's properties. The error is the reason why it is unusable; `None`: it does
    /// not exist.
    async fn read_namespace(
        self,
        properties: &Properties,
        nsid: u32,
    ) -> Result<Result<Found, Option<String>>, ControlError> {
        let mut page = vec![0; identify::SIZE];
        let sqe = Identify::new(cns::NAMESPACE).to_sqe(0, nsid);
        match self.ask(sqe, &[], &mut page).await {
            Ok(_) => {}
            Err(ControlError::Status { status, .. }) => {
                return Ok(Err(Some(format!("it cannot be identified: {status}"))));
            }
            Err(error) => return Err(error),
        }
        let Ok(said) = IdentifyNamespace::ref_from_bytes(&page) else {
            return Ok(Err(None));
        };
        if said.nsze.get() == 0 {
            return Ok(Err(None));
        }
        let names = self.names_of(properties, nsid, said).await?;
        Ok(describe(properties, nsid, said, names).map_err(Some))
    }

    async fn names_of(
        self,
        properties: &Properties,
        nsid: u32,
        said: &IdentifyNamespace,
    ) -> Result<Names, ControlError> {
        let mut names = Names {
            uuid: None,
            nguid: said.nguid,
            eui64: said.eui64,
            csi: 0,
        };
        if properties.version < Version::new(1, 3, 0) {
            return Ok(names);
        }
        let mut page = vec![0; identify::SIZE];
        let sqe = Identify::new(cns::NAMESPACE_DESCRIPTORS).to_sqe(0, nsid);
        match self.ask(sqe, &[], &mut page).await {
            Ok(_) => {}
            Err(ControlError::Status { .. }) => return Ok(names),
            Err(error) => return Err(error),
        }
        for descriptor in descriptors::iter(&page).flatten() {
            match descriptor {
                NsIdDescriptor::Uuid(uuid) => names.uuid = Some(uuid),
                NsIdDescriptor::Nguid(nguid) => names.nguid = nguid,
                NsIdDescriptor::Eui64(eui64) => names.eui64 = eui64,
                NsIdDescriptor::Csi(csi) => names.csi = csi,
                NsIdDescriptor::Unknown { .. } => {}
            }
        }
        Ok(names)
    }
}

struct Names {
    uuid: Option<Uuid>,
    nguid: [u8; 16],
    eui64: [u8; 8],
    csi: u8,
}

/// True if a bdev for `a` can also serve `b`.
fn is_same(a: &NamespaceProperties, b: &NamespaceProperties) -> bool {
    // Limits may have changed with new firmware; the bdev adopts them.
    let shape = |properties: &NamespaceProperties| {
        (
            properties.uuid,
            properties.block_shift,
            properties.protected,
        )
    };
    shape(a) == shape(b)
}

fn uuid_of(properties: &Properties, nsid: u32, names: &Names) -> Uuid {
    if let Some(uuid) = names.uuid.filter(|uuid| !uuid.is_nil()) {
        return uuid;
    }
    if names.nguid != [0; 16] {
        return Uuid::from_bytes(names.nguid);
    }
    let name = if names.eui64 != [0; 8] {
        format!("eui.{}", u64::from_be_bytes(names.eui64))
    } else {
        format!(
            "{}:{}:{nsid}",
            properties.info.drive.model, properties.info.drive.serial
        )
    };
    Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes())
}

fn describe(
    properties: &Properties,
    nsid: u32,
    said: &IdentifyNamespace,
    names: Names,
) -> Result<Found, String> {
    if names.csi != identify::csi::NVM {
        return Err(format!("its command set is {}, not NVM", names.csi));
    }
    let format = said.lbaf[said.format_index()];
    let block = said.block_bytes();
    let Some(block) = block.filter(|bytes| BLOCK_SIZES.contains(bytes)) else {
        return Err(format!(
            "its blocks are of 2^{} bytes, not of {} to {}",
            format.lbads,
            BLOCK_SIZES.start(),
            BLOCK_SIZES.end()
        ));
    };
    let metadata = format.ms.get();
    // If protection information fills the metadata, the controller inserts and strips it.
    let protected = said.dps & DPS_TYPE != 0 && metadata == PROTECTION_BYTES;
    if metadata > 0 && !protected {
        return Err(format!(
            "its format has {metadata} bytes of metadata per block, which are not protection information alone; \
             format it without (nvme format --lbaf)"
        ));
    }
    if said.nsze.get().checked_mul(block.into()).is_none() {
        return Err(format!(
            "its size of {} blocks is not possible",
            said.nsze.get()
        ));
    }
    let shift = block.trailing_zeros();
    let has = |oncs| properties.oncs.contains(oncs);
    let nsfeat = Nsfeat::from_bits_retain(said.nsfeat);
    let max_blocks = (u64::from(properties.max_transfer) >> shift).clamp(1, NLB_MAX) as u32;
    let copy = copy_limits(said, max_blocks, properties.list_bytes).filter(|_| has(Oncs::COPY));
    let mut ops = [true; Op::COUNT];
    ops[Op::Unmap.index()] = has(Oncs::DATASET_MANAGEMENT);
    ops[Op::WriteZeroes.index()] = has(Oncs::WRITE_ZEROES);
    ops[Op::Compare.index()] = has(Oncs::COMPARE);
    ops[Op::CompareAndWrite.index()] =
        has(Oncs::COMPARE) && properties.info.fuses & FUSES_COMPARE_AND_WRITE != 0;
    ops[Op::Copy.index()] = copy.is_some();
    ops[Op::Verify.index()] = has(Oncs::VERIFY);
    if protected {
        // These operations would need the tags of the stored blocks.
        for op in [Op::Compare, Op::CompareAndWrite, Op::Copy] {
            ops[op.index()] = false;
        }
    }
    let preferred = |value: u16| u32::from(value) + 1;
    let performance = nsfeat.contains(Nsfeat::OPTIMAL_PERFORMANCE);
    let granularity = |value: u16| if performance { preferred(value) } else { 0 };
    let physical = if performance {
        preferred(said.npwg.get())
            .next_power_of_two()
            .min(65536 >> shift.min(16))
            << shift
    } else {
        block
    };
    let limits = Limits {
        max_blocks,
        max_unmap_blocks: range_limit(properties, shift),
        max_verify_blocks: verify_limit(properties, shift),
        atomic_blocks: atomic_blocks(properties, said, nsfeat),
        compare_and_write_blocks: said.compare_and_write_blocks(properties.acwu),
        optimal_boundary_blocks: boundary(said, max_blocks),
        unmap_granularity_blocks: granularity(said.npdg.get()),
        unmap_alignment_blocks: granularity(said.npda.get()),
        volatile_cache: properties.info.volatile_cache,
        // Deallocation is advisory: a controller may deallocate only some of the blocks. DLFEAT
        // describes deallocated blocks only, not all blocks of the command.
        unmap_zeroes: false,
        zeroes_deallocate: has(Oncs::WRITE_ZEROES)
            && said.dlfeat & 0b111 == dlfeat::READ_ZEROES
            && said.dlfeat & dlfeat::WRITE_ZEROES_DEALLOCATES != 0,
        ..Limits::unlimited(u32::from(properties.entries) - 1)
    };
    Ok(Found {
        properties: NamespaceProperties {
            nsid,
            uuid: uuid_of(properties, nsid, &names),
            block_shift: shift,
            physical_block_size: physical.max(block),
            limits,
            ops,
            copy_range_blocks: copy.unwrap_or(0),
            nguid: names.nguid,
            eui64: names.eui64,
            metadata_bytes: metadata,
            protected,
        },
        blocks: said.nsze.get(),
        read_only: said.nsattr & NSATTR_WRITE_PROTECTED != 0,
    })
}

/// Blocks per source range of a Copy. `None` if a copy of `max_blocks` needs more ranges than fit.
fn copy_limits(said: &IdentifyNamespace, max_blocks: u32, list_bytes: usize) -> Option<u32> {
    let range = u32::from(said.mssrl.get());
    let room = (list_bytes / nacre_nvmf_wire::commands::io::CopyRange0::SIZE) as u32;
    let ranges = (u32::from(said.msrc) + 1).min(room);
    let fits =
        range > 0 && said.mcl.get() >= max_blocks && range.saturating_mul(ranges) >= max_blocks;
    fits.then_some(range)
}

/// Largest unmap and write zeroes, in blocks: the layer above has one limit for both.
fn range_limit(properties: &Properties, shift: u32) -> u64 {
    let mut most = NLB_MAX;
    if properties.wzsl > 0 && properties.oncs.contains(Oncs::WRITE_ZEROES) {
        let bytes = properties
            .page_bytes_min
            .checked_shl(properties.wzsl.into());
        most = most.min(bytes.unwrap_or(u64::MAX) >> shift);
    }
    if properties.oncs.contains(Oncs::WRITE_ZEROES)
        && properties.wzsl == 0
        && properties.version < Version::V2_0
    {
        // Older controllers cannot report WZSL. MDTS does not bind Write Zeroes, but some
        // controllers apply it.
        most = most.min((u64::from(properties.max_transfer) >> shift).max(1));
    }
    for limit in [u64::from(properties.dmrsl), properties.dmsl] {
        if limit > 0 && properties.oncs.contains(Oncs::DATASET_MANAGEMENT) {
            most = most.min(limit);
        }
    }
    most.max(1)
}

/// The limit of a verify. If none is reported, the limit of a read: some controllers execute a
/// verify as a read.
fn verify_limit(properties: &Properties, shift: u32) -> u32 {
    let bytes = match properties.vsl {
        0 => Some(u64::from(properties.max_transfer)),
        vsl => properties.page_bytes_min.checked_shl(vsl.into()),
    };
    (bytes.unwrap_or(u64::MAX) >> shift).clamp(1, NLB_MAX) as u32
}

/// The number of blocks written atomically across a power failure, at any start block.
fn atomic_blocks(properties: &Properties, said: &IdentifyNamespace, nsfeat: Nsfeat) -> u32 {
    let own = nsfeat.contains(Nsfeat::ATOMICITY) && said.nawupf.get() > 0;
    let unit = u32::from(if own {
        said.nawupf.get()
    } else {
        properties.awupf
    }) + 1;
    // A write across an atomic boundary is not atomic, and writes may start at any block.
    match said.nabspf.get() {
        0 => unit,
        _ => 1,
    }
}

/// The boundary that I/Os should not cross. Ignores a boundary without benefit.
fn boundary(said: &IdentifyNamespace, max_blocks: u32) -> u32 {
    let boundary = u32::from(said.noiob.get());
    match boundary {
        // Splitting at this boundary would have no benefit.
        0 => 0,
        boundary if boundary == 1 && max_blocks > 1 => 0,
        boundary => boundary,
    }
}
