//! The public keys of update bundles: Ed25519, one PEM file each, in a folder of the image.

use std::fs;
use std::path::{Path, PathBuf};

use aws_lc_rs::signature::{ED25519, UnparsedPublicKey};
use rustls_pki_types::SubjectPublicKeyInfoDer;
use rustls_pki_types::pem::PemObject;

/// Most keys of a folder.
const MOST: usize = 16;
/// Most bytes of a key's file.
const MOST_BYTES: u64 = 4096;

/// `SubjectPublicKeyInfo` of an Ed25519 key up to the key itself (RFC 8410, section 4).
const PREFIX: [u8; 12] = [
    0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00,
];

pub(super) const SIGNATURE_BYTES: usize = 64;

#[derive(Debug)]
pub struct Keys(Vec<Key>);

#[derive(Debug)]
struct Key {
    name: String,
    bytes: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("{path}: {source}", path = path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path}: not an Ed25519 public key in PEM", path = path.display())]
    Format { path: PathBuf },
    #[error("{path}: no key (*.pem); no bundle can be checked", path = path.display())]
    None { path: PathBuf },
    #[error("{path}: more than {MOST} keys", path = path.display())]
    TooMany { path: PathBuf },
}

impl Keys {
    /// Reads every `*.pem` of a folder. Fails if one of them is no key.
    pub fn read(folder: &Path) -> Result<Self, KeyError> {
        let failed = |path: &Path, source| KeyError::Read {
            path: path.to_owned(),
            source,
        };
        let mut keys = Vec::new();
        let files = match fs::read_dir(folder) {
            Ok(files) => files,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(KeyError::None {
                    path: folder.to_owned(),
                });
            }
            Err(source) => return Err(failed(folder, source)),
        };
        for file in files {
            let path = file.map_err(|source| failed(folder, source))?.path();
            if path.extension().is_none_or(|extension| extension != "pem") {
                continue;
            }
            if keys.len() == MOST {
                return Err(KeyError::TooMany {
                    path: folder.to_owned(),
                });
            }
            keys.push(read_key(&path)?);
        }
        if keys.is_empty() {
            return Err(KeyError::None {
                path: folder.to_owned(),
            });
        }
        keys.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self(keys))
    }

    /// The name of the key that made this signature.
    pub fn signer(&self, message: &[u8], signature: &[u8]) -> Option<&str> {
        let is_signer = |key: &&Key| {
            UnparsedPublicKey::new(&ED25519, &key.bytes)
                .verify(message, signature)
                .is_ok()
        };
        self.0.iter().find(is_signer).map(|key| key.name.as_str())
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|key| key.name.as_str())
    }
}

fn read_key(path: &Path) -> Result<Key, KeyError> {
    let format = || KeyError::Format {
        path: path.to_owned(),
    };
    let mut text = Vec::new();
    fs::File::open(path)
        .and_then(|file| {
            std::io::Read::read_to_end(&mut std::io::Read::take(file, MOST_BYTES), &mut text)
        })
        .map_err(|source| KeyError::Read {
            path: path.to_owned(),
            source,
        })?;
    let der = SubjectPublicKeyInfoDer::from_pem_slice(&text).map_err(|_| format())?;
    let bytes = der.as_ref().strip_prefix(&PREFIX[..]).ok_or_else(format)?;
    if bytes.len() != 32 {
        return Err(format());
    }
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    Ok(Key {
        name: name.into_owned(),
        bytes: bytes.to_owned(),
    })
}
