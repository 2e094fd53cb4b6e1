//! Soft-RoCE devices: add and delete them over RDMA netlink (`NETLINK_RDMA`, client `NLDEV`), as
//! `rdma link add NAME type rxe netdev IF` and `rdma link delete NAME` do.
//!
//! ```text
//!   RDMA_NLDEV_CMD_NEWLINK   DEV_NAME, LINK_TYPE "rxe", NDEV_NAME      add
//!   RDMA_NLDEV_CMD_GET       dump; DEV_NAME and DEV_INDEX of each      name -> index
//!   RDMA_NLDEV_CMD_DELLINK   DEV_INDEX                                 delete
//! ```
//!
//! Adding and deleting need CAP_NET_ADMIN. The kernel acknowledges each request with NLMSG_ERROR:
//! 0, or a negative errno, which becomes a [`LinkError`] with the cause and the remedy. Messages
//! and attributes are encoded in `nlmsg`; constants are those of `rdma/rdma_netlink.h`.

use std::io;

use rustix::io::Errno;
use rustix::net::netlink;

use crate::absence::NoDevice;
use crate::fabric::Fabric;
use crate::modules::{ModuleState, Modules};
use crate::nlmsg::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, Request, attribute_of, c_string,
    exchange, read_answer,
};
use crate::sysfs::Roots;

/// The longest name of a device and of an interface (IB_DEVICE_NAME_MAX 64, IFNAMSIZ 16), the
/// terminator included.
const DEVICE_NAME_MAX: usize = 64;
const NETDEV_NAME_MAX: usize = 16;

/// The reason why a link was not added or deleted.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error(
        "the kernel module {module} is not loaded{}; remedy: {}",
        if *.state == ModuleState::Missing { ", and this kernel has none that can be seen" } else { "" },
        module_remedy(module, *state)
    )]
    Module {
        module: &'static str,
        state: ModuleState,
    },
    #[error("{kernel}; remedy: {}", .kernel.remedy())]
    Kernel { kernel: NoDevice },
    #[error(
        "not permitted: adding and deleting RDMA links takes CAP_NET_ADMIN; remedy: run it as root"
    )]
    Permission,
    #[error("there is an RDMA device \"{name}\" already{}; remedy: choose another name", on(.netdev))]
    Exists {
        name: String,
        /// The interface that it is on.
        netdev: Option<String>,
    },
    #[error(
        "interface \"{netdev}\" has the soft-RoCE device \"{device}\" already; remedy: use it, or \
         delete it first: `nacre rdma rxe del {device}`"
    )]
    Taken { netdev: String, device: String },
    #[error("there is no RDMA device \"{name}\"; have: {}", list(.have))]
    NoDevice { name: String, have: Vec<String> },
    #[error("RDMA device \"{name}\" is not soft-RoCE but {driver}: it cannot be deleted")]
    NotRxe { name: String, driver: String },
    #[error("there is no network interface \"{netdev}\"; have: {}", list(.have))]
    NoNetdev { netdev: String, have: Vec<String> },
    #[error("\"{name}\" is not a name for {what}: 1 to {max} letters, digits, `_`, `-`, `.`")]
    Name {
        what: &'static str,
        name: String,
        max: usize,
    },
    #[error(
        "interface \"{netdev}\" is a VLAN: soft-RoCE takes real devices only; remedy: add it on the \
         interface below, its GIDs then cover the VLAN"
    )]
    Vlan { netdev: String },
    #[error("the kernel refused to {action} {name}")]
    Refused {
        action: &'static str,
        name: String,
        source: io::Error,
    },
    #[error("RDMA netlink does not answer")]
    Socket(#[source] io::Error),
}

fn module_remedy(module: &str, state: ModuleState) -> String {
    match state {
        ModuleState::Missing => format!(
            "install the kernel package that has {module} (often linux-modules-extra), or use another kernel"
        ),
        _ => format!("`modprobe {module}` as root"),
    }
}

fn list(names: &[String]) -> String {
    match names {
        [] => "none".into(),
        names => names.join(", "),
    }
}

