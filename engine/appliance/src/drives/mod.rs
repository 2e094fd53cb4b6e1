//! Keeps a list of the NVMe drives that the daemon's user-space driver uses, and binds them to
//! vfio-pci at once and at each boot.
//!
//! ```text
//!   bind      checks ─▶ vfio-pci ─▶ drives.json
//!   unbind    the kernel's driver ─▶ drives.json without the drive
//!   restore   drives.json ─▶ the same drives ─▶ vfio-pci       at each start, before the daemon
//! ```
//!
//! A card in another slot changes PCI addresses. Therefore the serial number and the model identify
//! a drive, and the kernel's driver reads both from the drive. So a drive is refused if another PCI
//! function has the same two, as with a drive with two ports. A drive that is bound to vfio-pci
//! shows no serial number, so the list also has its address.
//!
//! The list is in the partition for state: a factory reset erases it, and the boot after that binds
//! no drive.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nacre_bdev_nvme_vfio::pci::{Address, Drive, Driver, Options, PciError, System, Use};
use nacre_engine_values::files;
use serde::{Deserialize, Serialize};

use crate::lock::{Lock, LockError};
use crate::place::{Places, create_folder, printable};
use crate::status::{self, StatusError};

/// Most drives of the list.
const MOST: usize = 256;
/// The state of a controller whose serial number can be trusted.
const LIVE: Option<&str> = Some("live");
/// After this time, a start of the machine begins with no further drive. The last one may take two
/// minutes more, and the unit has five.
const BINDING: Duration = Duration::from_secs(120);

/// A drive of the list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenDrive {
    pub serial: String,
    pub model: String,
    /// Its last known PCI address; `None`: another drive of the list has that address now.
    pub address: Option<Address>,
}

impl TakenDrive {
    /// The identity of a drive that the kernel's driver has identified.
    fn of(drive: &Drive) -> Option<Self> {
        let controller = drive.controller.as_ref()?;
        let is_known = controller.state.as_deref() == LIVE && !controller.serial.is_empty();
        is_known.then(|| Self {
            serial: controller.serial.clone(),
            model: controller.model.clone(),
            address: Some(drive.address),
        })
    }

    fn is_same(&self, other: &Self) -> bool {
        (&self.serial, &self.model) == (&other.serial, &other.model)
    }

    fn is(&self, drive: &Drive) -> bool {
        Self::of(drive).is_some_and(|found| self.is_same(&found))
    }

    /// True if the kernel's driver has read this identity from the drive, whatever its state is.
    fn is_shared_with(&self, drive: &Drive) -> bool {
        drive.controller.as_ref().is_some_and(|controller| {
            (&self.serial, &self.model) == (&controller.serial, &controller.model)
        })
    }

    /// True if vfio-pci has a drive at its address.
    fn is_bound(&self, drives: &[Drive]) -> bool {
        let is_it =
            |drive: &Drive| self.address == Some(drive.address) && drive.driver == Driver::VfioPci;
        drives.iter().any(is_it)
    }
}

impl fmt::Display for TakenDrive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { serial, model, .. } = self;
        write!(
            f,
            "{} (serial number {})",
            printable(model),
            printable(serial)
        )
    }
}

/// A drive in a call: by its address, its serial number, or both.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveId {
    pub address: Option<Address>,
    pub serial: Option<String>,
}

impl DriveId {
    fn names(&self, drive: &TakenDrive) -> bool {
        let is_any = self.address.is_some() || self.serial.is_some();
        let has_address = self.address.is_none_or(|at| drive.address == Some(at));
        let has_serial = self.serial.as_ref().is_none_or(|own| *own == drive.serial);
        is_any && has_address && has_serial
    }
}

impl fmt::Display for DriveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.address, &self.serial) {
            (Some(address), None) => write!(f, "drive {address}"),
            (None, Some(serial)) => write!(f, "drive with serial number {serial:?}"),
            (Some(address), Some(serial)) => {
                write!(f, "drive {address} with serial number {serial:?}")
            }
            (None, None) => f.write_str("drive without address and serial number"),
        }
    }
}

/// The driver of a drive of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DriveState {
    /// vfio-pci has it: the daemon attaches it by its address.
    Bound,
    /// The kernel has it, and disks of the machine show it.
    Kernel,
    /// The machine does not show it, or shows several drives that may be it.
    Missing,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DriveStatus {
    #[serde(flatten)]
    pub drive: TakenDrive,
    pub state: DriveState,
}

