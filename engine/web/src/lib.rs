//! The web server of the administration page.
//!
//! ```text
//!   endpoint     the addresses of [web] listen                  parse
//!   list_file    a short list in a private file                 perform
//!   accounts     accounts and their names                       decide
//!   api_tokens   the tokens of programs                         decide
//!   passwords    argon2id, on helper threads                    perform
//!   sessions     tokens and their sessions                      decide
//!   delays       delays after wrong passwords                   decide
//!   setup_code   the code that makes the first account          decide
//!   logins       accounts, API tokens, sessions and the code    decide
//!   certificate  the certificate of the HTTPS listeners         perform
//!   acts         what users do besides calls, for the audit log  decide
//!   assets       the embedded files of the page                 parse
//!   pages        requests and answers of HTTP                   parse
//!   api          requests and answers in JSON                   parse
//!   upload       a file of an admin for the machine              perform
//!   live         server-sent events                             decide
//!   patient      the limit for clients that do not read         perform
//!   web          what listeners and requests share              decide
//!   server       listeners and connections                      perform
//! ```
//!
//! The engine executes calls and supplies live data: [`web::Backend`]. Everything runs on its
//! management thread, except for the hashing of passwords and the writing of files.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

pub mod accounts;
pub mod acts;
mod api;
pub mod api_tokens;
pub mod assets;
pub mod certificate;
mod delays;
pub mod endpoint;
pub mod list_file;
pub mod live;
pub mod logins;
mod pages;
pub mod passwords;
mod patient;
pub mod server;
pub mod sessions;
mod setup_code;
pub mod upload;
pub mod web;

#[cfg(test)]
mod testing;

#[cfg(test)]
mod tests;
