//! Volumes of a run that show external devices. All volumes are of one family, so each may get any
//! device as parent.

use super::{GRANULES, VOLUME_UNITS, World};
use crate::ids::{Token, VersionId};
use crate::interface::Request;
use crate::tests::external;
use crate::tests::model::{History, Kind, Number};
use crate::tests::op::Op;
use crate::tests::rig::identity;

const FAMILY: u64 = 1;

fn units_of(device: u64) -> u64 {
    VOLUME_UNITS + device % 2
}

fn contents_of(device: u64) -> Vec<u64> {
    let values = (0..GRANULES).map(|granule| external::value(device, granule));
    values.collect()
}

impl World {
    /// Creates a volume, on a device or on none.
    pub(super) fn create_beside_devices(&mut self) -> (Token, Op) {
        let number = self.number();
        self.model
            .add(number, FAMILY, Kind::Volume, GRANULES as usize);
        let identity = identity(number);
        let device = self.random.below(3);
        let request = if device == 0 {
            Request::Create {
                identity,
                units: VOLUME_UNITS,
                thick: self.random.one_in(3),
            }
        } else {
            self.model.settle_on(number, &contents_of(device));
            let device = external::device(device, units_of(device));
            Request::CloneExternal { device, identity }
        };
        (self.rig.submit(request), Op::Create { number })
    }

    /// Gives a volume that no other request is about a device as parent.
    pub(super) fn set_external(
        &mut self,
        number: Number,
        version: VersionId,
    ) -> Option<(Token, Op)> {
        let volume = &self.model.versions[&number];
        let is_quiet = !volume.granules.iter().any(History::in_flight);
        if !is_quiet || self.ops.values().any(|op| op.is_about(number)) {
            return None;
        }
        let device = self.random.within(1, 2);
        let op = self.begin_set_parent(number, version, contents_of(device))?;
        let device = external::device(device, units_of(device));
        let request = Request::SetExternal { version, device };
        Some((self.rig.submit(request), op))
    }

    /// A pool at rest knows exactly the devices that volumes or snapshots show.
    pub(super) fn check_devices(&mut self) -> Result<(), String> {
        let state = self.rig.pool.state();
        for (id, device) in state.externals() {
            if state.versions.children(id).len() == 0 {
                return Err(format!("nothing shows {:?}", device.identity));
            }
            self.report.devices += 1;
        }
        Ok(())
    }
}
