//! The split module: divides a base device into parts of equal size, each a device.
//!
//! ```text
//!   base   0         size       2*size      3*size    end
//!          ├── p0 ───┼── p1 ───┼── p2 ───┤ unused ──┤
//! ```
//!
//! The parts share one claim on the base, so no other user writes to it. A part keeps its offset
//! and size: a larger base changes nothing, and a smaller one cuts off the parts beyond its end.
//! The stored call names the size of the parts, so a start on a larger base makes the same ones.
//! The UUID of a part is derived from its offset and size: a known UUID never denotes other blocks.
//! The parts are deleted together, or with the base.

mod channel;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use nacre_hugepages::Pool;
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing::warn;
use uuid::Uuid;

use crate::device::{Bdev, Geometry, Limits};
use crate::layer::ModuleQueue;
use crate::listing::{ListAnswer, ListQuery};
use crate::module::{CreateError, MethodDoc, Module};
use crate::queue::Queue;
use crate::registry::Registry;
use crate::stack::{Base, Stacked, derived_uuid};

/// Largest number of parts: each has queues on every core.
pub const MAX_PARTS: u32 = 1024;

const MIB: u64 = 1 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The base device; the parts are named after it: `disk0p0`, `disk0p1`, and so on.
    #[cfg_attr(feature = "clap", arg(value_name = "BASE"))]
    pub base_bdev: String,
    /// Number of parts, at most 1024. Fewer are made if no more fit.
    #[cfg_attr(feature = "clap", arg(value_name = "COUNT"))]
    pub split_count: u32,
    /// Size of each part in MiB; 0: the base is divided equally.
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "MIB", default_value_t = 0))]
    pub split_size_mb: u64,
    /// Size of each part in bytes, a multiple of the block size; not with `split_size_mb`. An
    /// equal division that is not in whole MiB is stored with it. SPDK has no such parameter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "BYTES", conflicts_with = "split_size_mb")
    )]
    pub part_bytes: Option<u64>,
}

/// Names the base, in the parameters of `bdev_split_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ByBase {
    /// The base device, whose parts are deleted.
    pub base_bdev: String,
}

/// A block device that is one part of the base.
pub struct Part {
    name: String,
    uuid: Uuid,
    index: usize,
    /// Start of the part on the base, in blocks.
    offset: u64,
    blocks: u64,
    parts: Arc<Parts>,
}

/// The state that the parts of one base share.
struct Parts {
    base: Base,
    /// Smallest number of blocks of the base since the part's last `forget_least`, by part.
    least_of_base: Mutex<Vec<u64>>,
}

impl Module for Part {
    const KIND: &'static str = "split";
    const ABOUT: &'static str = "Parts of another device, named after it: p0, p1, …";
    const PRODUCT: &'static str = "Split Disk";
    const CREATE: MethodDoc = MethodDoc {
        name: "bdev_split_create",
        about: "Divides a device into parts of equal size, and answers their names.",
    };
    const DELETE: MethodDoc = MethodDoc {
        name: "bdev_split_delete",
        about: "Deletes the parts of a device and the devices stacked on them; the device stays.",
    };
    const BASE: Option<&'static str> = Some("base_bdev");
    const UNDECODABLE: i32 = -32602;
    const DELETED_BY: (&'static str, &'static str) =
        ("base_bdev", "/driver_specific/split/base_bdev");
    const NOT_FOUND: Option<(i32, &'static str)> = Some((-32602, "No such file or directory"));
    type Config = Config;
    type Created = Vec<String>;
    type Named = ByBase;
    type Error = CreateError;

    fn names(config: &Config) -> Vec<String> {
        let count = config.split_count.min(MAX_PARTS);
        (0..count).map(|index| config.name_of(index)).collect()
    }

    fn create(config: &mut Config, registry: &Registry) -> Result<Vec<Arc<dyn Bdev>>, CreateError> {
        let parts = create(config, registry)?;
        Ok(parts
            .into_iter()
            .map(|part| part as Arc<dyn Bdev>)
            .collect())
    }

    fn created(names: Vec<String>) -> Vec<String> {
        names
    }

    /// SPDK replies without names here.
    fn deferred(_names: Vec<String>) -> Vec<String> {
        Vec::new()
    }

    fn check(config: &Config) -> Result<(), CreateError> {
        if config.split_count > 0 {
            return Ok(());
        }
        Err(CreateError::Parameter {
            field: "split_count",
            cause: "0 parts".to_owned(),
            remedy: "give the number of parts",
        })
    }

    fn named(named: ByBase) -> String {
        format!("{}p0", named.base_bdev)
    }

    fn refusal(config: &Config, errno_text: &str) -> Option<String> {
        let (count, base) = (config.split_count, &config.base_bdev);
        Some(format!(
            "Failed to create {count} split bdevs from '{base}': {errno_text}"
        ))
    }
}

impl Config {
    fn name_of(&self, index: u32) -> String {
        format!("{}p{index}", self.base_bdev)
    }

