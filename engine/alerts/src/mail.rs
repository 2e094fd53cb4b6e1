//! Sends a message as mail through an SMTP server.

use std::net::SocketAddr;
use std::time::Duration;

use lettre::Address;
use lettre::message::header::{ContentType, HeaderName, HeaderValue};
use lettre::transport::smtp;
use lettre::transport::smtp::authentication::{Credentials, Mechanism};
use lettre::transport::smtp::client::{
    AsyncSmtpConnection, AsyncTokioStream, Certificate, CertificateStore, TlsParameters,
};
use lettre::transport::smtp::commands::{self, Data, Rcpt, Rset};
use lettre::transport::smtp::extension::{
    ClientId, Extension, MailBodyParameter, MailParameter, ServerInfo,
};
use zeroize::Zeroizing;

use crate::address::mailbox;
use crate::answers::Answers;
use crate::{Failure, Message, Server, Trust};

/// The time for QUIT, whose answer decides nothing.
const GOODBYE: Duration = Duration::from_secs(2);

/// A mail server, the sender, and the recipients.
#[derive(Debug)]
pub struct Mail {
    pub server: Server,
    /// From [`Server::resolve`].
    pub addresses: Vec<SocketAddr>,
    pub security: MailEncryption,
    /// `None`: the server needs no authentication.
    pub login: Option<Login>,
    pub from: String,
    pub to: Vec<String>,
}

/// The encryption of the connection to the server, with the CA certificates for the server's
/// certificate. The setting `tls` of a receiver selects it.
#[derive(Debug)]
pub enum MailEncryption {
    /// After the command STARTTLS (RFC 3207). A server without it is refused.
    StartTls(Trust),
    /// From the first byte on (RFC 8314).
    Implicit(Trust),
    /// No encryption.
    Clear,
}

pub struct Login {
    pub user: String,
    pub password: Zeroizing<String>,
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Login({:?})", self.user)
    }
}

/// The recipients of a message that need no further attempt: the server accepted the message for
/// them, or refused it for good. Keep it from attempt to attempt.
#[derive(Debug, Default)]
pub struct Progress {
    accepted: Vec<String>,
    refused: Vec<String>,
    /// The first refusal.
    refusal: Option<Failure>,
}

impl Progress {
    /// True if the server has accepted the message for at least one recipient.
    pub fn is_partial(&self) -> bool {
        !self.accepted.is_empty()
    }

    fn refuse(&mut self, recipient: &str, failure: Failure) {
        self.refused.push(recipient.to_owned());
        self.refusal.get_or_insert(failure);
    }

    fn is_over(&self, recipient: &String) -> bool {
        self.accepted.contains(recipient) || self.refused.contains(recipient)
    }
}

impl Mail {
    /// Sends the message to the recipients that `progress` lacks, within `limit`. `Ok`: the server
    /// has accepted it for every recipient. A final failure ([`Failure::is_final`]): it has refused
    /// it for good for at least one, and no other attempt is useful.
    pub async fn send(
        &self,
        message: &Message,
        progress: &mut Progress,
        limit: Duration,
    ) -> Result<(), Failure> {
        let session = self.session(message, progress, limit);
        let ended = tokio::time::timeout(limit, session).await;
        if self.to.iter().all(|recipient| progress.is_over(recipient)) {
            return progress.refusal.take().map_or(Ok(()), Err);
        }
        ended.map_err(|_| Failure::Late(limit))?
    }

