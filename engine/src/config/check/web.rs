//! Checks of the configuration's section `[web]`, the administration page: its listen addresses,
//! and that `cert` and `key` are both set or both absent.

use nacre_engine_web::endpoint::Endpoint;

use super::{Check, Settings};

/// Most listen addresses of the page.
const MAX_LISTENERS: usize = 16;

impl Check<'_> {
    /// Records a problem for each wrong parameter of `[web]`.
    pub(super) fn web(&mut self, settings: &Settings) {
        let web = &settings.web;
        for (at, text) in web.listen.iter().enumerate() {
            if let Err(error) = text.parse::<Endpoint>() {
                self.refuse(&format!("web.listen[{at}]"), &error, error.remedy());
            }
        }
        if web.listen.len() > MAX_LISTENERS {
            let cause = format!("more than {MAX_LISTENERS} addresses");
            self.refuse("web.listen", cause, "use 0.0.0.0 or [::] for all addresses");
        }
        if web.cert.is_some() != web.key.is_some() {
            let key = if web.cert.is_some() {
                "web.cert"
            } else {
                "web.key"
            };
            let cause = "the page needs both cert and key, or neither";
            self.refuse(key, cause, "add the other one to [web]");
        }
    }
}
