//! The certificates of the TLS listeners for management and metrics: the files of `[rpc.tls]` and
//! `[metrics.tls]`.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use super::Engine;
use crate::config::Settings;
use crate::doctor::revocation as doctor;
use crate::rpc::tls::crl::Revocation;
use crate::rpc::tls::files::{self, Files, Named, ServerTls, TlsError};

const RPC_CRL: &str = "[rpc.tls] client_crl";
const METRICS_CRL: &str = "[metrics.tls] client_crl";

/// The configured files of one listener.
struct CertificateFiles<'a> {
    cert: Option<Named<'a>>,
    key: Option<Named<'a>>,
    ca: Option<Named<'a>>,
    crl: Option<Named<'a>>,
}

/// The certificates that were read from the files, for each listener.
#[derive(Debug)]
pub struct Certificates {
    /// `None`: `[rpc.tls]` has no listener.
    rpc: Option<Configured>,
    metrics: Configured,
}

/// The TLS configuration of a listener; `None`: no TLS.
type Configured = Result<Option<Arc<ServerTls>>, TlsError>;

/// The errors of certificates that could not be read; the listener keeps its former ones. `None`:
/// the new certificates are in effect.
#[derive(Debug, Default)]
pub struct RefusedCertificates {
    pub rpc: Option<TlsError>,
    pub metrics: Option<TlsError>,
}

impl RefusedCertificates {
    pub fn all(self) -> impl Iterator<Item = TlsError> {
        self.rpc.into_iter().chain(self.metrics)
    }
}

impl Certificates {
    /// Reads the files of the settings.
    pub fn read(settings: &Settings) -> Self {
        let [rpc, metrics] = listeners(settings);
        Self {
            rpc: settings.rpc.tls.listen.is_some().then(|| rpc.server()),
            metrics: metrics.server(),
        }
    }

    /// Puts the certificates in effect for later connections. Those that could not be read stay as
    /// they were. So do those of the management listener if the new settings have none: it listens
    /// until the next start.
    pub fn apply(self, engine: &Engine) -> RefusedCertificates {
        let mut tunables = engine.tunables();
        let mut refused = RefusedCertificates::default();
        let listens = engine.settings.rpc.tls.listen.is_some();
        match self.rpc.filter(|_| listens) {
            Some(Ok(rpc)) => tunables.rpc_tls = rpc,
            Some(Err(error)) => refused.rpc = Some(error),
            None => {}
        }
        match self.metrics {
            Ok(metrics) => tunables.http_tls = metrics,
            Err(error) => refused.metrics = Some(error),
        }
        engine.tune(tunables);
        refused
    }
}

/// The revocation lists in effect, for `nacre doctor`.
pub fn in_effect(engine: &Engine) -> Vec<doctor::Revocation> {
    let tunables = engine.tunables();
    let all = [
        (RPC_CRL, tunables.rpc_tls),
        (METRICS_CRL, tunables.http_tls),
    ];
    let all = all.into_iter().filter_map(|(crl, tls)| Some((crl, tls?)));
    let of = |(crl, tls): (&str, Arc<ServerTls>)| {
        let found = tls.revocations.iter();
        found.map(|found| of_list(crl, found)).collect::<Vec<_>>()
    };
    all.flat_map(of).collect()
}

/// The revocation lists in the configured files, for `nacre doctor` without a daemon.
pub fn for_doctor(settings: &Settings) -> Vec<doctor::Revocation> {
    let mut all = Vec::new();
    for CertificateFiles { ca, crl, .. } in listeners(settings) {
        let Some((ca, crl)) = ca.zip(crl) else {
            continue;
        };
        match files::revocations(ca, crl) {
            Ok(found) => all.extend(found.iter().map(|found| of_list(crl.key, found))),
            Err(error) => all.push(doctor::Revocation {
                file: crl.key.to_owned(),
                problem: Some(error.to_string()),
                ..doctor::Revocation::default()
            }),
        }
    }
    all
}

fn of_list(crl: &str, found: &Revocation) -> doctor::Revocation {
    let now = SystemTime::now();
    let left = |until: SystemTime| until.duration_since(now).unwrap_or_default().as_secs_f64();
    doctor::Revocation {
        file: crl.to_owned(),
        authority: found.authority.clone(),
        problem: found.problem(now),
        expires_in_s: found.until.map(left),
    }
}

fn listeners(settings: &Settings) -> [CertificateFiles<'_>; 2] {
    let (rpc, metrics) = (&settings.rpc.tls, &settings.metrics.tls);
    [
        CertificateFiles {
            cert: named("[rpc.tls] cert", rpc.cert.as_deref()),
            key: named("[rpc.tls] key", rpc.key.as_deref()),
            ca: named("[rpc.tls] client_ca", rpc.client_ca.as_deref()),
            crl: named(RPC_CRL, rpc.client_crl.as_deref()),
        },
        CertificateFiles {
            cert: named("[metrics.tls] cert", metrics.cert.as_deref()),
            key: named("[metrics.tls] key", metrics.key.as_deref()),
            ca: named("[metrics.tls] client_ca", metrics.client_ca.as_deref()),
            crl: named(METRICS_CRL, metrics.client_crl.as_deref()),
        },
    ]
}

fn named<'a>(key: &'static str, path: Option<&'a Path>) -> Option<Named<'a>> {
    path.map(|path| Named { key, path })
}

