//! The CSI calls `NodeStageVolume` and `NodeUnstageVolume`: connect a volume to this machine over
//! NVMe-oF, and mount its file system at the staging path; and the reverse.
//!
//! A *path* is one connection of the kernel's host to an address of the volume's subsystem. A
//! record per volume, written before the connections, says how it is staged. The paths of a
//! subsystem stay while another of its volumes has a record or is in use.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic::{Code, Status};
use tracing::{info, warn};
use uuid::Uuid;

use super::Node;
use super::bounded::AccessError;
use super::context::Context;
use super::fabrics::{self, Device};
use super::format::{self, Content};
use super::mounts::{self, must};
use super::paths::PathChange;
use super::records::Staged;
use crate::capability::{Capability, required_path, volume_id};
use crate::messages::Nothing;
use crate::messages::node::{NodeStageVolumeRequest, NodeUnstageVolumeRequest};

/// Time for the device of a connected volume to appear.
const DEVICE: Duration = Duration::from_secs(20);
/// No connection begins later than this after the first one: one to a silent address takes the
/// kernel some seconds.
const CONNECTS: Duration = Duration::from_secs(30);
/// Interval at which the device is looked for.
const LOOK: Duration = Duration::from_millis(50);

impl Node {
    /// `NodeStageVolume`: connects the volume. A block volume needs no more. For a mounted volume,
    /// formats it if it is blank and writable, mounts it, and grows the file system to the volume.
    /// A repeated call succeeds. `ALREADY_EXISTS`: the volume is in use with other parameters.
    pub(crate) fn stage(&self, asked: &NodeStageVolumeRequest) -> Result<Nothing, Status> {
        let id = volume_id(&asked.volume_id)?;
        let staging = Path::new(required_path(
            "staging_target_path",
            &asked.staging_target_path,
        )?);
        let capability = Capability::read(asked.volume_capability.as_ref());
        let capability = capability.map_err(|unfit| unfit.exceeds())?;
        let id = self.known(id, &asked.volume_id)?;
        let context = Context::read(&asked.publish_context)?;
        if context.uuid != id {
            let text = "publish_context is that of another volume";
            return Err(Status::invalid_argument(text));
        }
        let _one = self.pending.start(&asked.volume_id)?;
        let mut staged = Staged::new(&self.boot_id, &context, staging, &capability);
        if let Some(mut before) = self.staged(id)? {
            if before.is_read_only.is_none() && before.fs_type.is_none() {
                let device = fabrics::device(&*self.host, id)?;
                before.is_read_only = device.map(|device| device.is_read_only);
            }
            if !before.is_like(&staged) && self.is_in_use(&before, &staged)? {
                let text = format!(
                    "volume {id} is staged at {} in another way",
                    before.staging.display()
                );
                return Err(Status::already_exists(text));
            }
            staged.follow(before);
        }
        let change = self.paths.change(&context.nqn)?;
        // Before the paths: as long as the record is there, no other volume takes them away.
        self.records.write(id, &staged)?;
        let device = self.attach(change, &context)?;
        self.refuse_other(&staged, &device)?;
        match staged.fs_type.clone() {
            Some(fs_type) => self.mount(id, &mut staged, &device, &fs_type)?,
            None if staged.is_read_only() && !device.is_read_only => {
                let path = device.path.to_string_lossy();
                let _ = must(&*self.host, "blockdev", &["--setro", &path])?;
            }
            None => {}
        }
        Ok(Nothing {})
    }

    /// True if the earlier staging is in effect: its file system is mounted, its block device is
    /// present, or the other subsystem that it names is connected.
    fn is_in_use(&self, before: &Staged, wanted: &Staged) -> Result<bool, Status> {
        let host = &*self.host;
        let is_other = before.nqn != wanted.nqn;
        if is_other && !self.paths.of(&before.nqn)?.is_empty() {
            return Ok(true);
        }
        if before.fs_type.is_none() {
            return Ok(fabrics::device(host, before.uuid)?.is_some());
        }
        Ok(mounts::at(host, &before.staging)?.is_some())
    }

