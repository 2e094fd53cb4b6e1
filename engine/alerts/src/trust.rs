//! The certificates that sign those of webhooks and mail servers.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

use crate::Failure;

/// Certificates of authorities, for TLS 1.2 and 1.3.
#[derive(Debug, Clone)]
pub struct Trust {
    authorities: Vec<CertificateDer<'static>>,
    config: Arc<ClientConfig>,
}

impl Trust {
    /// Reads a PEM file, or the system's certificates. Blocks.
    pub fn read(file: Option<&Path>) -> Result<Self, Failure> {
        let refuse = |cause: String| match file {
            Some(path) => Failure::Authorities {
                path: path.to_owned(),
                cause,
            },
            None => Failure::SystemAuthorities(cause),
        };
        let certificates = match file {
            Some(path) => {
                let text = std::fs::read(path).map_err(|error| refuse(error.to_string()))?;
                let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
                all.map_err(|error| refuse(error.to_string()))?
            }
            // A few of many that cannot be read are no failure.
            None => rustls_native_certs::load_native_certs().certs,
        };
        let mut roots = RootCertStore::empty();
        let mut authorities = certificates;
        authorities.retain(|certificate| roots.add(certificate.clone()).is_ok());
        if authorities.is_empty() {
            return Err(refuse("there is no certificate".into()));
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| refuse(error.to_string()))?
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
