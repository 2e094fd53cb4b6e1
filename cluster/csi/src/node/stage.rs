//! `NodeStageVolume`, `NodeUnstageVolume`: a volume becomes a block device of this machine, and a
//! file system at the staging path.

use std::path::Path;
use std::time::{Duration, Instant};

use tonic::Status;
use tracing::{info, warn};
use uuid::Uuid;

use super::Node;
use super::context::Context;
use super::fabrics::{self, Device};
use super::format::{self, Content};
use super::mounts::{self, must};
use super::records::Staged;
use crate::capability::{Capability, required_path, volume_id};
use crate::messages::Nothing;
use crate::messages::node::{NodeStageVolumeRequest, NodeUnstageVolumeRequest};

/// Time for the device of a connected volume to appear.
const DEVICE: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(50);

impl Node {
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
        let mut staged = Staged::new(&context, staging, &capability.access);
        if let Some(before) = self.records.read(id)? {
            if !before.is_like(&staged) && self.is_in_use(&before)? {
                let text = format!(
                    "volume {id} is staged at {} in another way",
                    before.staging.display()
                );
                return Err(Status::already_exists(text));
            }
            staged.is_formatting = before.is_formatting;
        }
        self.records.write(id, &staged)?;
        let device = self.attach(&context)?;
        if let Some(fs_type) = staged.fs_type.clone() {
            self.mount(
                id,
                &mut staged,
                &device,
                &fs_type,
                capability.is_read_only(),
            )?;
        }
        Ok(Nothing {})
    }

    fn is_in_use(&self, staged: &Staged) -> Result<bool, Status> {
        if staged.fs_type.is_none() {
            return Ok(fabrics::device(&*self.host, staged.uuid).is_some());
        }
        Ok(mounts::at(&*self.host, &staged.staging)?.is_some())
    }

    /// Connects all addresses. One is enough to go on; the guardian tries the others again.
    fn attach(&self, context: &Context) -> Result<Device, Status> {
        let (host, nqn) = (&*self.host, context.nqn.as_str());
        let mut failures = Vec::new();
        for portal in fabrics::missing(host, &self.me, nqn, &context.portals) {
            if let Err(error) = fabrics::connect(host, &self.me, nqn, &portal) {
                warn!(%portal, nqn, %error, "cannot connect");
                failures.push(format!("{portal}: {error}"));
            }
        }
        let paths = fabrics::paths(host, &self.me, nqn);
        if paths.is_empty() {
            let text = format!("no path to {nqn}: {}", failures.join("; "));
            return Err(Status::unavailable(text));
        }
        let end = Instant::now() + DEVICE;
        loop {
            if let Some(device) = fabrics::device(host, context.uuid)
                && device.bytes > 0
            {
                return Ok(device);
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
        is_read_only: bool,
    ) -> Result<(), Status> {
        let host = &*self.host;
        if let Some(there) = mounts::at(host, &staged.staging)? {
            if there.number == device.number {
                return Ok(());
            }
            // The device of that mount is gone: its paths were given up, and the volume came back
            // as another one. Its unwritten data is lost already.
            warn!(volume = %id, staging = %staged.staging.display(), "replacing a dead mount");
            let path = staged.staging.to_string_lossy().into_owned();
            let _ = must(host, "umount", &["-l", &path])?;
        }
        let found = format::content(host, device)?;
        // Without a signature there is no file system, so no data: the format did not end.
        let is_unfinished = staged.is_formatting && found == Content::Unknown;
        match found {
            Content::FileSystem(found) if found == fs_type => {}
            Content::Blank if is_read_only => {
                let text = format!("volume {id} is blank, and the access mode is for reading");
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
        if is_read_only {
            options.push("ro".to_owned());
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
        must(host, "mount", &words).map(drop)
    }

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
        // While the device does not answer, this does not end. Then the paths stay: data that is
        // not written yet would be lost with them.
        mounts::unmount(host, staging)?;
        let staged = self.records.read(id)?;
        if let Some(device) = fabrics::device(host, id) {
            self.refuse_users(id, &device)?;
            let flushed = std::fs::File::open(&device.path).and_then(|file| file.sync_all());
            flushed.map_err(|error| {
                Status::unavailable(format!("{} is not flushed: {error}", device.path.display()))
            })?;
        }
        let nqn = staged.map(|staged| staged.nqn);
        if let Some(nqn) = nqn.or_else(|| fabrics::subsystem_of(host, id)) {
            fabrics::disconnect(host, &self.me, &nqn)
                .map_err(|error| Status::internal(format!("cannot disconnect {nqn}: {error}")))?;
        }
        self.records.remove(id)?;
        Ok(Nothing {})
    }

    /// A device that is mounted elsewhere is not disconnected.
    fn refuse_users(&self, id: Uuid, device: &Device) -> Result<(), Status> {
        let mounted = mounts::all(&*self.host)?;
        let of_file_system = mounted.iter().find(|mount| mount.number == device.number);
        // A block volume at a pod: the device's file in devtmpfs.
        let name = Path::new("/").join(&device.name);
        let of_device = mounted.iter().find(|mount| mount.root == name);
        match of_file_system.or(of_device) {
            Some(mount) => Err(Status::failed_precondition(format!(
                "volume {id} is still mounted at {}: NodeUnpublishVolume comes first",
                mount.target.display()
            ))),
            None => Ok(()),
        }
    }
}