    /// One transaction for each recipient, so that one that is refused stops no other.
    async fn session(
        &self,
        message: &Message,
        progress: &mut Progress,
        limit: Duration,
    ) -> Result<(), Failure> {
        let mut connection = self.open(message, limit).await?;
        let accepts = Letters::of(connection.server_info());
        let from = accepts.check(&self.from)?;
        for recipient in &self.to {
            if !progress.is_over(recipient)
                && let Err(failure) = accepts.check(recipient)
            {
                progress.refuse(recipient, failure);
            }
        }
        let mail = self.compose(message, accepts)?.formatted();
        let mut later = None;
        let mut is_clean = true;
        for recipient in &self.to {
            if progress.is_over(recipient) {
                continue;
            }
            if !is_clean && let Err(error) = connection.command(Rset).await {
                return Err(later.unwrap_or(error).into());
            }
            let to = mailbox(recipient)?.email;
            let first = commands::Mail::new(Some(from.clone()), accepts.parameters(&mail));
            match transact(&mut connection, first, Rcpt::new(to, vec![]), &mail).await {
                Ok(()) => progress.accepted.push(recipient.clone()),
                Err(source) if source.is_permanent() => {
                    let failure = Failure::Recipient {
                        recipient: recipient.clone(),
                        source,
                    };
                    progress.refuse(recipient, failure);
                    is_clean = false;
                }
                Err(error) if error.is_transient() => {
                    later.get_or_insert(error);
                    is_clean = false;
                }
                Err(error) => return Err(error.into()),
            }
        }
        let _ = tokio::time::timeout(GOODBYE, connection.quit()).await;
        later.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Connects, with TLS and authentication.
    async fn open(
        &self,
        message: &Message,
        limit: Duration,
    ) -> Result<AsyncSmtpConnection, Failure> {
        let stream = self.server.connect(&self.addresses, limit).await?;
        let stream: Box<dyn AsyncTokioStream> = match &self.security {
            MailEncryption::StartTls(_) => Box::new(Answers::before_starttls(stream)),
            MailEncryption::Implicit(trust) => {
                Box::new(Answers::new(self.server.handshake(stream, trust).await?))
            }
            MailEncryption::Clear => Box::new(Answers::new(stream)),
        };
        let hello = ClientId::Domain(message.domain());
        let mut connection = AsyncSmtpConnection::connect_with_transport(stream, &hello).await?;
        if let MailEncryption::StartTls(trust) = &self.security {
            connection.starttls(self.tls(trust)?, &hello).await?;
        }
        if let Some(login) = &self.login {
            let password = login.password.as_str().to_owned();
            let credentials = Credentials::new(login.user.clone(), password);
            let mechanisms = [Mechanism::Plain, Mechanism::Login];
            connection.auth(&mechanisms, &credentials).await?;
        }
        Ok(connection)
    }

    fn tls(&self, trust: &Trust) -> Result<TlsParameters, smtp::Error> {
        let mut builder = TlsParameters::builder(self.server.host.clone())
            .certificate_store(CertificateStore::None);
        for authority in trust.authorities() {
            let certificate = Certificate::from_der(authority.to_vec())?;
            builder = builder.add_root_certificate(certificate);
        }
        builder.build_rustls()
    }

    /// The header names only recipients whose letters the server accepts.
    fn compose(&self, message: &Message, accepts: Letters) -> Result<lettre::Message, Failure> {
        let mut builder = lettre::Message::builder()
            .from(mailbox(&self.from)?)
            .subject(message.subject())
            .date_now()
            .message_id(Some(format!("<{}@{}>", message.id, message.domain())))
            .header(ContentType::TEXT_PLAIN);
        for recipient in &self.to {
            if accepts.check(recipient).is_ok() {
                builder = builder.to(mailbox(recipient)?);
            }
        }
        let mut mail = builder.body(message.mail_text())?;
        // RFC 3834: vacation programs do not answer.
        let automatic = HeaderName::new_from_ascii_str("Auto-Submitted");
        let value = HeaderValue::new(automatic, "auto-generated".to_owned());
        mail.headers_mut().insert_raw(value);
        Ok(mail)
    }
}

async fn transact(
    connection: &mut AsyncSmtpConnection,
    sender: commands::Mail,
    recipient: Rcpt,
    mail: &[u8],
) -> Result<(), smtp::Error> {
    connection.command(sender).await?;
    connection.command(recipient).await?;
    connection.command(Data).await?;
    connection.message(mail).await.map(drop)
}

/// The letters that a server accepts in addresses. Names and texts are encoded, so that they need
/// nothing.
#[derive(Clone, Copy)]
enum Letters {
    Ascii,
    /// RFC 6531.
    Utf8,
}

impl Letters {
    fn of(server: &ServerInfo) -> Self {
        let needed = [Extension::SmtpUtfEight, Extension::EightBitMime];
        let has_all = needed.iter().all(|one| server.supports_feature(*one));
        if has_all { Self::Utf8 } else { Self::Ascii }
    }

    fn check(self, address: &str) -> Result<Address, Failure> {
        let email = mailbox(address)?.email;
        let text: &str = email.as_ref();
        if text.is_ascii() || matches!(self, Self::Utf8) {
            return Ok(email);
        }
        let address = text.to_owned();
        Err(Failure::International { address })
    }

    fn parameters(self, mail: &[u8]) -> Vec<MailParameter> {
        if mail.is_ascii() {
            return Vec::new();
        }
        let body = MailParameter::Body(MailBodyParameter::EightBitMime);
        vec![MailParameter::SmtpUtfEight, body]
    }
}
