//! Parses and checks the SGL descriptors of a host's command, before the RDMA device gets their
//! addresses and keys for RDMA READ and WRITE.

use nacre_hugepages::Buf;
use nacre_nvmf_wire::{Sgl, SglDescriptor, StatusCode};

/// A range of the host's memory, from a Keyed SGL Data Block descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remote {
    pub address: u64,
    pub length: u32,
    /// The remote key (R_Key).
    pub key: u32,
    /// The host asks for an invalidation of `key` with the response (SEND with Invalidate).
    pub invalidate: bool,
}

/// The descriptors of one command, in the order of its data.
pub(crate) enum Remotes<'a> {
    /// SGL1 is the descriptor.
    One(Remote),
    /// The bytes of the descriptors in the capsule; all are valid.
    List(&'a [u8]),
}

impl Remote {
    fn parse(descriptor: &SglDescriptor) -> Result<Self, StatusCode> {
        match descriptor
            .parse()
            .map_err(|error| error.status().with_dnr())?
        {
            Sgl::Keyed {
                address,
                length,
                key,
                invalidate,
            } => {
                // A range that wraps around is invalid.
                if address.checked_add(length.into()).is_none() {
                    return Err(StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr());
                }
                Ok(Self {
                    address,
                    length,
                    key,
                    invalidate,
                })
            }
            _ => Err(StatusCode::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr()),
        }
    }
}

impl<'a> Remotes<'a> {
    /// The memory ranges of a transfer of `bytes`. `pointer` is SGL1 of the command, and `list` the
    /// descriptors in its capsule if SGL1 refers to them. The ranges must have `bytes` in sum:
    /// exactly if `exact`, else at least. Errors have DNR set.
    pub(crate) fn new(
        pointer: &SglDescriptor,
        list: Option<&'a [u8]>,
        bytes: usize,
        exact: bool,
    ) -> Result<Self, StatusCode> {
        let (remotes, total) = match (pointer.parse(), list) {
            (Ok(Sgl::InCapsuleDescriptors { .. }), Some(list)) => {
                let mut total = 0u64;
                for descriptor in descriptors(list) {
                    total += u64::from(Remote::parse(&descriptor)?.length);
                }
                (Remotes::List(list), total)
            }
            _ => {
                let one = Remote::parse(pointer)?;
                (Remotes::One(one), one.length.into())
            }
        };
        match total.cmp(&(bytes as u64)) {
            std::cmp::Ordering::Less => Err(StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr()),
            std::cmp::Ordering::Greater if exact => {
                Err(StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr())
            }
            _ => Ok(remotes),
        }
    }

    /// The ranges, in the order of the data.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Remote> {
        let (one, list) = match self {
            Remotes::One(one) => (Some(*one), &[][..]),
            Remotes::List(list) => (None, *list),
        };
        let parsed = descriptors(list).filter_map(|descriptor| Remote::parse(&descriptor).ok());
        one.into_iter().chain(parsed)
    }
}

fn descriptors(list: &[u8]) -> impl Iterator<Item = SglDescriptor> {
    let (chunks, _) = list.as_chunks::<{ SglDescriptor::SIZE }>();
    chunks.iter().map(|bytes| SglDescriptor(*bytes))
}

/// The part of a capsule's data that an in-capsule descriptor describes. `data` is the capsule
/// after the command, with `there` received bytes. `None` if the part is empty, or not within them.
pub(crate) fn in_capsule(data: Option<Buf>, there: u32, offset: u64, length: u32) -> Option<Buf> {
    let end = offset.checked_add(length.into())?;
    if length == 0 || end > u64::from(there) {
        return None;
    }
    let mut data = data?;
    if offset > 0 {
        data = data.slice(offset as usize, length as usize);
    }
    data.truncate(length as usize);
    Some(data)
}

/// The descriptors in a capsule, with arguments as in [`in_capsule`]. Fails if there are more than
/// `limit`, or if they are not within the received data.
pub(crate) fn list(
    data: Option<Buf>,
    there: u32,
    offset: u64,
    length: u32,
    limit: u8,
) -> Result<Buf, StatusCode> {
    if length / SglDescriptor::SIZE as u32 > u32::from(limit) {
        return Err(StatusCode::INVALID_NUMBER_OF_SGL_DESCRIPTORS.with_dnr());
    }
    in_capsule(data, there, offset, length).ok_or(StatusCode::SGL_OFFSET_INVALID.with_dnr())
}

