//! The RPC errors for errors of pools.

use nacre_bdev_pool::{ImportError, PoolError, Refusal as Refused};

use crate::refusal::Refusal;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;

impl Refusal for PoolError {
    fn refusal(self) -> RpcError {
        let cause = self.to_string();
        let of = |errno| RpcError::errno(errno, cause.clone());
        match self {
            Self::Import(ImportError::NoSuperblock) => of(Errno::ENOENT)
                .field("disk")
                .remedy("pool_create makes a pool on it"),
            Self::Import(ImportError::Foreign { .. }) => of(Errno::EBUSY).field("disk"),
            Self::Import(ImportError::DiskMissing { .. }) => of(Errno::ENODEV)
                .field("disk")
                .remedy("attach the disk, then import the pool again"),
            Self::DiskAway { .. } => of(Errno::ENODEV)
                .field("disk")
                .remedy("attach the disk: the pool is imported when it appears"),
            Self::Import(ImportError::DiskTwice { .. }) => of(Errno::EEXIST)
                .field("disk")
                .remedy("remove the device of the copy, then import the pool again"),
            Self::Import(ImportError::DiskSize { .. }) => of(Errno::EINVAL).field("disk"),
            Self::Import(_) => of(Errno::EIO).field("disk"),
            Self::Refused(refused) => {
                let errno = match refused {
                    Refused::UnknownVersion => Errno::ENODEV,
                    Refused::FirstDisk | Refused::LastDisk | Refused::NotLeaving => Errno::EINVAL,
                    Refused::DiskLeaving | Refused::TooLate => Errno::EBUSY,
                    Refused::NoRoom { .. } => Errno::ENOSPC,
                    Refused::Cancelled => Errno::EINVAL,
                    Refused::OutOfRange
                    | Refused::WrongKind
                    | Refused::NoParent
                    | Refused::OtherSize => Errno::EINVAL,
                    Refused::Exists | Refused::SameParent => Errno::EEXIST,
                    Refused::Changing => Errno::EBUSY,
                    Refused::Exported => Errno::ENODEV,
                    Refused::NoSpace { .. } | Refused::TooMany => Errno::ENOSPC,
                    Refused::DiskUnfit => Errno::EINVAL,
                    Refused::Damaged | Refused::Medium | Refused::Held => Errno::EIO,
                };
                of(errno)
            }
            Self::Unknown { .. } => of(Errno::ENODEV),
            Self::Degraded(_) => of(Errno::EIO)
                .remedy("make the external device available; bdev_get_bdevs lists devices"),
            Self::Silent(_) => of(Errno::ETIMEDOUT)
                .remedy("look at the external device and its connection, then try again"),
            Self::NotEmpty { .. } => of(Errno::EPERM)
                .field("disk")
                .remedy("look at its data first; force overwrites it"),
            Self::AlreadyOpen { .. } => of(Errno::EEXIST).field("disk"),
            Self::NameTaken { .. } => of(Errno::EEXIST).field("disk").remedy(
                "import it under another name: new_name, or nacre pool import DISK --name NEW",
            ),
            Self::OtherPool { .. } => of(Errno::ENODEV)
                .field("disk")
                .remedy("name the disk with the pool"),
            Self::Unfit { .. } => of(Errno::EINVAL).field("disk"),
            Self::Io { .. } => of(Errno::EIO).field("disk"),
            Self::NotErased { .. } => of(Errno::EIO).field("pool").remedy(
                "repair or detach these disks; nacre pool create --force overwrites the superblocks",
            ),
            Self::Closed => of(Errno::ENODEV),
            Self::Busy => of(Errno::EAGAIN).remedy("ask again a little later"),
        }
    }
}
