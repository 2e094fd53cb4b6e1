//! Why RDMA is unavailable: the missing library, module, device node or device, and the remedy.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::sys::LoadError;
use crate::sys::api::{LIBIBVERBS, LIBRDMACM};
use crate::types::VerbsError;

/// The missing parts, the first cause first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Absence {
    /// A library of rdma-core.
    Library {
        library: &'static str,
        detail: String,
    },
    /// The kernel's side of verbs for programs.
    UverbsModule,
    /// Devices of the kernel whose nodes are not in this process's `/dev`: a container, most often.
    UverbsNode {
        node: PathBuf,
    },
    /// The node is there and is not ours.
    UverbsDenied {
        node: PathBuf,
    },
    /// A network controller of an RDMA vendor without a driver that makes an RDMA device of it.
    Driver {
        pci: String,
        modules: &'static str,
    },
    /// None of the above: nothing here can do RDMA.
    Hardware,
    /// The connection manager for programs: module or node.
    RdmaCm {
        node: PathBuf,
    },
    RdmaCmDenied {
        node: PathBuf,
    },
}

impl Absence {
    /// The reason code of a listener that is not there.
    pub fn reason(&self) -> &'static str {
        match self {
            Absence::Library { library, .. } if *library == LIBRDMACM => "no_rdma_cm",
            Absence::Library { .. }
            | Absence::UverbsModule
            | Absence::UverbsNode { .. }
            | Absence::UverbsDenied { .. } => "no_uverbs",
            Absence::Driver { .. } | Absence::Hardware => "no_rdma_dev",
            Absence::RdmaCm { .. } | Absence::RdmaCmDenied { .. } => "no_rdma_cm",
        }
    }

    pub fn remedy(&self) -> String {
        match self {
            Absence::Library { library, .. } if *library == LIBIBVERBS => {
                "install it: apt install libibverbs1 ibverbs-providers, or dnf install libibverbs"
                    .into()
            }
            Absence::Library { .. } => {
                "install it: apt install librdmacm1, or dnf install librdmacm".into()
            }
            Absence::UverbsModule => "modprobe ib_core ib_uverbs".into(),
            Absence::UverbsNode { .. } | Absence::RdmaCm { .. } if in_container() => {
                "give the container its nodes: --device=/dev/infiniband".into()
            }
            Absence::UverbsNode { .. } => "modprobe ib_uverbs, and see that udev runs".into(),
            Absence::RdmaCm { .. } => "modprobe rdma_ucm".into(),
            Absence::UverbsDenied { node } | Absence::RdmaCmDenied { node } => format!(
                "run as root or as a member of the group of {} (often `rdma`)",
                node.display()
            ),
            Absence::Driver { modules, .. } => {
                format!("modprobe {modules}; dmesg tells why it failed")
            }
            Absence::Hardware => "look with lspci; for soft-RoCE: modprobe rdma_rxe; \
                 rdma link add rxe0 type rxe netdev <interface>"
                .into(),
        }
    }

    pub fn into_error(self) -> VerbsError {
        VerbsError::Unavailable {
            what: self.to_string(),
            remedy: self.remedy(),
        }
    }

    /// Why no device is found by libraries that are there.
    pub fn of(system: &System) -> Absence {
        let class = system.sys.join("class/infiniband");
        let first = names(&class).into_iter().next();
        if first.is_none() {
            return system.unused_controller().unwrap_or(Absence::Hardware);
        }
        let uverbs = names(&system.sys.join("class/infiniband_verbs"))
            .into_iter()
            .find(|name| name.starts_with("uverbs"));
        match uverbs {
            None => Absence::UverbsModule,
            Some(name) => {
                let node = system.dev.join("infiniband").join(name);
                match node.try_exists() {
                    Ok(true) => Absence::UverbsDenied { node },
                    _ => Absence::UverbsNode { node },
                }
            }
        }
    }

    /// Why the connection manager cannot be opened.
    pub(super) fn of_cm(system: &System) -> Absence {
        let node = system.dev.join("infiniband/rdma_cm");
        match node.try_exists() {
            Ok(true) => Absence::RdmaCmDenied { node },
            _ => Absence::RdmaCm { node },
        }
    }
}

