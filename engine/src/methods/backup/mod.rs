//! `backup_*`: backups of snapshots of pools in a directory or an object store.

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::rc::Rc;

use nacre_bdev_pool::LvolInfo;
use nacre_engine_backup::{BadBackup, Header, Location};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::replies::refuse_nil;
use crate::refusal::Refusal;
use crate::rpc::error::Errno;
use crate::rpc::{Changes, Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::backup::{self, BackupPlace, Ended, Job, JobState, Operation, RestoreRequest};
use crate::services::pools::find_lvol;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<CreateBackup>()
        .add::<ListBackups>()
        .add::<VerifyBackup>()
        .add::<RestoreBackup>()
        .add::<DeleteBackup>()
        .add::<ListJobs>()
        .add::<CancelJob>();
}

/// The place of backups.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema, clap::Args)]
#[serde(deny_unknown_fields)]
pub struct BackupStore {
    /// `file:///path` of an existing directory on the daemon's machine, or `s3://bucket/prefix`.
    #[arg(value_name = "STORE")]
    pub location: String,
    /// URL of the S3 server. Default: Amazon's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    /// Region of the S3 server. Default: us-east-1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[arg(long)]
    pub region: Option<String>,
    /// A file of the daemon in the format of `~/.aws/credentials` that only the daemon's user can
    /// read. S3 needs it.
    #[schemars(with = "Option<String>")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "FILE")]
    pub credentials_file: Option<PathBuf>,
    /// A PEM file of the daemon with the certificates that sign the server's. Default: the
    /// system's.
    #[schemars(with = "Option<String>")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
}

