//! [`Logins`]: the users of the page with their accounts, API tokens, sessions, delays and the
//! set-up code. The HTTP server and RPC methods call it.

use std::cell::RefCell;
use std::net::IpAddr;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nacre_engine_rpc::Role;
use nacre_reactor::Clock;
use tracing::{info, warn};
use zeroize::Zeroizing;

use crate::accounts::{Account, AccountError, Accounts, MAX_ACCOUNTS, check_name};
use crate::api_tokens::{self, ApiToken, ApiTokens, TokenError};
use crate::delays::Delays;
use crate::list_file::FileError;
use crate::passwords::{self, Cost, PasswordError, Passwords};
use crate::sessions::{Sessions, Token, TokenId};
use crate::setup_code::SetupCode;

/// The account name under which attempts with the set-up code are counted. No account can have it.
const SETUP: &str = ":setup";

/// The reason that a name and password, or a set-up code, opened no session.
#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    /// Wrong, or sent before the delay after wrong ones has ended. The value is the delay before
    /// the next attempt.
    #[error("wrong name or password")]
    Wrong(Duration),
    #[error("wrong set-up code")]
    WrongCode(Duration),
    #[error(transparent)]
    Account(#[from] AccountError),
    #[error("no random numbers: {0}")]
    Random(#[from] getrandom::Error),
}

impl From<PasswordError> for LoginError {
    fn from(error: PasswordError) -> Self {
        Self::Account(error.into())
    }
}

#[derive(Debug)]
pub struct Logins {
    accounts: Accounts,
    tokens: ApiTokens,
    passwords: Passwords,
    sessions: RefCell<Sessions>,
    delays: RefCell<Delays>,
    /// The set-up code; `None` once there is an account.
    code: RefCell<Option<SetupCode>>,
    clock: Clock,
}

/// The user or program of a request.
#[derive(Debug, Clone)]
pub struct SignedIn {
    pub id: TokenId,
    pub by: By,
    /// Name of the account or of the API token.
    pub name: String,
    pub role: Role,
}

/// The proof of identity in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The cookie of a session.
    Session,
    ApiToken,
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("no random numbers: {0}")]
    Random(#[from] getrandom::Error),
}

impl Logins {
    /// `folder`: the data directory; `None`: accounts and tokens are in memory only.
    pub fn open(folder: Option<&Path>, cost: Cost, clock: Clock) -> Result<Rc<Self>, OpenError> {
        let accounts = Accounts::open(folder)?;
        let tokens = ApiTokens::open(folder)?;
        let code = if accounts.is_empty() {
            Some(SetupCode::random()?)
        } else {
            None
        };
        Ok(Rc::new(Self {
            accounts,
            tokens,
            passwords: Passwords::new(cost),
            sessions: RefCell::default(),
            delays: RefCell::default(),
            code: RefCell::new(code),
            clock,
        }))
    }

    pub fn accounts(&self) -> Vec<Account> {
        self.accounts.list()
    }

    fn account(&self, name: &str) -> Option<Account> {
        self.accounts.find(|account| account.name == name)
    }

    /// The role of an account, if there is one of this name.
    pub fn role(&self, name: &str) -> Option<Role> {
        self.account(name).map(|account| account.role)
    }

    /// True while there is no account, so that the set-up code is needed.
    pub fn wants_setup(&self) -> bool {
        self.accounts.is_empty()
    }

    /// The set-up code; `None` once there is an account.
    pub fn setup_code(&self) -> Option<Zeroizing<String>> {
        self.code.borrow().as_ref().map(SetupCode::shown)
    }

    /// The account of a session. `active`: the request is an act of the user, which prolongs the
    /// session.
    pub fn signed_in(&self, id: TokenId, active: bool) -> Option<SignedIn> {
        let now = self.clock.now();
        let name = self.sessions.borrow().account(id, now)?.to_owned();
        let role = self.account(&name)?.role;
        if active {
            self.sessions.borrow_mut().touch(id, now);
        }
        Some(SignedIn {
            id,
            by: By::Session,
            name,
            role,
        })
    }

    /// The API token with this secret, unless it has expired.
    pub fn program(&self, secret: &str) -> Option<SignedIn> {
        let id = api_tokens::id_of(secret)?;
        let token = self.tokens.valid(id, now_ms())?;
        Some(SignedIn {
            id,
            by: By::ApiToken,
            name: token.name,
            role: token.role,
        })
    }

