//! Reads certificates and keys from PEM files, and makes the rustls configurations of server and
//! client.

use std::fs::OpenOptions;
use std::io::{Error, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustls::client::WebPkiServerVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tracing::warn;
use zeroize::Zeroizing;

use super::crl::{Dates, Revocation};
use crate::der::Malformed;

/// Most bytes of a file.
const MAX_BYTES: u64 = 1 << 20;

/// The reason that the files of a server or client cannot be used. `key`: the setting or flag that
/// names the file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{key} {path}: cannot be read: {source}", path = path.display())]
    Unreadable {
        key: &'static str,
        path: PathBuf,
        source: Error,
    },
    #[error("{key} {path}: its mode is {mode:04o}, so that other users can use the key: `chmod 600` it", path = path.display())]
    Shared {
        key: &'static str,
        path: PathBuf,
        mode: u32,
    },
    #[error("{key} {path}: {what} in PEM is needed (-----BEGIN …): {source}", path = path.display())]
    NoPem {
        key: &'static str,
        path: PathBuf,
        what: &'static str,
        source: pem::Error,
    },
    #[error("{key} {path}: {source}", path = path.display())]
    Refused {
        key: &'static str,
        path: PathBuf,
        source: rustls::Error,
    },
    #[error("{key} {path}: {source}", path = path.display())]
    NoAuthority {
        key: &'static str,
        path: PathBuf,
        source: VerifierBuilderError,
    },
    #[error("{key} {path}: a revocation list: {source}", path = path.display())]
    NoList {
        key: &'static str,
        path: PathBuf,
        source: Malformed,
    },
}

/// A file, and the setting or flag that names it.
#[derive(Debug, Clone, Copy)]
pub struct Named<'a> {
    pub key: &'static str,
    pub path: &'a Path,
}

/// The files of a server: its certificate chain, its key, and the authorities for client
/// certificates.
#[derive(Debug, Clone, Copy)]
pub struct Files<'a> {
    pub cert: Named<'a>,
    pub key: Named<'a>,
    /// `None`: clients need no certificate.
    pub ca: Option<Named<'a>>,
    /// The revocation lists of `ca`; `None`: no certificate is revoked.
    pub crl: Option<Named<'a>>,
}

/// The configuration of a server, and the check of its clients' certificates.
#[derive(Debug)]
pub struct ServerTls {
    pub config: Arc<ServerConfig>,
    /// The authorities for client certificates, with their revocation lists; empty: revocation is
    /// not checked.
    pub revocations: Vec<Revocation>,
    verifier: Option<Arc<dyn ClientCertVerifier>>,
}

impl ServerTls {
    /// Checks the certificates of a connected client again, after a change of the authorities or
    /// their revocation lists.
    pub fn check(&self, chain: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
        let Some(verifier) = &self.verifier else {
            return Ok(());
        };
        let (own, others) = chain
            .split_first()
            .ok_or(rustls::Error::NoCertificatesPresented)?;
        let now = UnixTime::now();
        verifier.verify_client_cert(own, others, now).map(drop)
    }
}

impl Files<'_> {
    /// The configuration of a server. Logs the authorities whose clients are refused because of a
    /// missing or ended revocation list.
    pub fn server(&self) -> Result<Arc<ServerTls>, TlsError> {
        let provider = provider();
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|source| self.cert.refused(source))?;
        let (verifier, revocations) = match self.ca {
            None => (None, Vec::new()),
            Some(ca) => {
                let (verifier, revocations) = self.verifier(ca, provider)?;
                (Some(verifier), revocations)
            }
        };
        let builder = match &verifier {
            None => builder.with_no_client_auth(),
            Some(verifier) => builder.with_client_cert_verifier(Arc::clone(verifier)),
        };
        let mut config = builder
            .with_single_cert(self.cert.chain()?, self.key.private_key()?)
            .map_err(|source| self.key.refused(source))?;
        config.send_tls13_tickets = 0;
        Ok(Arc::new(ServerTls {
            config: Arc::new(config),
            revocations,
            verifier,
        }))
    }

    fn verifier(
        &self,
        ca: Named<'_>,
        provider: Arc<CryptoProvider>,
    ) -> Result<(Arc<dyn ClientCertVerifier>, Vec<Revocation>), TlsError> {
        let roots = Arc::new(ca.roots()?);
        let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider);
        let mut revocations = Vec::new();
        if let Some(crl) = self.crl {
            let lists = crl.lists()?;
            let now = SystemTime::now();
            revocations = crl.revocations(&roots, &lists)?;
            for problem in revocations.iter().filter_map(|of| of.problem(now)) {
                let (key, path) = (crl.key, crl.path.display());
                warn!("{key} {path}: {problem}; clients with its certificates are refused");
            }
            builder = builder.with_crls(lists).enforce_revocation_expiration();
        }
        let verifier = builder.build();
        let verifier = verifier.map_err(|source| no_authority(ca, self.crl, source))?;
        Ok((verifier, revocations))
    }
}

