//! `nacre --tls`: commands call the daemon of another machine over TLS, with a client certificate.

use std::path::PathBuf;
use std::sync::OnceLock;

use clap::Args;
use nacre_engine_rpc::tls::connect::Remote;

#[derive(Debug, Args)]
#[command(next_help_heading = "A daemon on another machine")]
pub(crate) struct TlsArgs {
    /// Call the daemon whose [rpc.tls] listens here, in place of a Unix socket
    #[arg(
        long,
        value_name = "HOST:PORT",
        env = "NACRE_TLS",
        requires_all = ["cert", "key", "ca"],
        value_parser = address
    )]
    tls: Option<String>,
    /// This client's certificate (PEM); its subject decides the role
    #[arg(long, value_name = "FILE", env = "NACRE_TLS_CERT")]
    cert: Option<PathBuf>,
    /// The key of the certificate (PEM, mode 0600)
    #[arg(long, value_name = "FILE", env = "NACRE_TLS_KEY")]
    key: Option<PathBuf>,
    /// Certificates that sign the daemon's (PEM)
    #[arg(long, value_name = "FILE", env = "NACRE_TLS_CA")]
    ca: Option<PathBuf>,
    /// Revocation lists of those certificates (PEM): refuse a daemon whose certificate is revoked
    #[arg(long, value_name = "FILE", env = "NACRE_TLS_CRL")]
    crl: Option<PathBuf>,
    /// The name in the daemon's certificate, unless it is that of --tls
    #[arg(long, value_name = "NAME", env = "NACRE_TLS_SERVER_NAME")]
    server_name: Option<String>,
}

static REMOTE: OnceLock<Remote> = OnceLock::new();

impl TlsArgs {
    /// Makes this the daemon of all connections of the process.
    pub(crate) fn set(self) {
        if let (Some(address), Some(cert), Some(key), Some(ca)) =
            (self.tls, self.cert, self.key, self.ca)
        {
            let (server_name, crl) = (self.server_name, self.crl);
            let _ = REMOTE.set(Remote {
                address,
                server_name,
                cert,
                key,
                ca,
                crl,
            });
        }
    }
}

/// The daemon of `--tls`, if it was given.
pub(crate) fn remote() -> Option<&'static Remote> {
    REMOTE.get()
}

fn address(text: &str) -> Result<String, String> {
    let port = text.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    match port.map(|(_, port)| port.parse::<u16>()) {
        Some(Ok(port)) if port > 0 => Ok(text.to_owned()),
        _ => Err("write HOST:PORT, such as storage1:4430 or [2001:db8::1]:4430".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::address;

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for good in ["a:1", "192.0.2.1:4430", "[::1]:4430"] {
            assert_eq!(address(good), Ok(good.to_owned()));
        }
        for bad in ["", "a", ":1", "a:", "a:0", "a:x", "a:65536"] {
            assert!(address(bad).is_err(), "{bad}");
        }
    }
}