#[cfg(test)]
mod tests {
    use nacre_hugepages::{ClassSpec, Pool};

    use super::*;

    fn keyed(address: u64, length: u32) -> SglDescriptor {
        SglDescriptor::from(Sgl::Keyed {
            address,
            length,
            key: 7,
            invalidate: false,
        })
    }

    /// One descriptor, and each possible error in it.
    #[test]
    fn single() {
        let outcome = |pointer: &SglDescriptor, bytes, exact| {
            Remotes::new(pointer, None, bytes, exact).map(|remotes| remotes.iter().count())
        };
        let length = Err(StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr());
        assert_eq!(outcome(&keyed(4096, 512), 512, true), Ok(1));
        assert_eq!(outcome(&keyed(4096, 512), 513, true), length);
        assert_eq!(outcome(&keyed(4096, 512), 511, true), length);
        assert_eq!(outcome(&keyed(4096, 512), 511, false), Ok(1));
        assert_eq!(outcome(&keyed(u64::MAX - 511, 512), 512, true), length);
        assert_eq!(outcome(&keyed(u64::MAX - 512, 512), 512, true), Ok(1));
        for other in [
            Sgl::Transport { length: 512 },
            Sgl::DataBlock {
                address: 0,
                length: 512,
            },
            Sgl::InCapsuleDescriptors {
                offset: 0,
                length: 16,
            },
        ] {
            let pointer = SglDescriptor::from(other);
            let refused = Err(StatusCode::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr());
            assert_eq!(outcome(&pointer, 512, true), refused, "{other:?}");
        }
    }

    /// Several descriptors: each is checked, and so is their sum.
    #[test]
    fn several() {
        let pointer = SglDescriptor::from(Sgl::InCapsuleDescriptors {
            offset: 0,
            length: 32,
        });
        let list: Vec<u8> = [keyed(4096, 512), keyed(8192, 1024)]
            .iter()
            .flat_map(|d| d.0)
            .collect();
        let remotes = Remotes::new(&pointer, Some(&list), 1536, true).unwrap();
        let lengths: Vec<u32> = remotes.iter().map(|remote| remote.length).collect();
        assert_eq!(lengths, [512, 1024]);
        assert!(Remotes::new(&pointer, Some(&list), 1537, true).is_err());
        let transport = SglDescriptor::from(Sgl::Transport { length: 512 });
        let bad = [keyed(4096, 1024).0, transport.0].concat();
        let refused = Remotes::new(&pointer, Some(&bad), 1536, true).err();
        assert_eq!(
            refused,
            Some(StatusCode::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr())
        );
    }

    /// Ranges of a capsule: inside the received data, or refused.
    #[test]
    fn capsules() {
        let pool = Pool::heap(&[ClassSpec {
            size: 4096,
            count: 1,
        }]);
        let data = || Some(pool.acquire(4096).unwrap());
        let len = |buf: Option<Buf>| buf.map(|buf| buf.len());
        assert_eq!(len(in_capsule(data(), 1024, 0, 1024)), Some(1024));
        assert_eq!(len(in_capsule(data(), 1024, 512, 512)), Some(512));
        for (there, offset, length) in [
            (1024, 0, 1025),
            (1024, 1024, 1),
            (1024, u64::MAX, 1),
            (1024, 0, 0),
            (0, 0, 16),
        ] {
            assert_eq!(len(in_capsule(data(), there, offset, length)), None);
        }
        assert_eq!(list(data(), 1024, 0, 64, 4).unwrap().len(), 64);
        let refused = |offset, length| list(data(), 1024, offset, length, 4).err();
        let number = StatusCode::INVALID_NUMBER_OF_SGL_DESCRIPTORS.with_dnr();
        assert_eq!(refused(0, 80), Some(number));
        assert_eq!(
            refused(1000, 64),
            Some(StatusCode::SGL_OFFSET_INVALID.with_dnr())
        );
        assert_eq!(
            refused(u64::MAX, 16),
            Some(StatusCode::SGL_OFFSET_INVALID.with_dnr())
        );
        assert_eq!(pool.stats()[0].free, 1);
    }
}