/// The authorities of the file `ca`, and those with a list in the file `crl`.
pub fn revocations(ca: Named<'_>, crl: Named<'_>) -> Result<Vec<Revocation>, TlsError> {
    crl.revocations(&ca.roots()?, &crl.lists()?)
}

/// The configuration of a client with a certificate. `crl`: the revocation lists of `ca`.
pub fn client(
    cert: Named<'_>,
    key: Named<'_>,
    ca: Named<'_>,
    crl: Option<Named<'_>>,
) -> Result<Arc<ClientConfig>, TlsError> {
    let provider = provider();
    let roots = Arc::new(ca.roots()?);
    let mut verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider));
    if let Some(crl) = crl {
        let lists = crl.lists()?;
        verifier = verifier.with_crls(lists).enforce_revocation_expiration();
    }
    let verifier = verifier
        .build()
        .map_err(|source| no_authority(ca, crl, source))?;
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(|source| cert.refused(source))?
        .with_webpki_verifier(verifier)
        .with_client_auth_cert(cert.chain()?, key.private_key()?)
        .map_err(|source| key.refused(source))?;
    Ok(Arc::new(config))
}

/// The error of a file of authorities, or of their revocation lists.
fn no_authority(ca: Named<'_>, crl: Option<Named<'_>>, source: VerifierBuilderError) -> TlsError {
    let named = match source {
        VerifierBuilderError::InvalidCrl(_) => crl.unwrap_or(ca),
        _ => ca,
    };
    TlsError::NoAuthority {
        key: named.key,
        path: named.path.to_owned(),
        source,
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

impl Named<'_> {
    fn refused(&self, source: rustls::Error) -> TlsError {
        TlsError::Refused {
            key: self.key,
            path: self.path.to_owned(),
            source,
        }
    }

    fn no_pem(&self, what: &'static str, source: pem::Error) -> TlsError {
        TlsError::NoPem {
            key: self.key,
            path: self.path.to_owned(),
            what,
            source,
        }
    }

    /// The certificates in the file; the server's or client's own one is the first.
    pub fn chain(&self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let text = self.read(false)?;
        let all: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&text).collect();
        match all {
            Ok(all) if all.is_empty() => {
                Err(self.no_pem("a certificate", pem::Error::NoItemsFound))
            }
            Ok(all) => Ok(all),
            Err(error) => Err(self.no_pem("a certificate", error)),
        }
    }

    fn private_key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        let text = self.read(true)?;
        PrivateKeyDer::from_pem_slice(&text).map_err(|error| self.no_pem("a private key", error))
    }

    fn roots(&self) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in self.chain()? {
            roots
                .add(certificate)
                .map_err(|source| self.refused(source))?;
        }
        Ok(roots)
    }

    /// The revocation lists in the file, the newest first: rustls uses the first list of an
    /// authority.
    fn lists(&self) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
        const WHAT: &str = "a certificate revocation list";
        let text = self.read(false)?;
        let all: Result<Vec<_>, pem::Error> =
            CertificateRevocationListDer::pem_slice_iter(&text).collect();
        let all = all.map_err(|error| self.no_pem(WHAT, error))?;
        if all.is_empty() {
            return Err(self.no_pem(WHAT, pem::Error::NoItemsFound));
        }
        let dated = all.into_iter().map(|list| {
            let made = self.dates(&list)?.made;
            Ok((made, list))
        });
        let mut dated = dated.collect::<Result<Vec<_>, TlsError>>()?;
        dated.sort_by_key(|(made, _)| std::cmp::Reverse(*made));
        Ok(dated.into_iter().map(|(_, list)| list).collect())
    }

    fn dates<'a>(&self, list: &'a [u8]) -> Result<Dates<'a>, TlsError> {
        Dates::of_list(list).map_err(|source| TlsError::NoList {
            key: self.key,
            path: self.path.to_owned(),
            source,
        })
    }

    /// The authorities of `lists`, and those of `roots` that have no list.
    fn revocations(
        &self,
        roots: &RootCertStore,
        lists: &[CertificateRevocationListDer<'_>],
    ) -> Result<Vec<Revocation>, TlsError> {
        let mut found: Vec<(&[u8], Option<SystemTime>)> = Vec::new();
        for list in lists {
            let Dates { issuer, until, .. } = self.dates(list)?;
            if found.iter().all(|(known, _)| *known != issuer) {
                found.push((issuer, Some(until)));
            }
        }
        for root in &roots.roots {
            let name = root.subject.as_ref();
            if found.iter().all(|(known, _)| *known != name) {
                found.push((name, None));
            }
        }
        let of = |(name, until)| Revocation::of(name, until);
        Ok(found.into_iter().map(of).collect())
    }

    /// Reads a regular file of at most 1 MiB. `secret`: refuses one that other users can access.
    fn read(&self, secret: bool) -> Result<Zeroizing<Vec<u8>>, TlsError> {
        let unreadable = |source| TlsError::Unreadable {
            key: self.key,
            path: self.path.to_owned(),
            source,
        };
        // Without NONBLOCK the open of a pipe would wait for a writer.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(self.path)
            .map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() || metadata.len() > MAX_BYTES {
            let cause = "it is not a regular file of at most 1 MiB";
            return Err(unreadable(Error::other(cause)));
        }
        let mode = metadata.permissions().mode() & 0o7777;
        if secret && mode & 0o077 != 0 {
            return Err(TlsError::Shared {
                key: self.key,
                path: self.path.to_owned(),
                mode,
            });
        }
        // No reallocation: that would leave a copy of the secret in freed memory.
        let room = usize::try_from(metadata.len()).map_or(0, |bytes| bytes + 1);
        let mut bytes = Zeroizing::new(Vec::with_capacity(room));
        file.take(metadata.len())
            .read_to_end(&mut bytes)
            .map_err(unreadable)?;
        Ok(bytes)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    //! Goal: each wrong file is refused with its name and the remedy. Method: certificates in
    //! `test_files`, made by `test_files/make`.

    use super::*;

    const CA: &str = include_str!("test_files/ca.pem");
    const SERVER: [&str; 2] = [
        include_str!("test_files/server.pem"),
        include_str!("test_files/server.key"),
    ];
    pub(crate) const OPS_CERT: &str = include_str!("test_files/ops.pem");
    const OPS_KEY: &str = include_str!("test_files/ops.key");
    const EXPIRED: [&str; 2] = [
        include_str!("test_files/expired.pem"),
        include_str!("test_files/expired.key"),
    ];
    const FOREIGN: [&str; 3] = [
        include_str!("test_files/foreign.pem"),
        include_str!("test_files/foreign.key"),
        include_str!("test_files/foreign_ca.pem"),
    ];

    const VIEWER: [&str; 2] = [
        include_str!("test_files/viewer.pem"),
        include_str!("test_files/viewer.key"),
    ];
    const REVOKED: [&str; 2] = [
        include_str!("test_files/revoked.pem"),
        include_str!("test_files/revoked.key"),
    ];
    const CRL_SERVER: &str = include_str!("test_files/crl_server.pem");
    const CRL_NONE: &str = include_str!("test_files/crl_none.pem");
    const CRL_VIEWER: &str = include_str!("test_files/crl_viewer.pem");
    const CRL_ENDED: &str = include_str!("test_files/crl_ended.pem");
    const CRL_FOREIGN: &str = include_str!("test_files/crl_foreign.pem");

    /// The first certificate of a PEM text.
    pub(crate) fn certificate(text: &str) -> Vec<u8> {
        CertificateDer::from_pem_slice(text.as_bytes())
            .unwrap()
            .to_vec()
    }

    /// A folder with all files; keys have mode 0600.
    pub(crate) fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("ca.pem", CA),
            ("server.pem", SERVER[0]),
            ("server.key", SERVER[1]),
            ("ops.pem", OPS_CERT),
            ("ops.key", OPS_KEY),
            ("expired.pem", EXPIRED[0]),
            ("expired.key", EXPIRED[1]),
            ("foreign.pem", FOREIGN[0]),
            ("foreign.key", FOREIGN[1]),
            ("foreign_ca.pem", FOREIGN[2]),
            ("viewer.pem", VIEWER[0]),
            ("viewer.key", VIEWER[1]),
            ("revoked.pem", REVOKED[0]),
            ("revoked.key", REVOKED[1]),
            ("crl_server.pem", CRL_SERVER),
            ("crl_none.pem", CRL_NONE),
            ("crl_viewer.pem", CRL_VIEWER),
            ("crl_ended.pem", CRL_ENDED),
            ("crl_foreign.pem", CRL_FOREIGN),
            // The newer list counts, although it is the second one.
            ("crl_both.pem", &[CRL_NONE, CRL_VIEWER].concat()),
        ] {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            let mode = if name.ends_with(".key") { 0o600 } else { 0o644 };
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        }
        dir
    }

    /// The server's configuration from files of this folder.
    pub(crate) fn server(
        dir: &Path,
        cert: &str,
        key: &str,
        ca: &str,
    ) -> Result<Arc<ServerTls>, TlsError> {
        server_with_lists(dir, [cert, key, ca], None)
    }

    /// As [`server`], with revocation lists.
    pub(crate) fn server_with_lists(
        dir: &Path,
        files: [&str; 3],
        crl: Option<&str>,
    ) -> Result<Arc<ServerTls>, TlsError> {
        let [cert, key, ca] = files.map(|name| dir.join(name));
        let crl = crl.map(|name| dir.join(name));
        let named = |key, path| Named { key, path };
        let files = Files {
            cert: named("[rpc.tls] cert", &cert),
            key: named("[rpc.tls] key", &key),
            ca: Some(named("[rpc.tls] client_ca", &ca)),
            crl: crl.as_ref().map(|path| named("[rpc.tls] client_crl", path)),
        };
        files.server()
    }

    #[test]
    fn wrong_files_are_refused_by_name() {
        let folder = folder();
        let dir = folder.path();
        let refused = |cert, key, ca| server(dir, cert, key, ca).unwrap_err().to_string();
        server(dir, "server.pem", "server.key", "ca.pem").unwrap();
        let open = dir.join("open.key");
        std::fs::copy(dir.join("server.key"), &open).unwrap();
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o640)).unwrap();
        for (cert, key, ca, expected) in [
            ("none.pem", "server.key", "ca.pem", "[rpc.tls] cert"),
            ("none.pem", "server.key", "ca.pem", "No such file"),
            (
                "server.key",
                "server.key",
                "ca.pem",
                "a certificate in PEM is needed",
            ),
            ("server.pem", "server.pem", "ca.pem", "[rpc.tls] key"),
            (
                "server.pem",
                "server.pem",
                "ca.pem",
                "a private key in PEM is needed",
            ),
            ("server.pem", "ops.key", "ca.pem", "[rpc.tls] key"),
            ("server.pem", "open.key", "ca.pem", "mode is 0640"),
            (
                "server.pem",
                "server.key",
                "server.key",
                "[rpc.tls] client_ca",
            ),
            ("server.pem", "server.key", ".", "not a regular file"),
        ] {
            // The certificates are PEM files that everyone may read.
            let text = match (cert, key) {
                ("server.pem", "server.pem") => {
                    std::fs::set_permissions(
                        dir.join("server.pem"),
                        PermissionsExt::from_mode(0o600),
                    )
                    .unwrap();
                    refused(cert, key, ca)
                }
                _ => refused(cert, key, ca),
            };
            assert!(text.contains(expected), "{cert} {key} {ca}: {text}");
        }
    }

    /// Goal: a revoked certificate is refused, and so are all of an authority whose list ended or
    /// is missing.
    #[test]
    fn revocation_lists() {
        const FILES: [&str; 3] = ["server.pem", "server.key", "ca.pem"];
        const ROOT: &str = "CN=Root,O=Nacre tests";
        let folder = folder();
        let dir = folder.path();
        let refusal = |tls: &ServerTls, text: &str| {
            let refused = tls.check(&[certificate(text).into()]);
            refused.map_or_else(|error| error.to_string(), |()| "none".into())
        };
        let missing = format!("there is no revocation list of {ROOT}");
        let ended = format!("the revocation list of {ROOT} ended at 2023-01-08T00:00:00Z");
        for (crl, ops, viewer, problem) in [
            (None, "none", "none", None),
            (Some("crl_none.pem"), "none", "none", None),
            (Some("crl_viewer.pem"), "none", "Revoked", None),
            (Some("crl_both.pem"), "none", "Revoked", None),
            (
                Some("crl_foreign.pem"),
                "UnknownRevocationStatus",
                "UnknownRevocationStatus",
                Some(missing),
            ),
            (Some("crl_ended.pem"), "expired", "expired", Some(ended)),
        ] {
            let tls = server_with_lists(dir, FILES, crl).unwrap();
            for (text, expected) in [(OPS_CERT, ops), (VIEWER[0], viewer)] {
                let found = refusal(&tls, text);
                assert!(found.contains(expected), "{crl:?}: {found}");
            }
            let Some(crl) = crl else { continue };
            let named = |key, path| Named { key, path };
            let (ca, crl) = (dir.join("ca.pem"), dir.join(crl));
            let found = revocations(named("ca", &ca), named("crl", &crl)).unwrap();
            assert_eq!(found, tls.revocations);
            let now = SystemTime::now();
            let problems: Vec<String> = found.iter().filter_map(|of| of.problem(now)).collect();
            assert_eq!(problems, Vec::from_iter(problem));
        }
        for (crl, expected) in [
            ("ca.pem", "[rpc.tls] client_crl"),
            ("ca.pem", "a certificate revocation list in PEM is needed"),
            ("none.pem", "No such file"),
        ] {
            let error = server_with_lists(dir, FILES, Some(crl)).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
