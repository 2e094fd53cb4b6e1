//! Where backups are stored: a directory (`file:///path`) or an S3 object store
//! (`s3://bucket/prefix`) with its credentials, and how requests are retried.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{BackoffConfig, Certificate, ClientOptions, ObjectStore, RetryConfig};
use url::Url;
use zeroize::Zeroizing;

use crate::failure::printable;
use crate::{Failure, Store};

/// Most bytes of a location, an endpoint or a region.
const LONGEST: usize = 1024;
/// Timeout of one HTTP request. Objects have at most 4 MiB, manifests at most 128 MiB.
const REQUEST: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(10);
/// Retries of a failed request. The pauses before them add up to at least 3 s, 18 s on average. So
/// a server that restarts within 3 s fails no backup.
const RETRIES: usize = 6;
/// No retry begins later than this after the first attempt.
const RETRYING: Duration = Duration::from_secs(90);
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Each pause is random, and at most this many times the pause before.
const PAUSE_FACTOR: f64 = 3.0;

/// Where backups are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// An absolute path on the daemon's machine.
    Directory(String),
    S3 {
        bucket: String,
        /// Without slashes at its ends; empty for the whole bucket.
        prefix: String,
    },
}

/// How to reach an object store.
#[derive(Clone, Default)]
pub struct S3Options {
    /// URL of the server. Default: that of AWS for the region.
    pub endpoint: Option<String>,
    /// Default: `us-east-1`.
    pub region: Option<String>,
    /// Required by [`Location::open`] for an object store.
    pub credentials: Option<Credentials>,
    /// CA certificates for the server, in PEM, in addition to those of the system.
    pub authorities: Option<Vec<u8>>,
}

/// An access key of the object store. `Debug` does not print it.
#[derive(Clone)]
pub struct Credentials {
    access_key: String,
    secret_key: Zeroizing<String>,
    session_token: Option<Zeroizing<String>>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

impl Credentials {
    /// Parses the format of `~/.aws/credentials`; only the first profile is used. Fails if it has
    /// no access key or no secret key.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let (mut access_key, mut secret_key, mut session_token) = (None, None, None);
        let mut profiles = 0;
        for line in text.lines().map(str::trim) {
            if line.starts_with('[') {
                profiles += 1;
            }
            if profiles > 1 {
                break;
            }
            let Some((key, value)) = line.split_once('=') else {
                continue;
            };
            let value = value.trim();
            if value.is_empty() || value.contains(char::is_control) {
                continue;
            }
            match key.trim() {
                "aws_access_key_id" => access_key = Some(value.to_owned()),
                "aws_secret_access_key" => secret_key = Some(Zeroizing::new(value.to_owned())),
                "aws_session_token" => session_token = Some(Zeroizing::new(value.to_owned())),
                _ => {}
            }
        }
        let missing = |key: &str| Failure::Credentials(format!("there is no line {key} = …"));
        Ok(Self {
            access_key: access_key.ok_or_else(|| missing("aws_access_key_id"))?,
            secret_key: secret_key.ok_or_else(|| missing("aws_secret_access_key"))?,
            session_token,
        })
    }
}

