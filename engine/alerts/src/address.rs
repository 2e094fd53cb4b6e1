//! The addresses of alert receivers in the configuration: URLs of webhooks, mail servers, and mail
//! addresses. Parsed and checked.

use hyper::Uri;
use lettre::message::Mailbox;

/// The error of a text that is no valid address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("not a URL")]
    NoUrl,
    #[error("the URL has no scheme http:// or https://")]
    Scheme,
    #[error("the URL has a user or a password, which requests would not carry")]
    UserInfo,
    #[error("\"{0}\" is not a host with an optional port")]
    Server(String),
    #[error("\"{text}\" is not a mail address: {cause}")]
    Mailbox { text: String, cause: String },
}

impl AddressError {
    /// Advice for the user: the form of address to write, or the option to use instead.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::NoUrl | Self::Scheme => "write https://HOST[:PORT]/PATH",
            Self::UserInfo => "name a file with a token in token_file",
            Self::Server(_) => "write HOST or HOST:PORT",
            Self::Mailbox { .. } => "write name@example.org, or Name <name@example.org>",
        }
    }
}

/// A host name or IP address, and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Without the brackets of an IPv6 address.
    pub host: String,
    pub port: u16,
}

impl Server {
    /// Parses `HOST`, `HOST:PORT`, `[IPV6]` and `[IPV6]:PORT`. Refuses port 0.
    pub fn parse(text: &str, default_port: u16) -> Result<Self, AddressError> {
        let refused = || AddressError::Server(text.to_owned());
        let authority: hyper::http::uri::Authority = text.parse().map_err(|_| refused())?;
        let host = authority.host();
        let after = &text[host.len().min(text.len())..];
        let port = match after.strip_prefix(':') {
            None if after.is_empty() => default_port,
            None => return Err(refused()),
            Some(port) => port.parse().map_err(|_| refused())?,
        };
        if host.is_empty() || port == 0 || text.contains('@') {
            return Err(refused());
        }
        let host = host.trim_matches(['[', ']']).to_owned();
        Ok(Self { host, port })
    }
}

impl Server {
    /// True for `localhost` and loopback addresses: messages to them cross no network.
    pub fn is_local(&self) -> bool {
        let address = self.host.parse::<std::net::IpAddr>();
        self.host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// The URL of a webhook: `http` or `https`, without user and password. `Debug` hides path and
/// query.
#[derive(Clone, PartialEq, Eq)]
pub struct Url {
    pub(crate) https: bool,
    pub(crate) server: Server,
    /// The value of the header `Host`.
    pub(crate) authority: String,
    /// The path and the query.
    pub(crate) path: String,
}

impl std::fmt::Debug for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Url({:?})", self.origin())
    }
}

impl Url {
    /// The port defaults to 443 for `https` and to 80 for `http`, the path to `/`.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        if !text.contains("://") {
            return Err(AddressError::Scheme);
        }
        let uri: Uri = text.parse().map_err(|_| AddressError::NoUrl)?;
        let https = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(AddressError::Scheme),
        };
        let authority = uri.authority().ok_or(AddressError::NoUrl)?;
        if authority.as_str().contains('@') {
            return Err(AddressError::UserInfo);
        }
        let server = Server::parse(authority.as_str(), if https { 443 } else { 80 })?;
        // Its text adds the slash that a URL with a query and no path lacks.
        let path = uri.path_and_query().map(ToString::to_string);
        Ok(Self {
            https,
            server,
            authority: authority.to_string(),
            path: path.unwrap_or_else(|| "/".into()),
        })
    }

    pub fn server(&self) -> &Server {
        &self.server
    }

    pub fn is_https(&self) -> bool {
        self.https
    }

    /// True if requests are encrypted (HTTPS) or stay on this machine, so they may carry a secret.
    pub fn is_private(&self) -> bool {
        self.https || self.server.is_local()
    }

    /// The URL without its path and query, which can be secret.
    pub fn origin(&self) -> String {
        let scheme = if self.https { "https" } else { "http" };
        format!("{scheme}://{}", self.authority)
    }
}

/// Checks a mail address: `name@example.org` or `Name <name@example.org>`.
pub fn check_mailbox(text: &str) -> Result<(), AddressError> {
    mailbox(text).map(drop)
}

pub(crate) fn mailbox(text: &str) -> Result<Mailbox, AddressError> {
    text.parse().map_err(
        |error: lettre::address::AddressError| AddressError::Mailbox {
            text: text.to_owned(),
            cause: error.to_string(),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_a_host_and_a_port() {
        for (text, expected) in [
            ("mail.example.org", "mail.example.org:587"),
            ("mail.example.org:25", "mail.example.org:25"),
            ("192.0.2.1:25", "192.0.2.1:25"),
            ("[2001:db8::1]:25", "[2001:db8::1]:25"),
            ("[2001:db8::1]", "[2001:db8::1]:587"),
        ] {
            let server = Server::parse(text, 587).unwrap();
            assert_eq!(server.to_string(), expected);
            assert!(!server.host.contains('['));
        }
        for text in ["", ":25", "a:", "a:0", "a:65536", "a b", "u@a:25", "a:25x"] {
            Server::parse(text, 587).unwrap_err();
        }
    }

    #[test]
    fn urls_are_split() {
        let url = Url::parse("https://hooks.example.org/a/b?c=d").unwrap();
        assert!(url.https);
        assert_eq!(url.server.to_string(), "hooks.example.org:443");
        assert_eq!(
            (&*url.path, &*url.authority),
            ("/a/b?c=d", "hooks.example.org")
        );
        assert_eq!(url.origin(), "https://hooks.example.org");
        let url = Url::parse("http://[::1]:8080").unwrap();
        assert_eq!((url.https, &*url.path), (false, "/"));
        assert_eq!(url.server.to_string(), "[::1]:8080");
        let url = Url::parse("https://hooks.example.org?s3cret").unwrap();
        assert_eq!(url.path, "/?s3cret");
        assert_eq!(format!("{url:?}"), "Url(\"https://hooks.example.org\")");
        for (text, expected) in [
            ("hooks.example.org", AddressError::Scheme),
            ("ftp://a/", AddressError::Scheme),
            ("https://", AddressError::NoUrl),
            ("https://a b/", AddressError::NoUrl),
            ("https://u:p@a/", AddressError::UserInfo),
        ] {
            assert_eq!(Url::parse(text), Err(expected), "{text}");
        }
    }

    #[test]
    fn mail_addresses_are_checked() {
        check_mailbox("ops@example.org").unwrap();
        check_mailbox("Storage <ops@example.org>").unwrap();
        for text in ["", "ops", "ops@", "a@b\r\nBcc: c@d"] {
            check_mailbox(text).unwrap_err();
        }
    }
}
