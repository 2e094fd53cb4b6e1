//! Checks of `[[remote]]`.

use std::collections::BTreeSet;

use nacre_nvmf_remote::MAX_PATHS;

use super::Check;
use crate::attach::{AttachParams, Multipath, OF_ADDRESS};
use crate::config::remote::RemoteTarget;
use crate::values::read::{self, Texts};

impl Check<'_> {
    pub(super) fn remotes(&mut self, targets: &[RemoteTarget]) {
        let mut names = BTreeSet::new();
        for (at, target) in targets.iter().enumerate() {
            let key = format!("remote[{at}]");
            let Some(paths) = self.paths(&key, target) else {
                continue;
            };
            self.several_paths(&key, target, &paths);
            if !names.insert(paths[0].name.clone()) {
                let cause = format!("a second remote target \"{}\"", paths[0].name);
                let remedy = "give each a name of its own";
                self.refuse(&format!("{key}.name"), cause, remedy);
            }
        }
    }

    /// The parameters of each path. Reports the first error of the target, then `None` if a path
    /// has no parameters.
    fn paths(&mut self, key: &str, target: &RemoteTarget) -> Option<Vec<AttachParams>> {
        if target.address.0.iter().all(String::is_empty) {
            let remedy = "add address = \"auto://ADDRESS/NQN\"";
            let cause = "a target without an address".to_owned();
            self.refuse_unless_refused_with(&format!("{key}.address"), cause, remedy);
            return None;
        }
        let all = match target.attach_params() {
            Ok(all) => all,
            Err((at, error)) => {
                self.refuse(&address_key(key, target, at), error, "");
                return None;
            }
        };
        let (mut paths, mut is_refused) = (Vec::new(), false);
        for (at, params) in all.iter().enumerate() {
            match read::first::<AttachParams>(params, Texts::Read) {
                Ok(params) => {
                    let refused = params.check_alone().err().filter(|_| !is_refused);
                    if let Some(error) = refused {
                        is_refused = true;
                        let field = error.data.as_ref().and_then(|facts| facts.field.as_deref());
                        let key = match field.filter(|field| !OF_ADDRESS.contains(field)) {
                            Some(field) => format!("{key}.{}", key_of(field)),
                            None => address_key(key, target, at),
                        };
                        self.refused(&key, &error);
                    }
                    paths.push(params);
                }
                Err((place, error)) => {
                    self.wrong_param(key, &place, &error);
                    return None;
                }
            }
        }
        Some(paths)
    }

    /// Refuses paths that are not to the same namespaces of one subsystem, and a second path where
    /// the attaching method would refuse it.
    fn several_paths(&mut self, key: &str, target: &RemoteTarget, paths: &[AttachParams]) {
        let (first, count) = (&paths[0], paths.len());
        if count > MAX_PATHS {
            let cause = format!("{count} paths, and {MAX_PATHS} are the most");
            self.refuse(&format!("{key}.address"), cause, "leave some out");
        }
        if count > 1 && first.multipath == Some(Multipath::Disable) {
            let cause = format!("it refuses a second path, and there are {count} addresses");
            let remedy = "leave it out";
            self.refuse(&format!("{key}.multipath"), cause, remedy);
        }
        for (at, path) in paths.iter().enumerate().skip(1) {
            let of_address = address_key(key, target, at);
            let place = |one: &AttachParams| {
                let transport = one.trtype.to_ascii_lowercase();
                (transport, one.traddr.clone(), one.trsvcid.clone())
            };
            let same = paths[..at].iter().position(|one| place(one) == place(path));
            let (cause, remedy) = if path.subnqn != first.subnqn {
                let nqn = first.subnqn.as_deref().unwrap_or_default();
                (
                    format!("another subsystem than that of address[0], {nqn}"),
                    "all addresses of a target are paths to one subsystem: write another [[remote]]",
                )
            } else if (path.nsid, path.uuid) != (first.nsid, first.uuid) {
                (
                    "it selects another namespace than address[0]".to_owned(),
                    "select it in the first address: that holds for all paths",
                )
            } else if path.hostnqn != first.hostnqn {
                (
                    "another hostnqn than that of address[0]".to_owned(),
                    "write it in the first address: that holds for all paths",
                )
            } else if let Some(same) = same {
                (
                    format!("the same path as address[{same}]"),
                    "leave it out, or write another address, port or transport",
                )
            } else {
                continue;
            };
            self.refuse(&of_address, cause, remedy);
        }
    }
}

/// The key of an address: one that is in a list has an index.
fn address_key(key: &str, target: &RemoteTarget, at: usize) -> String {
    match target.address.0.len() {
        1 => format!("{key}.address"),
        _ => format!("{key}.address[{at}]"),
    }
}

/// The key of a parameter.
fn key_of(field: &str) -> &str {
    field.strip_prefix("multipath_opts.").unwrap_or(field)
}
