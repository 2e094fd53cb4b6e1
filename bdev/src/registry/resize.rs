//! Changes of a registered device's announced size, the size that hosts read.
//!
//! ```text
//!   new size of the module ─┬─ larger ──────────────────────────────────> announce
//!                           └─ smaller ─┬─ no user relies on the end ───> announce
//!                                       └─ a user does ─┬─ by force ────> announce
//!                                                       └─ else ────────> refuse
//! ```
//!
//! Devices stacked on the device get their new sizes with it.
//!
//! A mounted file system fails if its device shrinks. So a device that lost blocks (its file was
//! truncated) is still announced with its old size. The remaining blocks work, and the module
//! completes I/O beyond them with [`crate::Status::OutOfRange`].
//!
//! A host may connect between the check and the change. That is safe: the watch counts a host from
//! its Connect command on, and the host reads the size several round trips later.

use std::sync::Arc;

use super::claim::Watch;
use super::{Event, Holder, Record, Registry, RegistryError};
use crate::device::Bdev;
use crate::layer::Layer;

/// How to treat a smaller size while a user relies on the larger one.
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
    /// The user's name, if it relies on the present size.
    fn relies(self) -> Option<String> {
        match self {
            Self::Always(who) => Some(who),
            Self::Watching(watch) => watch(),
        }
    }
}

/// A device and the devices stacked on it, from the bottom up, and the users of all these devices.
#[derive(Default)]
struct Stack {
    layers: Vec<Arc<Layer>>,
    users: Vec<User>,
}

impl Registry {
    /// Announces the module's present size, also for the devices stacked on it, with
    /// [`Event::Resized`]. Returns the new number of blocks if it changed. Fails with
    /// [`RegistryError::Shrinks`] if a user relies on a larger size.
    pub fn notify_resize(&self, name: &str) -> Result<Option<u64>, RegistryError> {
        self.take_size(name, Shrink::IfUnused)
    }

    /// Like [`Registry::notify_resize`]; [`Shrink::Forced`] allows a smaller size in any case.
    pub fn take_size(&self, name: &str, shrink: Shrink) -> Result<Option<u64>, RegistryError> {
        let stack = self.stack(name)?;
        self.send_cut(&stack);
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

    /// Fails with [`RegistryError::WouldShrink`] if a user relies on a size above `bytes`. Call
    /// this before resizing the module, which then fails I/O beyond its new size immediately.
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

    /// Names of the device and of the devices stacked on it, from the bottom up.
    pub fn stacked_on(&self, name: &str) -> Result<Vec<String>, RegistryError> {
        let Stack { layers, .. } = self.stack(name)?;
        Ok(layers.iter().map(|l| l.name().to_owned()).collect())
    }

    /// Sends [`Event::Cut`] for the device and each device stacked on it that has fewer blocks than
    /// announced.
    pub fn report_cut(&self, name: &str) -> Result<(), RegistryError> {
        self.stack(name).map(|stack| self.send_cut(&stack))
    }

    fn send_cut(&self, stack: &Stack) {
        for layer in &stack.layers {
            if layer.present_blocks() < layer.geometry().blocks {
                let name = layer.name().to_owned();
                self.inner.bus.send(&Event::Cut { name });
            }
        }
    }

    fn stack(&self, name: &str) -> Result<Stack, RegistryError> {
        let state = self.inner.state.lock();
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
    /// The user that opened the device without a claim, if any.
    fn unclaimed(&self) -> Option<User> {
        let queues = self.layer.open_queues();
        let open = self.claims.is_empty() && queues > 0;
        open.then(|| User::Always(format!("a user with {queues} open queues")))
    }
}