    /// Names the size of the parts, so that the call makes the same ones on a larger base.
    fn fix_size(&mut self, bytes: u64) {
        if self.split_size_mb != 0 || self.part_bytes.is_some() {
            return;
        }
        if bytes.is_multiple_of(MIB) {
            self.split_size_mb = bytes / MIB;
        } else {
            self.part_bytes = Some(bytes);
        }
    }

    /// The number of parts and the blocks of each, on a base of this geometry.
    fn layout(&self, base: Geometry) -> Result<(u32, u64), CreateError> {
        let refused = |field, cause: String, remedy| CreateError::Parameter {
            field,
            cause,
            remedy,
        };
        let block_size = u64::from(base.block_size);
        let (field, bytes) = match (self.part_bytes, self.split_size_mb) {
            (None, 0) => ("split_count", 0),
            (None, size) => ("split_size_mb", size.saturating_mul(MIB)),
            (Some(bytes), 0) if bytes != 0 && bytes.is_multiple_of(block_size) => {
                ("part_bytes", bytes)
            }
            (Some(bytes), size) => {
                let cause = match size {
                    0 => format!("{bytes} bytes are not whole blocks of {block_size}"),
                    _ => "the size is given twice".to_owned(),
                };
                let remedy = "give whole blocks, or split_size_mb instead";
                return Err(refused("part_bytes", cause, remedy));
            }
        };
        let each = match bytes {
            0 => base.blocks / u64::from(self.split_count.max(1)),
            _ => bytes / block_size,
        };
        let most = base.blocks.checked_div(each).unwrap_or(0);
        if most == 0 && bytes == 0 {
            let cause = format!("{} parts of {} blocks", self.split_count, base.blocks);
            let remedy = "a part has at least one block: give fewer parts";
            return Err(refused(field, cause, remedy));
        }
        if most == 0 {
            let cause = format!(
                "{bytes} bytes do not fit the device of {} bytes",
                base.bytes()
            );
            return Err(refused(field, cause, "give a smaller size"));
        }
        let count = u64::from(self.split_count).min(most);
        match u32::try_from(count) {
            Ok(count) if count <= MAX_PARTS => Ok((count, each)),
            _ => {
                let cause = format!("{count} parts are more than {MAX_PARTS}");
                Err(refused("split_count", cause, "give fewer parts"))
            }
        }
    }
}

/// Creates the parts, claims the base exclusively for them, and writes their size to `config`. The
/// caller registers them.
pub fn create(config: &mut Config, registry: &Registry) -> Result<Vec<Arc<Part>>, CreateError> {
    Part::check(config)?;
    let base = registry.get(&config.base_bdev)?.layer;
    let geometry = base.geometry();
    let (count, blocks) = config.layout(geometry)?;
    let bytes = blocks * u64::from(geometry.block_size);
    if count < config.split_count {
        let (bdev, requested) = (&config.base_bdev, config.split_count);
        warn!(bdev, requested, count, "no more parts fit on the device");
    }
    let names: Vec<String> = (0..count).map(|index| config.name_of(index)).collect();
    let parts = Arc::new(Parts {
        base: Base::claim(registry, &config.base_bdev, &names)?,
        least_of_base: Mutex::new(vec![u64::MAX; names.len()]),
    });
    config.fix_size(bytes);
    let part = |(index, name): (usize, String)| {
        let place = format!("{name} {bytes} bytes from {}", index as u64 * bytes);
        Arc::new(Part {
            uuid: derived_uuid(None, parts.base.uuid(), &place),
            name,
            index,
            offset: index as u64 * blocks,
            blocks,
            parts: Arc::clone(&parts),
        })
    };
    Ok(names.into_iter().enumerate().map(part).collect())
}

impl Part {
    /// The blocks of this part on a base that has `base` blocks.
    fn within(&self, base: u64) -> u64 {
        base.saturating_sub(self.offset).min(self.blocks)
    }

