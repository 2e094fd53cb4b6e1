//! Metrics of the keys of the keyring (DH-HMAC-CHAP and TLS): the time until each one expires.

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};

family!(
    EXPIRES,
    "nacre_key_expires_seconds",
    Gauge,
    "Time until a key expires, negative afterwards. Keys that never expire are left out.",
    ["key"]
);

#[derive(Debug)]
pub struct KeyMetrics;

impl MetricsSource for KeyMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 1] = [&EXPIRES];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        let keys = of.engine.keyring.list().into_iter();
        for listed in keys.filter(|listed| !listed.removed) {
            if let Some(seconds) = listed.key.expires_in_s() {
                into.value(&EXPIRES, &[&listed.key.name], seconds);
            }
        }
    }
}