/// A drive that was bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    pub drive: TakenDrive,
    pub address: Address,
    pub already: bool,
}

/// The result of [`unbind`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GivenBack {
    pub id: DriveId,
    /// The kernel's name of the controller, such as `nvme0`.
    pub controller: Option<String>,
    /// True if it was bound to vfio-pci.
    pub was_bound: bool,
}

/// The result of [`restore`].
#[derive(Debug)]
pub struct Restoration {
    pub drives: Vec<RestoredDrive>,
    /// An error if the present addresses could not be written to the list.
    pub list: Result<(), DriveError>,
}

/// The result of [`restore`] for one drive.
#[derive(Debug)]
pub struct RestoredDrive {
    pub drive: TakenDrive,
    pub outcome: Result<Address, DriveError>,
}

#[derive(Debug, thiserror::Error)]
pub enum DriveError {
    #[error(transparent)]
    Status(#[from] StatusError),
    #[error("drive {address} is in use: {}; end that first", list(uses))]
    InUse { address: Address, uses: Vec<Use> },
    #[error(
        "drive {address} has no IOMMU group, and without one it may write to any memory; switch the IOMMU on in the \
         firmware (VT-d, AMD-Vi), and restart"
    )]
    NoIommu { address: Address },
    #[error(
        "the kernel knows no serial number of drive {address}, so a later start could not find it again; wait until \
         its controller is live"
    )]
    NotIdentified { address: Address },
    #[error(
        "vfio-pci has drive {address} already, and the list of this machine does not; give it back first"
    )]
    BoundByOthers { address: Address },
    #[error(
        "drive {address} has the serial number {found:?}, and not {expected:?}; look at the disks again"
    )]
    OtherSerial {
        address: Address,
        expected: String,
        found: String,
    },
    #[error("the daemon has no {id} of this machine; the list has: {}", list(have))]
    NotTaken { id: DriveId, have: Vec<TakenDrive> },
    #[error(
        "drive {address} has the model and the serial number of {}, too, so a later start could bind the wrong one: \
         a drive with two ports, or a faulty serial number; take the other function out of the machine, or create a \
         file bdev on the disk",
        list(others)
    )]
    SharedSerial {
        address: Address,
        others: Vec<Address>,
    },
    #[error("the list has several of {id}; give its address and its serial number")]
    Several { id: DriveId },
    #[error("the list has {MOST} drives, its most; give one back first")]
    Full,
    #[error(
        "{drive} is not bound: no live NVMe drive of this machine has this model and serial number{}",
        place(drive, other)
    )]
    Missing {
        drive: TakenDrive,
        /// The drive at its last address.
        other: Option<Box<TakenDrive>>,
    },
    #[error(
        "{drive} is not bound: several functions have this serial number, at {}, and its former address is none of \
         them; give it back, and take it again",
        list(at)
    )]
    Ambiguous { drive: TakenDrive, at: Vec<Address> },
    #[error(
        "no time: {drive} is not bound, since the drives before it took {} s; take it again",
        BINDING.as_secs()
    )]
    NoTime { drive: TakenDrive },
    #[error(
        "{path}: {source}; no drive is bound: take the drives again, which makes a new list",
        path = path.display()
    )]
    Malformed {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    Pci(PciError),
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    if items.is_empty() {
        return "none".into();
    }
    let items: Vec<String> = items.iter().map(T::to_string).collect();
    items.join(", ")
}

fn place(drive: &TakenDrive, other: &Option<Box<TakenDrive>>) -> String {
    match (drive.address, other) {
        (Some(address), Some(other)) => format!("; at {address}, its last address, is {other}"),
        (Some(address), None) => format!("; its last address was {address}"),
        (None, _) => String::new(),
    }
}

impl From<PciError> for DriveError {
    /// The remedies of a shell do not help on an appliance.
    fn from(error: PciError) -> Self {
        match error {
            PciError::InUse { address, uses, .. } => Self::InUse { address, uses },
            PciError::NoIommu { address, .. } => Self::NoIommu { address },
            error => Self::Pci(error),
        }
    }
}

/// The file of the list.
#[derive(Debug, Default, Serialize, Deserialize)]
struct List {
    drives: Vec<TakenDrive>,
}