    /// Forgets the base's fewest blocks for this part, and keeps them for the others. The base has
    /// one count for all.
    fn forget_least_of_base(&self) -> u64 {
        let base = self.parts.base.module();
        let mut all = self.parts.least_of_base.lock();
        let least = base.forget_least();
        for part in all.iter_mut() {
            *part = least.min(*part);
        }
        std::mem::replace(&mut all[self.index], base.present_blocks())
    }

    /// A unit of the base in blocks; 0 (none) unless the part begins at a multiple of it.
    fn aligned(&self, unit: u32) -> u32 {
        if unit != 0 && self.offset.is_multiple_of(u64::from(unit)) {
            unit
        } else {
            0
        }
    }
}

impl Stacked for Part {
    fn base(&self) -> &Base {
        &self.parts.base
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn product_name(&self) -> &'static str {
        Self::PRODUCT
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn geometry(&self) -> Geometry {
        let base = self.parts.base.geometry();
        let physical_blocks = base.physical_block_size / base.block_size;
        Geometry {
            blocks: self.within(base.blocks),
            physical_block_size: self.aligned(physical_blocks).max(1) * base.block_size,
            ..base
        }
    }

    /// The base's units hold only for parts that begin at a multiple of them.
    fn limits(&self) -> Limits {
        let base = self.parts.base.limits();
        Limits {
            atomic_blocks: self.aligned(base.atomic_blocks).max(1),
            optimal_boundary_blocks: self.aligned(base.optimal_boundary_blocks),
            optimal_write_blocks: self.aligned(base.optimal_write_blocks),
            unmap_granularity_blocks: self.aligned(base.unmap_granularity_blocks),
            unmap_alignment_blocks: self.aligned(base.unmap_alignment_blocks),
            ..base
        }
    }

    fn queue(self: Arc<Self>, base: ModuleQueue, _pool: &Pool) -> Box<dyn Queue> {
        Box::new(channel::Channel::new(&self, base))
    }

    /// Unknown: the base only has a number for all its parts.
    fn allocated_blocks(&self) -> Option<u64> {
        None
    }

    fn list_allocated(&self, query: ListQuery, answer: ListAnswer) {
        answer.give_all(&query);
    }

    fn present_blocks(&self) -> u64 {
        self.within(self.parts.base.module().present_blocks())
    }

    fn least_blocks(&self) -> u64 {
        // A question changes nothing: the base's count may be the only lasting record of a loss.
        let of_base = self.parts.base.module().least_blocks();
        self.within(of_base.min(self.parts.least_of_base.lock()[self.index]))
    }

    fn forget_least(&self) -> u64 {
        self.within(self.forget_least_of_base())
    }

    fn driver_specific(&self) -> serde_json::Value {
        let base = self.parts.base.name();
        serde_json::json!({"split": {"base_bdev": base, "offset_blocks": self.offset}})
    }
}