fn on(netdev: &Option<String>) -> String {
    netdev
        .as_ref()
        .map(|netdev| format!(", on {netdev}"))
        .unwrap_or_default()
}

/// Adds the soft-RoCE device `name` on the Ethernet interface `netdev`. Needs CAP_NET_ADMIN. The
/// kernel loads `rdma_rxe` by its alias `rdma-link-rxe`, if module loading is allowed.
pub fn rxe_add(roots: &Roots, name: &str, netdev: &str) -> Result<(), LinkError> {
    check_add(roots, name, netdev)?;
    let attributes = [
        (attribute::DEV_NAME, name),
        (attribute::LINK_TYPE, "rxe"),
        (attribute::NDEV_NAME, netdev),
    ]
    .map(|(kind, text)| (kind, c_string(text)));
    let answer =
        request(command::NEWLINK, &attributes).map_err(|error| no_netlink(roots, error))?;
    answer.map_err(|errno| refused_add(roots, name, netdev, errno))
}

/// Deletes the soft-RoCE device `name` and breaks its queue pairs. Needs CAP_NET_ADMIN.
pub fn rxe_del(roots: &Roots, name: &str) -> Result<(), LinkError> {
    let fabric = Fabric::read(&roots.sys);
    let no_device = || LinkError::NoDevice {
        name: name.to_owned(),
        have: fabric.devices.iter().map(|d| d.name.clone()).collect(),
    };
    let device = fabric.device(name).ok_or_else(no_device)?;
    if device.kind != crate::DriverKind::Rxe {
        return Err(LinkError::NotRxe {
            name: name.to_owned(),
            driver: device.driver.clone().unwrap_or_else(|| "unknown".into()),
        });
    }
    let index = device_index(name)
        .map_err(|error| no_netlink(roots, error))?
        .ok_or_else(no_device)?;
    let attributes = [(attribute::DEV_INDEX, index.to_ne_bytes().to_vec())];
    let answer =
        request(command::DELLINK, &attributes).map_err(|error| no_netlink(roots, error))?;
    answer.map_err(|errno| match errno {
        Errno::PERM | Errno::ACCESS => LinkError::Permission,
        Errno::NODEV => no_device(),
        errno => LinkError::Refused {
            action: "delete",
            name: name.to_owned(),
            source: errno.into(),
        },
    })
}

/// Maps the failure of the socket: without `ib_core` the kernel has no `NETLINK_RDMA`
/// (EPROTONOSUPPORT).
fn no_netlink(roots: &Roots, error: io::Error) -> LinkError {
    match Errno::from_io_error(&error) {
        Some(Errno::PROTONOSUPPORT) => match NoDevice::of(roots) {
            Some(kernel @ NoDevice::Kernel { .. }) => LinkError::Kernel { kernel },
            _ => LinkError::Module {
                module: "ib_core",
                state: Modules::read(roots).state("ib_core"),
            },
        },
        _ => LinkError::Socket(error),
    }
}

/// Finds errors before the request, because the kernel has only EINVAL or EEXIST for them.
fn check_add(roots: &Roots, name: &str, netdev: &str) -> Result<(), LinkError> {
    let plain = |text: &str| {
        text.chars()
            .all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
    };
    for (what, text, max) in [
        ("an RDMA device", name, DEVICE_NAME_MAX - 1),
        ("an interface", netdev, NETDEV_NAME_MAX - 1),
    ] {
        if text.is_empty() || text.len() > max || (what == "an RDMA device" && !plain(text)) {
            return Err(LinkError::Name {
                what,
                name: text.to_owned(),
                max,
            });
        }
    }
    if !roots.sys.join("class/net").join(netdev).exists() {
        return Err(LinkError::NoNetdev {
            netdev: netdev.to_owned(),
            have: crate::sysfs::names(&roots.sys.join("class/net")),
        });
    }
    let uevent = roots.sys.join("class/net").join(netdev).join("uevent");
    let uevent = crate::sysfs::text(&uevent).unwrap_or_default();
    if uevent.lines().any(|line| line == "DEVTYPE=vlan") {
        return Err(LinkError::Vlan {
            netdev: netdev.to_owned(),
        });
    }
    let fabric = Fabric::read(&roots.sys);
    if let Some(there) = fabric.device(name) {
        return Err(LinkError::Exists {
            name: name.to_owned(),
            netdev: there.ports.first().and_then(|port| port.netdev.clone()),
        });
    }
    let taken = fabric.ports().find(|(device, port)| {
        device.kind == crate::DriverKind::Rxe && port.netdev.as_deref() == Some(netdev)
    });
    match taken {
        Some((device, _)) => Err(LinkError::Taken {
            netdev: netdev.to_owned(),
            device: device.name.clone(),
        }),
        None => Ok(()),
    }
}

