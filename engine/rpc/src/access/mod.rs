//! Roles of clients, classes of methods, and which role may call which class.
//!
//! ```text
//!             read  operate  admin  secret
//!   viewer     x
//!   operator   x      x
//!   admin      x      x       x      x
//! ```
//!
//! The user and groups of a client decide its role: the highest one that lists it. For a client
//! over TLS the subject of its certificate decides, for a user of the page the account. A list of
//! methods replaces the row of a viewer or operator.

use std::fmt;
use std::io::Result;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

pub use nacre_engine_peer::Credentials;
use nacre_engine_peer::{group_id, user_id};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::{Errno, RpcError};
use super::subject::Subject;

/// The classes of methods: reading, operating, administration and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Reads what viewers may see.
    Read,
    /// Daily work: ANA states, resyncs, reconnects, counters, log levels.
    Operate,
    /// Creates, changes and deletes objects, listeners and hosts; stops the daemon; reads the audit
    /// log.
    Admin,
    /// Changes keys.
    Secret,
}

impl Class {
    pub const ALL: [Self; 4] = [Self::Read, Self::Operate, Self::Admin, Self::Secret];

    pub fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Admin => "admin",
            Self::Secret => "secret",
        }
    }

    /// True if each call has a line in the audit log.
    pub fn is_audited(self) -> bool {
        self != Self::Read
    }

    /// The lowest role that may call methods of this class.
    pub fn role(self) -> Role {
        match self {
            Self::Read => Role::Viewer,
            Self::Operate => Role::Operator,
            Self::Admin | Self::Secret => Role::Admin,
        }
    }
}

/// The roles of clients; each has all rights of the ones before it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Viewer,
    Operator,
    Admin,
}

impl Role {
    pub const ALL: [Self; 3] = [Self::Viewer, Self::Operator, Self::Admin];

    pub fn word(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

/// A client of the socket or of the TLS listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub identity: Identity,
    /// Name of the program, as the process gives it. Empty for a client over TLS.
    pub program: String,
}

/// The identity of a client, by the means that proves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// A process of this machine, with the credentials that the kernel gives.
    Local(Credentials),
    /// A certificate with this subject, for a client over TLS.
    Certificate {
        subject: Subject,
        address: SocketAddr,
    },
    /// A user of the administration page, who signed in to this account.
    Account {
        name: String,
        role: Role,
        address: SocketAddr,
    },
    /// A program that sent the secret of this API token to the page's listener.
    ApiToken {
        name: String,
        role: Role,
        address: SocketAddr,
    },
}

impl Identity {
    /// True for a process of this machine.
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Local(_))
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let credentials = match &self.identity {
            Identity::Local(credentials) => credentials,
            Identity::Certificate { subject, address } => {
                return write!(f, "certificate {subject} at {address}");
            }
            Identity::Account { name, address, .. } => {
                return write!(f, "account {name} at {address}");
            }
            Identity::ApiToken { name, address, .. } => {
                return write!(f, "API token {name} at {address}");
            }
        };
        write!(f, "user {}", credentials.uid)?;
        match (self.program.as_str(), credentials.pid) {
            ("", None) => Ok(()),
            ("", Some(pid)) => write!(f, " (process {pid})"),
            (program, None) => write!(f, " ({program})"),
            (program, Some(pid)) => write!(f, " ({program}, process {pid})"),
        }
    }
}

/// One entry of a role's list: `uid:0`, `user:alice`, `gid:27`, `group:storage`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Member {
    Uid(u32),
    User(String),
    Gid(u32),
    Group(String),
}

/// The error of a text that is not a [`Member`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" names no user and no group")]
pub struct NoMember(String);

impl Member {
    pub const FORMS: &'static str = "write uid:1000, user:alice, gid:27 or group:storage";

    /// The user or group with its id; `None`: the machine has no such name. May query the network.
    pub fn resolve(&self) -> Result<Option<Principal>> {
        match self.id() {
            Some(principal) => Ok(Some(principal)),
            None => self.look_up(),
        }
    }

    /// The user or group of an entry that is a number; `None` for a name.
    fn id(&self) -> Option<Principal> {
        match self {
            Self::Uid(uid) => Some(Principal::User(*uid)),
            Self::Gid(gid) => Some(Principal::Group(*gid)),
            Self::User(_) | Self::Group(_) => None,
        }
    }

    fn look_up(&self) -> Result<Option<Principal>> {
        Ok(match self {
            Self::Uid(uid) => Some(Principal::User(*uid)),
            Self::Gid(gid) => Some(Principal::Group(*gid)),
            Self::User(name) => user_id(name)?.map(Principal::User),
            Self::Group(name) => group_id(name)?.map(Principal::Group),
        })
    }
}

impl FromStr for Member {
    type Err = NoMember;