    /// As [`Logins::is_valid`], for a request that takes long and keeps its session in use.
    pub fn goes_on(&self, of: &SignedIn) -> bool {
        match of.by {
            By::Session => self.signed_in(of.id, true).is_some(),
            By::ApiToken => self.is_valid(of),
        }
    }

    /// False once the session or the API token has ended.
    pub fn is_valid(&self, of: &SignedIn) -> bool {
        match of.by {
            By::Session => self.signed_in(of.id, false).is_some(),
            By::ApiToken => self.tokens.valid(of.id, now_ms()).is_some(),
        }
    }

    pub fn api_tokens(&self) -> Vec<ApiToken> {
        self.tokens.list()
    }

    /// Creates an API token and returns its secret. `validity`: `None`: until it is deleted.
    pub async fn create_api_token(
        &self,
        name: &str,
        role: Role,
        validity: Option<Duration>,
    ) -> Result<Zeroizing<String>, TokenError> {
        self.tokens.create(name, role, validity, now_ms()).await
    }

    pub async fn delete_api_token(&self, name: &str) -> Result<(), TokenError> {
        self.tokens.delete(name).await
    }

    /// Opens a session for a name and password.
    pub async fn login(
        &self,
        name: &str,
        password: Zeroizing<String>,
        address: IpAddr,
    ) -> Result<Token, LoginError> {
        self.verify(name, password, address).await?;
        Ok(self.open_session(name)?)
    }

    /// Verifies the password of an account, subject to the delays.
    async fn verify(
        &self,
        name: &str,
        password: Zeroizing<String>,
        address: IpAddr,
    ) -> Result<(), LoginError> {
        // A name that no account can have takes no room in the tables.
        let counted = match check_name(name) {
            Ok(()) => name,
            Err(_) => "",
        };
        let begun = {
            let mut delays = self.delays.borrow_mut();
            delays.begin(counted, address, self.clock.now())
        };
        begun.map_err(LoginError::Wrong)?;
        let hash = self.account(name).map(|account| account.hash);
        let is_long = password.len() > passwords::MAX_BYTES;
        let tried = if is_long {
            Zeroizing::new(String::new())
        } else {
            password
        };
        let judged = self.passwords.verify(tried, hash.clone()).await;
        if judged.is_err() {
            self.delays.borrow_mut().take_back(counted, address);
        }
        let is_right = judged?;
        // The account may have changed meanwhile.
        let is_same = self.account(name).map(|account| account.hash) == hash;
        if !is_right || is_long || !is_same {
            let delay = self
                .delays
                .borrow()
                .next(counted, address, self.clock.now());
            if !delay.is_zero() {
                warn!(%address, account = counted, "web: wrong passwords; the next try has to wait");
            }
            return Err(LoginError::Wrong(delay));
        }
        self.delays.borrow_mut().succeed(counted, address);
        Ok(())
    }

    fn open_session(&self, name: &str) -> Result<Token, getrandom::Error> {
        self.sessions.borrow_mut().open(name, self.clock.now())
    }

    pub fn logout(&self, id: TokenId) {
        self.sessions.borrow_mut().close(id);
    }

    /// Creates the first account, with the role admin, and opens a session for it. The set-up code
    /// works once.
    pub async fn set_up(
        &self,
        code: &str,
        name: &str,
        password: Zeroizing<String>,
        address: IpAddr,
    ) -> Result<Token, LoginError> {
        let wanted = self.code.borrow().clone().ok_or(AccountError::SetUp)?;
        let begun = {
            let mut delays = self.delays.borrow_mut();
            delays.begin(SETUP, address, self.clock.now())
        };
        begun.map_err(LoginError::WrongCode)?;
        if !wanted.is(code) {
            let delay = self.delays.borrow().next(SETUP, address, self.clock.now());
            warn!(%address, "web: wrong set-up code");
            return Err(LoginError::WrongCode(delay));
        }
        self.delays.borrow_mut().succeed(SETUP, address);
        self.add_account(name, Role::Admin, password, true).await?;
        info!(%address, account = name, "web: first account made with the set-up code");
        Ok(self.open_session(name)?)
    }

    pub async fn add(
        &self,
        name: &str,
        role: Role,
        password: Zeroizing<String>,
    ) -> Result<(), AccountError> {
        self.add_account(name, role, password, false).await
    }

