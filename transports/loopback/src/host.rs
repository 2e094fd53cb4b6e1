//! The host side of a loopback connection: passes commands and their buffers to the target's
//! transport on the same thread.

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use nacre_nvmf::transport::{Closed, HostCommand, HostEvent, HostTransport, ListenerId};
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::tcp::ADMIN_IN_CAPSULE_BYTES;
use nacre_reactor::{Idle, Nanos};

use crate::error::ConnectError;
use crate::link::{Command, End, Faults, Link};
use crate::transport::Core;

/// One queue pair of a host that is connected to a target in the same process. Dropping it closes
/// the connection.
pub struct LoopbackHost {
    link: Rc<RefCell<Link>>,
    core: Rc<RefCell<Core>>,
    index: u32,
    generation: u32,
    in_capsule_bytes: u32,
}

impl LoopbackHost {
    pub(crate) fn connect(
        core: Rc<RefCell<Core>>,
        listener: ListenerId,
        name: &str,
    ) -> Result<Self, ConnectError> {
        let link = Rc::new(RefCell::new(Link::new()));
        let (index, generation) = core.borrow_mut().add(Rc::clone(&link), listener, name)?;
        Ok(Self {
            link,
            core,
            index,
            generation,
            in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
        })
    }

    /// Returns a handle for fault injection: it can break or stall this connection.
    pub fn faults(&self) -> Faults {
        let (core, index, generation) = (Rc::clone(&self.core), self.index, self.generation);
        Faults {
            link: Rc::clone(&self.link),
            notify: Rc::new(move || core.borrow_mut().notify(index, generation)),
        }
    }

    fn notify(&self) {
        self.core.borrow_mut().notify(self.index, self.generation);
    }
}

impl HostTransport for LoopbackHost {
    fn submit(&mut self, command: HostCommand) {
        let mut link = self.link.borrow_mut();
        let HostCommand {
            mut sqe,
            write,
            read,
        } = command;
        let limit = if sqe.is_fabrics() {
            ADMIN_IN_CAPSULE_BYTES
        } else {
            self.in_capsule_bytes
        };
        let length = write
            .as_ref()
            .or(read.as_ref())
            .map_or(0, |data| data.len() as u32);
        let in_capsule = write.is_some() && length > 0 && length <= limit;
        sqe.set_sgl(if in_capsule {
            Sgl::InCapsule { offset: 0, length }
        } else {
            Sgl::Transport { length }
        });
        let cid = usize::from(sqe.cid());
        if cid >= link.commands.len() {
            link.commands.resize_with(cid + 1, || None);
        }
        assert!(
            link.commands[cid].is_none(),
            "command identifier {cid} is in use"
        );
        link.commands[cid] = Some(Command { write, read });
        if !link.is_open() {
            return;
        }
        link.capsules.push_back((cid as u16, sqe));
        drop(link);
        self.notify();
    }

    fn poll(&mut self, _now: Nanos, events: &mut Vec<HostEvent>, limit: usize) {
        let mut link = self.link.borrow_mut();
        if link.stalled {
            return;
        }
        let end = events.len() + limit;
        while events.len() < end {
            if let Some(event) = link.to_host.pop_front() {
                events.push(event);
            } else if let End::Due(_) = &link.host {
                if let End::Due(why) = std::mem::replace(&mut link.host, End::Reported) {
                    events.push(HostEvent::Closed(why));
                }
            } else {
                return;
            }
        }
    }

    fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.in_capsule_bytes = bytes;
    }

    fn reclaim(&mut self) -> Option<HostCommand> {
        let mut link = self.link.borrow_mut();
        if link.is_open() {
            return None;
        }
        while let Some(command) = link.commands.pop() {
            if let Some(Command { write, read }) = command {
                let sqe = Sqe::new(0, link.commands.len() as u16);
                return Some(HostCommand { sqe, write, read });
            }
        }
        None
    }

    fn close(&mut self) {
        self.link
            .borrow_mut()
            .end(Closed::Local, Closed::Peer, false);
        self.notify();
    }

    fn arm(&mut self, _now: Nanos) -> Idle {
        let link = self.link.borrow();
        let due = !link.to_host.is_empty() || matches!(link.host, End::Due(_));
        if due && !link.stalled {
            Idle::Busy
        } else {
            Idle::Quiet
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for LoopbackHost {
    fn drop(&mut self) {
        self.close();
    }
}