    fn from_str(text: &str) -> std::result::Result<Self, NoMember> {
        let no_member = || NoMember(text.to_owned());
        let (kind, of) = text.split_once(':').ok_or_else(no_member)?;
        // The largest number is the kernel's word for "no user".
        let id = || {
            of.parse()
                .ok()
                .filter(|id| *id != u32::MAX)
                .ok_or_else(no_member)
        };
        let name = || {
            Some(of.to_owned())
                .filter(|of| !of.is_empty())
                .ok_or_else(no_member)
        };
        match kind {
            "uid" => Ok(Self::Uid(id()?)),
            "gid" => Ok(Self::Gid(id()?)),
            "user" => Ok(Self::User(name()?)),
            "group" => Ok(Self::Group(name()?)),
            _ => Err(no_member()),
        }
    }
}

/// A user or a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Principal {
    User(u32),
    Group(u32),
}

impl Principal {
    fn includes(self, credentials: &Credentials) -> bool {
        match self {
            Self::User(uid) => credentials.uid == uid,
            Self::Group(gid) => credentials.is_in(gid),
        }
    }
}

/// A role's list, as written and as resolved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Members {
    pub texts: Vec<String>,
    pub principals: Vec<Principal>,
}

impl Members {
    /// The members, and a text for each name that the machine does not have. May query the network.
    pub fn resolve(texts: &[String]) -> (Self, Vec<String>) {
        Self::resolve_with(texts, Member::resolve)
    }

    /// As [`Members::resolve`], without looking up names. The texts are about a name service that
    /// has not answered within `limit`.
    pub fn without_names(texts: &[String], limit: Duration) -> (Self, Vec<String>) {
        let late = || {
            let seconds = limit.as_secs();
            std::io::Error::other(format!(
                "the name service has not answered within {seconds} s; write the number \
                 (uid: or gid:), or repair the name service and send SIGHUP"
            ))
        };
        Self::resolve_with(texts, |member| match member.id() {
            Some(principal) => Ok(Some(principal)),
            None => Err(late()),
        })
    }

    fn resolve_with(
        texts: &[String],
        resolve: impl Fn(&Member) -> Result<Option<Principal>>,
    ) -> (Self, Vec<String>) {
        let (mut principals, mut unknown) = (Vec::new(), Vec::new());
        for text in texts {
            let resolved = text.parse::<Member>().map(|member| resolve(&member));
            match resolved {
                Ok(Ok(Some(principal))) => principals.push(principal),
                Ok(Ok(None)) => unknown.push(format!("{text}: this machine has no such name")),
                Ok(Err(error)) => unknown.push(format!("{text}: {error}")),
                Err(error) => unknown.push(error.to_string()),
            }
        }
        let texts = texts.to_vec();
        (Self { texts, principals }, unknown)
    }
}

/// The users who must be able to open the socket's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketAccess {
    /// Only the daemon's user, and root: mode 0600.
    Owner,
    /// This group, too: mode 0660.
    Group(u32),
    /// Users, or several groups: mode 0666. The credentials of each client decide.
    Everyone,
}

impl SocketAccess {
    pub fn mode(self) -> u32 {
        match self {
            Self::Owner => 0o600,
            Self::Group(_) => 0o660,
            Self::Everyone => 0o666,
        }
    }
}

/// The rules of one daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// The daemon's own user, always an admin.
    pub own_uid: u32,
    pub admin: Members,
    pub operator: Members,
    pub viewer: Members,
    /// Roles of clients over TLS, by the subject of their certificate.
    pub certificates: Vec<(Subject, Role)>,
    /// If not empty, exactly the methods that an operator may call.
    pub operator_methods: Vec<String>,
    /// As `operator_methods`, for viewers.
    pub viewer_methods: Vec<String>,
}

impl Access {
    /// The role of a client. `None`: it may not call anything.
    pub fn role(&self, identity: &Identity) -> Option<Role> {
        let credentials = match identity {
            Identity::Local(credentials) => credentials,
            Identity::Certificate { subject, .. } => {
                let listed = self.certificates.iter();
                let listed = listed.filter(|(wanted, _)| subject.has_all_of(wanted));
                return listed.map(|(_, role)| *role).max();
            }
            Identity::Account { role, .. } | Identity::ApiToken { role, .. } => return Some(*role),
        };
        if credentials.uid == self.own_uid {
            return Some(Role::Admin);
        }
        let mut roles = Role::ALL.into_iter().rev();
        roles.find(|role| {
            let mut principals = self.members(*role).principals.iter();
            principals.any(|principal| principal.includes(credentials))
        })
    }

    /// True if a client with this role may call the method.
    pub fn permits(&self, role: Role, method: &str, class: Class) -> bool {
        match self.methods(role) {
            [] => role >= class.role(),
            only => only.iter().any(|name| name == method),
        }
    }

    /// The users who must be able to open the socket.
    pub fn socket_access(&self) -> SocketAccess {
        let all = Role::ALL.map(|role| &self.members(role).principals);
        let mut others: Vec<Principal> = all.into_iter().flatten().copied().collect();
        // The owner needs no more than mode 0600, and root not even that.
        others.retain(|of| ![Principal::User(0), Principal::User(self.own_uid)].contains(of));
        others.sort_unstable();
        others.dedup();
        match others.as_slice() {
            [] => SocketAccess::Owner,
            [Principal::Group(gid)] => SocketAccess::Group(*gid),
            _ => SocketAccess::Everyone,
        }
    }

