//! Determines the Linux capabilities that a configuration needs.

use nacre_engine_sandbox::{CapabilitySet, Needs};

use super::Settings;

/// Highest SO_PRIORITY that a socket may have without CAP_NET_ADMIN (socket(7)).
const HIGHEST_UNPRIVILEGED: u8 = 6;

impl Settings {
    /// The features of the configuration that need a capability.
    pub fn capability_needs(&self) -> Needs {
        let priorities = [&self.qos.storage, &self.qos.replication].map(|class| class.prio);
        let highest = priorities.into_iter().flatten().max();
        // Names that do not exist were refused.
        let named = self.security.capabilities.iter();
        let named = named.filter_map(|name| nacre_engine_sandbox::parse(name).ok());
        Needs {
            network_changes: !self.rdma.rxe.is_empty() || highest > Some(HIGHEST_UNPRIVILEGED),
            added: named.fold(CapabilitySet::empty(), |all, one| all | one),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::load_text;

    #[test]
    fn features_that_change_the_network_need_it() {
        let needs = |text: &str| {
            let loaded = load_text(Some(("/n.toml", text)), [], &[]).unwrap();
            loaded.settings.capability_needs()
        };
        assert!(!needs("").network_changes && needs("").added.is_empty());
        assert!(!needs("[qos]\nstorage = { prio = 6 }\n").network_changes);
        assert!(needs("[qos]\nreplication = { prio = 7 }\n").network_changes);
        assert!(needs("[rdma]\nrxe = [\"eth0\"]\n").network_changes);
        let added = needs("[security]\ncapabilities = [\"dac_override\", \"CAP_KILL\"]\n").added;
        assert_eq!(
            nacre_engine_sandbox::names(added),
            ["CAP_DAC_OVERRIDE", "CAP_KILL"]
        );
    }
}
