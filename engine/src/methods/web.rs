//! `web_*`, Nacre extensions: the accounts of the administration page, and its state.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::rpc::access;
use crate::rpc::method::NoParams;
use crate::rpc::secret::{RevealedText, SecretText};
use crate::rpc::{Changes, Class, Method, Order, Registry, Role, RpcError, When};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<ListAccounts>().add::<AddAccount>();
    registry.add::<ChangeAccount>().add::<RemoveAccount>();
    registry.add::<GetStatus>();
}

fn revealed(text: &SecretText) -> Zeroizing<String> {
    Zeroizing::new(text.reveal().to_owned())
}

pub struct ListAccounts;

#[derive(Debug, Serialize, JsonSchema)]
pub struct AccountReply {
    name: String,
    role: Role,
    /// Milliseconds since 1970.
    created_ms: u64,
}

impl Method<Engine> for ListAccounts {
    const NAME: &'static str = "web_account_list";
    const ABOUT: &'static str = "Lists the accounts of the administration page.";
    const CLASS: Class = Class::Admin;
    const CHANGES: Changes = Changes::Nothing;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = Vec<AccountReply>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<AccountReply>, RpcError> {
        let accounts = engine.calls.page.logins()?.accounts().into_iter();
        let accounts = accounts.map(|account| AccountReply {
            role: account.role,
            name: account.name,
            created_ms: account.created_ms,
        });
        Ok(accounts.collect())
    }
}

pub struct AddAccount;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AddAccountParams {
    /// 1 to 32 of a-z, 0-9, `.`, `_` and `-`, a letter first.
    pub name: String,
    /// The role of the account: `viewer`, `operator` or `admin`.
    pub role: Role,
    /// 12 to 256 bytes. Only its hash is stored.
    #[serde(serialize_with = "SecretText::send")]
    pub password: SecretText,
}

impl Method<Engine> for AddAccount {
    const NAME: &'static str = "web_account_add";
    const ABOUT: &'static str = "Makes an account of the administration page. The first one has the role admin, and ends \
         the set-up code.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = AddAccountParams;
    type Reply = bool;

    async fn apply(params: AddAccountParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let logins = engine.calls.page.logins()?;
        let (role, password) = (params.role, revealed(&params.password));
        logins.add(&params.name, role, password).await?;
        Ok(true)
    }
}

pub struct ChangeAccount;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeAccountParams {
    /// Name of the account.
    pub name: String,
    /// The new role; left out: the present one.
    pub role: Option<Role>,
    /// The new password; left out: the present one.
    #[serde(serialize_with = "SecretText::send_some")]
    pub password: Option<SecretText>,
}

impl Method<Engine> for ChangeAccount {
    const NAME: &'static str = "web_account_change";
    const ABOUT: &'static str = "Changes role or password of an account of the administration page. Its sessions end. The last admin \
         keeps its role.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = ChangeAccountParams;
    type Reply = bool;

    async fn apply(params: ChangeAccountParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let logins = engine.calls.page.logins()?;
        let password = params.password.as_ref().map(revealed);
        let role = params.role;
        logins.change(&params.name, role, password).await?;
        Ok(true)
    }
}

pub struct RemoveAccount;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveAccountParams {
    /// Name of the account.
    pub name: String,
}

impl Method<Engine> for RemoveAccount {
    const NAME: &'static str = "web_account_remove";
    const ABOUT: &'static str =
        "Removes an account of the administration page. Its sessions end. The last admin stays.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = RemoveAccountParams;
    type Reply = bool;

    async fn apply(params: RemoveAccountParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.calls.page.logins()?.remove(&params.name).await?;
        Ok(true)
    }
}

pub struct GetStatus;

#[derive(Debug, Serialize, JsonSchema)]
pub struct StatusReply {
    /// The addresses of the page; empty: it is off.
    listen: Vec<String>,
    /// The SHA-256 digest of the certificate, as browsers show it; null without HTTPS.
    fingerprint: Option<String>,
    /// True while there is no account.
    setup: bool,
    /// The code that makes the first account. Only for admins of this machine.
    setup_code: Option<RevealedText>,
}

impl Method<Engine> for GetStatus {
    const NAME: &'static str = "web_get_status";
    const ABOUT: &'static str = "Shows the addresses of the administration page, the fingerprint of its certificate and, for an admin of this \
         machine, the set-up code.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = StatusReply;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<StatusReply, RpcError> {
        let page = &engine.calls.page;
        let logins = page.logins().ok();
        let actor = access::actor();
        let may_see = actor.local && actor.role == Role::Admin;
        let code = logins.as_ref().filter(|_| may_see);
        let code = code.and_then(|logins| logins.setup_code());
        Ok(StatusReply {
            listen: page.listen(),
            fingerprint: page.fingerprint(),
            setup: logins.is_some_and(|logins| logins.wants_setup()),
            setup_code: code.map(RevealedText::from),
        })
    }
}
