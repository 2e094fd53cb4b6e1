//! Finds the reason why this machine has no RDMA: a missing library, kernel module, device node or
//! device. `nacre doctor` and the listeners report the reason and its remedy.

use std::fmt;
use std::path::{Path, PathBuf};

use nacre_transport_rdma_link::{NoDevice, Roots, in_container};

use crate::sys::LoadError;
use crate::sys::api::{LIBIBVERBS, LIBRDMACM};
use crate::types::VerbsError;

/// The missing part that prevents RDMA. A machine that lacks several parts reports the first one in
/// this order, with [`Absence::NoDevice`] before the kernel modules and nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Absence {
    /// A library of rdma-core cannot be loaded; `detail` is the dynamic loader's error.
    Library {
        library: &'static str,
        detail: String,
    },
    /// The kernel module `ib_uverbs`, which serves verbs to user space, is not loaded.
    UverbsModule,
    /// The kernel has devices, but this process's `/dev` has no nodes for them. Usual cause: a
    /// container.
    UverbsNode { node: PathBuf },
    /// The node exists, but the libraries list no device. Usual cause: this process has no
    /// permission to open the node.
    UverbsDenied { node: PathBuf },
    /// The kernel has no RDMA device.
    NoDevice(NoDevice),
    /// The node of the user-space connection manager is missing: the module `rdma_ucm` is not
    /// loaded, or a container lacks the node.
    RdmaCm { node: PathBuf },
    /// The connection manager's node exists, but librdmacm cannot open it. Usual cause: this
    /// process has no permission.
    RdmaCmDenied { node: PathBuf },
}

impl Absence {
    /// The reason code that RPC and metrics report for a listener without RDMA, for example
    /// `no_uverbs`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Library { library, .. } if *library == LIBRDMACM => "no_rdma_cm",
            Self::Library { .. }
            | Self::UverbsModule
            | Self::UverbsNode { .. }
            | Self::UverbsDenied { .. } => "no_uverbs",
            Self::NoDevice(_) => "no_rdma_dev",
            Self::RdmaCm { .. } | Self::RdmaCmDenied { .. } => "no_rdma_cm",
        }
    }

    /// The command or setting that fixes it, for the operator.
    pub fn remedy(&self) -> String {
        match self {
            Self::Library { library, .. } if *library == LIBIBVERBS => {
                "install it: apt install libibverbs1 ibverbs-providers, or dnf install libibverbs"
                    .into()
            }
            Self::Library { .. } => {
                "install it: apt install librdmacm1, or dnf install librdmacm".into()
            }
            Self::UverbsModule => "modprobe ib_core ib_uverbs".into(),
            Self::UverbsNode { .. } | Self::RdmaCm { .. } if in_container(&Roots::real()) => {
                "give the container its nodes: --device=/dev/infiniband".into()
            }
            Self::UverbsNode { .. } => "modprobe ib_uverbs, and see that udev runs".into(),
            Self::RdmaCm { .. } => "modprobe rdma_ucm".into(),
            Self::UverbsDenied { node } | Self::RdmaCmDenied { node } => format!(
                "run as root or as a member of the group of {} (often `rdma`)",
                node.display()
            ),
            Self::NoDevice(why) => why.remedy(),
        }
    }

    /// Converts to [`VerbsError::Unavailable`] with this text and remedy.
    pub fn into_error(self) -> VerbsError {
        VerbsError::Unavailable {
            what: self.to_string(),
            remedy: self.remedy(),
        }
    }

    /// The reason why the loaded libraries list no device. `system`: the roots of `/sys` and
    /// `/dev`.
    pub fn of(system: &Roots) -> Self {
        if let Some(why) = NoDevice::of(system) {
            return Self::NoDevice(why);
        }
        let uverbs = names(&system.sys.join("class/infiniband_verbs"))
            .into_iter()
            .find(|name| name.starts_with("uverbs"));
        match uverbs {
            None => Self::UverbsModule,
            Some(name) => {
                let node = system.dev.join("infiniband").join(name);
                match node.try_exists() {
                    Ok(true) => Self::UverbsDenied { node },
                    _ => Self::UverbsNode { node },
                }
            }
        }
    }

    /// The reason why the connection manager cannot be opened.
    pub(super) fn of_cm(system: &Roots) -> Self {
        // Report a missing device first: without one the connection manager is of no use.
        if let Some(why) = NoDevice::of(system) {
            return Self::NoDevice(why);
        }
        let node = system.dev.join("infiniband/rdma_cm");
        match node.try_exists() {
            Ok(true) => Self::RdmaCmDenied { node },
            _ => Self::RdmaCm { node },
        }
    }
}