    /// Connects to all addresses, and waits for the block device. One connection is enough; the
    /// reconnector tries the other addresses again later.
    fn attach(&self, change: PathChange<'_>, context: &Context) -> Result<Device, Status> {
        let (host, nqn) = (&*self.host, context.nqn.as_str());
        let (mut failures, mut is_late) = (Vec::new(), false);
        let last = Instant::now() + CONNECTS;
        for address in self.paths.missing(nqn, &context.addresses)? {
            if let Err(error) = change.connect(&address) {
                warn!(%address, nqn, %error, "cannot connect");
                is_late |= error.is_late();
                failures.push(format!("{address}: {error}"));
            }
            if Instant::now() >= last {
                failures.push("the other addresses were not tried yet".to_owned());
                break;
            }
        }
        drop(change);
        let paths = self.paths.of(nqn)?;
        if paths.is_empty() {
            let text = format!("no path to {nqn}: {}", failures.join("; "));
            return Err(if is_late {
                Status::deadline_exceeded(text)
            } else {
                Status::unavailable(text)
            });
        }
        let end = Instant::now() + DEVICE;
        loop {
            match fabrics::device(host, context.uuid) {
                Ok(Some(device)) if device.bytes > 0 => return Ok(device),
                Err(refused) if refused.code() != Code::Unavailable => return Err(refused),
                _ => {}
            }
            if Instant::now() >= end {
                let live = paths.iter().filter(|path| path.is_live).count();
                return Err(Status::unavailable(format!(
                    "{nqn} has {} paths, {live} of them live, and no device with UUID {} after \
                     {} s",
                    paths.len(),
                    context.uuid,
                    DEVICE.as_secs()
                )));
            }
            std::thread::sleep(LOOK);
        }
    }

    fn mount(
        &self,
        id: Uuid,
        staged: &mut Staged,
        device: &Device,
        fs_type: &str,
    ) -> Result<(), Status> {
        let host = &*self.host;
        let is_read_only = staged.is_read_only();
        if let Some(there) = mounts::at(host, &staged.staging)? {
            if there.number == device.number {
                if there.is_read_only == is_read_only {
                    return Ok(());
                }
                let text = format!(
                    "volume {id} is mounted at {} already, for {}",
                    staged.staging.display(),
                    if is_read_only { "writing" } else { "reading" }
                );
                return Err(Status::already_exists(text));
            }
            if fabrics::is_present(host, &there.number) {
                let text = format!(
                    "{} is the mount of another device ({}), which is in use",
                    staged.staging.display(),
                    there.number
                );
                return Err(Status::failed_precondition(text));
            }
            // The device of that mount is gone: its paths were given up, and the volume came back
            // as another one. Its unwritten data is lost already.
            warn!(volume = %id, staging = %staged.staging.display(), "replacing a dead mount");
            let path = staged.staging.to_string_lossy().into_owned();
            let _ = must(host, "umount", &["-l", &path])?;
        }
        let found = format::content(host, &self.devices, device)?;
        // The mark alone does not count: another node may have made the file system meanwhile.
        let is_half = matches!(found, Content::Unknown | Content::HalfMade(_));
        let is_unfinished = staged.is_formatting && is_half;
        match found {
            Content::FileSystem(found) if found == fs_type => {}
            found if is_read_only && (found == Content::Blank || is_unfinished) => {
                let text = format!(
                    "volume {id} has {found}, and the access mode is for reading: it is not \
                     formatted"
                );
                return Err(Status::failed_precondition(text));
            }
            found if found == Content::Blank || is_unfinished => {
                staged.is_formatting = true;
                self.records.write(id, staged)?;
                format::make(host, device, fs_type)?;
                info!(volume = %id, fs_type, "formatted a blank volume");
            }
            found => {
                let text = format!("volume {id} has {found}, not {fs_type}: it is not formatted");
                return Err(Status::failed_precondition(text));
            }
        }
        staged.is_formatting = false;
        self.records.write(id, staged)?;
        std::fs::create_dir_all(&staged.staging)
            .map_err(|error| Status::internal(format!("{}: {error}", staged.staging.display())))?;
        let mut options = staged.flags.clone();
        if is_read_only && !options.iter().any(|option| option == "ro") {
            options.push("ro".to_owned());
        }
        // A clone may be mounted beside its source, which has the same UUID.
        if fs_type == "xfs" && !options.iter().any(|option| option == "nouuid") {
            options.push("nouuid".to_owned());
        }
        let options = options.join(",");
        let (from, to) = (
            device.path.to_string_lossy(),
            staged.staging.to_string_lossy(),
        );
        let mut words = vec!["-t", fs_type];
        if !options.is_empty() {
            words.extend(["-o", &options]);
        }
        words.extend([&*from, &*to]);
        must(host, "mount", &words)?;
        // The contents may be those of a smaller volume.
        if !is_read_only && matches!(fs_type, "ext4" | "xfs") {
            format::grow(host, &self.devices, device, &staged.staging)?;
        }
        Ok(())
    }

