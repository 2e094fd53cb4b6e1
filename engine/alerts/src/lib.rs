//! Delivers messages about events to receivers outside the daemon: webhooks and mail servers.
//!
//! ```text
//!   Message ─┬─▶ Webhook::send   HTTP POST of JSON, signed      one attempt each,
//!            └─▶ Mail::send      SMTP, plain text               with a time limit
//!
//!   Failure ───▶ Retry::pause    when to try again, or never
//! ```
//!
//! The daemon chooses the events and calls again after a failure. It reads secrets and certificates
//! on a helper thread ([`Trust::read`]); everything else here is asynchronous.

#![forbid(unsafe_code)]

mod address;
mod failure;
mod mail;
mod message;
mod retry;
mod trust;
mod webhook;

pub use address::{AddressError, Server, Url, check_mailbox};
pub use failure::Failure;
pub use mail::{Login, Mail, Security};
pub use message::{Event, Message};
pub use retry::Retry;
pub use trust::Trust;
pub use webhook::{SigningSecret, WeakSecret, Webhook};

#[cfg(test)]
mod tests;
