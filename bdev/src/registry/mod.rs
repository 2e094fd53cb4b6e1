//! The registry of block devices: it finds them by name, alias or UUID, grants claims to their
//! users, and sends events when they change. RPC methods, namespaces and volumes use it.
//!
//! ```text
//!   register ──> listed ──remove──> removing ──last queue closed──> gone (the ticket is done)
//!                  │                   queues answer Gone, the name is still taken
//!                  ├ claims: exclusive (a device stacked on it), shared (namespaces),
//!                  │         read-only (volumes of a pool that show its contents)
//!                  └ events to subscribers: registered, resized, cut (it has fewer blocks than
//!                            announced), removing, unregistered
//! ```
//!
//! It belongs to the control plane. One lock protects it. No callback, and no destructor of a
//! device, runs under the lock. The data path uses a [`LayerQueue`] and never the registry.

mod claim;
mod events;
mod resize;
#[cfg(test)]
mod tests;
mod ticket;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use nacre_hugepages::Pool;
use parking_lot::Mutex;
use uuid::Uuid;

pub use claim::{Claim, Holder, Usage, Watch};
pub use events::{Event, Events, Subscription};
pub use resize::Shrink;
pub use ticket::DeleteTicket;

use self::claim::ClaimRecord;
use self::events::Bus;
use crate::device::{Bdev, OpenError};
use crate::layer::{Layer, LayerQueue};
use crate::stats::DeviceStats;

/// Longest name or alias in bytes.
pub const MAX_NAME: usize = 255;

/// The error of a registry call. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error("no bdev has the name, alias or UUID \"{name}\"")]
    NotFound { name: String },
    #[error("\"{name}\" is already the name, alias or UUID of bdev \"{bdev}\"")]
    Exists { name: String, bdev: String },
    #[error(
        "bdev \"{name}\" is being removed and {queues} of its queues are still open: try again"
    )]
    Removing { name: String, queues: usize },
    #[error("\"{name}\" is not a valid name for a bdev: {why}")]
    BadName { name: String, why: &'static str },
    #[error("bdev \"{name}\" is used by {holder}: release it there first, or remove it by force")]
    Claimed { name: String, holder: Holder },
    #[error("bdev \"{name}\" has {queues} open queues, which may write: close them first")]
    Open { name: String, queues: usize },
    /// A requested size is smaller than the announced one.
    #[error(
        "bdev \"{name}\" would have {wanted} bytes instead of {announced}, on which {user} relies: nothing was changed"
    )]
    WouldShrink {
        name: String,
        /// Sizes in bytes.
        announced: u64,
        wanted: u64,
        user: String,
    },
    /// The device already has a smaller size than the announced one.
    #[error(
        "bdev \"{name}\" has {now} bytes now, but {user} relies on the announced {announced}: the announced size \
         stays, and I/O past the present end fails"
    )]
    Shrinks {
        name: String,
        /// Sizes in bytes.
        announced: u64,
        now: u64,
        user: String,
    },
    #[error("\"{alias}\" is not an alias of bdev \"{name}\"")]
    NoSuchAlias { name: String, alias: String },
    #[error(transparent)]
    Queue(#[from] OpenError),
}

/// How a removal treats the users of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// Refused while a claim exists.
    IfUnused,
    /// Removes the device as if it had been unplugged: users get [`Event::Removing`], and devices
    /// stacked on it are removed as well.
    Hot,
}

/// A registered device, with its aliases and users.
#[derive(Clone)]
pub struct Listed {
    pub layer: Arc<Layer>,
    pub aliases: Vec<String>,
    /// The users, in order of arrival.
    pub claims: Vec<(Holder, Usage)>,
}

/// The registry of all block devices of the process. Clones refer to the same registry.
#[derive(Clone, Default)]
pub struct Registry {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    state: Mutex<RegistryState>,
    bus: Bus,
}

#[derive(Default)]
struct RegistryState {
    records: HashMap<String, Record>,
    /// Names by alias and by UUID.
    others: HashMap<String, String>,
    /// Names in order of registration.
    order: BTreeMap<u64, String>,
    /// The next number for a device or a claim.
    next: u64,
}

struct Record {
    layer: Arc<Layer>,
    sequence: u64,
    aliases: Vec<String>,
    claims: Vec<ClaimRecord>,
    removing: Option<DeleteTicket>,
}

impl Registry {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device under its name and UUID. Fails if either is in use, or if the name is invalid
    /// (see [`check_name`]).
    pub fn register(&self, bdev: Arc<dyn Bdev>) -> Result<Arc<Layer>, RegistryError> {
        self.register_announced(bdev, 0)
    }

