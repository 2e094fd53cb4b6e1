//! Mail through an SMTP server.

use std::time::Duration;

use lettre::message::header::{ContentType, HeaderName, HeaderValue};
use lettre::transport::smtp::authentication::Credentials;
use lettre::transport::smtp::client::{Certificate, CertificateStore, Tls, TlsParameters};
use lettre::transport::smtp::extension::ClientId;
use lettre::{AsyncSmtpTransport, AsyncTransport, Tokio1Executor};
use zeroize::Zeroizing;

use crate::address::mailbox;
use crate::{Failure, Message, Server, Trust};

/// A mail server and the recipients.
#[derive(Debug)]
pub struct Mail {
    pub server: Server,
    pub security: Security,
    /// `None`: the server needs no authentication.
    pub login: Option<Login>,
    pub from: String,
    pub to: Vec<String>,
}

/// How the connection is encrypted.
#[derive(Debug)]
pub enum Security {
    /// After the command STARTTLS (RFC 3207). A server without it is refused.
    StartTls(Trust),
    /// From the first byte on (RFC 8314).
    Implicit(Trust),
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

impl Mail {
    /// Sends the message; `Ok` after the server has accepted it for every recipient.
    pub async fn send(&self, message: &Message, limit: Duration) -> Result<(), Failure> {
        let mail = self.compose(message)?;
        let host = self.server.host.clone();
        let mut builder = AsyncSmtpTransport::<Tokio1Executor>::builder_dangerous(host)
            .port(self.server.port)
            .hello_name(ClientId::Domain(message.node.clone()))
            .timeout(Some(limit))
            .tls(self.tls()?);
        if let Some(login) = &self.login {
            let password = login.password.as_str().to_owned();
            builder = builder.credentials(Credentials::new(login.user.clone(), password));
        }
        let transport = builder.build();
        let sent = tokio::time::timeout(limit, transport.send(mail)).await;
        sent.map_err(|_| Failure::Late(limit))??;
        Ok(())
    }

    fn tls(&self) -> Result<Tls, Failure> {
        let parameters = |trust: &Trust| {
            let mut builder = TlsParameters::builder(self.server.host.clone())
                .certificate_store(CertificateStore::None);
            for authority in trust.authorities() {
                let certificate = Certificate::from_der(authority.to_vec())?;
                builder = builder.add_root_certificate(certificate);
            }
            builder.build_rustls()
        };
        Ok(match &self.security {
            Security::StartTls(trust) => Tls::Required(parameters(trust)?),
            Security::Implicit(trust) => Tls::Wrapper(parameters(trust)?),
            Security::Clear => Tls::None,
        })
    }

    fn compose(&self, message: &Message) -> Result<lettre::Message, Failure> {
        let mut builder = lettre::Message::builder()
            .from(mailbox(&self.from)?)
            .subject(&message.text)
            .date_now()
            .message_id(Some(format!("<{}@{}>", message.id, message.node)))
            .header(ContentType::TEXT_PLAIN);
        for recipient in &self.to {
            builder = builder.to(mailbox(recipient)?);
        }
        let mut mail = builder.body(message.mail_text())?;
        // RFC 3834: vacation programs do not answer.
        let automatic = HeaderName::new_from_ascii_str("Auto-Submitted");
        let value = HeaderValue::new(automatic, "auto-generated".to_owned());
        mail.headers_mut().insert_raw(value);
        Ok(mail)
    }
}