    /// `NodeUnstageVolume`: unmounts the volume, flushes its device, and disconnects the subsystem
    /// unless another volume needs it. Refused while the device is in use or cannot be flushed. A
    /// repeated call succeeds.
    pub(crate) fn unstage(&self, asked: &NodeUnstageVolumeRequest) -> Result<Nothing, Status> {
        let id = volume_id(&asked.volume_id)?;
        let staging = Path::new(required_path(
            "staging_target_path",
            &asked.staging_target_path,
        )?);
        let Some(id) = id else {
            return Ok(Nothing {});
        };
        let _one = self.pending.start(&asked.volume_id)?;
        let host = &*self.host;
        // First: a damaged record is refused before anything changes.
        let staged = self.staged(id)?;
        // Without multipath there is one device per path, all of one subsystem.
        let devices = fabrics::devices(host, id)?;
        for device in &devices {
            match &staged {
                Some(staged) => self.refuse_other(staged, device)?,
                None if device.nqn == devices[0].nqn => {}
                None => {
                    let text = format!(
                        "volume {id} has devices of {} and of {}: disconnect the wrong one",
                        devices[0].nqn, device.nqn
                    );
                    return Err(Status::failed_precondition(text));
                }
            }
        }
        // The paths of a device stay until its data is written: it would be lost with them.
        mounts::unmount(host, staging, &devices)?;
        // Open until the paths are gone, so that no program mounts the device meanwhile.
        let claimed = devices.iter().map(|device| self.claim(id, device));
        let mut claimed = claimed.collect::<Result<Vec<File>, Status>>()?;
        let of_record = staged.as_ref().map(|staged| staged.nqn.clone());
        let of_device = devices.first().map(|device| device.nqn.clone());
        // Until the record is gone: the last volume of a subsystem disconnects it.
        let _change = match of_record.or(of_device) {
            Some(nqn) => {
                let change = self.paths.change(&nqn)?;
                let other = self.other_of(&nqn, id)?.map(|other| other.to_string());
                let other = match other {
                    None => self.in_use_of(&nqn, id, &devices, &mut claimed)?,
                    other => other,
                };
                match other {
                    Some(other) => {
                        info!(volume = %id, nqn, other, "the paths stay for another volume");
                        self.allow_writes(staged.as_ref(), &devices)?;
                    }
                    None => change.disconnect()?,
                }
                Some(change)
            }
            None => None,
        };
        drop(claimed);
        self.records.remove(id)?;
        Ok(Nothing {})
    }

    /// The name of another device of the subsystem that is in use without a record, such as by an
    /// administrator's mount. Opens all unused devices exclusively, into `claimed`: the caller
    /// keeps them open until the paths are gone.
    fn in_use_of(
        &self,
        nqn: &str,
        id: Uuid,
        own: &[Device],
        claimed: &mut Vec<File>,
    ) -> Result<Option<String>, Status> {
        for device in fabrics::devices_of(&*self.host, nqn)? {
            if own.iter().any(|one| one.name == device.name) {
                continue;
            }
            match self.claim(id, &device) {
                Ok(file) => claimed.push(file),
                // It is in use, or its data is not written.
                Err(_) => return Ok(Some(device.name)),
            }
        }
        Ok(None)
    }

    /// Makes devices that stay connected writable again after a read-only staging.
    fn allow_writes(&self, staged: Option<&Staged>, devices: &[Device]) -> Result<(), Status> {
        if staged.is_none_or(|staged| staged.fs_type.is_some() || !staged.is_read_only()) {
            return Ok(());
        }
        for device in devices {
            let path = device.path.to_string_lossy();
            let _ = must(&*self.host, "blockdev", &["--setrw", &path])?;
        }
        Ok(())
    }

    /// Opens a device exclusively, and flushes its cached data. Fails if a program or mount has it.
    fn claim(&self, id: Uuid, device: &Device) -> Result<File, Status> {
        self.refuse_users(id, device)?;
        let (host, path) = (Arc::clone(&self.host), device.path.clone());
        let claimed = self
            .devices
            .run(&device.path, self.flush_time, move || host.claim(&path));
        claimed.map_err(|error| match error {
            AccessError::Failed(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                Status::failed_precondition(format!(
                    "volume {id} is in use: a program or a mount has {}",
                    device.path.display()
                ))
            }
            late if late.is_late() => Status::deadline_exceeded(format!(
                "volume {id} stays connected: {} has data that is not written: {late}",
                device.path.display()
            )),
            error => Status::unavailable(format!(
                "volume {id} stays connected: {} is not flushed: {error}",
                device.path.display()
            )),
        })
    }

    /// Fails if the device is mounted anywhere.
    fn refuse_users(&self, id: Uuid, device: &Device) -> Result<(), Status> {
        let mounted = mounts::all(&*self.host)?;
        match mounted.iter().find(|mount| mounts::is_of(mount, device)) {
            Some(mount) => Err(Status::failed_precondition(format!(
                "volume {id} is still mounted at {}: NodeUnpublishVolume comes first",
                mount.target.display()
            ))),
            None => Ok(()),
        }
    }
}