    /// Like [`Registry::register`], with the number of blocks that was announced to hosts, for
    /// example before a restart. A device with fewer blocks is presented with the announced number.
    pub fn register_announced(
        &self,
        bdev: Arc<dyn Bdev>,
        announced: u64,
    ) -> Result<Arc<Layer>, RegistryError> {
        let below = bdev.bases();
        let below: Vec<Arc<Layer>> = below.iter().filter_map(|b| self.lookup(b)).collect();
        let layer = Layer::stacked(bdev, &below);
        layer.announce(announced);
        let name = layer.name().to_owned();
        check_name(&name)?;
        {
            let mut state = self.inner.state.lock();
            let uuid = layer.uuid().to_string();
            for taken in [&name, &uuid] {
                state.check_free(taken)?;
            }
            let sequence = state.next;
            state.next += 1;
            state.order.insert(sequence, name.clone());
            if uuid != name {
                state.others.insert(uuid, name.clone());
            }
            let record = Record {
                layer: Arc::clone(&layer),
                sequence,
                aliases: Vec::new(),
                claims: Vec::new(),
                removing: None,
            };
            state.records.insert(name.clone(), record);
        }
        self.inner.bus.send(&Event::Registered { name });
        Ok(layer)
    }

    /// Finds a device by name, alias or UUID, unless it is being removed.
    pub fn lookup(&self, name: &str) -> Option<Arc<Layer>> {
        let state = self.inner.state.lock();
        state
            .find(name)
            .ok()
            .map(|record| Arc::clone(&record.layer))
    }

    /// Finds a device like [`Registry::lookup`]; the error is [`RegistryError::NotFound`] or
    /// [`RegistryError::Removing`].
    pub fn get(&self, name: &str) -> Result<Listed, RegistryError> {
        self.inner.state.lock().find(name).map(Record::listed)
    }

    /// All devices in order of registration, without those under removal.
    pub fn list(&self) -> Vec<Listed> {
        let state = self.inner.state.lock();
        let records = state
            .order
            .values()
            .filter_map(|name| state.records.get(name));
        records
            .filter(|record| record.removing.is_none())
            .map(Record::listed)
            .collect()
    }

    /// The statistics of a device; `None` as in [`Registry::lookup`].
    pub fn stats(&self, name: &str) -> Option<Arc<DeviceStats>> {
        self.lookup(name).map(|layer| Arc::clone(layer.stats()))
    }

    /// Opens a queue for the calling core without a claim. Fails while an exclusive claim exists,
    /// or a read-only one of a device that takes writes.
    pub fn open(&self, name: &str, pool: &Pool) -> Result<LayerQueue, RegistryError> {
        let layer = {
            let state = self.inner.state.lock();
            let record = state.find(name)?;
            if let Some(claim) = record.blocking(Usage::Shared) {
                return Err(record.claimed_by(claim));
            }
            Arc::clone(&record.layer)
        };
        Ok(layer.open_queue(pool)?)
    }

    /// Registers `holder` as a user of a device until the claim is dropped. An exclusive claim
    /// needs a device without other claims and open queues. A read-only claim needs a device that
    /// nothing can write: no shared claim, and no queues but those of other read-only claims,
    /// unless the device itself refuses writes. While a [`Holder::User`] has a claim, the device
    /// cannot shrink, except by force. Devices stacked on it do not prevent that, but their users
    /// do.
    pub fn claim(&self, name: &str, holder: Holder, usage: Usage) -> Result<Claim, RegistryError> {
        self.claim_with(name, holder, usage, None)
    }

    /// Like [`Registry::claim`], but the claim prevents shrinking only while `watch` returns a user
    /// that relies on the size.
    pub fn claim_watched(
        &self,
        name: &str,
        holder: Holder,
        usage: Usage,
        watch: Arc<Watch>,
    ) -> Result<Claim, RegistryError> {
        self.claim_with(name, holder, usage, Some(watch))
    }

    fn claim_with(
        &self,
        name: &str,
        holder: Holder,
        usage: Usage,
        watch: Option<Arc<Watch>>,
    ) -> Result<Claim, RegistryError> {
        let mut state = self.inner.state.lock();
        let id = state.next;
        state.next += 1;
        let record = state.find_mut(name)?;
        let queues = record.layer.open_queues();
        if let Some(claim) = record.blocking(usage) {
            return Err(record.claimed_by(claim));
        }
        let may_be_open = match usage {
            Usage::Exclusive => false,
            Usage::Shared => true,
            // Queues beside another read-only claim are of such claims.
            Usage::ReadOnly => !record.claims.is_empty() || record.is_fixed(),
        };
        if queues > 0 && !may_be_open {
            return Err(RegistryError::Open {
                name: record.layer.name().to_owned(),
                queues,
            });
        }
        record.claims.push(ClaimRecord {
            id,
            holder,
            usage,
            watch,
        });
        let layer = Arc::clone(&record.layer);
        drop(state);
        Ok(Claim::new(id, layer, Arc::downgrade(&self.inner)))
    }