impl From<LoadError> for Absence {
    fn from(error: LoadError) -> Absence {
        Absence::Library {
            library: error.library(),
            detail: error.to_string(),
        }
    }
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Absence::Library { detail, .. } => write!(f, "{detail}"),
            Absence::UverbsModule => {
                f.write_str("No RDMA devices found: the module ib_uverbs is not loaded")
            }
            Absence::UverbsNode { node } => {
                write!(f, "No RDMA devices found: {} is missing", node.display())
            }
            Absence::UverbsDenied { node } => write!(
                f,
                "No RDMA devices found: {} may not be opened",
                node.display()
            ),
            Absence::Driver { pci, modules } => write!(
                f,
                "No RDMA devices found: {pci} has no RDMA driver ({modules})"
            ),
            Absence::Hardware => {
                f.write_str("No RDMA devices found: no network controller here has an RDMA driver")
            }
            Absence::RdmaCm { node } => write!(
                f,
                "the RDMA connection manager is missing: there is no {}",
                node.display()
            ),
            Absence::RdmaCmDenied { node } => write!(
                f,
                "the RDMA connection manager may not be used: {} cannot be opened",
                node.display()
            ),
        }
    }
}

/// Where the kernel is looked at.
#[derive(Debug, Clone)]
pub struct System {
    pub sys: PathBuf,
    pub dev: PathBuf,
}

/// PCI vendors of RDMA hardware, and the modules that make RDMA devices of it.
const MAKERS: [(&str, &str); 6] = [
    ("0x15b3", "mlx5_ib"),
    ("0x14e4", "bnxt_re"),
    ("0x8086", "irdma"),
    ("0x1077", "qedr"),
    ("0x1425", "iw_cxgb4"),
    ("0x19e5", "hns_roce_hw_v2"),
];

impl System {
    pub fn of_this_machine() -> System {
        System {
            sys: "/sys".into(),
            dev: "/dev".into(),
        }
    }

    /// A network controller of an RDMA vendor. Intel's and Broadcom's may lack RDMA: those whose
    /// driver has no RDMA companion do not count.
    fn unused_controller(&self) -> Option<Absence> {
        let devices = self.sys.join("bus/pci/devices");
        names(&devices).into_iter().find_map(|pci| {
            let dir = devices.join(&pci);
            let read = |file: &str| std::fs::read_to_string(dir.join(file)).unwrap_or_default();
            // Network (02) controllers, of which 0x0207 is InfiniBand.
            if !read("class").starts_with("0x02") {
                return None;
            }
            let vendor = read("vendor");
            let (_, modules) = MAKERS.iter().find(|(id, _)| *id == vendor.trim())?;
            let driver = std::fs::read_link(dir.join("driver")).ok();
            let driver = driver.as_deref().and_then(Path::file_name);
            let able = match driver.and_then(|name| name.to_str()) {
                None => true,
                Some(name) => matches!(
                    name,
                    "mlx5_core"
                        | "mlx4_core"
                        | "bnxt_en"
                        | "ice"
                        | "i40e"
                        | "idpf"
                        | "qede"
                        | "cxgb4"
                        | "hns3"
                ),
            };
            able.then_some(Absence::Driver { pci, modules })
        })
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

fn in_container() -> bool {
    ["/.dockerenv", "/run/.containerenv"]
        .iter()
        .any(|file| Path::new(file).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine(tempfile::TempDir, System);

    impl Machine {
        fn new() -> Machine {
            let dir = tempfile::tempdir().unwrap();
            let system = System {
                sys: dir.path().join("sys"),
                dev: dir.path().join("dev"),
            };
            Machine(dir, system)
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    /// Goal: each cause has its own text, reason and remedy, and begins with the words that people
    /// search for. Method: a machine that gains one part after the other.
    #[test]
    fn each_cause_is_told_apart() {
        let machine = Machine::new();
        let says = || {
            let absence = Absence::of(&machine.1);
            let text = absence.to_string();
            assert!(text.starts_with("No RDMA devices found: "), "{text}");
            (absence.reason(), text, absence.remedy())
        };
        let (reason, _, remedy) = says();
        assert_eq!(reason, "no_rdma_dev");
        assert!(remedy.contains("modprobe rdma_rxe"));

        machine.file("sys/bus/pci/devices/0000:01:00.0/class", "0x020000\n");
        machine.file("sys/bus/pci/devices/0000:01:00.0/vendor", "0x15b3\n");
        let (reason, text, remedy) = says();
        assert_eq!(reason, "no_rdma_dev");
        assert!(text.contains("0000:01:00.0"), "{text}");
        assert!(remedy.starts_with("modprobe mlx5_ib"), "{remedy}");

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

    /// Goal: the connection manager is distinguished from verbs.
    #[test]
    fn the_connection_manager_has_its_own_reason() {
        let machine = Machine::new();
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
