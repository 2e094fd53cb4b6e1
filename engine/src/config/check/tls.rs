//! Checks of TLS: certificates of the management protocol and of HTTP, secure channel
//! concatenation.

use nacre_nvmf::transport::TlsPolicy;

use super::{Check, Settings, Subsystem};
use crate::config::settings::Listener;
use crate::rpc::subject::Subject;

impl Check<'_> {
    pub(super) fn tls(&mut self, settings: &Settings) {
        let (rpc, metrics) = (&settings.rpc.tls, &settings.metrics.tls);
        if rpc.listen.is_some() {
            for (key, path) in [
                ("cert", &rpc.cert),
                ("key", &rpc.key),
                ("client_ca", &rpc.client_ca),
            ] {
                if path.is_none() {
                    let cause = format!("rpc.tls.{key} is missing: a TLS listener needs it");
                    let remedy = format!("add {key} = \"/…/{key}.pem\" to [rpc.tls]");
                    self.refuse("rpc.tls.listen", cause, &remedy);
                }
            }
        }
        for (table, ca, crl) in [
            ("rpc.tls", &rpc.client_ca, &rpc.client_crl),
            ("metrics.tls", &metrics.client_ca, &metrics.client_crl),
        ] {
            if crl.is_some() && ca.is_none() {
                let cause = format!(
                    "{table}.client_ca is missing: without it, client certificates are not checked, \
                     so a revocation list has no effect"
                );
                let remedy = format!("add client_ca = \"/…/clients.pem\" to [{table}]");
                self.refuse(&format!("{table}.client_crl"), cause, &remedy);
            }
        }
        let listeners = settings.listeners();
        let requires = |listener: &Listener| listener.options.tls() == TlsPolicy::Require;
        if settings.cluster.is_node() && !listeners.is_empty() && listeners.iter().all(requires) {
            let cause = "all listeners require TLS, and the nodes of a cluster connect to each other \
                         in clear: no node reaches the replicas of this one";
            let remedy = "add an [[nvmf.listener]] without tls on the network of the nodes, or use \
                          tls = \"allow\"";
            self.refuse("cluster.name", cause, remedy);
        }
        for text in rpc.roles.keys() {
            if let Err(error) = text.parse::<Subject>() {
                self.refuse(&format!("rpc.tls.roles.{text}"), error, Subject::FORMS);
            }
        }
        let is_half = metrics.cert.is_some() != metrics.key.is_some();
        if is_half || (metrics.cert.is_none() && metrics.client_ca.is_some()) {
            let cause = "TLS needs both cert and key";
            let given = [
                ("metrics.tls.cert", metrics.cert.is_some()),
                ("metrics.tls.key", metrics.key.is_some()),
                ("metrics.tls.client_ca", true),
            ];
            let given = given.iter().find(|(_, given)| *given).expect("the last");
            self.refuse(given.0, cause, "add the other one to [metrics.tls]");
        }
    }

    /// Checks the hosts that must use secure channel concatenation.
    pub(super) fn concat(&mut self, key: &str, subsystem: &Subsystem) {
        for (n, host) in subsystem
            .host
            .iter()
            .enumerate()
            .filter(|(_, h)| h.keys.must_concat())
        {
            let key = format!("{key}.host[{n}].concat");
            if host.keys.psk.is_some() {
                let cause = "the host has a psk, so it makes no key for TLS";
                self.refuse(&key, cause, "leave out psk or concat");
            } else if host.keys.dhchap_key.is_none() {
                let cause = "the host has no key to authenticate with";
                self.refuse_unless_refused_with(&key, cause.into(), "add dhchap_key = \"name\"");
            }
        }
    }
}