impl List {
    fn read(places: &Places) -> Result<Self, DriveError> {
        let path = places.drives();
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|source| DriveError::Malformed { path, source }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(DriveError::Io { path, source }),
        }
    }

    /// A damaged list, which a start reports, gives way to a new one.
    fn read_or_new(places: &Places) -> Result<Self, DriveError> {
        match Self::read(places) {
            Err(DriveError::Malformed { .. }) => Ok(Self::default()),
            other => other,
        }
    }

    fn write(&self, places: &Places) -> Result<(), DriveError> {
        let path = places.drives();
        let failed = |source| DriveError::Io {
            path: places.drives(),
            source,
        };
        create_folder(&places.notes(), 0o700).map_err(failed)?;
        let text = serde_json::to_vec(self).map_err(|error| failed(error.into()))?;
        files::replace_private(&path, &text).map_err(failed)
    }

    /// The position of the drive; none if the list does not have it. `present`: the list with
    /// present addresses, by which a call names a drive first.
    fn find(&self, present: &[TakenDrive], id: &DriveId) -> Result<Option<usize>, DriveError> {
        let named = |drives: &[TakenDrive]| {
            let mut found: Vec<usize> = (0..drives.len()).collect();
            found.retain(|&at| id.names(&drives[at]));
            found
        };
        let mut found = named(present);
        if found.is_empty() {
            found = named(&self.drives);
        }
        // An entry without an address has no other name than its serial number.
        let nameless = found.iter().find(|&&at| present[at].address.is_none());
        match (found.as_slice(), nameless) {
            ([], _) => Ok(None),
            ([one], _) | (_, Some(one)) => Ok(Some(*one)),
            _ => Err(DriveError::Several { id: id.clone() }),
        }
    }

    /// The position of the drive, and its address while vfio-pci has it. No position: a drive that
    /// another command bound, such as `nacre nvme bind`.
    fn find_bound(
        &self,
        drives: &[Drive],
        id: &DriveId,
    ) -> Result<(Option<usize>, Option<Address>), DriveError> {
        let is_bound = |at: &Address| {
            let mut drives = drives.iter();
            drives.any(|drive| drive.address == *at && drive.driver == Driver::VfioPci)
        };
        let present = present(&self.drives, &places_of(&self.drives, drives));
        if let Some(found) = self.find(&present, id)? {
            return Ok((Some(found), present[found].address.filter(is_bound)));
        }
        match (id.address.filter(is_bound), &id.serial) {
            (Some(at), None) => Ok((None, Some(at))),
            _ => Err(DriveError::NotTaken {
                id: id.clone(),
                have: self.drives.clone(),
            }),
        }
    }

    /// Adds a drive, in place of entries that are stale by now.
    fn add(&mut self, drive: &TakenDrive, drives: &[Drive]) -> Result<(), DriveError> {
        self.drives.retain(|one| {
            let is_elsewhere = one.address != drive.address
                && (one.is_bound(drives)
                    || drives
                        .iter()
                        .any(|found| one.address == Some(found.address) && one.is(found)));
            !one.is_same(drive) || is_elsewhere
        });
        for one in &mut self.drives {
            if one.address == drive.address {
                one.address = None;
            }
        }
        if self.drives.len() >= MOST {
            return Err(DriveError::Full);
        }
        self.drives.push(drive.clone());
        Ok(())
    }
}

/// Refuses a drive that cannot be bound, and changes nothing. Opens each of its disks for a moment.
pub fn check(
    places: &Places,
    system: &System,
    address: Address,
    serial: Option<&str>,
) -> Result<TakenDrive, DriveError> {
    status::image(places)?;
    check_in(&List::read_or_new(places)?, system, address, serial)
}

fn check_in(
    list: &List,
    system: &System,
    address: Address,
    serial: Option<&str>,
) -> Result<TakenDrive, DriveError> {
    let drive = system.drive(address)?;
    let known = match &drive.driver {
        Driver::VfioPci => {
            let mut drives = list.drives.iter();
            let own = drives.find(|one| one.address == Some(address));
            own.cloned().ok_or(DriveError::BoundByOthers { address })?
        }
        Driver::Other(_) => {
            let driver = drive.driver;
            return Err(PciError::OtherDriver { address, driver }.into());
        }
        _ => TakenDrive::of(&drive).ok_or(DriveError::NotIdentified { address })?,
    };
    if let Some(expected) = serial
        && *expected != known.serial
    {
        return Err(DriveError::OtherSerial {
            address,
            expected: expected.to_owned(),
            found: known.serial,
        });
    }
    if drive.driver != Driver::VfioPci {
        check_alone(list, &system.drives(), &known, address)?;
    }
    system.check(address, &Options::default())?;
    Ok(known)
}

