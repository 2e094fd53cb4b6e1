//! The state of kernel modules: loaded or built in, available to load, or missing.

use std::collections::BTreeSet;
use std::fs;

use serde::Serialize;

use crate::sysfs::{self, Roots};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModuleState {
    Loaded,
    BuiltIn,
    /// The module is on disk for this kernel; `modprobe` loads it.
    Loadable,
    /// The module is not on disk, as far as can be seen: in a container the folder may be hidden.
    Missing,
}

impl ModuleState {
    /// True if the module is loaded or built in.
    pub fn is_there(self) -> bool {
        matches!(self, Self::Loaded | Self::BuiltIn)
    }
}

/// The running kernel's modules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Modules {
    loaded: BTreeSet<String>,
    built_in: BTreeSet<String>,
    loadable: BTreeSet<String>,
    /// The list of loadable modules was readable.
    listed: bool,
}

impl Modules {
    pub fn read(roots: &Roots) -> Self {
        let read = |path: std::path::PathBuf| fs::read_to_string(path).unwrap_or_default();
        let release = sysfs::text(&roots.proc.join("sys/kernel/osrelease")).unwrap_or_default();
        let folder = roots.modules.join(release);
        let loaded = read(roots.proc.join("modules"));
        let loadable = fs::read_to_string(folder.join("modules.dep"));
        let listed = loadable.is_ok();
        Self {
            loaded: loaded
                .lines()
                .filter_map(|line| line.split_whitespace().next())
                .map(canonical)
                .collect(),
            built_in: read(folder.join("modules.builtin"))
                .lines()
                .filter_map(name_of_file)
                .collect(),
            loadable: loadable
                .unwrap_or_default()
                .lines()
                .filter_map(|line| name_of_file(line.split(':').next()?))
                .collect(),
            listed,
        }
    }

    pub fn state(&self, module: &str) -> ModuleState {
        let module = canonical(module);
        if self.loaded.contains(&module) {
            ModuleState::Loaded
        } else if self.built_in.contains(&module) {
            ModuleState::BuiltIn
        } else if self.loadable.contains(&module) {
            ModuleState::Loadable
        } else {
            ModuleState::Missing
        }
    }

    /// True if the list of loadable modules was readable. If not, [`ModuleState::Missing`] is not
    /// certain.
    pub fn is_listed(&self) -> bool {
        self.listed
    }
}

/// Names of modules are the same with dashes and underscores.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// `kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz` is `rdma_rxe`.
fn name_of_file(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    let (name, _) = file.split_once(".ko")?;
    Some(canonical(name))
}
