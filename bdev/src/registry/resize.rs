//! The announced size of a device: the only place that admits another size.
//!
//! ```text
//!   the module has another size ──larger──────────────────────────────> announced, upwards too
//!                  └smaller──no user relies on the lost end──^   ^
//!                                └a user does: refused ──by force┘ with a warning
//! ```
//!
//! A host relies on the announced size. If the device shrank under a host, the host's I/O beyond
//! the new end would fail, and a mounted file system would be cut off. So a device that lost its
//! end (a file was truncated) keeps its announced size. Existing blocks are served, and the module
//! completes I/O beyond them with [`crate::Status::OutOfRange`].
//!
//! The check and the change are not atomic towards a host that connects. They need not be: the host
//! relies on the device from its Connect on, and reads the size several round trips later.

use std::sync::Arc;

use super::claim::Watch;
use super::{Event, Holder, Record, Registry, RegistryError};
use crate::device::Bdev;
use crate::layer::Layer;

/// What to do with a smaller size while a user relies on the larger one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shrink {
    /// Refuse the size.
    IfUnused,
    /// Adopt the size: users that rely on the lost end lose their data there.
    Forced,
}

/// A user that may rely on the size of a device.
enum User {
    Always(String),
    Watching(Arc<Watch>),
}

impl User {
    fn relies(self) -> Option<String> {
        match self {
            User::Always(who) => Some(who),
            User::Watching(watch) => watch(),
        }
    }
}

/// A device and the devices stacked on it, from the bottom up, and the users of all of them.
#[derive(Default)]
struct Stack {
    layers: Vec<Arc<Layer>>,
    users: Vec<User>,
}

impl Registry {
    /// Adopts the module's present size, also for the devices stacked on it, and notifies
    /// subscribers. Returns the new size if it changed. Refuses a smaller size while a user relies
    /// on the larger one.
    pub fn notify_resize(&self, name: &str) -> Result<Option<u64>, RegistryError> {
        self.take_size(name, Shrink::IfUnused)
    }

    /// Like [`Registry::notify_resize`], except that `shrink` permits or refuses a smaller size.
    pub fn take_size(&self, name: &str, shrink: Shrink) -> Result<Option<u64>, RegistryError> {
        let stack = self.stack(name)?;
        self.tell_cut(&stack);
        let Stack { layers, users } = stack;
        let device = &layers[0];
        let (announced, now) = (device.geometry(), device.module().geometry());
        if now.blocks < announced.blocks
            && let Some(user) = users.into_iter().find_map(User::relies)
        {
            let (announced, now) = (announced.bytes(), now.bytes());
            if shrink == Shrink::IfUnused {
                return Err(RegistryError::Shrinks {
                    name: device.name().to_owned(),
                    announced,
                    now,
                    user,
                });
            }
            tracing::warn!(
                bdev = device.name(),
                announced,
                now,
                user,
                "made smaller by force, in bytes: data past the new end is lost"
            );
        }
        // From the bottom up: the size of each device depends on the device below it.
        let mut changed = layers.iter().map(|layer| {
            let changed = layer.refresh();
            if let Some(blocks) = changed {
                self.inner.bus.send(&Event::Resized {
                    name: layer.name().to_owned(),
                    blocks,
                });
            }
            changed
        });
        let first = changed.next().flatten();
        changed.for_each(drop);
        Ok(first)
    }

    /// Checks whether the device may shrink to `bytes`. Call this before the change: a module with
    /// a smaller size fails I/O beyond it immediately.
    pub fn may_shrink(&self, name: &str, bytes: u64) -> Result<(), RegistryError> {
        let Stack { layers, users } = self.stack(name)?;
        let announced = layers[0].geometry().bytes();
        let name = layers[0].name().to_owned();
        let relies = || users.into_iter().find_map(User::relies);
        match (bytes < announced).then(relies).flatten() {
            None => Ok(()),
            Some(user) => Err(RegistryError::WouldShrink {
                name,
                announced,
                wanted: bytes,
                user,
            }),
        }
    }

    /// Names of the device and of those stacked on it.
    pub fn stacked_on(&self, name: &str) -> Result<Vec<String>, RegistryError> {
        let Stack { layers, .. } = self.stack(name)?;
        Ok(layers.iter().map(|l| l.name().to_owned()).collect())
    }

    /// Notifies subscribers if the device, or one stacked on it, has fewer blocks than announced.
    pub fn tell_if_cut(&self, name: &str) -> Result<(), RegistryError> {
        self.stack(name).map(|stack| self.tell_cut(&stack))
    }

    fn tell_cut(&self, stack: &Stack) {
        for layer in &stack.layers {
            if layer.present_blocks() < layer.geometry().blocks {
                let name = layer.name().to_owned();
                self.inner.bus.send(&Event::Cut { name });
            }
        }
    }

    fn stack(&self, name: &str) -> Result<Stack, RegistryError> {
        let state = self.lock();
        let mut stack = Stack::default();
        let mut next = vec![state.find(name)?];
        while let Some(record) = next.pop() {
            stack.layers.push(Arc::clone(&record.layer));
            for claim in &record.claims {
                match (&claim.holder, &claim.watch) {
                    (Holder::Bdevs(uppers), _) => {
                        next.extend(uppers.iter().filter_map(|upper| state.find(upper).ok()));
                    }
                    (Holder::User(_), Some(watch)) => {
                        stack.users.push(User::Watching(Arc::clone(watch)))
                    }
                    (holder, None) => stack.users.push(User::Always(holder.to_string())),
                }
            }
            stack.users.extend(record.unclaimed());
        }
        Ok(stack)
    }
}

impl Record {
    /// Returns the user that opened the device without a claim, if there is one.
    fn unclaimed(&self) -> Option<User> {
        let queues = self.layer.open_queues();
        let open = self.claims.is_empty() && queues > 0;
        open.then(|| User::Always(format!("a user with {queues} open queues")))
    }
}
