//! Delivers messages about events to receivers outside the daemon: webhooks and mail servers.
//!
//! ```text
//!   Message ─┬─▶ Webhook::send   HTTP POST of JSON, signed      one attempt each,
//!            └─▶ Mail::send      SMTP, plain text               with a time limit
//!
//!   Failure ───▶ Retry::pause    when to try again, or never
//! ```
//!
//! The daemon chooses the events and calls again after a failure. It reads files and asks the
//! resolver ([`Server::resolve`]) on a helper thread; everything else here is asynchronous.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

mod address;
mod answers;
mod connect;
mod failure;
mod mail;
mod message;
mod retry;
mod trust;
mod webhook;

pub use address::{AddressError, Server, Url, check_mailbox};
pub use failure::Failure;
pub use mail::{Login, Mail, MailEncryption, Progress};
pub use message::{Event, Message, one_line};
pub use retry::Retry;
pub use trust::Trust;
pub use webhook::{SigningSecret, WeakSecret, Webhook};

#[cfg(test)]
mod tests;