    async fn add_account(
        &self,
        name: &str,
        role: Role,
        password: Zeroizing<String>,
        first: bool,
    ) -> Result<(), AccountError> {
        check_name(name)?;
        passwords::check(name, &password)?;
        if self.account(name).is_some() {
            return Err(AccountError::Exists(name.to_owned()));
        }
        let hash = self.passwords.hash(password).await?;
        let account = Account {
            name: name.to_owned(),
            role,
            hash,
            created_ms: now_ms(),
        };
        let added = self.accounts.change(|list| {
            if first && !list.is_empty() {
                return Err(AccountError::SetUp);
            }
            if list.iter().any(|other| other.name == account.name) {
                return Err(AccountError::Exists(account.name));
            }
            if list.len() >= MAX_ACCOUNTS {
                return Err(AccountError::Full);
            }
            list.push(account);
            // The set-up code is used up then: an admin has to exist for further accounts.
            has_admin(list, name)
        });
        added.await?;
        self.code.replace(None);
        Ok(())
    }

    /// Changes the role or the password of an account, and ends its sessions.
    pub async fn change(
        &self,
        name: &str,
        role: Option<Role>,
        password: Option<Zeroizing<String>>,
    ) -> Result<(), AccountError> {
        if role.is_none() && password.is_none() {
            return Err(AccountError::Nothing);
        }
        if self.account(name).is_none() {
            return Err(AccountError::Unknown(name.to_owned()));
        }
        let hash = match password {
            None => None,
            Some(password) => {
                passwords::check(name, &password)?;
                Some(self.passwords.hash(password).await?)
            }
        };
        let changed = self.accounts.change(|list| {
            let account = list.iter_mut().find(|account| account.name == name);
            let account = account.ok_or_else(|| AccountError::Unknown(name.to_owned()))?;
            account.role = role.unwrap_or(account.role);
            if let Some(hash) = hash {
                account.hash = hash;
            }
            has_admin(list, name)
        });
        changed.await?;
        self.sessions.borrow_mut().close_of(name);
        Ok(())
    }

    /// Changes the user's own password. Ends all sessions of the account, and opens a new one.
    pub async fn change_own(
        &self,
        name: &str,
        old: Zeroizing<String>,
        new: Zeroizing<String>,
        address: IpAddr,
    ) -> Result<Token, LoginError> {
        passwords::check(name, &new).map_err(AccountError::from)?;
        self.verify(name, old, address).await?;
        self.change(name, None, Some(new)).await?;
        Ok(self.open_session(name)?)
    }

    pub async fn remove(&self, name: &str) -> Result<(), AccountError> {
        let removed = self.accounts.change(|list| {
            let before = list.len();
            list.retain(|account| account.name != name);
            if list.len() == before {
                return Err(AccountError::Unknown(name.to_owned()));
            }
            has_admin(list, name)
        });
        removed.await?;
        self.sessions.borrow_mut().close_of(name);
        Ok(())
    }
}

/// Refuses a list without an account with the role admin. `name`: the account to name in the error.
fn has_admin(list: &[Account], name: &str) -> Result<(), AccountError> {
    if list.iter().any(|account| account.role == Role::Admin) {
        return Ok(());
    }
    Err(AccountError::LastAdmin(name.to_owned()))
}

pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passwords::CHEAP;
    use crate::testing::{PASSWORD, run, secret};
    use nacre_reactor::VirtualClock;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn logins() -> (Rc<Logins>, VirtualClock) {
        let clock = VirtualClock::new();
        (Logins::open(None, CHEAP, clock.clock()).unwrap(), clock)
    }

    #[test]
    fn the_setup_code_makes_one_account() {
        run(async {
            let (logins, clock) = logins();
            let code = logins.setup_code().unwrap();
            assert!(logins.wants_setup());
            for n in 0..7 {
                let refused = logins.set_up("AAAA", "ann", secret(PASSWORD), HERE).await;
                let Err(LoginError::WrongCode(delay)) = refused else {
                    panic!("{refused:?}");
                };
                assert_eq!(delay.is_zero(), n < 4, "{n}: {delay:?}");
            }
            // The right code has to wait, too.
            let refused = logins.set_up(&code, "ann", secret(PASSWORD), HERE).await;
            assert!(matches!(refused, Err(LoginError::WrongCode(_))));
            clock.advance(Duration::from_secs(61));
            let refused = logins.set_up(&code, "ann", secret("short"), HERE).await;
            assert!(matches!(refused, Err(LoginError::Account(_))));
            // Of two at once, one makes the account.
            let (one, two) = tokio::join!(
                logins.set_up(&code, "ann", secret(PASSWORD), HERE),
                logins.set_up(&code, "bob", secret(PASSWORD), HERE)
            );
            assert_eq!(u8::from(one.is_ok()) + u8::from(two.is_ok()), 1);
            assert!(!logins.wants_setup() && logins.setup_code().is_none());
            let again = logins.set_up(&code, "cid", secret(PASSWORD), HERE).await;
            assert!(matches!(
                again,
                Err(LoginError::Account(AccountError::SetUp))
            ));
        });
    }

    #[test]
    fn sessions_end_with_changes_of_the_account() {
        run(async {
            let (logins, clock) = logins();
            logins
                .add("ann", Role::Admin, secret(PASSWORD))
                .await
                .unwrap();
            logins
                .add("bob", Role::Viewer, secret(PASSWORD))
                .await
                .unwrap();
            let login = async |name: &str, password: &str| {
                let token = logins.login(name, secret(password), HERE).await;
                token.map(|token| token.id())
            };
            let bob = login("bob", PASSWORD).await.unwrap();
            assert_eq!(logins.signed_in(bob, true).unwrap().role, Role::Viewer);
            logins
                .change("bob", Some(Role::Operator), None)
                .await
                .unwrap();
            assert!(logins.signed_in(bob, true).is_none());
            let bob = login("bob", PASSWORD).await.unwrap();
            let other = login("bob", PASSWORD).await.unwrap();
            let own = |old, new| logins.change_own("bob", secret(old), secret(new), HERE);
            assert!(own("wrong password", "another password").await.is_err());
            assert!(own(PASSWORD, "short").await.is_err());
            let replaced = own(PASSWORD, "another password").await.unwrap().id();
            assert!(logins.signed_in(other, true).is_none());
            assert!(logins.signed_in(bob, true).is_none());
            assert!(logins.signed_in(replaced, true).is_some());
            assert!(login("bob", PASSWORD).await.is_err());
            logins.remove("bob").await.unwrap();
            assert!(logins.signed_in(replaced, true).is_none());
            // Time ends sessions.
            let ann = login("ann", PASSWORD).await.unwrap();
            clock.advance(Duration::from_secs(29 * 60));
            assert!(logins.signed_in(ann, false).is_some());
            clock.advance(Duration::from_secs(2 * 60));
            assert!(logins.signed_in(ann, true).is_none());
        });
    }

    #[test]
    fn an_admin_remains() {
        run(async {
            let (logins, _) = logins();
            let viewer = logins.add("bob", Role::Viewer, secret(PASSWORD)).await;
            assert!(matches!(viewer, Err(AccountError::LastAdmin(_))));
            assert!(logins.setup_code().is_some());
            logins
                .add("ann", Role::Admin, secret(PASSWORD))
                .await
                .unwrap();
            assert!(logins.setup_code().is_none());
            for refused in [
                logins.remove("ann").await,
                logins.change("ann", Some(Role::Viewer), None).await,
            ] {
                assert!(matches!(refused, Err(AccountError::LastAdmin(_))));
            }
            let exists = logins.add("ann", Role::Viewer, secret(PASSWORD)).await;
            assert!(matches!(exists, Err(AccountError::Exists(_))));
            let nothing = logins.change("ann", None, None).await;
            assert!(matches!(nothing, Err(AccountError::Nothing)));
            let unknown = logins.remove("bob").await;
            assert!(matches!(unknown, Err(AccountError::Unknown(_))));
            for n in 1..MAX_ACCOUNTS {
                let name = format!("a{n}");
                logins
                    .add(&name, Role::Viewer, secret(PASSWORD))
                    .await
                    .unwrap();
            }
            let full = logins.add("bob", Role::Viewer, secret(PASSWORD)).await;
            assert!(matches!(full, Err(AccountError::Full)));
        });
    }

    #[test]
    fn wrong_passwords_wait_and_unknown_accounts_look_the_same() {
        run(async {
            let (logins, clock) = logins();
            logins
                .add("ann", Role::Admin, secret(PASSWORD))
                .await
                .unwrap();
            let mut seen = Vec::new();
            for name in ["ann", "bob"] {
                let mut delays = Vec::new();
                for _ in 0..6 {
                    match logins.login(name, secret("wrong password"), HERE).await {
                        Err(LoginError::Wrong(delay)) => delays.push(delay),
                        other => panic!("{other:?}"),
                    }
                }
                seen.push(delays);
            }
            assert_eq!(seen[0], seen[1]);
            assert!(!seen[0][5].is_zero());
            assert!(logins.login("ann", secret(PASSWORD), HERE).await.is_err());
            clock.advance(Duration::from_secs(2));
            assert!(logins.login("ann", secret(PASSWORD), HERE).await.is_ok());
            let long = "x".repeat(10_000);
            assert!(logins.login("ann", secret(&long), HERE).await.is_err());
        });
    }
}