    /// Adds another name for a device. Fails if the alias is in use or invalid.
    pub fn add_alias(&self, name: &str, alias: &str) -> Result<(), RegistryError> {
        check_name(alias)?;
        let mut state = self.inner.state.lock();
        let name = state.find(name)?.layer.name().to_owned();
        state.check_free(alias)?;
        state.find_mut(&name)?.aliases.push(alias.to_owned());
        state.others.insert(alias.to_owned(), name);
        Ok(())
    }

    /// Removes an alias that [`Registry::add_alias`] added.
    pub fn remove_alias(&self, name: &str, alias: &str) -> Result<(), RegistryError> {
        let mut state = self.inner.state.lock();
        let record = state.find_mut(name)?;
        let Some(at) = record.aliases.iter().position(|known| known == alias) else {
            let name = record.layer.name().to_owned();
            return Err(RegistryError::NoSuchAlias {
                name,
                alias: alias.to_owned(),
            });
        };
        record.aliases.remove(at);
        state.others.remove(alias);
        Ok(())
    }

    /// Replaces the alias `old` with `new`. After an error the device has its old aliases.
    pub fn rename_alias(&self, name: &str, old: &str, new: &str) -> Result<(), RegistryError> {
        self.add_alias(name, new)?;
        self.remove_alias(name, old).inspect_err(|_| {
            // Undo the addition. This fails only if another call has removed the new alias.
            let _ = self.remove_alias(name, new);
        })
    }

    /// Starts the removal of a device: its queues complete I/O with [`crate::Status::Gone`], and
    /// its name stays in use. The removal ends, and completes the ticket, when the last queue is
    /// closed. A hot removal also removes the devices stacked on it.
    pub fn remove(&self, name: &str, how: Removal) -> Result<DeleteTicket, RegistryError> {
        let (name, layer, ticket, stacked) = {
            let mut state = self.inner.state.lock();
            let record = state.find_mut(name)?;
            if let (Removal::IfUnused, Some(claim)) = (how, record.claims.first()) {
                return Err(record.claimed_by(claim));
            }
            let ticket = DeleteTicket::new();
            record.removing = Some(ticket.clone());
            let layer = Arc::clone(&record.layer);
            let stacked: Vec<String> = record
                .claims
                .iter()
                .flat_map(|claim| claim.holder.bdevs().iter().cloned())
                .collect();
            (layer.name().to_owned(), layer, ticket, stacked)
        };
        layer.set_gone();
        self.inner.bus.send(&Event::Removing { name: name.clone() });
        for upper in stacked {
            // An error means that another caller has removed it meanwhile.
            let _ = self.remove(&upper, Removal::Hot);
        }
        let (inner, finished) = (Arc::clone(&self.inner), ticket.clone());
        let here = std::thread::current().id();
        layer.when_closed(Box::new(move || {
            let forget = move || inner.forget(&name, &finished);
            if std::thread::current().id() == here {
                return forget();
            }
            // The last queue was closed on another thread, probably a reactor. Dropping a device
            // (unmapping a RAM disk, closing files) is too slow for a reactor.
            let forget = Arc::new(Mutex::new(Some(forget)));
            let once = Arc::clone(&forget);
            let call = move || {
                let call = once.lock().take();
                call.into_iter().for_each(|call| call());
            };
            let thread = std::thread::Builder::new().name("bdev-close".into());
            if let Err(error) = thread.spawn(call.clone()) {
                tracing::warn!(%error, "no thread to take a bdev apart: it is done on a reactor");
                call();
            }
        }));
        Ok(ticket)
    }

    /// Subscribes to events. The returned list holds at most `capacity` events; a full list drops
    /// its oldest event.
    pub fn subscribe(&self, capacity: usize) -> Events {
        self.inner.bus.subscribe(capacity)
    }

    /// Calls `call` with each event, on the thread that causes it, until the subscription is
    /// dropped. `call` must not block; it may use the registry.
    pub fn on_event(&self, call: impl Fn(&Event) + Send + Sync + 'static) -> Subscription {
        self.inner.bus.on_event(Arc::new(call))
    }

