//! The namespace identification descriptor list (CNS 03h): the identifiers of a namespace.

use uuid::Uuid;

/// One identifier of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NsIdDescriptor<'a> {
    Eui64([u8; 8]),
    Nguid([u8; 16]),
    Uuid(Uuid),
    /// The command set of the namespace.
    Csi(u8),
    /// A type that this code does not know.
    Unknown {
        nidt: u8,
        nid: &'a [u8],
    },
}

mod nidt {
    pub(super) const EUI64: u8 = 1;
    pub(super) const NGUID: u8 = 2;
    pub(super) const UUID: u8 = 3;
    pub(super) const CSI: u8 = 4;
}

/// NIDT, NIDL, and two reserved bytes.
const HEADER_BYTES: usize = 4;

/// Why a list was refused or could not be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NsIdError {
    #[error("the descriptor of type {nidt} at byte {offset} has {actual} bytes, not {expected}")]
    Length {
        nidt: u8,
        offset: usize,
        expected: usize,
        actual: usize,
    },
    #[error("the descriptor at byte {offset} reaches beyond the end of the list, byte {end}")]
    Truncated { offset: usize, end: usize },
    #[error("a descriptor of {needed} bytes does not fit at byte {offset} of {room}")]
    NoRoom {
        offset: usize,
        needed: usize,
        room: usize,
    },
}

/// Writes descriptors and returns the number of used bytes. The rest of `out` is zeroed, which ends
/// the list.
pub fn write(descriptors: &[NsIdDescriptor], out: &mut [u8]) -> Result<usize, NsIdError> {
    let room = out.len();
    out.fill(0);
    let mut offset = 0;
    for descriptor in descriptors {
        let (nidt, csi);
        let nid = match descriptor {
            NsIdDescriptor::Eui64(nid) => {
                nidt = nidt::EUI64;
                &nid[..]
            }
            NsIdDescriptor::Nguid(nid) => {
                nidt = nidt::NGUID;
                &nid[..]
            }
            NsIdDescriptor::Uuid(uuid) => {
                nidt = nidt::UUID;
                &uuid.as_bytes()[..]
            }
            NsIdDescriptor::Csi(value) => {
                nidt = nidt::CSI;
                csi = [*value];
                &csi[..]
            }
            NsIdDescriptor::Unknown { nidt: value, nid } => {
                nidt = *value;
                nid
            }
        };
        let needed = HEADER_BYTES + nid.len();
        let (Ok(nidl), Some(place)) = (
            u8::try_from(nid.len()),
            out.get_mut(offset..offset + needed),
        ) else {
            return Err(NsIdError::NoRoom {
                offset,
                needed,
                room,
            });
        };
        place[0] = nidt;
        place[1] = nidl;
        place[HEADER_BYTES..].copy_from_slice(nid);
        offset += needed;
    }
    Ok(offset)
}

/// The descriptors of a list, up to the one of length zero that ends it, or to its first error.
pub fn iter(list: &[u8]) -> impl Iterator<Item = Result<NsIdDescriptor<'_>, NsIdError>> + '_ {
    let mut offset = 0;
    core::iter::from_fn(move || {
        let [nidt, nidl, ..] = *list.get(offset..)? else {
            return None;
        };
        if nidl == 0 {
            return None;
        }
        let at = offset;
        let end = at + HEADER_BYTES + usize::from(nidl);
        let Some(nid) = list.get(at + HEADER_BYTES..end) else {
            offset = list.len();
            return Some(Err(NsIdError::Truncated {
                offset: at,
                end: list.len(),
            }));
        };
        let descriptor = parse(nidt, nid, at);
        offset = if descriptor.is_ok() { end } else { list.len() };
        Some(descriptor)
    })
}

fn parse(nidt: u8, nid: &[u8], offset: usize) -> Result<NsIdDescriptor<'_>, NsIdError> {
    let wrong = |expected| NsIdError::Length {
        nidt,
        offset,
        expected,
        actual: nid.len(),
    };
    Ok(match nidt {
        nidt::EUI64 => NsIdDescriptor::Eui64(nid.try_into().map_err(|_| wrong(8))?),
        nidt::NGUID => NsIdDescriptor::Nguid(nid.try_into().map_err(|_| wrong(16))?),
        nidt::UUID => NsIdDescriptor::Uuid(Uuid::from_slice(nid).map_err(|_| wrong(16))?),
        nidt::CSI => match nid {
            [csi] => NsIdDescriptor::Csi(*csi),
            _ => return Err(wrong(1)),
        },
        _ => NsIdDescriptor::Unknown { nidt, nid },
    })
}

#[cfg(test)]
mod tests {
    use hex_literal::hex;
    use proptest::prelude::*;

    use super::*;

    /// A list with each kind, byte for byte.
    #[test]
    fn a_list() {
        let uuid = uuid::uuid!("f81d4fae-7dec-11d0-a765-00a0c91e6bf6");
        let names = [
            NsIdDescriptor::Eui64([1, 2, 3, 4, 5, 6, 7, 8]),
            NsIdDescriptor::Uuid(uuid),
            NsIdDescriptor::Csi(0),
        ];
        let mut list = [0xaa; 64];
        assert_eq!(write(&names, &mut list), Ok(37));
        assert_eq!(
            list[..41],
            hex!(
                "01080000 0102030405060708"
                "03100000 f81d4fae7dec11d0a76500a0c91e6bf6"
                "04010000 00"
                "00000000"
            )
        );
        assert_eq!(iter(&list).collect::<Result<Vec<_>, _>>().unwrap(), names);
        assert_eq!(
            write(&names, &mut list[..36]),
            Err(NsIdError::NoRoom {
                offset: 32,
                needed: 5,
                room: 36
            })
        );
    }

    #[test]
    fn bad_lists() {
        let error = |list| iter(list).last().unwrap().unwrap_err();
        assert_eq!(
            error(&hex!("02080000 0102030405060708 00")),
            NsIdError::Length {
                nidt: 2,
                offset: 0,
                expected: 16,
                actual: 8
            }
        );
        assert_eq!(
            error(&hex!("04010000 00 04020000 0000")),
            NsIdError::Length {
                nidt: 4,
                offset: 5,
                expected: 1,
                actual: 2
            }
        );
        assert_eq!(
            error(&hex!("01080000 0102")),
            NsIdError::Truncated { offset: 0, end: 6 }
        );
        assert_eq!(
            error(&hex!("0108")),
            NsIdError::Truncated { offset: 0, end: 2 }
        );
        assert_eq!(iter(&hex!("00")).count(), 0);
        let unknown = NsIdDescriptor::Unknown {
            nidt: 9,
            nid: &[7, 7],
        };
        assert_eq!(iter(&hex!("09020000 0707")).next(), Some(Ok(unknown)));
    }

    proptest! {
        /// Every list ends, and a parsed descriptor can be written and parsed again.
        #[test]
        fn any_list(list in proptest::collection::vec(any::<u8>(), 0..200)) {
            let names: Vec<_> = iter(&list).take_while(Result::is_ok).map(Result::unwrap).collect();
            prop_assert!(iter(&list).count() <= list.len());
            let mut again = [0; 256];
            let length = write(&names, &mut again).unwrap();
            prop_assert!(length <= list.len());
            prop_assert_eq!(iter(&again).collect::<Result<Vec<_>, _>>().unwrap(), names);
        }
    }
}
