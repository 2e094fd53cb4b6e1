//! The data structures of Identify (Base 5.17), which describe a controller and its namespaces.

pub mod controller;
pub mod descriptors;
pub mod namespace;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use controller::{IdentifyController, NvmController, PowerState};
pub use descriptors::{NsIdDescriptor, NsIdError};
pub use namespace::{IdentifyNamespace, IndependentNamespace, LbaFormat, NvmNamespace};

/// Bytes of every Identify data structure.
pub const SIZE: usize = 4096;

/// Values of CNS: the data structure that Identify returns.
pub mod cns {
    pub const NAMESPACE: u8 = 0x00;
    pub const CONTROLLER: u8 = 0x01;
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    pub const NVM_SET_LIST: u8 = 0x04;
    /// Data of the command set that CSI selects; so are the next two.
    pub const IO_NAMESPACE: u8 = 0x05;
    pub const IO_CONTROLLER: u8 = 0x06;
    pub const IO_ACTIVE_NAMESPACES: u8 = 0x07;
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
    pub const ALLOCATED_NAMESPACES: u8 = 0x10;
    pub const ALLOCATED_NAMESPACE: u8 = 0x11;
    pub const ATTACHED_CONTROLLERS: u8 = 0x12;
    pub const CONTROLLERS: u8 = 0x13;
    pub const UUID_LIST: u8 = 0x17;
    pub const IO_COMMAND_SETS: u8 = 0x1c;
}

/// Command set identifiers.
pub mod csi {
    pub const NVM: u8 = 0x00;
    pub const KEY_VALUE: u8 = 0x01;
    pub const ZONED_NAMESPACE: u8 = 0x02;
}

/// Namespace identifiers with a meaning of their own.
pub mod nsid {
    /// All namespaces.
    pub const BROADCAST: u32 = 0xffff_ffff;
    /// Largest identifier of one namespace.
    pub const MAX: u32 = 0xffff_fffe;
}

/// A list of namespaces (CNS 02h, 07h, 10h): identifiers in increasing order, the rest zero.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct NamespaceList {
    pub nsids: [U32; Self::MAX_ENTRIES],
}

const _: () = assert!(size_of::<NamespaceList>() == SIZE);

impl NamespaceList {
    pub const MAX_ENTRIES: usize = 1024;

    /// The first 1024 of `nsids` that are above `after` (the NSID of the command). `nsids` must be
    /// in increasing order.
    pub fn above(after: u32, nsids: impl IntoIterator<Item = u32>) -> Self {
        let mut list = Self {
            nsids: [U32::ZERO; Self::MAX_ENTRIES],
        };
        let nsids = nsids.into_iter().filter(|&nsid| nsid > after);
        for (entry, nsid) in list.nsids.iter_mut().zip(nsids) {
            *entry = U32::new(nsid);
        }
        list
    }

    /// The identifiers up to the first zero.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.nsids
            .iter()
            .map(|nsid| nsid.get())
            .take_while(|&nsid| nsid != 0)
    }
}

/// A list of controllers (CNS 12h, 13h): their count, then their identifiers in increasing order.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ControllerList {
    pub count: U16,
    pub cntlids: [U16; Self::MAX_ENTRIES],
}

const _: () = assert!(size_of::<ControllerList>() == SIZE);

impl ControllerList {
    pub const MAX_ENTRIES: usize = 2047;

    /// The first 2047 of `cntlids` that are at least `from` (the CNTID of the command).
    pub fn from_id(from: u16, cntlids: impl IntoIterator<Item = u16>) -> Self {
        let mut list = Self {
            count: U16::ZERO,
            cntlids: [U16::ZERO; Self::MAX_ENTRIES],
        };
        let cntlids = cntlids.into_iter().filter(|&cntlid| cntlid >= from);
        let mut count = 0;
        for (entry, cntlid) in list.cntlids.iter_mut().zip(cntlids) {
            *entry = U16::new(cntlid);
            count += 1;
        }
        list.count = U16::new(count);
        list
    }

    /// As many identifiers as the count states, at most those that fit the list.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.cntlids
            .iter()
            .take(self.count.get().into())
            .map(|cntlid| cntlid.get())
    }
}

/// I/O command set combinations (CNS 1Ch): each a bit mask of command sets, numbered by
/// [`csi`]; the feature I/O Command Set Profile chooses one.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct IoCommandSets {
    pub combinations: [U64; 512],
}

const _: () = assert!(size_of::<IoCommandSets>() == SIZE);

impl IoCommandSets {
    /// One combination, with the NVM command set alone.
    pub fn nvm_only() -> Self {
        let mut sets = Self {
            combinations: [U64::ZERO; 512],
        };
        sets.combinations[0] = U64::new(1 << csi::NVM);
        sets
    }
}

/// Writes an ASCII field: padded with spaces, cut to fit, with a space for each unprintable byte.
pub fn write_ascii(text: &str, field: &mut [u8]) {
    field.fill(b' ');
    for (out, byte) in field.iter_mut().zip(text.bytes()) {
        *out = if matches!(byte, b' '..=b'~') {
            byte
        } else {
            b' '
        };
    }
}

/// Reads an ASCII field without its padding. Bytes that are not ASCII become U+FFFD.
pub fn read_ascii(field: &[u8]) -> String {
    let end = field
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(field.len());
    String::from_utf8_lossy(field[..end].trim_ascii()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_lists() {
        let list = NamespaceList::above(2, [1, 2, 3, 9]);
        assert_eq!(list.iter().collect::<Vec<_>>(), [3, 9]);
        assert_eq!(list.as_bytes()[..12], [3, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        let full = NamespaceList::above(0, 1..5000);
        assert_eq!(
            full.iter().collect::<Vec<_>>(),
            (1..=1024).collect::<Vec<_>>()
        );
        assert_eq!(NamespaceList::above(u32::MAX, [1]).iter().count(), 0);
    }

    #[test]
    fn controller_lists() {
        let list = ControllerList::from_id(2, [1, 2, 7]);
        assert_eq!(list.as_bytes()[..8], [2, 0, 2, 0, 7, 0, 0, 0]);
        assert_eq!(list.iter().collect::<Vec<_>>(), [2, 7]);
        assert_eq!(ControllerList::from_id(0, 0..5000).iter().count(), 2047);
        let lying = ControllerList {
            count: U16::new(0xffff),
            ..list
        };
        assert_eq!(lying.iter().count(), 2047);
    }

    #[test]
    fn command_sets() {
        let sets = IoCommandSets::nvm_only();
        assert_eq!(
            sets.as_bytes()[..16],
            [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );
    }

    #[test]
    fn ascii() {
        let mut field = [0; 8];
        write_ascii("abc", &mut field);
        assert_eq!(&field, b"abc     ");
        write_ascii("0123456789", &mut field);
        assert_eq!(&field, b"01234567");
        write_ascii("a\n\u{fc}", &mut field);
        assert_eq!(&field, b"a       ");
        assert_eq!(read_ascii(b"abc  \0xx"), "abc");
        assert_eq!(read_ascii(b"\xff"), "\u{fffd}");
    }
}