fn refused_add(roots: &Roots, name: &str, netdev: &str, errno: Errno) -> LinkError {
    let module = || LinkError::Module {
        module: "rdma_rxe",
        state: Modules::read(roots).state("rdma_rxe"),
    };
    match errno {
        Errno::PERM | Errno::ACCESS => LinkError::Permission,
        // The kernel has no link type "rxe", and its module could not be loaded.
        Errno::INVAL if !Modules::read(roots).state("rdma_rxe").is_there() => module(),
        Errno::OPNOTSUPP | Errno::NOENT => module(),
        Errno::NODEV => LinkError::NoNetdev {
            netdev: netdev.to_owned(),
            have: crate::sysfs::names(&roots.sys.join("class/net")),
        },
        Errno::EXIST => LinkError::Exists {
            name: name.to_owned(),
            netdev: None,
        },
        errno => LinkError::Refused {
            action: "add",
            name: name.to_owned(),
            source: errno.into(),
        },
    }
}

/// enum rdma_nldev_command and enum rdma_nldev_attr of `rdma/rdma_netlink.h`.
mod command {
    pub(super) const GET: u16 = 1;
    pub(super) const NEWLINK: u16 = 3;
    pub(super) const DELLINK: u16 = 4;
}

mod attribute {
    pub(super) const DEV_INDEX: u16 = 1;
    pub(super) const DEV_NAME: u16 = 2;
    pub(super) const NDEV_NAME: u16 = 51;
    pub(super) const LINK_TYPE: u16 = 65;
}

/// RDMA_NL_NLDEV, the client of RDMA netlink for devices. The message type is the client and the
/// command: RDMA_NL_GET_TYPE.
const NLDEV: u16 = 5;

/// Sends one command and returns the kernel's acknowledgement.
fn request(command: u16, attributes: &[(u16, Vec<u8>)]) -> io::Result<Result<(), Errno>> {
    let message = message(command, NLM_F_REQUEST | NLM_F_ACK, attributes);
    let mut outcome = None;
    exchange(Some(netlink::RDMA), &message, |answer| {
        outcome = read_answer(answer);
        outcome.is_some()
    })?;
    outcome.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// The index (RDMA_NLDEV_ATTR_DEV_INDEX) of the device `name`, from a dump of all devices.
fn device_index(name: &str) -> io::Result<Option<u32>> {
    let message = message(command::GET, NLM_F_REQUEST | NLM_F_DUMP, &[]);
    let mut found = None;
    exchange(Some(netlink::RDMA), &message, |part| {
        let is_it = attribute_of(part.body, attribute::DEV_NAME)
            .is_some_and(|value| value.strip_suffix(&[0]) == Some(name.as_bytes()));
        if is_it {
            let index = attribute_of(part.body, attribute::DEV_INDEX);
            found = index.and_then(|bytes| Some(u32::from_ne_bytes(bytes.try_into().ok()?)));
        }
        part.kind == NLMSG_DONE || part.kind == NLMSG_ERROR
    })?;
    Ok(found)
}

/// Encodes a request: the message type of `NLDEV` and the command, then the attributes.
fn message(command: u16, flags: u16, attributes: &[(u16, Vec<u8>)]) -> Vec<u8> {
    let mut request = Request::new((NLDEV << 10) | command, flags, &[]);
    for (kind, value) in attributes {
        request = request.attribute(*kind, value);
    }
    request.finish()
}

#[cfg(test)]
mod tests;
