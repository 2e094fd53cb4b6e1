//! The NQN of the discovery subsystem: set by RPC or by the configuration file.

use nacre_nvmf_wire::Nqn;
use tracing::warn;
use uuid::Uuid;

use crate::config::settings::DiscoveryName;
use crate::services::Engine;
use crate::values::identity_file;

/// The file in the data directory with the NQN that was generated at the first start.
const IDENTITY_FILE: &str = "discoverynqn";

/// The configured unique NQN of the discovery subsystem; `None`: only the well-known one. With
/// `auto` and no data directory there is none, as in SPDK. Hosts with a persistent discovery
/// connection reconnect by this NQN. If it changed at each start, the daemon would refuse these
/// hosts for good.
pub fn configured_nqn(engine: &Engine) -> Option<Nqn> {
    // Validated when the configuration was loaded.
    match engine.settings.nvmf.discovery_name().ok()? {
        DiscoveryName::WellKnown => None,
        DiscoveryName::Unique(nqn) => Some(nqn),
        DiscoveryName::Auto => {
            let dir = engine.journal.store_path()?;
            let made = Nqn::unique_discovery(Uuid::new_v4());
            let kept = identity_file::read_or_create(dir, IDENTITY_FILE, made.as_str());
            let nqn = kept.and_then(|line| Nqn::new(&line).map_err(std::io::Error::other));
            let nqn = nqn.inspect_err(|error| {
                let file = dir.join(IDENTITY_FILE);
                warn!(%error, "no unique name for discovery: {}", file.display());
            });
            nqn.ok().filter(|nqn| !nqn.is_discovery())
        }
    }
}
