//! Delivers messages about events to receivers outside the daemon: webhooks and mail servers.
//!
//! ```text
//!   Message ─┬─▶ Webhook::send   HTTP POST of JSON, signed      one attempt each,
//!            └─▶ Mail::send      SMTP, plain text               with a time limit
//!
//!   Failure ───▶ Failure::is_final, Retry::pause    when to try again, or never
//! ```
//!
//! The daemon chooses the events and calls again after a failure. On a helper thread it reads the
//! files of secrets and certificates, and calls the functions that block: [`Server::resolve`] and
//! [`Trust::of_system`]. Sending is asynchronous.

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