impl Location {
    /// Parses `file:///PATH` or `s3://BUCKET/PREFIX`, of at most 1024 bytes. Fails on user,
    /// password, port, query or fragment.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let refuse = |why: &str| Failure::Location(why.to_owned());
        if text.len() > LONGEST {
            return Err(refuse("it is too long"));
        }
        let url = Url::parse(text)
            .map_err(|_| refuse("it must be file:///path or s3://bucket/prefix"))?;
        let has_more = !url.username().is_empty()
            || url.password().is_some()
            || url.port().is_some()
            || url.query().is_some()
            || url.fragment().is_some();
        if has_more {
            return Err(refuse("it has only a bucket and a prefix, or a path"));
        }
        match (url.scheme(), url.host_str()) {
            ("file", None | Some("")) => {
                let path = url.to_file_path();
                let path = path.map_err(|()| refuse("its path must be absolute"))?;
                let path = path
                    .to_str()
                    .ok_or_else(|| refuse("its path must be UTF-8"))?;
                Ok(Self::Directory(path.to_owned()))
            }
            ("file", Some(_)) => Err(refuse("a path has three slashes: file:///path")),
            ("s3", Some(bucket)) if !bucket.is_empty() => {
                let prefix = url.path().trim_matches('/');
                Path::parse(prefix).map_err(|_| refuse("its prefix is not valid"))?;
                Ok(Self::S3 {
                    bucket: bucket.to_owned(),
                    prefix: prefix.to_owned(),
                })
            }
            _ => Err(refuse("it must be file:///path or s3://bucket/prefix")),
        }
    }

    /// Opens the store, without a request to it. A directory must exist; an object store needs
    /// credentials. Reads the file system, so it may block. Call it in a tokio runtime.
    pub fn open(&self, options: &S3Options) -> Result<Store, Failure> {
        match self {
            Self::Directory(path) => {
                let files = LocalFileSystem::new_with_prefix(path);
                let files = files.map_err(|error| Failure::store("open", path, &error))?;
                let files = files.with_fsync(true).with_automatic_cleanup(true);
                Ok(Store::in_directory(Arc::new(files), path))
            }
            Self::S3 { bucket, prefix } => {
                let bucket = bucket_of(bucket, options)?;
                let prefix = Path::parse(prefix)
                    .map_err(|_| Failure::Location("its prefix is not valid".into()))?;
                Ok(Store::new(bucket, prefix))
            }
        }
    }
}

fn bucket_of(bucket: &str, options: &S3Options) -> Result<Arc<dyn ObjectStore>, Failure> {
    // Without them, the crate asks the metadata server of a cloud.
    let Some(credentials) = &options.credentials else {
        return Err(Failure::Credentials(
            "an object store needs credentials".into(),
        ));
    };
    let mut client = ClientOptions::new()
        .with_timeout(REQUEST)
        .with_connect_timeout(CONNECT);
    if let Some(pem) = &options.authorities {
        let found = Certificate::from_pem_bundle(pem);
        let found = found.map_err(|error| Failure::Location(printable(&error.to_string())))?;
        for certificate in found {
            client = client.with_root_certificate(certificate);
        }
    }
    let region = options.region.as_deref().unwrap_or("us-east-1");
    let mut builder = AmazonS3Builder::new()
        .with_bucket_name(bucket)
        .with_region(region)
        .with_access_key_id(&credentials.access_key)
        .with_secret_access_key(credentials.secret_key.as_str());
    if let Some(token) = &credentials.session_token {
        builder = builder.with_token(token.as_str());
    }
    if let Some(endpoint) = &options.endpoint {
        client = client.with_allow_http(check_endpoint(endpoint)?);
        // Servers other than Amazon's have the bucket in the path.
        builder = builder
            .with_endpoint(endpoint)
            .with_config(AmazonS3ConfigKey::VirtualHostedStyleRequest, "false");
    }
    let retry = RetryConfig {
        max_retries: RETRIES,
        retry_timeout: RETRYING,
        backoff: BackoffConfig {
            init_backoff: FIRST_PAUSE,
            base: PAUSE_FACTOR,
            ..BackoffConfig::default()
        },
    };
    let built = builder
        .with_client_options(client)
        .with_retry(retry)
        .build();
    let built = built.map_err(|error| Failure::store("open", bucket, &error))?;
    Ok(Arc::new(built))
}

/// Checks the URL of a server. Returns true if it is `http:`, without TLS.
fn check_endpoint(endpoint: &str) -> Result<bool, Failure> {
    let refuse = || {
        Failure::Location("the endpoint must be https://host[:port] or http://host[:port]".into())
    };
    let url = Url::parse(endpoint).map_err(|_| refuse())?;
    let is_plain = match url.scheme() {
        "http" => true,
        "https" => false,
        _ => return Err(refuse()),
    };
    let has_more = !url.username().is_empty()
        || url.password().is_some()
        || url.query().is_some()
        || url.fragment().is_some()
        || endpoint.len() > LONGEST
        || url.host_str().is_none();
    if has_more {
        Err(refuse())
    } else {
        Ok(is_plain)
    }
}
