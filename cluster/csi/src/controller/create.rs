//! `CreateVolume`, `DeleteVolume`.
//!
//! The id of a volume follows from its name, so that a repeated request finds the volume that an
//! earlier one made. The volume's description has a digest of the parameters, and ends with the
//! source of the contents, if there is one.

use tonic::{Code, Status};
use tracing::warn;
use uuid::Uuid;

use super::snapshots::ContentSource;
use super::{Controller, described, require_capabilities};
use crate::capability::{Capability, MIB, Parameters, Sizes, checked_name, volume_id};
use crate::daemon::{Volume, VolumeOrigin, WantedVolume, listed};
use crate::messages::Nothing;
use crate::messages::controller::{CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest};

/// Longest part of the name in the description, which has at most 255 bytes.
const NAME_IN_DESCRIPTION: usize = 128;
const MARK: &str = "parameters";

impl Controller {
    pub(crate) fn create(
        &self,
        asked: CreateVolumeRequest,
    ) -> Result<CreateVolumeResponse, Status> {
        let name = checked_name(&asked.name)?;
        require_capabilities(&asked.volume_capabilities)?;
        for capability in &asked.volume_capabilities {
            Capability::read(Some(capability)).map_err(|unfit| unfit.invalid())?;
        }
        let source = ContentSource::read(asked.volume_content_source.as_ref())?;
        if !asked.mutable_parameters.is_empty() {
            let text = "mutable_parameters: this driver has none";
            return Err(Status::invalid_argument(text));
        }
        let parameters = Parameters::read(&asked.parameters)?;
        let sizes = Sizes::read(asked.capacity_range.as_ref())?;
        if source.is_none() {
            sizes.chosen()?;
        }
        let deployment = self.daemon.deployment()?;
        parameters.refuse_ignored(deployment.is_cluster())?;
        let id = deployment.volume_id(name);
        let _one = self.pending.start(&id.to_string())?;
        let volume = match self.daemon.volume(id)? {
            Some(volume) => volume,
            None => self.make(id, name, sizes, parameters.clone(), source)?,
        };
        let differs = differs(&volume, &parameters)
            .or_else(|| has_other_source(&volume, source).map(str::to_owned));
        let differs = differs.or_else(|| {
            let text = || {
                format!(
                    "it has {} bytes, which capacity_range excludes",
                    volume.bytes
                )
            };
            (!sizes.admits(volume.bytes)).then(text)
        });
        if let Some(why) = differs {
            let text = format!("volume \"{name}\" exists, and {why}");
            return Err(Status::already_exists(text));
        }
        if let Some(source) = source {
            self.end_copy(source, id)?;
        }
        Ok(CreateVolumeResponse {
            volume: Some(described(&volume)),
        })
    }

    fn make(
        &self,
        id: Uuid,
        name: &str,
        sizes: Sizes,
        parameters: Parameters,
        source: Option<ContentSource>,
    ) -> Result<Volume, Status> {
        let sizes = match source {
            Some(source) => sizes.with_least(self.source_bytes(source)?)?,
            None => sizes,
        };
        let wanted = WantedVolume {
            id,
            name: volume_name(id, name),
            description: description(id, name, &parameters, source),
            mebibytes: sizes.chosen()? / MIB,
            parameters,
            snapshot: match source {
                Some(source) => Some(self.contents(source, id)?),
                None => None,
            },
        };
        self.daemon.create(&wanted).or_else(|refused| {
            // Another controller may have made it meanwhile.
            match self.daemon.volume(id) {
                Ok(Some(volume)) if refused.code() == Code::AlreadyExists => Ok(volume),
                Ok(None) => Err(match source.map(|source| self.end_copy(source, id)) {
                    Some(Err(left)) => Status::new(
                        refused.code(),
                        format!(
                            "{}; and the copy of its source stays until the next try: {}",
                            refused.message(),
                            left.message()
                        ),
                    ),
                    _ => refused,
                }),
                _ => Err(refused),
            }
        })
    }

