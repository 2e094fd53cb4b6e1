//! The announced size of a device: the only place that admits another size.
//!
//! ```text
//!   the module has another size ──larger──────────────────────────────> announced, upwards too
//!                  └smaller──no user relies on the lost end──^   ^
//!                                └a user does: refused ──by force┘ with a warning
//! ```
//!
//! A host believes the announced size. If the device became smaller under it, the host's I/O beyond
//! the new end would fail through no fault of the host, and a mounted file system would be cut off.
//! So a device that lost its end (a file was truncated) keeps its announced size. Existing blocks
//! are served, and the module completes I/O beyond them with [`crate::Status::OutOfRange`].
//!
//! The check and the change are not atomic towards a host that connects. They need not be: the host
//! relies on the device from its Connect on, and asks for the size several round trips later.

use std::sync::Arc;

use super::claim::Watch;
use super::{Event, Holder, Record, Registry, RegistryError};
use crate::device::Bdev;
use crate::layer::Layer;

/// The treatment of a smaller size while a user relies on the larger one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shrink {
    /// It is refused.
    IfUnused,
    /// Adopts it: users that rely on the lost end lose their data there.
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

/// A device and the devices stacked on it, in this order, and all users of any of them.
#[derive(Default)]
struct Stack {
    layers: Vec<Arc<Layer>>,
    users: Vec<User>,
}

impl Registry {
    /// The device may have changed its size: adopts it, also for the devices stacked on it, and
    /// notifies subscribers. Returns the new size if it changed. Refuses a smaller one while a user
    /// relies on the larger one.
    pub fn notify_resize(&self, name: &str) -> Result<Option<u64>, RegistryError> {
        self.take_size(name, Shrink::IfUnused)
    }

    /// Adopts a new size like [`Registry::notify_resize`]; `shrink` permits or refuses a smaller
    /// one.
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
        // From the bottom: each device has the size of the device below it.
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

    /// Checks whether the device can shrink to `bytes`, before any change: a module that has a
    /// smaller size fails I/O beyond it from then on.
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

    /// The device and those stacked on it, by name.
    pub fn stacked_on(&self, name: &str) -> Result<Vec<String>, RegistryError> {
        let Stack { layers, .. } = self.stack(name)?;
        Ok(layers.iter().map(|l| l.name().to_owned()).collect())
    }

    /// Notifies subscribers of a device that has fewer blocks than announced, and of the devices on
    /// top of it.
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
