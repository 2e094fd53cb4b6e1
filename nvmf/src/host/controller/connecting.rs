//! The start of an association: dials the admin queue, and chooses the step after Connect.

use nacre_nvmf_wire::fabrics::AuthRequirements;

use crate::host::error::HostError;
use crate::host::options::{Dial, HostOptions, WantedQueue};
use crate::host::queue::CommandQueue;
use crate::host::queue::Proof;
use crate::host::step::{ADMIN_ENTRIES, HostStep};
use crate::transport::TransportType;

/// Starts the transport connection of an admin queue.
pub(super) fn dial_admin(
    dial: &mut dyn Dial,
    transport: Option<TransportType>,
) -> Result<CommandQueue, HostError> {
    let wanted = WantedQueue {
        qid: 0,
        entries: ADMIN_ENTRIES,
        cntlid: 0,
        transport,
    };
    let dialled = dial.dial_wanted(&wanted);
    let transport = dialled.map_err(|e| HostError::Dial(e.to_string()))?;
    Ok(CommandQueue::new(transport, ADMIN_ENTRIES))
}

/// The step after Connect: authentication, if either end requires it.
pub(super) fn step_after_connect(
    queue: Option<&mut CommandQueue>,
    options: &HostOptions,
    required: AuthRequirements,
) -> Result<HostStep, HostError> {
    // The queue was lost in the meantime.
    let Some(queue) = queue else {
        return Ok(HostStep::ReadCap);
    };
    let begun = queue.begin_authentication(options, required, 0)?;
    Ok(if begun {
        HostStep::Authenticate
    } else {
        HostStep::ReadCap
    })
}

/// The step after authentication. With a new PSK all queues connect over TLS, this one first.
pub(super) fn step_after_authentication(
    proof: Proof,
    queue: &mut Option<CommandQueue>,
) -> HostStep {
    match proof {
        Proof::Alone => HostStep::ReadCap,
        Proof::WithPsk => {
            *queue = None;
            HostStep::Dialling
        }
    }
}
