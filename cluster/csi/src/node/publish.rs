//! `NodePublishVolume`, `NodeUnpublishVolume`: a staged volume at the path of a pod, as a bind
//! mount of the staging path or of the block device.

use std::io;
use std::path::{Path, PathBuf};

use tonic::Status;
use uuid::Uuid;

use super::Node;
use super::fabrics;
use super::mounts::{self, Mount, must};
use super::records::Staged;
use crate::capability::{Access, Capability, required_path, volume_id};
use crate::messages::node::{NodePublishVolumeRequest, NodeUnpublishVolumeRequest};
use crate::messages::{Mode, Nothing};

impl Node {
    pub(crate) fn publish(&self, asked: &NodePublishVolumeRequest) -> Result<Nothing, Status> {
        let id = volume_id(&asked.volume_id)?;
        let target = Path::new(required_path("target_path", &asked.target_path)?);
        let capability = Capability::read(asked.volume_capability.as_ref());
        let capability = capability.map_err(|unfit| unfit.exceeds())?;
        if asked.staging_target_path.is_empty() {
            let text = "staging_target_path is missing: NodeStageVolume comes first";
            return Err(Status::failed_precondition(text));
        }
        let staging = Path::new(required_path(
            "staging_target_path",
            &asked.staging_target_path,
        )?);
        let id = self.known(id, &asked.volume_id)?;
        let _one = self.pending.start(&asked.volume_id)?;
        let host = &*self.host;
        let staged = self.staged(id)?;
        let device = fabrics::device(host, id)?;
        let (Some(mut staged), Some(device)) = (staged, device) else {
            let text = format!("volume {id} is not staged here: NodeStageVolume comes first");
            return Err(Status::failed_precondition(text));
        };
        self.refuse_other(&staged, &device)?;
        let is_read_only = asked.readonly || capability.is_read_only();
        let is_block = capability.access == Access::Block;
        if is_block != staged.fs_type.is_none() {
            let text = format!("volume {id} is staged for the other access type");
            return Err(Status::failed_precondition(text));
        }
        if staged.is_read_only() && !is_read_only {
            let text = format!("volume {id} is staged for reading, and access is for writing");
            return Err(Status::failed_precondition(text));
        }
        // A device's file on a read-only mount still takes writes: the whole device must refuse
        // them.
        if is_block && is_read_only && !(staged.is_read_only() && device.is_read_only) {
            let text = "readonly: the block device is staged for writing; give the volume an \
                        access mode for reading";
            return Err(Status::invalid_argument(text));
        }
        let (source, number, root) = if is_block {
            let root = Path::new("/").join(&device.name);
            (device.path.clone(), None, Some(root))
        } else {
            let mounted = mounts::at(host, staging)?;
            let alive = mounted.filter(|mount| mount.number == device.number);
            if alive.is_none() {
                let text = format!(
                    "volume {id} is not mounted at {}: NodeStageVolume comes first",
                    staging.display()
                );
                return Err(Status::failed_precondition(text));
            }
            (staging.to_owned(), Some(device.number.clone()), None)
        };
        let is_ours = |mount: &Mount| {
            number.as_ref().is_none_or(|number| *number == mount.number)
                && root.as_ref().is_none_or(|root| *root == mount.root)
        };
        let is_remounted = is_read_only && !is_block;
        let there = mounts::at(host, target)?;
        if let Some(there) = &there {
            let is_ours = is_ours(there);
            if is_ours && (is_block || there.is_read_only == is_read_only) {
                return Ok(Nothing {});
            }
            // The driver died between the mount and the remount of the same call.
            let is_half = is_remounted && staged.read_only_targets.iter().any(|one| one == target);
            if !(is_ours && is_half) {
                let text = format!("{} is a mount of another kind already", target.display());
                return Err(Status::already_exists(text));
            }
        }
        if there.is_none() && capability.mode == Mode::SingleNodeSingleWriter {
            let others = mounts::all(host)?;
            let mut others = others
                .iter()
                .filter(|mount| is_ours(mount) && mount.target != staging);
            if let Some(other) = others.next() {
                let text = format!(
                    "volume {id} is for one writer, and is at {} already",
                    other.target.display()
                );
                return Err(Status::failed_precondition(text));
            }
        }
        let (from, to) = (source.to_string_lossy(), target.to_string_lossy());
        let bound = match there {
            Some(_) => Ok(()),
            None => {
                self.note_read_only(id, &mut staged, target, is_remounted)?;
                make_target(target, is_block)
                    .map_err(|error| Status::internal(format!("{}: {error}", target.display())))?;
                must(host, "mount", &["--bind", &from, &to]).map(drop)
            }
        };
        let bound = bound.and_then(|()| {
            if !is_remounted {
                return Ok(());
            }
            // The other options of the mount stay.
            must(host, "mount", &["-o", "remount,bind,ro", &to]).map(drop)
        });
        let bound = bound.and_then(|()| {
            let there = mounts::at(host, target)?;
            let is_good = there.is_some_and(|one| is_block || one.is_read_only == is_read_only);
            let text = || format!("{} did not become the wanted mount", target.display());
            is_good
                .then_some(())
                .ok_or_else(|| Status::internal(text()))
        });
        if let Err(refused) = bound {
            // A writable mount must not stand in for a read-only one.
            let unmounted = mounts::unmount(host, target, std::slice::from_ref(&device));
            let _ = unmounted.and_then(|()| remove_target(target));
            return Err(refused);
        }
        Ok(Nothing {})
    }

    /// Notes whether the target is published for reading, before it is mounted. Targets that are
    /// not mounted any more are dropped.
    fn note_read_only(
        &self,
        id: Uuid,
        staged: &mut Staged,
        target: &Path,
        is_read_only: bool,
    ) -> Result<(), Status> {
        let noted = &mut staged.read_only_targets;
        if is_read_only == noted.iter().any(|one| one == target) {
            return Ok(());
        }
        let mounted = mounts::all(&*self.host)?;
        noted.retain(|one| one != target && mounted.iter().any(|mount| mount.target == *one));
        if is_read_only {
            noted.push(target.to_owned());
        }
        self.records.write(id, staged)
    }

    pub(crate) fn unpublish(&self, asked: &NodeUnpublishVolumeRequest) -> Result<Nothing, Status> {
        let id = volume_id(&asked.volume_id)?;
        let target = PathBuf::from(required_path("target_path", &asked.target_path)?);
        let _one = self.pending.start(&asked.volume_id)?;
        let host = &*self.host;
        let devices = id.map_or_else(|| Ok(Vec::new()), |id| fabrics::devices(host, id))?;
        mounts::unmount(host, &target, &devices)?;
        remove_target(&target)?;
        Ok(Nothing {})
    }
}

/// A directory, or an empty file for a block device. Its parent is the orchestrator's.
fn make_target(target: &Path, is_block: bool) -> io::Result<()> {
    if is_block {
        let options = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(target);
        return options.map(drop);
    }
    match std::fs::create_dir(target) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && target.is_dir() => Ok(()),
        made => made,
    }
}

/// Removes what [`make_target`] made. A directory that is not empty has data: it stays.
fn remove_target(target: &Path) -> Result<(), Status> {
    let removed = match target.symlink_metadata() {
        Err(error) => Err(error),
        Ok(found) if found.is_dir() => std::fs::remove_dir(target),
        Ok(found) if found.len() == 0 => std::fs::remove_file(target),
        Ok(_) => Err(io::Error::other("it is no file of this driver")),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            let text = format!("cannot remove {}: {error}", target.display());
            Err(Status::internal(text))
        }
        _ => Ok(()),
    }
}
