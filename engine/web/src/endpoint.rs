//! The listen addresses of the administration page (`[web] listen` in the configuration), such as
//! `https://0.0.0.0:8443`.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

/// An address to listen on: HTTPS, or plain HTTP on a loopback address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    pub address: SocketAddr,
    /// True for HTTPS.
    pub secure: bool,
}

/// The reason why a text is not an [`Endpoint`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    #[error("\"{0}\" does not begin with https:// or http://")]
    Scheme(String),
    #[error("\"{0}\" is not an IP address with a port")]
    Address(String),
    #[error("{0} is no loopback address, and passwords would cross the network in clear")]
    Plain(SocketAddr),
}

impl EndpointError {
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Scheme(_) | Self::Address(_) => {
                "write \"https://0.0.0.0:8443\" or \"https://[::]:8443\""
            }
            Self::Plain(_) => "use https://, or listen on 127.0.0.1",
        }
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let (address, secure) = match (text.strip_prefix("https://"), text.strip_prefix("http://"))
        {
            (Some(address), _) => (address, true),
            (None, Some(address)) => (address, false),
            (None, None) => return Err(EndpointError::Scheme(text.to_owned())),
        };
        let address = address.strip_suffix('/').unwrap_or(address);
        let address: SocketAddr = address
            .parse()
            .map_err(|_| EndpointError::Address(address.to_owned()))?;
        if !secure && !address.ip().is_loopback() {
            return Err(EndpointError::Plain(address));
        }
        Ok(Self { address, secure })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_http_is_for_loopback() {
        for text in [
            "https://0.0.0.0:8443",
            "https://[::]:8443",
            "http://127.0.0.1:80",
            "http://[::1]:8080",
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        let refused = |text: &str| text.parse::<Endpoint>().unwrap_err();
        assert!(matches!(refused("0.0.0.0:8443"), EndpointError::Scheme(_)));
        assert!(matches!(
            refused("https://host:1"),
            EndpointError::Address(_)
        ));
        assert!(matches!(
            refused("https://1.2.3.4"),
            EndpointError::Address(_)
        ));
        assert!(matches!(
            refused("http://0.0.0.0:80"),
            EndpointError::Plain(_)
        ));
        assert!(matches!(
            refused("http://10.0.0.1:80"),
            EndpointError::Plain(_)
        ));
    }
}
