//! Commands about devices outside of the pool, and the core's reads of them.

use std::sync::Arc;

use nacre_bdev::{Bdev, Claim};
use nacre_bdev_pool_core::format::record::Identity;
use nacre_bdev_pool_core::ids::{Token, VersionId};
use nacre_bdev_pool_core::interface::{External, Request};
use nacre_bdev_pool_core::map::EXTERNAL_UNIT;
use nacre_bdev_pool_core::pool::{Pool, is_own};
use uuid::Uuid;

use super::commands::{Open, find};
use super::externals::Source;
use super::lanes::LaneRequest;
use super::{Keeper, Stage};
use crate::fit::external_units;
use crate::model::{Answer, ExternalParent, ExternalWork, Outcome, PoolError};

impl Keeper {
    /// Takes a device, and begins its use.
    pub(super) fn use_external(&mut self, claim: Arc<Claim>, work: ExternalWork, answer: Answer) {
        let Stage::Open(pool) = &self.stage else {
            return answer.closed();
        };
        let device = ExternalParent {
            id: claim.layer().uuid(),
            name: claim.layer().name().to_owned(),
        };
        let wanted = request_of(pool, &claim, work);
        let opened = wanted.and_then(|request| {
            self.externals.open(&self.disks, &self.shared, claim)?;
            Ok(request)
        });
        match opened {
            Err(error) => answer.fail(error),
            Ok(None) => {
                self.refresh_externals(None);
                answer.send(Outcome::Done);
            }
            Ok(Some(request)) => {
                self.externals.pin(device.id);
                let source = Source::new(device, &self.externals);
                let token = self.commands.insert(Open::External(answer, source));
                self.submit(token as Token, request);
            }
        }
    }

    pub(super) fn detach_external(&mut self, device: Uuid) {
        self.externals.remove(device);
        self.refresh_externals(None);
    }

    /// See `Externals::refresh`.
    pub(super) fn refresh_externals(&mut self, changed: Option<&[VersionId]>) {
        if let Stage::Open(pool) = &self.stage {
            let known = (&self.maps, &*self.shared);
            self.externals.refresh(pool, known, changed);
        }
    }

    /// Reads granules of an external device, for a lane or for a copy of the pool itself.
    pub(super) fn order_external(
        &mut self,
        token: Token,
        (version, place): (VersionId, u64),
        granules: u16,
    ) {
        if !is_own(token) {
            let state = LaneRequest::ReadsExternal;
            return self.order_read_of(token, EXTERNAL_UNIT, granules, state);
        }
        if let Stage::Open(pool) = &self.stage {
            let ios = self.fills.begin_read(token, granules, None);
            self.externals.read(pool, (version, place), ios);
        }
    }
}

/// The request of a use of a device. `None`: volumes show it already.
fn request_of(
    pool: &Pool,
    claim: &Claim,
    work: ExternalWork,
) -> Result<Option<Request>, PoolError> {
    let layer = claim.layer();
    let units = external_units(claim, pool.superblock().geometry.unit_bytes())?;
    let device = External {
        identity: Identity {
            id: layer.uuid(),
            name: layer.name().to_owned(),
        },
        units,
    };
    Ok(Some(match work {
        ExternalWork::Attach => {
            let known = pool.state().externals().map(|(_, version)| version);
            let needed = known.filter(|version| version.identity.id == device.identity.id);
            let needed = needed.map(|version| version.units).max();
            let id = layer.uuid();
            return match needed.ok_or(PoolError::Unknown { id })? {
                needed if needed <= units => Ok(None),
                needed => Err(PoolError::Unfit {
                    what: "bdev",
                    why: format!("it has {units} units, fewer than the {needed} of volumes on it"),
                }),
            };
        }
        ExternalWork::Clone { id, name } => Request::CloneExternal {
            device,
            identity: Identity { id, name },
        },
        ExternalWork::SetParent { lvol } => Request::SetExternal {
            version: find(pool, lvol)?,
            device,
        },
    }))
}
