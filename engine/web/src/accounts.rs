//! The accounts of the administration page, in a small file in the data directory.

use nacre_engine_rpc::Role;
use serde::{Deserialize, Serialize};

use crate::list_file::{Entry, ListFile, StoreError};
use crate::passwords::PasswordError;

pub const MAX_ACCOUNTS: usize = 64;
const MAX_NAME: usize = 32;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Account {
    pub name: String,
    pub role: Role,
    /// The argon2id hash of the password, in the PHC string format.
    pub(crate) hash: String,
    /// Unix time in milliseconds.
    pub created_ms: u64,
}

impl Entry for Account {
    const FILE: &'static str = "web-accounts.json";
    const KEY: &'static str = "accounts";
    const MAX_ENTRIES: usize = MAX_ACCOUNTS;
    /// Most bytes of the file; an account takes fewer than 300.
    const MAX_BYTES: u64 = 64 * 1024;
}

pub(crate) type Accounts = ListFile<Account>;

#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    #[error(transparent)]
    Name(#[from] NameError),
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
    #[error(transparent)]
    Store(#[from] StoreError),
}

#[derive(Debug, thiserror::Error)]
#[error(
    "\"{0}\" is no name: use 1 to {MAX_NAME} of a-z, 0-9, \".\", \"_\" and \"-\", a letter first"
)]
pub struct NameError(String);

/// Refuses a name that does not begin with a lower-case letter or is longer than [`MAX_NAME`]. The
/// other characters must be lower-case letters, digits, `.`, `_` or `-`.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let is_plain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-');
    let begins = name
        .bytes()
        .next()
        .is_some_and(|byte| byte.is_ascii_lowercase());
    if begins && name.len() <= MAX_NAME && name.bytes().all(is_plain) {
        return Ok(());
    }
    let shown: String = name.chars().take(2 * MAX_NAME).collect();
    Err(NameError(shown))
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
                    Ok::<_, AccountError>(())
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
        let path = folder.path().join(Account::FILE);
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        assert!(
            metadata.len() < Account::MAX_BYTES,
            "the bound holds the most accounts"
        );
        let again = Accounts::open(Some(folder.path())).unwrap();
        assert_eq!(again.list().len(), MAX_ACCOUNTS);
        assert_eq!(again.find(|one| one.name == "ann"), Some(account("ann")));
        assert_eq!(again.find(|one| one.name == "bob"), None);
        for (text, cause) in [
            ("{", "EOF"),
            (r#"{"version":2,"accounts":[]}"#, "version"),
            (r#"{"version":1}"#, "missing"),
            (
                r#"{"version":1,"accounts":[],"x":1}"#,
                "unknown field \"x\"",
            ),
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
                Ok::<_, AccountError>(())
            });
            let refused = refused.await.unwrap_err();
            assert!(matches!(refused, AccountError::Store(_)), "{refused}");
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
