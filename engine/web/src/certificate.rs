//! The certificate of the HTTPS listeners. It is from the administrator's files, or it is a
//! self-signed one for this machine's names. The daemon keeps the self-signed one in the data
//! directory and renews it.

use std::fmt::Write as _;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::digest::{SHA256, digest};
use nacre_engine_rpc::tls::files::{Files, Named, TlsError};
use nacre_engine_values::files;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType,
};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use tracing::{info, warn};
use zeroize::Zeroizing;

/// Validity of the daemon's own certificate.
pub const VALID: Duration = Duration::from_secs(365 * 86_400);
/// Time before the end of the validity at which the daemon renews its own certificate.
pub const RENEWED: Duration = Duration::from_secs(30 * 86_400);
/// Time before now at which the validity begins, because clocks of browsers may be slow.
const SKEW: Duration = Duration::from_secs(86_400);
/// Most names in a certificate; a machine may have many addresses.
const MAX_NAMES: usize = 64;
const FILE: &str = "web-certificate.pem";
/// Most bytes of the file.
const MAX_BYTES: u64 = 64 * 1024;
/// The first line of the file: `# nacre: until SECONDS for NAME,NAME`.
const HEAD: &str = "# nacre: until ";

#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error(transparent)]
    Files(#[from] TlsError),
    #[error("cannot make a certificate: {0}")]
    Made(#[from] rcgen::Error),
    #[error("the certificate cannot be used: {0}")]
    Refused(#[from] rustls::Error),
    #[error("the certificate cannot be stored in {path}: {source}", path = path.display())]
    Store {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the certificate cannot be read back: {0}")]
    Pem(#[from] rustls::pki_types::pem::Error),
}

/// A certificate in use.
#[derive(Debug, Clone)]
pub struct Certificate {
    pub config: Arc<ServerConfig>,
    /// `SHA256:` and the digest of the certificate in hexadecimal pairs, as browsers show it.
    pub fingerprint: String,
    /// Time at which the daemon renews the certificate; `None`: it is the administrator's.
    pub renew_at: Option<SystemTime>,
}

impl Certificate {
    /// Reads the administrator's certificate and key.
    pub fn of_files(cert: &Path, key: &Path) -> Result<Self, CertificateError> {
        let cert = Named {
            key: "[web] cert",
            path: cert,
        };
        let key = Named {
            key: "[web] key",
            path: key,
        };
        let files = Files {
            cert,
            key,
            ca: None,
            crl: None,
        };
        let server = files.server()?;
        let mut config = (*server.config).clone();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            config: Arc::new(config),
            fingerprint: cert.chain()?.first().map(fingerprint).unwrap_or_default(),
            renew_at: None,
        })
    }

    /// The daemon's own certificate for these names: from its file, or a new one if that cannot
    /// be read, lacks a name, is to be renewed or is not valid yet. `folder`: the data directory;
    /// `None`: the certificate is not stored.
    pub fn own(
        folder: Option<&Path>,
        names: &[String],
        now: SystemTime,
    ) -> Result<Self, CertificateError> {
        let names = sorted(names);
        let path = folder.map(|folder| folder.join(FILE));
        if let Some(path) = &path {
            match read(path, &names, now) {
                Ok(Some(kept)) => return Ok(kept),
                Ok(None) => {}
                Err(error) => {
                    warn!("{}: {error}; making another certificate", path.display());
                }
            }
        }
        let until = now + VALID;
        let text = make(&names, now, until)?;
        if let Some(path) = path {
            let stored = files::replace_private(&path, text.as_bytes());
            stored.map_err(|source| CertificateError::Store { path, source })?;
        }
        let made = Self::of_text(&text, until)?;
        info!(
            names = names.join(","),
            fingerprint = made.fingerprint,
            "web: new certificate"
        );
        Ok(made)
    }

    fn of_text(text: &str, until: SystemTime) -> Result<Self, CertificateError> {
        let certificate = CertificateDer::from_pem_slice(text.as_bytes())?;
        let key = PrivateKeyDer::from_pem_slice(text.as_bytes())?;
        let fingerprint = fingerprint(&certificate);
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)?;
        config.send_tls13_tickets = 0;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            config: Arc::new(config),
            fingerprint,
            renew_at: Some(until - RENEWED),
        })
    }
}