    pub(crate) fn delete(&self, asked: &DeleteVolumeRequest) -> Result<Nothing, Status> {
        let Some(id) = volume_id(&asked.volume_id)? else {
            return Ok(Nothing {});
        };
        let _one = self.pending.start(&asked.volume_id)?;
        // Left by a creation that was given up between the copy and the volume. If it cannot be
        // deleted now, a later snapshot does so.
        if let Err(error) = self.end_left_copy(id) {
            let error = error.message();
            warn!(volume = %id, error, "the copy of its source stays");
        }
        let Some(volume) = self.daemon.volume(id)? else {
            return Ok(Nothing {});
        };
        if let Some(publication) = self.daemon.publication(&volume)? {
            if publication.any_host || !publication.hosts.is_empty() {
                let hosts = if publication.any_host {
                    "any host".to_owned()
                } else {
                    listed(&publication.hosts)
                };
                let text = format!("volume {} is published to {hosts}", volume.name);
                return Err(Status::failed_precondition(text));
            }
            self.daemon.unpublish(&volume)?;
        }
        self.daemon.delete(&volume)?;
        Ok(Nothing {})
    }
}

/// The volume's name at the daemon: the name of the request if the daemon accepts it, else
/// `csi-ID`.
fn volume_name(id: Uuid, name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    // A name that reads as an id could be taken for another volume's id.
    if name.len() <= MAX_NAME && name.chars().all(is_plain) && Uuid::parse_str(name).is_err() {
        name.to_owned()
    } else {
        format!("csi-{id}")
    }
}

/// Longest name of the daemon's volumes.
const MAX_NAME: usize = 63;

fn digest(id: Uuid, parameters: &Parameters) -> Uuid {
    Uuid::new_v5(&id, parameters.canonical().as_bytes())
}

fn description(
    id: Uuid,
    name: &str,
    parameters: &Parameters,
    source: Option<ContentSource>,
) -> String {
    let plain = name.chars().filter(|c| c.is_ascii_graphic() || *c == ' ');
    let plain: String = plain.take(NAME_IN_DESCRIPTION).collect();
    let source = match source {
        Some(ContentSource::Snapshot(id)) => format!(" from snapshot {id}"),
        Some(ContentSource::Volume(id)) => format!(" from volume {id}"),
        None => String::new(),
    };
    format!(
        "CSI volume {plain} {MARK} {}{source}",
        digest(id, parameters)
    )
}

/// The words of a description before the source, and the source.
fn without_source(description: &str) -> (&str, Option<ContentSource>) {
    let read = || {
        let (before, id) = description.rsplit_once(' ')?;
        let id = id.parse().ok()?;
        let snapshot = before.strip_suffix(" from snapshot");
        let volume = before.strip_suffix(" from volume");
        let (before, source) = snapshot
            .map(|before| (before, ContentSource::Snapshot(id)))
            .or_else(|| Some((volume?, ContentSource::Volume(id))))?;
        // A name may end so, and the digest would follow.
        let (mark, digest) = before.rsplit_once(' ')?;
        let is_whole = mark.ends_with(MARK) && digest.parse::<Uuid>().is_ok();
        is_whole.then_some((before, Some(source)))
    };
    read().unwrap_or((description, None))
}

/// The digest of the parameters, if the description has one. An operator may have changed it.
fn marked_digest(volume: &Volume) -> Option<Uuid> {
    let (before, digest) = without_source(&volume.description).0.rsplit_once(' ')?;
    digest.parse().ok().filter(|_| before.ends_with(MARK))
}

/// The source of the volume's contents. The daemon's record of the volume has it, and it never
/// changes. The description has it, too, for volumes that an earlier daemon made.
pub(super) fn source(volume: &Volume) -> Option<ContentSource> {
    match volume.origin {
        Some(VolumeOrigin::Snapshot(id)) => Some(ContentSource::Snapshot(id)),
        Some(VolumeOrigin::Volume(id)) => Some(ContentSource::Volume(id)),
        Some(VolumeOrigin::Foreign) => None,
        None => without_source(&volume.description).1,
    }
}

/// Why the volume is not one with the contents of this source, or, without one, an empty one.
fn has_other_source(volume: &Volume, asked: Option<ContentSource>) -> Option<&'static str> {
    let is_other = volume.origin == Some(VolumeOrigin::Foreign) || source(volume) != asked;
    let is_known = volume.origin.is_some() || marked_digest(volume).is_some();
    match (is_other, is_known) {
        (false, _) => None,
        (true, true) => Some("it has the contents of another source, or of none"),
        (true, false) => Some(
            "nothing says that it has the contents of this source: its description was changed",
        ),
    }
}

