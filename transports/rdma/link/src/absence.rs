//! Determines why this machine has no RDMA device. All commands use it, so each reports the same
//! cause and remedy.

use std::fmt;
use std::fs;

use serde::Serialize;

use crate::driver::quirk;
use crate::modules::{ModuleState, Modules};
use crate::sysfs::{self, Roots};

/// The reason why this machine has no RDMA device: the first missing part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "missing", rename_all = "snake_case")]
pub enum NoDevice {
    /// A card with RDMA support has no RDMA device: its PCI address, its RDMA module, and the state
    /// of that. A card without a driver is judged by its vendor alone.
    Card {
        pci: String,
        module: String,
        state: ModuleState,
        container: bool,
    },
    /// The kernel has no RDMA support: device nodes or another container network would not help.
    Kernel {
        /// The list of this kernel's modules is readable.
        listed: bool,
    },
    /// No RDMA card; soft-RoCE is possible, if its module exists.
    Hardware {
        soft: ModuleState,
        /// An interface for soft-RoCE; `NAME` if there is none.
        netdev: String,
        container: bool,
    },
}

/// PCI vendors of RDMA hardware, and the modules for it.
const MAKERS: [(&str, &str); 6] = [
    ("0x15b3", "mlx5_ib"),
    ("0x14e4", "bnxt_re"),
    ("0x8086", "irdma"),
    ("0x1077", "qedr"),
    ("0x1425", "iw_cxgb4"),
    ("0x19e5", "hns_roce_hw_v2"),
];

impl NoDevice {
    /// Returns `None` if an RDMA device exists.
    pub fn of(roots: &Roots) -> Option<Self> {
        let class = roots.sys.join("class/infiniband");
        if !sysfs::names(&class).is_empty() {
            return None;
        }
        let modules = Modules::read(roots);
        let mut cards = cards(roots);
        // A card whose module is not loaded is more likely to be the cause.
        cards.sort_by_key(|(_, module)| modules.state(module).is_there());
        if let Some((pci, module)) = cards.into_iter().next() {
            let state = modules.state(&module);
            return Some(Self::Card {
                pci,
                module,
                state,
                container: in_container(roots),
            });
        }
        if !class.exists() && modules.state("ib_core") == ModuleState::Missing {
            let listed = modules.is_listed();
            return Some(Self::Kernel { listed });
        }
        let mut netdevs = sysfs::names(&roots.sys.join("class/net")).into_iter();
        Some(Self::Hardware {
            soft: modules.state("rdma_rxe"),
            netdev: netdevs
                .find(|name| name != "lo")
                .unwrap_or_else(|| "NAME".into()),
            container: in_container(roots),
        })
    }

    /// The command or the change that removes the cause.
    pub fn remedy(&self) -> String {
        const OTHER_KERNEL: &str = "install the kernel's package of further modules (such as linux-modules-extra), or use another kernel";
        match self {
            Self::Card {
                module,
                state,
                container,
                ..
            } => match state {
                // RDMA devices may belong to one network namespace.
                ModuleState::Loaded | ModuleState::BuiltIn if *container => {
                    "start the container with `--network host --device=/dev/infiniband`".into()
                }
                ModuleState::Loaded | ModuleState::BuiltIn => {
                    "look for the driver's errors: `dmesg | grep -i -e rdma -e infiniband`".into()
                }
                ModuleState::Loadable => format!("`modprobe ib_core`, `modprobe {module}`"),
                ModuleState::Missing => {
                    format!("`modprobe {module}`; if there is none, {OTHER_KERNEL}")
                }
            },
            Self::Kernel { listed: true } => format!("{OTHER_KERNEL}; TCP needs none"),
            Self::Kernel { listed: false } => format!(
                "`modprobe -a ib_core ib_uverbs rdma_ucm` on the machine itself; if it has none of them, \
                 {OTHER_KERNEL}; TCP needs none"
            ),
            Self::Hardware {
                soft,
                netdev,
                container,
            } => {
                let first = match soft {
                    ModuleState::Loadable => "`modprobe rdma_rxe`, then ",
                    _ => "",
                };
                let soft = match soft {
                    ModuleState::Missing => {
                        "a card is needed, or a kernel with soft-RoCE (rdma_rxe); TCP needs none"
                            .into()
                    }
                    _ => format!(
                        "without a card, soft-RoCE serves: {first}`nacre rdma rxe add rxe0 --netdev {netdev}` \
                         (`rdma link add rxe0 type rxe netdev {netdev}`)"
                    ),
                };
                match container {
                    true => format!(
                        "if the machine has a device, start the container with `--network host \
                         --device=/dev/infiniband`; {soft}"
                    ),
                    false => soft,
                }
            }
        }
    }
}