/// Refuses a drive that a later start could confuse with another one of the machine.
fn check_alone(
    list: &List,
    drives: &[Drive],
    known: &TakenDrive,
    address: Address,
) -> Result<(), DriveError> {
    // A bound drive shows no serial number: the list has it.
    let bound = list.drives.iter().filter(|one| one.is_bound(drives));
    let bound = bound.filter(|one| known.is_same(one));
    let mut others: BTreeSet<Address> = bound.filter_map(|one| one.address).collect();
    let shown = drives.iter().filter(|drive| known.is_shared_with(drive));
    others.extend(shown.map(|drive| drive.address));
    others.remove(&address);
    if others.is_empty() {
        return Ok(());
    }
    Err(DriveError::SharedSerial {
        address,
        others: others.into_iter().collect(),
    })
}

/// Binds a drive to vfio-pci, now and at each start.
pub fn bind(
    places: &Places,
    system: &System,
    address: Address,
    serial: Option<&str>,
) -> Result<Taken, DriveError> {
    bind_and(places, system, address, serial, List::write)
}

/// `write` keeps the list.
fn bind_and(
    places: &Places,
    system: &System,
    address: Address,
    serial: Option<&str>,
    write: impl FnOnce(&List, &Places) -> Result<(), DriveError>,
) -> Result<Taken, DriveError> {
    status::image(places)?;
    let _lock = Lock::of_drives(places)?;
    let mut list = List::read_or_new(places)?;
    let drive = check_in(&list, system, address, serial)?;
    let before = system.drives();
    list.add(&drive, &before)?;
    let bound = system.bind(address, &Options::default())?;
    if !bound.already
        && let Err(error) = write(&list, places)
    {
        // The first error is the one to report: this call only undoes the binding.
        let _ = system.unbind(address);
        return Err(error);
    }
    Ok(Taken {
        drive,
        address,
        already: bound.already,
    })
}

/// The address of a listed drive that [`unbind`] would give back to the kernel's driver; `None`: it
/// is not bound to vfio-pci now.
pub fn check_listed(
    places: &Places,
    system: &System,
    id: &DriveId,
) -> Result<Option<Address>, DriveError> {
    status::image(places)?;
    let (_, address) = List::read_or_new(places)?.find_bound(&system.drives(), id)?;
    Ok(address)
}

/// Gives a drive back to the kernel's driver, also at later starts. A drive that the machine does
/// not show only leaves the list.
pub fn unbind(places: &Places, system: &System, id: &DriveId) -> Result<GivenBack, DriveError> {
    unbind_and(places, system, id, List::write)
}

/// `write` keeps the list.
fn unbind_and(
    places: &Places,
    system: &System,
    id: &DriveId,
    write: impl FnOnce(&List, &Places) -> Result<(), DriveError>,
) -> Result<GivenBack, DriveError> {
    status::image(places)?;
    let _lock = Lock::of_drives(places)?;
    let mut list = List::read_or_new(places)?;
    let (found, bound) = list.find_bound(&system.drives(), id)?;
    let entry = found.map(|at| list.drives.remove(at));
    let mut controller = None;
    if let Some(address) = bound {
        controller = system.unbind(address)?.controller;
    }
    if entry.is_some()
        && let Err(error) = write(&list, places)
    {
        // Nothing has changed for the caller then.
        if let Some(address) = bound {
            let _ = system.bind(address, &Options::default());
        }
        return Err(error);
    }
    Ok(GivenBack {
        id: DriveId {
            address: bound.or(id.address),
            serial: entry.map(|entry| entry.serial),
        },
        controller,
        was_bound: bound.is_some(),
    })
}

/// Binds the drives of the list at a start of the machine. First the list gets the present
/// addresses: a command that ends early does not lose them. Each drive has its own result. One that
/// cannot be bound may delay the next ones; after two minutes, none is begun.
pub fn restore(places: &Places, system: &System) -> Result<Restoration, DriveError> {
    let begin = Instant::now();
    restore_and(places, system, || begin.elapsed(), List::write)
}