/// Why the volume is not one of these parameters. The digest decides: a volume whose replica is
/// being replaced has one more for a while. An operator may have changed the description: then the
/// number of replicas is compared.
pub(super) fn differs(volume: &Volume, parameters: &Parameters) -> Option<String> {
    if let Some(found) = marked_digest(volume) {
        let is_other = found != digest(volume.id, parameters);
        return is_other.then(|| "it was made with other parameters".to_owned());
    }
    let wanted = parameters.replica_count();
    let text = || format!("it has {} replicas, not {wanted}", volume.replicas);
    (volume.replicas != wanted).then(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_interface_become_names_of_the_daemon() {
        let id = Uuid::from_u128(1);
        assert_eq!(volume_name(id, "pvc-1"), "pvc-1");
        let other = format!("csi-{id}");
        for name in [
            "größe",
            "a b",
            &"x".repeat(128),
            &Uuid::from_u128(2).to_string(),
        ] {
            assert_eq!(volume_name(id, name), other, "{name}");
        }
    }

    /// Goal: the description has the source, and its longest form fits.
    #[test]
    fn the_source_is_in_the_description() {
        let id = Uuid::from_u128(1);
        let parameters = Parameters::default();
        let from = Uuid::from_u128(9);
        let long = "x".repeat(128);
        let misleading = format!("x {MARK} {from} from snapshot {from}");
        for source in [
            None,
            Some(ContentSource::Snapshot(from)),
            Some(ContentSource::Volume(from)),
        ] {
            for name in ["v", &long, &misleading] {
                let volume = Volume {
                    id,
                    name: "v".to_owned(),
                    bytes: 1,
                    replicas: 1,
                    description: description(id, name, &parameters, source),
                    subsystems: Vec::new(),
                    origin: None,
                };
                assert!(volume.description.len() <= 255, "{}", volume.description);
                assert_eq!(self::source(&volume), source, "{name}");
                assert_eq!(differs(&volume, &parameters), None);
            }
        }
    }

    /// Goal: a volume with other contents is no answer to a request, whatever an operator did to
    /// its description. Method: each origin with each request, with and without the driver's own
    /// description.
    #[test]
    fn other_sources_are_found() {
        let id = Uuid::from_u128(1);
        let (one, two) = (Uuid::from_u128(8), Uuid::from_u128(9));
        let parameters = Parameters::default();
        let sources = [
            None,
            Some(ContentSource::Snapshot(one)),
            Some(ContentSource::Volume(one)),
            Some(ContentSource::Snapshot(two)),
        ];
        let origin = |source: Option<ContentSource>| match source? {
            ContentSource::Snapshot(id) => Some(VolumeOrigin::Snapshot(id)),
            ContentSource::Volume(id) => Some(VolumeOrigin::Volume(id)),
        };
        let volume = |description: String, origin| Volume {
            id,
            name: "v".to_owned(),
            bytes: 1,
            replicas: 1,
            description,
            subsystems: Vec::new(),
            origin,
        };
        for has in sources {
            let own = description(id, "v", &parameters, has);
            let all = [
                (volume(own.clone(), origin(has)), "of this daemon"),
                (volume("mine".to_owned(), origin(has)), "changed"),
                (volume(own, None), "of an earlier daemon"),
            ];
            for (volume, kind) in all {
                for asked in sources {
                    let found = has_other_source(&volume, asked);
                    assert_eq!(found.is_none(), has == asked, "{kind}: {has:?} {asked:?}");
                }
                assert_eq!(source(&volume), has, "{kind}");
            }
        }
        // A clone by an earlier daemon with a changed description, or a volume that began empty.
        let unknown = volume("mine".to_owned(), None);
        assert_eq!(has_other_source(&unknown, None), None);
        let why = has_other_source(&unknown, sources[1]).expect("refused");
        assert!(why.contains("its description was changed"), "{why}");
        let foreign = volume("mine".to_owned(), Some(VolumeOrigin::Foreign));
        for asked in sources {
            assert!(has_other_source(&foreign, asked).is_some(), "{asked:?}");
        }
    }

    #[test]
    fn other_parameters_are_found() {
        let id = Uuid::from_u128(1);
        let parameters = Parameters::default();
        let mut volume = Volume {
            id,
            name: "v".to_owned(),
            bytes: 1,
            replicas: 1,
            description: description(id, &"é".repeat(100), &parameters, None),
            subsystems: Vec::new(),
            origin: None,
        };
        assert!(volume.description.len() <= 255);
        assert_eq!(differs(&volume, &parameters), None);
        let thin = Parameters {
            is_thin: true,
            ..Default::default()
        };
        assert!(differs(&volume, &thin).is_some());
        volume.replicas = 2;
        assert_eq!(differs(&volume, &parameters), None, "one is being replaced");
        volume.replicas = 1;
        volume.description = "ours".to_owned();
        assert_eq!(differs(&volume, &thin), None);
        volume.replicas = 2;
        assert!(differs(&volume, &thin).is_some());
    }
}
