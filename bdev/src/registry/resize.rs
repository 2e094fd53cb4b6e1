//! How large a device is said to be: the one place where another size is admitted.
//!
//! ```text
//!   the module has another size ──larger──────────────────────────────> announced, told upwards
//!                                └smaller──nobody relies on what is beyond──^   ^
//!                                   └somebody does: refused ──by force───────────┘ with a warning
//! ```
//!
//! A host believes the size that it was told. Were it made smaller under it, whatever the host still has for the blocks
//! beyond would fail without anything being wrong with the host, and a file system that is mounted there would be cut
//! off behind its back. So a device that lost its end (a file was truncated) goes on being announced as it was: what is
//! there is served, and the module answers [`crate::Status::OutOfRange`] to what is not.
//!
//! The check and the change are not one step towards a host that connects. It need not be: the host is among those who
//! rely on the device from its Connect on, and asks for the size several round trips later.

use std::sync::Arc;

use super::claim::Watch;
use super::{Event, Holder, Record, Registry, RegistryError};
use crate::device::Bdev;
use crate::layer::Layer;

/// What becomes of a smaller size while somebody relies on the larger one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shrink {
    /// It is refused.
    IfUnused,
    /// It is taken over: whoever relies on what was beyond loses it.
    Forced,
}

/// Who may rely on the size of a device.
enum User {
    Always(String),
    Asked(Arc<Watch>),
}

impl User {
    fn relies(self) -> Option<String> {
        match self {
            User::Always(who) => Some(who),
            User::Asked(watch) => watch(),
        }
    }
}

/// A device and what stands on it, in this order, and all who use one of them.
#[derive(Default)]
struct Stack {
    layers: Vec<Arc<Layer>>,
    users: Vec<User>,
}

impl Registry {
    /// The device may have changed its size: takes it over, also for the devices stacked on it, and
    /// tells subscribers. Answers the new size if it changed. A smaller one is refused while somebody relies on the
    /// larger one.
    pub fn notify_resize(&self, name: &str) -> Result<Option<u64>, RegistryError> {
        self.take_size(name, Shrink::IfUnused)
    }

    /// As [`Registry::notify_resize`], with the choice.
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
                "made smaller by force, in bytes: what was beyond is lost to whoever relied on it"
            );
        }
        // From the bottom: each has the size of what it stands on.
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

    /// Whether the device could be made as small as `bytes`, before anything is done to it: a module that is told a
    /// smaller size fails what is beyond from then on.
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

    /// The device and those that stand on it, by name.
    pub fn stacked_on(&self, name: &str) -> Result<Vec<String>, RegistryError> {
        let Stack { layers, .. } = self.stack(name)?;
        Ok(layers.iter().map(|l| l.name().to_owned()).collect())
    }

    /// Tells subscribers of a device that has fewer blocks than it is said to have, and of those
    /// that stand on it.
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
                    (Holder::Bdev(upper), _) => next.extend(state.find(upper)),
                    (Holder::User(_), Some(watch)) => {
                        stack.users.push(User::Asked(Arc::clone(watch)))
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
    /// Those who opened the device without a claim.
    fn unclaimed(&self) -> Option<User> {
        let queues = self.layer.open_queues();
        let open = self.claims.is_empty() && queues > 0;
        open.then(|| User::Always(format!("somebody with {queues} open queues")))
    }
}
