//! The certificates of the TLS listeners for management and metrics: the files of `[rpc.tls]` and
//! `[metrics.tls]`.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use super::engine::Engine;
use crate::config::Settings;
use crate::doctor::revocation as doctor;
use crate::rpc::tls::crl::Revocation;
use crate::rpc::tls::files::{self, Files, Named, ServerTls, TlsError};

/// The settings of one listener.
struct Listener<'a> {
    cert: Option<Named<'a>>,
    key: Option<Named<'a>>,
    ca: Option<Named<'a>>,
    crl: Option<Named<'a>>,
}

/// Reads the certificates, for connections from now on.
pub fn read(engine: &Engine, settings: &Settings) -> Result<(), TlsError> {
    let [rpc, metrics] = listeners(settings);
    let rpc = settings.rpc.tls.listen.is_some().then(|| rpc.server());
    let metrics = metrics.server();
    let mut tunables = engine.tunables();
    tunables.rpc_tls = rpc.transpose()?.flatten();
    tunables.http_tls = metrics?;
    engine.tune(tunables);
    Ok(())
}

/// The revocation lists, for `nacre doctor`.
pub fn for_doctor(settings: &Settings) -> Vec<doctor::Revocation> {
    let mut all = Vec::new();
    for Listener { ca, crl, .. } in listeners(settings) {
        let Some((ca, crl)) = ca.zip(crl) else {
            continue;
        };
        match files::revocations(ca, crl) {
            Ok(found) => all.extend(found.iter().map(|found| of_list(crl, found))),
            Err(error) => all.push(doctor::Revocation {
                file: crl.key.to_owned(),
                problem: Some(error.to_string()),
                ..doctor::Revocation::default()
            }),
        }
    }
    all
}

fn of_list(crl: Named<'_>, found: &Revocation) -> doctor::Revocation {
    let now = SystemTime::now();
    let left = |until: SystemTime| until.duration_since(now).unwrap_or_default().as_secs_f64();
    doctor::Revocation {
        file: crl.key.to_owned(),
        authority: found.authority.clone(),
        problem: found.problem(now),
        expires_in_s: found.until.map(left),
    }
}

fn listeners(settings: &Settings) -> [Listener<'_>; 2] {
    let (rpc, metrics) = (&settings.rpc.tls, &settings.metrics.tls);
    [
        Listener {
            cert: named("[rpc.tls] cert", rpc.cert.as_deref()),
            key: named("[rpc.tls] key", rpc.key.as_deref()),
            ca: named("[rpc.tls] client_ca", rpc.client_ca.as_deref()),
            crl: named("[rpc.tls] client_crl", rpc.client_crl.as_deref()),
        },
        Listener {
            cert: named("[metrics.tls] cert", metrics.cert.as_deref()),
            key: named("[metrics.tls] key", metrics.key.as_deref()),
            ca: named("[metrics.tls] client_ca", metrics.client_ca.as_deref()),
            crl: named("[metrics.tls] client_crl", metrics.client_crl.as_deref()),
        },
    ]
}

fn named<'a>(key: &'static str, path: Option<&'a Path>) -> Option<Named<'a>> {
    path.map(|path| Named { key, path })
}

impl Listener<'_> {
    /// The configuration of the server; `None`: without certificate or key.
    fn server(&self) -> Result<Option<Arc<ServerTls>>, TlsError> {
        let files = self.cert.zip(self.key).map(|(cert, key)| Files {
            cert,
            key,
            ca: self.ca,
            crl: self.crl,
        });
        files.map(|files| files.server()).transpose()
    }
}