fn fingerprint(certificate: &CertificateDer<'_>) -> String {
    let digest = digest(&SHA256, certificate);
    let mut text = String::from("SHA256:");
    for (at, byte) in digest.as_ref().iter().enumerate() {
        let between = if at > 0 { ":" } else { "" };
        let _ = write!(text, "{between}{byte:02X}");
    }
    text
}

fn sorted(names: &[String]) -> Vec<String> {
    let mut names: Vec<String> = names
        .iter()
        .filter(|name| is_plain(name))
        .cloned()
        .collect();
    names.sort();
    names.dedup();
    names.truncate(MAX_NAMES);
    names
}

/// True for an IP address, or a host name of letters, digits, hyphens and dots.
fn is_plain(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    name.parse::<std::net::IpAddr>().is_ok()
        || (!name.is_empty() && name.len() <= 253 && name.bytes().all(is_letter))
}

fn make(
    names: &[String],
    now: SystemTime,
    until: SystemTime,
) -> Result<Zeroizing<String>, CertificateError> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let mut params = CertificateParams::new(names)?;
    params.not_before = (now - SKEW).into();
    params.not_after = until.into();
    params.distinguished_name = DistinguishedName::new();
    let host = params.subject_alt_names.iter().find_map(|name| match name {
        SanType::DnsName(name) if name.as_str() != "localhost" => Some(name.as_str()),
        _ => None,
    });
    let subject = match host {
        // The longest common name of RFC 5280 has 64 letters.
        Some(host) if host.len() <= 50 => format!("Nacre on {host}"),
        _ => "Nacre".to_owned(),
    };
    params.distinguished_name.push(DnType::CommonName, subject);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let certificate = params.self_signed(&key)?;
    let seconds = until
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let key = Zeroizing::new(key.serialize_pem());
    let mut text = Zeroizing::new(String::new());
    let head = format!("{HEAD}{seconds} for {}\n", names.join(","));
    text.extend([head.as_str(), &certificate.pem(), &key]);
    Ok(text)
}

/// Reads the certificate in a file. `None` if the file is missing, a name is missing, or the
/// certificate is to be renewed or is not valid yet, because the clock was set back.
fn read(
    path: &Path,
    names: &[String],
    now: SystemTime,
) -> Result<Option<Certificate>, Box<dyn std::error::Error>> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut text = Zeroizing::new(String::new());
    file.take(MAX_BYTES).read_to_string(&mut text)?;
    let head = text.lines().next().and_then(|line| line.strip_prefix(HEAD));
    let (seconds, of) = head
        .and_then(|head| head.split_once(" for "))
        .ok_or("its first line is damaged")?;
    let until = UNIX_EPOCH
        .checked_add(Duration::from_secs(seconds.parse()?))
        .ok_or("its first line is damaged")?;
    // A clock that was set back leaves a certificate that is not valid yet.
    let is_fresh = now < until - RENEWED && now + VALID + SKEW >= until;
    let of: Vec<&str> = of.split(',').collect();
    if !is_fresh || !names.iter().all(|name| of.contains(&name.as_str())) {
        return Ok(None);
    }
    Ok(Some(Certificate::of_text(&text, until)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn names(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn the_own_certificate_is_kept_and_renewed() {
        let folder = tempfile::tempdir().unwrap();
        let of = Some(folder.path());
        let now = SystemTime::now();
        let all = names(&["store1", "10.0.0.1", "fe80::1", "localhost", "no name"]);
        let first = Certificate::own(of, &all, now).unwrap();
        assert_eq!(
            first.fingerprint.len(),
            7 + 32 * 3 - 1,
            "{}",
            first.fingerprint
        );
        let path = folder.path().join(FILE);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut other_order = all.clone();
        other_order.reverse();
        let again = Certificate::own(of, &other_order, now + VALID / 2).unwrap();
        assert_eq!(again.fingerprint, first.fingerprint);
        let mut seen = vec![first.fingerprint];
        let mut must_differ = |certificate: Certificate| {
            assert!(!seen.contains(&certificate.fingerprint));
            seen.push(certificate.fingerprint);
        };
        let day = Duration::from_secs(86_400);
        must_differ(Certificate::own(of, &all, now + VALID - RENEWED + day).unwrap());
        // The clock is set back by a year.
        must_differ(Certificate::own(of, &all, now).unwrap());
        must_differ(Certificate::own(of, &names(&["store2"]), now).unwrap());
        std::fs::write(&path, "damaged").unwrap();
        must_differ(Certificate::own(of, &all, now).unwrap());
        must_differ(Certificate::own(None, &all, now).unwrap());
    }
}