impl From<LoadError> for Absence {
    fn from(error: LoadError) -> Self {
        Self::Library {
            library: error.library(),
            detail: error.to_string(),
        }
    }
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library { detail, .. } => write!(f, "{detail}"),
            Self::UverbsModule => {
                f.write_str("No RDMA devices found: the module ib_uverbs is not loaded")
            }
            Self::UverbsNode { node } => {
                write!(f, "No RDMA devices found: {} is missing", node.display())
            }
            Self::UverbsDenied { node } => write!(
                f,
                "No RDMA devices found: {} may not be opened",
                node.display()
            ),
            Self::NoDevice(why) => write!(f, "No RDMA devices found: {why}"),
            Self::RdmaCm { node } => write!(
                f,
                "the RDMA connection manager is missing: there is no {}",
                node.display()
            ),
            Self::RdmaCmDenied { node } => write!(
                f,
                "the RDMA connection manager may not be used: {} cannot be opened",
                node.display()
            ),
        }
    }
}

fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine(tempfile::TempDir, Roots);

    impl Machine {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let system = Roots::below(dir.path());
            Self(dir, system)
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    /// Goal: each cause has its own text, reason and remedy, and each text begins with the words
    /// that users search for. Method: start with an empty machine and add one part at a time.
    #[test]
    fn each_cause_has_its_own_text() {
        let machine = Machine::new();
        let says = || {
            let absence = Absence::of(&machine.1);
            let text = absence.to_string();
            assert!(text.starts_with("No RDMA devices found: "), "{text}");
            (absence.reason(), text, absence.remedy())
        };
        let (reason, _, remedy) = says();
        assert_eq!(reason, "no_rdma_dev");
        assert!(remedy.contains("modprobe -a ib_core"), "{remedy}");

        machine.file("sys/bus/pci/devices/0000:01:00.0/class", "0x020000\n");
        machine.file("sys/bus/pci/devices/0000:01:00.0/vendor", "0x15b3\n");
        let (reason, text, remedy) = says();
        assert_eq!(reason, "no_rdma_dev");
        assert!(text.contains("0000:01:00.0"), "{text}");
        assert!(remedy.contains("modprobe mlx5_ib"), "{remedy}");

        machine.file("sys/class/infiniband/mlx5_0/node_desc", "x\n");
        let (reason, text, _) = says();
        assert_eq!(reason, "no_uverbs");
        assert!(
            text.ends_with("the module ib_uverbs is not loaded"),
            "{text}"
        );

        machine.file("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n");
        let (reason, text, _) = says();
        assert_eq!(reason, "no_uverbs");
        assert!(text.ends_with("infiniband/uverbs0 is missing"), "{text}");

        machine.file("dev/infiniband/uverbs0", "");
        let (_, text, remedy) = says();
        assert!(
            text.ends_with("infiniband/uverbs0 may not be opened"),
            "{text}"
        );
        assert!(remedy.contains("run as root"), "{remedy}");
    }

    /// Goal: a missing connection manager is reported apart from missing verbs.
    #[test]
    fn the_connection_manager_has_its_own_reason() {
        let machine = Machine::new();
        // Without a device, the missing device is the reason: the node would not help.
        assert_eq!(Absence::of_cm(&machine.1).reason(), "no_rdma_dev");
        machine.file("sys/class/infiniband/mlx5_0/node_desc", "x\n");
        let absence = Absence::of_cm(&machine.1);
        assert_eq!(absence.reason(), "no_rdma_cm");
        machine.file("dev/infiniband/rdma_cm", "");
        assert!(matches!(
            Absence::of_cm(&machine.1),
            Absence::RdmaCmDenied { .. }
        ));
        let missing = Absence::from(LoadError::Library {
            library: LIBRDMACM,
            detail: "librdmacm.so.1 cannot be loaded: no such file".into(),
        });
        assert_eq!(missing.reason(), "no_rdma_cm");
        assert!(missing.remedy().contains("librdmacm1"));
    }
}
