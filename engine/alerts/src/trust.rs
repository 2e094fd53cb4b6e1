//! The CA certificates for TLS connections to webhooks and mail servers.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

use crate::Failure;

/// CA certificates that a TLS client (1.2 and 1.3) trusts.
#[derive(Debug, Clone)]
pub struct Trust {
    authorities: Vec<CertificateDer<'static>>,
    config: Arc<ClientConfig>,
}

impl Trust {
    /// The certificates in the text of a PEM file. Fails if there is none. The path is for errors.
    pub fn of_pem(path: &Path, text: &[u8]) -> Result<Self, Failure> {
        let refuse = |cause: String| Failure::Authorities {
            path: path.to_owned(),
            cause,
        };
        let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
        let all = all.map_err(|error| refuse(error.to_string()))?;
        Self::of(all).map_err(refuse)
    }

    /// The CA certificates of the system. Fails if none can be read. Blocks.
    pub fn of_system() -> Result<Self, Failure> {
        // A few of many that cannot be read are no failure.
        let found = rustls_native_certs::load_native_certs().certs;
        Self::of(found).map_err(Failure::SystemAuthorities)
    }

    fn of(mut authorities: Vec<CertificateDer<'static>>) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        authorities.retain(|certificate| roots.add(certificate.clone()).is_ok());
        if authorities.is_empty() {
            return Err("there is no certificate".into());
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self {
            authorities,
            config: Arc::new(config),
        })
    }

    pub(crate) fn config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.config)
    }

    pub(crate) fn authorities(&self) -> &[CertificateDer<'static>] {
        &self.authorities
    }
}