impl fmt::Display for NoDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Card {
                pci, module, state, ..
            } if state.is_there() => {
                write!(f, "{pci} and its module {module} are there")
            }
            Self::Card { pci, module, .. } => write!(f, "{pci} needs the module {module}"),
            Self::Kernel { listed: true } => {
                f.write_str("this kernel has no RDMA: it has no module ib_core")
            }
            Self::Kernel { listed: false } => f.write_str(
                "this kernel has no RDMA: ib_core is not loaded, and which modules it has cannot be seen here",
            ),
            Self::Hardware { .. } => f.write_str(
                "no PCI device with a driver known for RDMA (`lspci | grep -i -e mellanox -e infiniband`)",
            ),
        }
    }
}

/// The PCI addresses of devices with RDMA support, each with its RDMA module. Devices whose driver
/// has no RDMA part are ignored. A network controller without a driver counts by its vendor.
fn cards(roots: &Roots) -> Vec<(String, String)> {
    let devices = roots.sys.join("bus/pci/devices");
    let card = |pci: String| {
        let dir = devices.join(&pci);
        let driver = fs::read_link(dir.join("driver")).ok();
        let driver = driver
            .as_deref()
            .and_then(|path| path.file_name()?.to_str());
        if let Some(driver) = driver {
            return Some((pci, quirk(driver)?.module.to_owned()));
        }
        // Network (02) controllers, of which 0x0207 is InfiniBand.
        let read = |file: &str| sysfs::text(&dir.join(file)).unwrap_or_default();
        if !read("class").starts_with("0x02") {
            return None;
        }
        let vendor = read("vendor");
        let (_, module) = MAKERS.iter().find(|(id, _)| *id == vendor.trim())?;
        Some((pci, (*module).to_owned()))
    };
    let mut names: Vec<String> = sysfs::names(&devices).into_iter().collect();
    names.sort();
    names.into_iter().filter_map(card).collect()
}

/// True if this process appears to run in a container.
pub fn in_container(roots: &Roots) -> bool {
    let marked = |path: &str| roots.proc.join("..").join(path).exists();
    marked(".dockerenv") || marked("run/.containerenv") || {
        let environment = fs::read(roots.proc.join("1/environ")).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .any(|entry| entry.starts_with(b"container="))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine(tempfile::TempDir);

    impl Machine {
        fn file(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn says(&self) -> (String, String) {
            let found = NoDevice::of(&Roots::below(self.0.path())).unwrap();
            (found.to_string(), found.remedy())
        }
    }

    /// Goal: a kernel without RDMA is named as the cause, in a container too, and every suggested
    /// remedy can help. Method: add parts to a machine one by one.
    #[test]
    fn the_first_missing_part_is_named() {
        let machine = Machine(tempfile::tempdir().unwrap());
        machine.file(".dockerenv", "");
        machine.file("proc/sys/kernel/osrelease", "6.1.0\n");
        let (why, remedy) = machine.says();
        assert!(why.contains("this kernel has no RDMA"), "{why}");
        for useless in ["--device", "rxe"] {
            assert!(!remedy.contains(useless), "{remedy}");
        }
        machine.file("lib/modules/6.1.0/modules.dep", "kernel/net/x.ko:\n");
        let (why, remedy) = machine.says();
        assert!(why.contains("no module ib_core"), "{why}");
        assert!(remedy.contains("linux-modules-extra"), "{remedy}");

        machine.file(
            "lib/modules/6.1.0/modules.dep",
            "kernel/drivers/infiniband/core/ib_core.ko:\n",
        );
        let (why, remedy) = machine.says();
        assert!(why.contains("no PCI device"), "{why}");
        assert!(remedy.contains("--network host --device"), "{remedy}");
        assert!(
            !remedy.contains("nacre rdma rxe add"),
            "no such module: {remedy}"
        );
        fs::remove_file(machine.0.path().join(".dockerenv")).unwrap();
        machine.file(
            "lib/modules/6.1.0/modules.dep",
            "kernel/drivers/infiniband/core/ib_core.ko:\nkernel/drivers/infiniband/sw/rxe/rdma_rxe.ko:\n",
        );
        machine.file("sys/class/net/eth7/mtu", "1500\n");
        let (_, remedy) = machine.says();
        assert!(
            remedy.contains("`modprobe rdma_rxe`, then `nacre rdma rxe add rxe0 --netdev eth7`"),
            "{remedy}"
        );

        machine.file("sys/bus/pci/devices/0000:01:00.0/class", "0x020000\n");
        machine.file("sys/bus/pci/devices/0000:01:00.0/vendor", "0x15b3\n");
        let (why, remedy) = machine.says();
        assert!(
            why.contains("0000:01:00.0 needs the module mlx5_ib"),
            "{why}"
        );
        assert!(remedy.contains("modprobe mlx5_ib"), "{remedy}");

        machine.file("sys/class/infiniband/mlx5_0/node_desc", "x\n");
        assert_eq!(NoDevice::of(&Roots::below(machine.0.path())), None);
    }
}
