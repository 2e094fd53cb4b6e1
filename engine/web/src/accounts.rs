//! The accounts of the page: a small file in the directory of the state.

use std::cell::RefCell;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use nacre_engine_rpc::Role;
use nacre_engine_values::files;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use crate::passwords::PasswordError;

pub const MAX_ACCOUNTS: usize = 64;
const MAX_NAME: usize = 32;
/// Largest file in bytes: each account takes less than 300.
const MAX_BYTES: u64 = 64 * 1024;
const FILE: &str = "web-accounts.json";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Account {
    pub name: String,
    pub role: Role,
    /// The password's hash, as argon2 writes it.
    pub(crate) hash: String,
    /// Milliseconds since 1970.
    pub created_ms: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    accounts: Vec<Account>,
}

const VERSION: u32 = 1;

#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    #[error(
        "\"{0}\" is no name: use 1 to {MAX_NAME} of a-z, 0-9, \".\", \"_\" and \"-\", a letter first"
    )]
    Name(String),
    #[error("there is an account \"{0}\" already")]
    Exists(String),
    #[error("there is no account \"{0}\"")]
    Unknown(String),
    #[error("\"{0}\" is the last account with the role admin")]
    LastAdmin(String),
    #[error("there are {MAX_ACCOUNTS} accounts already")]
    Full,
    #[error("neither a role nor a password is given")]
    Nothing,
    #[error("an account exists already")]
    SetUp,
    #[error(transparent)]
    Password(#[from] PasswordError),
    #[error("the accounts cannot be stored in {path}: {source}", path = path.display())]
    Store {
        path: PathBuf,
        source: std::io::Error,
    },
}

/// Why the daemon cannot start with this file.
#[derive(Debug, thiserror::Error)]
#[error("the accounts of the page in {path}: {cause}; repair the file, or move it away to start without accounts", path = path.display())]
pub struct FileError {
    path: PathBuf,
    cause: String,
}

#[derive(Debug)]
pub struct Accounts {
    /// None: the accounts end with the daemon.
    path: Option<PathBuf>,
    list: RefCell<Vec<Account>>,
    changing: Mutex<()>,
}

impl Accounts {
    /// Reads the accounts in the directory of the state.
    pub fn open(folder: Option<&Path>) -> Result<Self, FileError> {
        let path = folder.map(|folder| folder.join(FILE));
        let list = match &path {
            None => Vec::new(),
            Some(path) => read(path).map_err(|cause| FileError {
                path: path.clone(),
                cause,
            })?,
        };
        Ok(Self {
            path,
            list: RefCell::new(list),
            changing: Mutex::default(),
        })
    }

    pub fn is_empty(&self) -> bool {
        self.list.borrow().is_empty()
    }

    pub fn list(&self) -> Vec<Account> {
        self.list.borrow().clone()
    }

    pub fn find(&self, name: &str) -> Option<Account> {
        let list = self.list.borrow();
        list.iter().find(|account| account.name == name).cloned()
    }

    /// Changes the list, in memory after the file has it.
    pub(crate) async fn change(
        &self,
        change: impl FnOnce(&mut Vec<Account>) -> Result<(), AccountError>,
    ) -> Result<(), AccountError> {
        let _one = self.changing.lock().await;
        let mut list = self.list();
        change(&mut list)?;
        if let Some(path) = self.path.clone() {
            let stored = Stored {
                version: VERSION,
                accounts: list.clone(),
            };
            let written = tokio::task::spawn_blocking(move || {
                let text = serde_json::to_vec_pretty(&stored)?;
                files::replace_private(&path, &text)
            });
            let written = written.await.unwrap_or_else(|panic| Err(panic.into()));
            let path = self.path.clone().unwrap_or_default();
            written.map_err(|source| AccountError::Store { path, source })?;
        }
        self.list.replace(list);
        Ok(())
    }
}

/// Refuses a name that is not plain.
pub fn check_name(name: &str) -> Result<(), AccountError> {
    let is_plain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-');
    let begins = name
        .bytes()
        .next()
        .is_some_and(|byte| byte.is_ascii_lowercase());
    if begins && name.len() <= MAX_NAME && name.bytes().all(is_plain) {
        return Ok(());
    }
    let shown: String = name.chars().take(2 * MAX_NAME).collect();
    Err(AccountError::Name(shown))
}

/// The accounts of a file; a missing one has none.
fn read(path: &Path) -> Result<Vec<Account>, String> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.to_string()),
    };
    let mut text = Vec::new();
    let read = file.take(MAX_BYTES + 1).read_to_end(&mut text);
    read.map_err(|error| error.to_string())?;
    if text.len() as u64 > MAX_BYTES {
        return Err(format!("it has more than {MAX_BYTES} bytes"));
    }
    let stored: Stored = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    if stored.version != VERSION {
        return Err(format!("its version is {}, not {VERSION}", stored.version));
    }
    if stored.accounts.len() > MAX_ACCOUNTS {
        return Err(format!("it has more than {MAX_ACCOUNTS} accounts"));
    }
    Ok(stored.accounts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::run;
    use std::os::unix::fs::PermissionsExt;

    fn account(name: &str) -> Account {
        Account {
            name: name.into(),
            role: Role::Admin,
            hash: "h".repeat(100),
            created_ms: 1_800_000_000_000,
        }
    }

    #[test]
    fn accounts_survive_in_a_private_file() {
        let folder = tempfile::tempdir().unwrap();
        run(async {
            let accounts = Accounts::open(Some(folder.path())).unwrap();
            assert!(accounts.is_empty());
            let add = |account: Account| {
                accounts.change(|list| {
                    list.push(account);
                    Ok(())
                })
            };
            add(account("ann")).await.unwrap();
            let refused = accounts.change(|_| Err(AccountError::Full)).await;
            assert!(matches!(refused, Err(AccountError::Full)));
            for n in 1..MAX_ACCOUNTS {
                let name = format!("a{n}{}", "x".repeat(MAX_NAME - 4));
                add(account(&name)).await.unwrap();
            }
        });
        let path = folder.path().join(FILE);
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        assert!(
            metadata.len() < MAX_BYTES,
            "the bound holds the most accounts"
        );
        let again = Accounts::open(Some(folder.path())).unwrap();
        assert_eq!(again.list().len(), MAX_ACCOUNTS);
        assert_eq!(again.find("ann"), Some(account("ann")));
        assert_eq!(again.find("bob"), None);
        for (text, cause) in [
            ("{", "EOF"),
            (r#"{"version":2,"accounts":[]}"#, "version"),
            (&*" ".repeat(70_000), "more than"),
        ] {
            std::fs::write(&path, text).unwrap();
            let refused = Accounts::open(Some(folder.path())).unwrap_err().to_string();
            assert!(refused.contains(cause), "{refused}");
        }
    }

    /// Goal: a change that cannot be stored does not count.
    #[test]
    fn a_change_that_is_not_stored_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let accounts = Accounts::open(Some(&folder.path().join("gone"))).unwrap();
        run(async {
            let refused = accounts.change(|list| {
                list.push(account("ann"));
                Ok(())
            });
            let refused = refused.await.unwrap_err();
            assert!(matches!(refused, AccountError::Store { .. }), "{refused}");
            assert!(accounts.is_empty());
        });
    }

    #[test]
    fn names_are_plain() {
        for name in ["a", "ann", "a.b-c_9", &"a".repeat(MAX_NAME)] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in [
            "",
            "Ann",
            "9a",
            "-a",
            "a b",
            "a\n",
            "é",
            &"a".repeat(MAX_NAME + 1),
        ] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }
}