    /// Waits until every module has examined every device (SPDK's `bdev_wait_for_examine`). Returns
    /// immediately, because no module claims devices by their contents.
    pub fn wait_for_examine(&self) {}
}

impl Inner {
    /// Ends a removal, after the last queue of the device was closed.
    fn forget(&self, name: &str, ticket: &DeleteTicket) {
        let record = {
            let mut state = self.state.lock();
            let Some(record) = state.records.remove(name) else {
                return;
            };
            state.order.remove(&record.sequence);
            state.others.retain(|_, target| target != name);
            record
        };
        // Outside the lock: dropping the device may drop claims on other devices, which locks.
        drop(record);
        self.bus.send(&Event::Unregistered {
            name: name.to_owned(),
        });
        ticket.finish();
    }

    /// Ends the claim `id`.
    fn release(&self, layer: &Arc<Layer>, id: u64) {
        let mut state = self.state.lock();
        // Another device may have the name by now.
        let record = state.records.get_mut(layer.name());
        if let Some(record) = record.filter(|record| Arc::ptr_eq(&record.layer, layer)) {
            record.claims.retain(|claim| claim.id != id);
        }
    }
}

impl RegistryState {
    /// The name of the device with this name, alias or UUID; any other text is returned unchanged.
    fn resolve<'a>(&'a self, name: &'a str) -> &'a str {
        if self.records.contains_key(name) {
            return name;
        }
        if let Some(found) = self.others.get(name) {
            return found;
        }
        // Accept every notation of UUIDs.
        let uuid = Uuid::parse_str(name).ok().map(|uuid| uuid.to_string());
        uuid.and_then(|uuid| self.others.get(&uuid))
            .map_or(name, String::as_str)
    }

    fn find(&self, name: &str) -> Result<&Record, RegistryError> {
        let record = self.records.get(self.resolve(name));
        Record::present(record, name)
    }

    fn find_mut(&mut self, name: &str) -> Result<&mut Record, RegistryError> {
        let key = self.resolve(name).to_owned();
        Record::present(self.records.get(&key), name)?;
        let missing = || RegistryError::NotFound {
            name: name.to_owned(),
        };
        self.records.get_mut(&key).ok_or_else(missing)
    }

    fn check_free(&self, name: &str) -> Result<(), RegistryError> {
        let Some(record) = self.records.get(self.resolve(name)) else {
            return Ok(());
        };
        let bdev = record.layer.name().to_owned();
        match record.removing {
            Some(_) => Err(RegistryError::Removing {
                name: bdev,
                queues: record.layer.open_queues(),
            }),
            None => Err(RegistryError::Exists {
                name: name.to_owned(),
                bdev,
            }),
        }
    }
}

impl Record {
    fn present<'a>(record: Option<&'a Self>, name: &str) -> Result<&'a Self, RegistryError> {
        match record {
            None => Err(RegistryError::NotFound {
                name: name.to_owned(),
            }),
            Some(record) if record.removing.is_some() => Err(RegistryError::Removing {
                name: record.layer.name().to_owned(),
                queues: record.layer.open_queues(),
            }),
            Some(record) => Ok(record),
        }
    }

    fn listed(&self) -> Listed {
        Listed {
            layer: Arc::clone(&self.layer),
            aliases: self.aliases.clone(),
            claims: self
                .claims
                .iter()
                .map(|claim| (claim.holder.clone(), claim.usage))
                .collect(),
        }
    }

    /// True when the device refuses writes.
    fn is_fixed(&self) -> bool {
        self.layer.limits().read_only
    }

    /// The claim that excludes another use.
    fn blocking(&self, usage: Usage) -> Option<&ClaimRecord> {
        let is_fixed = self.is_fixed();
        let mut claims = self.claims.iter();
        claims.find(|claim| claim.usage.excludes(usage, is_fixed))
    }

    fn claimed_by(&self, claim: &ClaimRecord) -> RegistryError {
        let name = self.layer.name().to_owned();
        RegistryError::Claimed {
            name,
            holder: claim.holder.clone(),
        }
    }
}

/// Checks a name or alias: 1 to [`MAX_NAME`] bytes, no control characters, no white space at either
/// end. Names appear in logs, tables, file names and scripts.
pub fn check_name(name: &str) -> Result<(), RegistryError> {
    let why = if name.is_empty() {
        "it is empty"
    } else if name.len() > MAX_NAME {
        "it is longer than 255 bytes"
    } else if name.chars().any(char::is_control) {
        "it contains control characters"
    } else if name.trim() != name {
        "it begins or ends with white space"
    } else {
        return Ok(());
    };
    Err(RegistryError::BadName {
        name: name.escape_debug().to_string(),
        why,
    })
}