impl CertificateFiles<'_> {
    /// Reads the TLS configuration. `None` without certificate or key.
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

#[cfg(test)]
mod tests {
    //! Goal: a listener has the certificates that could be read last, whatever the files of the
    //! other one are, and the doctor examines those. Method: the files of the tests of TLS.

    use std::os::unix::fs::PermissionsExt;

    use serde_json::{Value, json};

    use super::*;
    use crate::methods::testing::TestDaemon;

    const CERT: &str = include_str!("../../rpc/src/tls/test_files/server.pem");
    const KEY: &str = include_str!("../../rpc/src/tls/test_files/server.key");
    const CA: &str = include_str!("../../rpc/src/tls/test_files/ca.pem");
    const CRL: &str = include_str!("../../rpc/src/tls/test_files/crl_none.pem");
    const CRL_ENDED: &str = include_str!("../../rpc/src/tls/test_files/crl_ended.pem");

    struct Rig {
        folder: tempfile::TempDir,
        daemon: TestDaemon,
    }

    impl Rig {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let mut settings = Settings::default();
            let path = |name: &str| Some(folder.path().join(name));
            settings.rpc.tls.listen = Some("127.0.0.1:4430".parse().unwrap());
            settings.rpc.tls.cert = path("rpc.pem");
            settings.rpc.tls.key = path("rpc.key");
            settings.rpc.tls.client_ca = path("rpc_ca.pem");
            settings.rpc.tls.client_crl = path("rpc.crl");
            settings.metrics.tls.cert = path("metrics.pem");
            settings.metrics.tls.key = path("metrics.key");
            settings.metrics.tls.client_ca = path("metrics_ca.pem");
            settings.metrics.tls.client_crl = path("metrics.crl");
            for of in ["rpc", "metrics"] {
                for (name, text) in [
                    (".pem", CERT),
                    (".key", KEY),
                    ("_ca.pem", CA),
                    (".crl", CRL),
                ] {
                    let path = folder.path().join(format!("{of}{name}"));
                    std::fs::write(&path, text).unwrap();
                    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
                }
            }
            let daemon = TestDaemon::with(settings, None);
            let rig = Self { folder, daemon };
            assert_eq!(rig.reload(), [None, None]);
            rig
        }

        fn write(&self, name: &str, text: &str) {
            std::fs::write(self.folder.path().join(name), text).unwrap();
        }

        /// Reads the files again; returns why those of both listeners are refused.
        fn reload(&self) -> [Option<String>; 2] {
            let engine = &self.daemon.engine;
            let RefusedCertificates { rpc, metrics } =
                Certificates::read(&engine.settings).apply(engine);
            [rpc, metrics].map(|error| error.map(|error| error.to_string()))
        }

        fn in_use(&self) -> [Arc<ServerTls>; 2] {
            let tunables = self.daemon.engine.tunables();
            [tunables.rpc_tls, tunables.http_tls].map(|tls| tls.expect("a certificate"))
        }

        /// The states of the revocation lists, by setting.
        fn doctor(&self) -> Vec<(String, String)> {
            let report = self.daemon.call("doctor_run", json!({}));
            let findings = report["findings"].as_array().unwrap();
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            let lists = findings.iter().filter(|of| of["id"] == "tls.revocation");
            lists
                .map(|of| (text(&of["subject"]), text(&of["status"])))
                .collect()
        }
    }

    #[test]
    fn one_listener_holds_back_no_other() {
        for (broken, of) in [("rpc.pem", 0), ("metrics.crl", 1), ("rpc.key", 0)] {
            let rig = Rig::new();
            let before = rig.in_use();
            rig.write(broken, "damaged");
            let refused = rig.reload();
            let name = broken.split('.').next().unwrap();
            assert!(refused[of].as_ref().unwrap().contains(name), "{refused:?}");
            assert_eq!(refused[1 - of], None);
            let after = rig.in_use();
            assert!(Arc::ptr_eq(&before[of], &after[of]), "as it was");
            assert!(!Arc::ptr_eq(&before[1 - of], &after[1 - of]), "read again");
        }
    }

    /// Goal: without its settings a listener serves until the next start.
    #[test]
    fn a_listener_outlives_its_settings() {
        let rig = Rig::new();
        let engine = &rig.daemon.engine;
        Certificates::read(&Settings::default()).apply(engine);
        let tunables = engine.tunables();
        assert!(tunables.rpc_tls.is_some() && tunables.http_tls.is_none());
        let plain = TestDaemon::with(Settings::default(), None);
        Certificates::read(&engine.settings).apply(&plain.engine);
        assert!(plain.engine.tunables().rpc_tls.is_none(), "no listener");
    }

    #[test]
    fn the_doctor_examines_the_lists_in_use() {
        let rig = Rig::new();
        let expected = |rpc: &str, metrics: &str| {
            let of = |crl: &str, status: &str| (crl.to_owned(), status.to_owned());
            [of(RPC_CRL, rpc), of(METRICS_CRL, metrics)]
        };
        assert_eq!(rig.doctor(), expected("PASS", "PASS"));
        rig.write("rpc.crl", CRL_ENDED);
        rig.write("metrics.crl", "damaged");
        assert_eq!(rig.doctor(), expected("PASS", "PASS"), "before the reload");
        rig.reload();
        assert_eq!(rig.doctor(), expected("FAIL", "PASS"));
    }
}