impl BackupStore {
    fn place(self) -> Result<BackupPlace, RpcError> {
        let parsed = Location::parse(&self.location);
        let location = parsed.map_err(|failure| failure.refusal().field("store.location"))?;
        let is_s3 = matches!(location, Location::S3 { .. });
        let of_s3 = [
            ("endpoint", self.endpoint.is_some()),
            ("region", self.region.is_some()),
            ("credentials_file", self.credentials_file.is_some()),
            ("ca", self.ca.is_some()),
        ];
        for (field, is_set) in of_s3 {
            if is_set && !is_s3 {
                let cause = "a directory has none";
                let field = format!("store.{field}");
                return Err(RpcError::errno(Errno::EINVAL, cause).field(field));
            }
        }
        if is_s3 && self.credentials_file.is_none() {
            let cause = "an object store needs credentials";
            return Err(RpcError::errno(Errno::EINVAL, cause)
                .field("store.credentials_file")
                .remedy("name a file in the format of ~/.aws/credentials with mode 0600"));
        }
        for (field, path) in [
            ("credentials_file", &self.credentials_file),
            ("ca", &self.ca),
        ] {
            if path.as_ref().is_some_and(|path| !path.is_absolute()) {
                let cause = "the path must be absolute";
                let field = format!("store.{field}");
                return Err(RpcError::errno(Errno::EINVAL, cause).field(field));
            }
        }
        Ok(BackupPlace {
            location,
            text: self.location,
            endpoint: self.endpoint,
            region: self.region,
            credentials_file: self.credentials_file,
            ca: self.ca,
        })
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct BackupReply {
    #[schemars(with = "String")]
    pub backup: Uuid,
    /// Seconds since 1970.
    pub created: u64,
    /// Name of the volume at that time, and its UUID.
    pub volume: String,
    #[schemars(with = "String")]
    pub volume_uuid: Uuid,
    pub snapshot: String,
    #[schemars(with = "String")]
    pub snapshot_uuid: Uuid,
    pub size_bytes: u64,
    /// Bytes in the store that a restore reads. Backups share them.
    pub stored_bytes: u64,
    /// Bytes that this backup added to the store.
    pub new_bytes: u64,
    /// The backup with which it was compared.
    #[schemars(with = "Option<String>")]
    pub base: Option<Uuid>,
}

fn describe(header: &Header) -> BackupReply {
    BackupReply {
        backup: header.id,
        created: header.created,
        volume: header.volume.name.clone(),
        volume_uuid: header.volume.id,
        snapshot: header.snapshot.name.clone(),
        snapshot_uuid: header.snapshot.id,
        size_bytes: header.size_bytes,
        stored_bytes: header.stored_bytes,
        new_bytes: header.new_bytes,
        base: header.base,
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct JobReply {
    pub job: u32,
    pub operation: Operation,
    /// `running`, `complete`, `failed` or `cancelled`.
    pub state: &'static str,
    pub location: String,
    #[schemars(with = "String")]
    pub backup: Uuid,
    /// The snapshot, or the new volume; empty for others.
    pub subject: String,
    /// Parts of 4 MiB. The total is 0 until it is known.
    pub done_objects: u64,
    pub total_objects: u64,
    /// Bytes written to the store, or read from it.
    pub stored_bytes: u64,
    pub elapsed_s: f64,
    /// Estimated from the pace so far.
    pub left_s: Option<f64>,
    pub error: Option<String>,
    /// Of a verification: the damaged objects, and the number of further ones.
    pub damaged: Vec<String>,
    pub more_damaged: u64,
    /// Of a complete job.
    pub result: Option<BackupReply>,
    /// Of a deletion: another daemon backs up the volume, so a later deletion removes the objects.
    pub deferred: bool,
    /// Of a deletion: the reasons that objects stay, such as other backups with bad manifests. The
    /// backup is deleted; a later deletion removes the objects.
    pub left: Vec<String>,
}

fn describe_job(job: &Job) -> JobReply {
    let seconds = |time: std::time::Duration| (time.as_secs_f64() * 1000.0).round() / 1000.0;
    let mut reply = JobReply {
        job: job.number,
        operation: job.operation,
        state: "running",
        location: job.location.clone(),
        backup: job.backup,
        subject: job.subject.clone(),
        done_objects: job.progress.done(),
        total_objects: job.progress.total(),
        stored_bytes: job.progress.stored(),
        elapsed_s: seconds(job.elapsed()),
        left_s: job.left().map(seconds),
        error: None,
        damaged: Vec::new(),
        more_damaged: 0,
        result: None,
        deferred: false,
        left: Vec::new(),
    };
    match &*job.state.borrow() {
        JobState::Runs => {}
        JobState::Cancelled => reply.state = "cancelled",
        JobState::Failed(error) => {
            reply.state = "failed";
            let cause = error.data.as_ref().map(|data| data.cause.clone());
            reply.error = Some(cause.unwrap_or_else(|| error.message.clone()));
        }
        JobState::Complete(ended) => {
            reply.state = "complete";
            match ended {
                Ended::Created(header) | Ended::Restored(header) => {
                    reply.result = Some(describe(header));
                }
                Ended::Verified(verified) => {
                    reply.result = Some(describe(&verified.header));
                    reply.damaged = verified.damaged.iter().map(ToString::to_string).collect();
                    reply.more_damaged = verified.more_damaged;
                }
                Ended::Deleted(removed) => {
                    reply.deferred = removed.deferred;
                    reply.left = removed.left.iter().map(ToString::to_string).collect();
                }
            }
        }
    }
    reply
}

pub struct CreateBackup;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateBackupParams {
    /// UUID, or `pool/name`.
    pub snapshot: String,
    pub store: BackupStore,
    /// The volume to which the backup belongs: UUID, or `pool/name`. Default: the one that grew
    /// from the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// Write all data. Default: share unchanged data of the volume's newest backup.
    #[serde(default)]
    pub full: bool,
}

impl Method<Engine> for CreateBackup {
    const NAME: &'static str = "backup_create";
    const ABOUT: &'static str = "Backs up a snapshot of a pool in the background; backup_jobs lists the progress. Unchanged \
         data of the volume's newest backup is not written again.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = CreateBackupParams;
    type Reply = JobReply;

    async fn apply(params: CreateBackupParams, engine: Rc<Engine>) -> Result<JobReply, RpcError> {
        engine.earlier_changes().await;
        let place = params.store.place()?;
        let (pool, snapshot) = find_lvol(&engine, "snapshot", &params.snapshot)?;
        let snapshot: LvolInfo = snapshot.info();
        if !snapshot.is_snapshot {
            let cause = format!("\"{}\" is not a snapshot", params.snapshot);
            return Err(RpcError::errno(Errno::EINVAL, cause)
                .field("snapshot")
                .remedy("make one of the volume with lvol_snapshot"));
        }
        let named = match &params.volume {
            Some(volume) => Some(find_lvol(&engine, "volume", volume)?.1),
            None => None,
        };
        let volume = backup::volume_of(&pool, &snapshot, named.as_deref()).await?;
        let source = (pool, Rc::new(snapshot));
        let job = backup::create(&engine, place, source, &volume, params.full);
        Ok(describe_job(&*job.await?))
    }
}

pub struct ListBackups;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListBackupsParams {
    pub store: BackupStore,
    /// Only those of the volume with this UUID.
    #[schemars(with = "Option<String>")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_uuid: Option<Uuid>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct ListBackupsReply {
    /// Oldest first.
    pub backups: Vec<BackupReply>,
    /// Backups whose manifest cannot be used.
    pub bad: Vec<BadBackupReply>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct BadBackupReply {
    #[schemars(with = "String")]
    pub backup: Uuid,
    #[schemars(with = "String")]
    pub volume_uuid: Uuid,
    pub cause: String,
}

impl From<BadBackup> for BadBackupReply {
    fn from(bad: BadBackup) -> Self {
        Self {
            backup: bad.id,
            volume_uuid: bad.volume,
            cause: bad.cause.to_string(),
        }
    }
}

impl Method<Engine> for ListBackups {
    const NAME: &'static str = "backup_list";
    const ABOUT: &'static str = "Lists the backups in a store.";
    const CLASS: Class = Class::Admin;
    const CHANGES: Changes = Changes::Nothing;
    const ORDER: Order = Order::Free;
    type Params = ListBackupsParams;
    type Reply = ListBackupsReply;

    async fn apply(
        params: ListBackupsParams,
        _engine: Rc<Engine>,
    ) -> Result<ListBackupsReply, RpcError> {
        let listed = backup::list(params.store.place()?, params.volume_uuid).await?;
        Ok(ListBackupsReply {
            backups: listed.backups.iter().map(describe).collect(),
            bad: listed.bad.into_iter().map(BadBackupReply::from).collect(),
        })
    }
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BackupParams {
    /// UUID of the backup; backup_list shows it.
    #[schemars(with = "String")]
    pub backup: Uuid,
    pub store: BackupStore,
}

pub struct VerifyBackup;

impl Method<Engine> for VerifyBackup {
    const NAME: &'static str = "backup_verify";
    const ABOUT: &'static str =
        "Reads all data of a backup in the background, and compares the checksums.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = BackupParams;
    type Reply = JobReply;

    async fn apply(params: BackupParams, engine: Rc<Engine>) -> Result<JobReply, RpcError> {
        let job = backup::verify(&engine, params.store.place()?, params.backup)?;
        Ok(describe_job(&job))
    }
}

pub struct RestoreBackup;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreBackupParams {
    /// UUID of the backup; backup_list shows it.
    #[schemars(with = "String")]
    pub backup: Uuid,
    pub store: BackupStore,
    /// Name or UUID of the pool that gets the volume.
    pub pool: String,
    /// Name of the new volume, which has it when the restore is complete.
    pub name: String,
    /// Default: random.
    #[schemars(with = "Option<String>")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
}

impl Method<Engine> for RestoreBackup {
    const NAME: &'static str = "backup_restore";
    const ABOUT: &'static str =
        "Makes a thin volume from a backup in the background. Damaged data ends the restore.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = RestoreBackupParams;
    type Reply = JobReply;

    async fn apply(params: RestoreBackupParams, engine: Rc<Engine>) -> Result<JobReply, RpcError> {
        engine.earlier_changes().await;
        refuse_nil(params.uuid)?;
        let request = RestoreRequest {
            place: params.store.place()?,
            backup: params.backup,
            pool: engine.devices.pools.find(&params.pool)?,
            name: params.name,
            id: params.uuid.unwrap_or_else(Uuid::new_v4),
        };
        Ok(describe_job(&*backup::restore(&engine, request)?))
    }
}

pub struct DeleteBackup;

impl Method<Engine> for DeleteBackup {
    const NAME: &'static str = "backup_delete";
    const ABOUT: &'static str =
        "Deletes a backup in the background, with the data that no other backup of the volume has.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = BackupParams;
    type Reply = JobReply;

    async fn apply(params: BackupParams, engine: Rc<Engine>) -> Result<JobReply, RpcError> {
        let job = backup::delete(&engine, params.store.place()?, params.backup)?;
        Ok(describe_job(&job))
    }
}

pub struct ListJobs;

impl Method<Engine> for ListJobs {
    const NAME: &'static str = "backup_jobs";
    const ABOUT: &'static str =
        "Lists the backup jobs that run, and the last ones that ended, with their progress.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = Vec<JobReply>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<JobReply>, RpcError> {
        let jobs = engine.devices.backups.list();
        Ok(jobs.iter().map(|job| describe_job(job)).collect())
    }
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JobParams {
    /// Number of the job.
    pub job: u32,
}

pub struct CancelJob;

impl Method<Engine> for CancelJob {
    const NAME: &'static str = "backup_cancel";
    const ABOUT: &'static str =
        "Cancels a backup job. A job that is about to complete, or has ended, ignores it.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = JobParams;
    type Reply = JobReply;

    async fn apply(params: JobParams, engine: Rc<Engine>) -> Result<JobReply, RpcError> {
        let job = engine.devices.backups.find(params.job)?;
        job.progress.cancel();
        Ok(describe_job(&job))
    }
}
