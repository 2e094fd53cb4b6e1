//! The attributes of a remote namespace, parsed from its Identify data, and the comparison of two
//! namespaces by identity.

use nacre_nvmf_wire::identify::descriptors;
use nacre_nvmf_wire::identify::namespace::{Nsfeat, dlfeat};
use nacre_nvmf_wire::identify::{IdentifyNamespace, NsIdDescriptor};
use uuid::Uuid;
use zerocopy::FromBytes;

use super::error::HostError;

/// A namespace as its Identify data describe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceInfo {
    pub nsid: u32,
    pub blocks: u64,
    pub block_size: u32,
    pub uuid: Option<Uuid>,
    /// Zeroes: the namespace has none. The same holds for `eui64`.
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    pub ana_group: u32,
    /// Write Zeroes deallocates on request, and deallocated blocks read as zeroes.
    pub zeroes_deallocate: bool,
    pub read_only: bool,
    /// Optimal I/O boundary in blocks; 0: none.
    pub optimal_boundary_blocks: u32,
    /// Number of blocks that are written atomically even in case of a power failure.
    pub atomic_blocks: u32,
    /// Most blocks of a fused Compare and Write, if the controller supports it.
    pub compare_and_write_blocks: u32,
    /// Reservation capabilities ([`nacre_nvmf_wire::identify::namespace::Rescap`]).
    pub rescap: u8,
}

impl NamespaceInfo {
    /// Parses the data of Identify Namespace (CNS 00h). `acwu`: the controller's ACWU, for
    /// namespaces without NACWU. Fails if the data is short, the block size is invalid, or the
    /// namespace has metadata.
    pub fn parse(nsid: u32, data: &[u8], acwu: u16) -> Result<Self, HostError> {
        let short = || HostError::Misbehaved {
            what: "short Identify Namespace data".into(),
        };
        let (identify, _) = IdentifyNamespace::ref_from_prefix(data).map_err(|_| short())?;
        let format = identify.lbaf[identify.format_index()];
        let block_size = identify
            .block_bytes()
            .ok_or_else(|| HostError::Misbehaved {
                what: format!("namespace {nsid} has an impossible block size"),
            })?;
        if format.ms.get() != 0 {
            let what = format!("namespace {nsid} has metadata, which is not supported");
            return Err(HostError::Misbehaved { what });
        }
        Ok(Self {
            nsid,
            blocks: identify.nsze.get(),
            block_size,
            uuid: None,
            nguid: identify.nguid,
            eui64: identify.eui64,
            ana_group: identify.anagrpid.get(),
            zeroes_deallocate: identify.dlfeat & (7 | dlfeat::WRITE_ZEROES_DEALLOCATES)
                == dlfeat::READ_ZEROES | dlfeat::WRITE_ZEROES_DEALLOCATES,
            read_only: identify.nsattr & 1 == 1,
            optimal_boundary_blocks: u32::from(identify.noiob.get()),
            atomic_blocks: atomic_blocks(identify),
            compare_and_write_blocks: identify.compare_and_write_blocks(acwu),
            rescap: identify.rescap,
        })
    }

    /// Adds the contents of the identification descriptor list (CNS 03h).
    pub fn add_descriptors(&mut self, data: &[u8]) -> Result<(), HostError> {
        for descriptor in descriptors::iter(data) {
            match descriptor.map_err(|e| HostError::Misbehaved {
                what: e.to_string(),
            })? {
                NsIdDescriptor::Uuid(uuid) => self.uuid = Some(uuid),
                NsIdDescriptor::Nguid(nguid) => self.nguid = nguid,
                NsIdDescriptor::Eui64(eui64) => self.eui64 = eui64,
                NsIdDescriptor::Csi(_) | NsIdDescriptor::Unknown { .. } => {}
            }
        }
        Ok(())
    }

    /// True if `other` has the same identifiers and block size, on another path or after a
    /// reconnect.
    pub fn same_identity(&self, other: &Self) -> bool {
        (self.uuid, self.nguid, self.eui64) == (other.uuid, other.nguid, other.eui64)
            && self.block_size == other.block_size
    }

    /// True if the namespace has a UUID, an NGUID or an EUI-64.
    pub fn has_identity(&self) -> bool {
        self.uuid.is_some() || self.nguid != [0; 16] || self.eui64 != [0; 8]
    }

    /// The reason why `found` is another namespace, or has fewer blocks than this one. `None`: it
    /// is the same, possibly larger.
    pub fn difference(&self, found: &Self) -> Option<String> {
        if self.block_size != found.block_size {
            let (was, is) = (self.block_size, found.block_size);
            return Some(format!(
                "its blocks were of {was} bytes, and are of {is} now"
            ));
        }
        if !self.same_identity(found) {
            let (was, is) = (self.identity(), found.identity());
            return Some(format!("it was {was}, and is {is} now"));
        }
        let (was, is) = (self.blocks, found.blocks);
        (is < was).then(|| format!("it had {was} blocks, and has {is} now"))
    }

    /// The identifier as text, for example `UUID …`.
    pub fn identity(&self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        match (self.uuid, self.nguid, self.eui64) {
            (Some(uuid), ..) => format!("UUID {uuid}"),
            (None, nguid, _) if nguid != [0; 16] => format!("NGUID {}", hex(&nguid)),
            (None, _, eui64) if eui64 != [0; 8] => format!("EUI-64 {}", hex(&eui64)),
            _ => "without an identity".to_owned(),
        }
    }
}

/// Blocks of a write that is atomic in case of a power failure at any start LBA (NAWUPF or AWUPF).
/// 1 if the namespace has atomic boundaries, because a write across one is not atomic.
fn atomic_blocks(identify: &IdentifyNamespace) -> u32 {
    let own = Nsfeat::from_bits_retain(identify.nsfeat).contains(Nsfeat::ATOMICITY);
    if own && identify.nabspf.get() == 0 {
        u32::from(identify.nawupf.get()) + 1
    } else {
        1
    }
}

#[cfg(test)]
mod tests {
    use nacre_nvmf_wire::identify::LbaFormat;
    use zerocopy::IntoBytes;

    use super::*;

    /// The atomic write unit counts if the target says that it does, and if it has no boundaries.
    #[test]
    fn atomic_units() {
        let mut identify = IdentifyNamespace::zeroed();
        identify.lbaf[0] = LbaFormat::new(512, 0);
        identify.nawupf = 7.into();
        let atomic = |identify: &IdentifyNamespace| {
            let info = NamespaceInfo::parse(1, identify.as_bytes(), 0).expect("one that can be");
            info.atomic_blocks
        };
        assert_eq!(atomic(&identify), 1, "reserved");
        identify.nsfeat = Nsfeat::ATOMICITY.bits();
        assert_eq!(atomic(&identify), 8);
        identify.nacwu = 3.into();
        let info = NamespaceInfo::parse(1, identify.as_bytes(), 1).expect("one that can be");
        assert_eq!(info.compare_and_write_blocks, 4);
        identify.nabspf = 63.into();
        assert_eq!(atomic(&identify), 1);
    }
}