/// `spent`: time since the beginning. `write` keeps the list.
fn restore_and(
    places: &Places,
    system: &System,
    spent: impl Fn() -> Duration,
    write: impl FnOnce(&List, &Places) -> Result<(), DriveError>,
) -> Result<Restoration, DriveError> {
    status::image(places)?;
    let _lock = Lock::of_drives(places)?;
    let List { drives: wanted } = List::read(places)?;
    if wanted.is_empty() {
        return Ok(Restoration {
            drives: Vec::new(),
            list: Ok(()),
        });
    }
    let drives = system.identified_drives(|found| {
        let mut wanted = wanted.iter();
        wanted.all(|one| one.is_bound(found) || found.iter().any(|drive| one.is(drive)))
    });
    let found = places_of(&wanted, &drives);
    let list = List {
        drives: present(&wanted, &found),
    };
    let written = if list.drives == wanted {
        Ok(())
    } else {
        write(&list, places)
    };
    let bind = |(drive, at): (TakenDrive, Result<Address, DriveError>)| {
        let outcome = at.and_then(|address| {
            if spent() >= BINDING {
                let drive = drive.clone();
                return Err(DriveError::NoTime { drive });
            }
            system.bind(address, &Options::default())?;
            Ok(address)
        });
        RestoredDrive { drive, outcome }
    };
    Ok(Restoration {
        drives: list.drives.into_iter().zip(found).map(bind).collect(),
        list: written,
    })
}

/// The present address of each drive. First the drives at their former addresses, which distinguish
/// drives with one serial number; then each other one, if a single function is left with its serial
/// number. No address is the place of two drives.
fn places_of(wanted: &[TakenDrive], drives: &[Drive]) -> Vec<Result<Address, DriveError>> {
    let is_at_home = |one: &TakenDrive| {
        let is_it = |drive: &Drive| one.address == Some(drive.address) && one.is(drive);
        one.is_bound(drives) || drives.iter().any(is_it)
    };
    let homes = wanted.iter().filter(|one| is_at_home(one));
    let mut claimed: BTreeSet<Address> = homes.filter_map(|one| one.address).collect();
    let mut places = Vec::new();
    for one in wanted {
        if let Some(address) = one.address
            && is_at_home(one)
        {
            places.push(Ok(address));
            continue;
        }
        let free = drives
            .iter()
            .filter(|drive| one.is(drive) && !claimed.contains(&drive.address));
        let at: Vec<Address> = free.map(|drive| drive.address).collect();
        let place = match (at.as_slice(), one.address) {
            ([address], _) => Ok(*address),
            ([], last) => Err(DriveError::Missing {
                drive: one.clone(),
                other: drives
                    .iter()
                    .find(|drive| Some(drive.address) == last)
                    .and_then(TakenDrive::of)
                    .map(Box::new),
            }),
            _ => Err(DriveError::Ambiguous {
                drive: one.clone(),
                at,
            }),
        };
        claimed.extend(place.as_ref().ok());
        places.push(place);
    }
    places
}

/// The drives with their present addresses. A drive without a place keeps its last address, unless
/// another drive of the list has it now.
fn present(wanted: &[TakenDrive], found: &[Result<Address, DriveError>]) -> Vec<TakenDrive> {
    let is_others = |address: &Address| {
        let mut found = found.iter();
        found.any(|other| other.as_ref().is_ok_and(|other| other == address))
    };
    let of = |(one, at): (&TakenDrive, &Result<Address, DriveError>)| TakenDrive {
        address: match at {
            Ok(at) => Some(*at),
            Err(_) => one.address.filter(|address| !is_others(address)),
        },
        ..one.clone()
    };
    wanted.iter().zip(found).map(of).collect()
}

/// The drives of the list, with their present addresses. Reads sysfs only.
pub fn status(places: &Places, system: &System) -> Result<Vec<DriveStatus>, DriveError> {
    let list = List::read(places)?;
    let drives = if list.drives.is_empty() {
        Vec::new()
    } else {
        system.drives()
    };
    let found = places_of(&list.drives, &drives);
    let now = present(&list.drives, &found).into_iter().zip(found);
    let of = |(drive, at): (TakenDrive, Result<Address, DriveError>)| {
        let state = match at {
            Ok(_) if drive.is_bound(&drives) => DriveState::Bound,
            Ok(_) => DriveState::Kernel,
            Err(_) => DriveState::Missing,
        };
        DriveStatus { drive, state }
    };
    Ok(now.map(of).collect())
}

#[cfg(test)]
mod tests;