    /// The error for a client without a role.
    pub fn stranger(&self, caller: &Caller) -> RpcError {
        let cause = format!("{caller} has no role: it may not command this daemon");
        let Some((table, line)) = self.with_member(Role::Viewer, caller) else {
            return RpcError::errno(Errno::EACCES, cause);
        };
        let or = match &caller.identity {
            Identity::Local(_) => format!("call as user {}, or ", self.own_uid),
            Identity::Certificate { .. } | Identity::Account { .. } | Identity::ApiToken { .. } => {
                String::new()
            }
        };
        RpcError::errno(Errno::EACCES, cause).remedy(format!(
            "{or}set {line} (or operator, or admin) in [{table}] of the configuration, and reload it"
        ))
    }

    /// The error for a call that [`Access::permits`] denies.
    pub fn refusal(&self, caller: &Caller, role: Role, method: &str, class: Class) -> RpcError {
        let cause = format!(
            "{method} is of class {}, and {caller} has the role {}",
            class.word(),
            role.word()
        );
        let methods = self.methods(role);
        let setting = if methods.is_empty() {
            self.with_member(class.role(), caller)
        } else {
            let line = list(role, methods.iter().map(String::as_str).chain([method]));
            Some(("rpc.access.methods", line))
        };
        let remedy = match (setting, &caller.identity) {
            (Some((table, line)), _) => {
                format!("set {line} in [{table}] of the configuration, and reload it")
            }
            (None, Identity::Account { name, .. }) => {
                let role = class.role().word();
                format!(
                    "`nacre web account change {name} --role {role}` gives the account that role"
                )
            }
            (None, Identity::ApiToken { .. }) => {
                let role = class.role().word();
                format!("`nacre web token create NAME --role {role}` makes a token with that role")
            }
            (None, _) => return RpcError::errno(Errno::EACCES, cause),
        };
        RpcError::errno(Errno::EACCES, cause).remedy(remedy)
    }

    /// The table and the line of the configuration that would give the role to the client. `None`:
    /// no setting can.
    fn with_member(&self, role: Role, caller: &Caller) -> Option<(&'static str, String)> {
        Some(match &caller.identity {
            Identity::Local(credentials) => {
                let new = format!("uid:{}", credentials.uid);
                let texts = self.members(role).texts.iter().map(String::as_str);
                ("rpc.access", list(role, texts.chain([new.as_str()])))
            }
            Identity::Certificate { subject, .. } => {
                let subject = subject
                    .to_string()
                    .replace('\\', r"\\")
                    .replace('"', "\\\"");
                (
                    "rpc.tls",
                    format!("roles = {{ \"{subject}\" = \"{}\" }}", role.word()),
                )
            }
            Identity::Account { .. } | Identity::ApiToken { .. } => return None,
        })
    }

    fn members(&self, role: Role) -> &Members {
        match role {
            Role::Viewer => &self.viewer,
            Role::Operator => &self.operator,
            Role::Admin => &self.admin,
        }
    }

    fn methods(&self, role: Role) -> &[String] {
        match role {
            Role::Viewer => &self.viewer_methods,
            Role::Operator => &self.operator_methods,
            Role::Admin => &[],
        }
    }
}

/// A line of the configuration: `operator = ["a", "b"]`.
fn list<'a>(role: Role, texts: impl Iterator<Item = &'a str>) -> String {
    let texts: Vec<String> = texts.map(|text| format!("\"{text}\"")).collect();
    format!("{} = [{}]", role.word(), texts.join(", "))
}

tokio::task_local! {
    static ACTOR: Actor;
}

/// The client whose call a task executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Actor {
    pub role: Role,
    /// A process of this machine.
    pub local: bool,
}

/// The role of the client whose call the current task executes. Admin for the daemon's own calls.
pub fn role() -> Role {
    actor().role
}

/// As [`role`], with the client's origin.
pub fn actor() -> Actor {
    let own = Actor {
        role: Role::Admin,
        local: true,
    };
    ACTOR.try_with(|actor| *actor).unwrap_or(own)
}

/// Executes `work` for a client: [`actor`] and [`role`] return that client in it.
pub async fn acting_as<T>(actor: Actor, work: impl Future<Output = T>) -> T {
    ACTOR.scope(actor, work).await
}

/// Refuses a parameter if the client's role may not call methods of `class`. For parameters that do
/// more than the class of their method allows.
pub fn require(class: Class, parameter: &'static str) -> std::result::Result<(), RpcError> {
    let role = role();
    if role >= class.role() {
        return Ok(());
    }
    let cause = format!(
        "it makes the call one of class {}, and the client has the role {}",
        class.word(),
        role.word()
    );
    Err(RpcError::errno(Errno::EACCES, cause)
        .field(parameter)
        .remedy("leave it out"))
}

#[cfg(test)]
mod tests;
