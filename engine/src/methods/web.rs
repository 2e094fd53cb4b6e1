//! `web_*`, Nacre extensions: accounts of the administration page, API tokens of programs, and the
//! state of the page.

use std::rc::Rc;
use std::time::Duration;

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
    registry.add::<ListTokens>().add::<CreateToken>();
    registry.add::<DeleteToken>().add::<GetStatus>();
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

pub struct ListTokens;

#[derive(Debug, Serialize, JsonSchema)]
pub struct TokenReply {
    name: String,
    role: Role,
    /// Milliseconds since 1970.
    created_ms: u64,
    /// Milliseconds since 1970; null: it is valid until it is deleted.
    expires_ms: Option<u64>,
}

impl Method<Engine> for ListTokens {
    const NAME: &'static str = "web_token_list";
    const ABOUT: &'static str =
        "Lists the API tokens of programs, also those whose time is over. No answer has a secret.";
    const CLASS: Class = Class::Admin;
    const CHANGES: Changes = Changes::Nothing;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = Vec<TokenReply>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<TokenReply>, RpcError> {
        let tokens = engine.calls.page.logins()?.api_tokens().into_iter();
        let tokens = tokens.map(|token| TokenReply {
            name: token.name,
            role: token.role,
            created_ms: token.created_ms,
            expires_ms: token.expires_ms,
        });
        Ok(tokens.collect())
    }
}

pub struct CreateToken;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateTokenParams {
    /// 1 to 32 of a-z, 0-9, `.`, `_` and `-`, a letter first.
    pub name: String,
    /// The role of the program: `viewer`, `operator` or `admin`.
    pub role: Role,
    /// For so many seconds the token is valid: 60 to 316224000 (ten years); left out: until it is
    /// deleted.
    pub validity_s: Option<u64>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct CreatedTokenReply {
    /// The secret, which no other answer has: `nacre_` and 64 hexadecimal digits.
    token: RevealedText,
}

impl Method<Engine> for CreateToken {
    const NAME: &'static str = "web_token_create";
    const ABOUT: &'static str = "Makes an API token: with it a program calls methods over the listeners of the administration page, \
         by POST /api/rpc with `Authorization: Bearer TOKEN`. Only the digest of the secret is stored.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = CreateTokenParams;
    type Reply = CreatedTokenReply;

    async fn apply(
        params: CreateTokenParams,
        engine: Rc<Engine>,
    ) -> Result<CreatedTokenReply, RpcError> {
        let logins = engine.calls.page.logins()?;
        let validity = params.validity_s.map(Duration::from_secs);
        let created = logins.create_api_token(&params.name, params.role, validity);
        let token = RevealedText::from(created.await?);
        Ok(CreatedTokenReply { token })
    }
}

pub struct DeleteToken;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeleteTokenParams {
    /// Name of the API token.
    pub name: String,
}

impl Method<Engine> for DeleteToken {
    const NAME: &'static str = "web_token_delete";
    const ABOUT: &'static str =
        "Deletes an API token: its next request is refused, and its streams of live data end.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = DeleteTokenParams;
    type Reply = bool;

    async fn apply(params: DeleteTokenParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let logins = engine.calls.page.logins()?;
        logins.delete_api_token(&params.name).await?;
        Ok(true)
    }
}

pub struct GetStatus;

#[derive(Debug, Serialize, JsonSchema)]
pub struct WebStatusReply {
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
    type Reply = WebStatusReply;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<WebStatusReply, RpcError> {
        let page = &engine.calls.page;
        let logins = page.logins().ok();
        let actor = access::actor();
        let may_see = actor.local && actor.role == Role::Admin;
        let code = logins.as_ref().filter(|_| may_see);
        let code = code.and_then(|logins| logins.setup_code());
        Ok(WebStatusReply {
            listen: page.listen(),
            fingerprint: page.fingerprint(),
            setup: logins.is_some_and(|logins| logins.wants_setup()),
            setup_code: code.map(RevealedText::from),
        })
    }
}
