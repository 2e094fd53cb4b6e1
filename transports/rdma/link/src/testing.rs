//! Simulated machines for tests: folders with the files that describe RDMA devices on Linux, below
//! `sys`, `proc`, `dev` and `lib/modules`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use tempfile::TempDir;

use crate::Roots;

/// A temporary folder with the files of a simulated machine. Methods that add or remove files panic
/// if that fails; paths are relative to the folder.
pub struct Tree {
    root: TempDir,
}

/// An empty entry of a GID table.
pub const ZERO_GID: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

impl Tree {
    pub fn roots(&self) -> Roots {
        Roots::below(self.root.path())
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    /// Writes a file: `text` and a newline.
    pub fn file(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    pub fn remove(&self, path: &str) {
        fs::remove_file(self.path(path)).unwrap();
    }

    pub fn link(&self, path: &str, target: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    pub fn netdev(&self, name: &str, address: &str, mtu: u32) {
        self.file(&format!("sys/class/net/{name}/address"), address);
        self.file(&format!("sys/class/net/{name}/mtu"), &mtu.to_string());
    }

    /// Adds an RDMA device with these files below `sys/class/infiniband/<name>`.
    pub fn device(&self, name: &str, attributes: &[(&str, &str)]) {
        for (attribute, value) in attributes {
            self.file(&format!("sys/class/infiniband/{name}/{attribute}"), value);
        }
    }

    /// Adds a port. `state`, `phys_state` and `link_layer` are the contents of the files, such as
    /// `4: ACTIVE`, `5: LinkUp` and `Ethernet`.
    pub fn port(&self, device: &str, num: u8, state: &str, phys_state: &str, link_layer: &str) {
        let at = format!("sys/class/infiniband/{device}/ports/{num}");
        self.file(&format!("{at}/state"), state);
        self.file(&format!("{at}/phys_state"), phys_state);
        self.file(&format!("{at}/link_layer"), link_layer);
        self.file(&format!("{at}/rate"), "100 Gb/sec (4X EDR)");
        self.file(&format!("{at}/lid"), "0x0");
        self.file(&format!("{at}/sm_lid"), "0x0");
    }

    /// Adds an entry of the GID table. `kind`: its type, such as `RoCE v2`; `ndev`: its network
    /// interface.
    pub fn gid(&self, device: &str, port: u8, index: u16, gid: &str, kind: &str, ndev: &str) {
        let at = format!("sys/class/infiniband/{device}/ports/{port}");
        self.file(&format!("{at}/gids/{index}"), gid);
        self.file(&format!("{at}/gid_attrs/types/{index}"), kind);
        self.file(&format!("{at}/gid_attrs/ndevs/{index}"), ndev);
    }

    /// Adds the character devices that a process opens: `uverbs` of `device`, and `rdma_cm`.
    pub fn usable(&self, uverbs: &str, device: &str) {
        self.file(
            &format!("sys/class/infiniband_verbs/{uverbs}/ibdev"),
            device,
        );
        self.file(&format!("dev/infiniband/{uverbs}"), "");
        self.file("dev/infiniband/rdma_cm", "");
    }

    /// Adds the kernel's lists of modules. `loaded`: names; `loadable`: files below the folder of
    /// the kernel's modules.
    pub fn modules(&self, loaded: &[&str], loadable: &[&str]) {
        let lines: Vec<String> = loaded
            .iter()
            .map(|name| format!("{name} 16384 0 - Live 0x0"))
            .collect();
        self.file("proc/modules", &lines.join("\n"));
        self.file("proc/sys/kernel/osrelease", "6.12.0-test");
        let lines: Vec<String> = loadable.iter().map(|file| format!("{file}:")).collect();
        self.file("lib/modules/6.12.0-test/modules.dep", &lines.join("\n"));
        self.file(
            "lib/modules/6.12.0-test/modules.builtin",
            "kernel/drivers/nvme/host/nvme-core.ko",
        );
    }
}

pub fn empty() -> Tree {
    Tree {
        root: TempDir::new().unwrap(),
    }
}

/// Soft-RoCE on eth0 (10.0.0.4, fd00::4), with its VLAN 7 (10.7.0.4), as Linux 6.12 shows it.
pub fn rxe_on_eth() -> Tree {
    let tree = empty();
    tree.netdev("eth0", "52:54:00:12:34:56", 1500);
    tree.device(
        "rxe0",
        &[
            ("node_guid", "5054:00ff:fe12:3456"),
            ("sys_image_guid", "5054:00ff:fe12:3456"),
            ("fw_ver", ""),
            ("node_type", "1: CA"),
            ("node_desc", "rxe"),
            ("parent", "eth0"),
        ],
    );
    tree.port("rxe0", 1, "4: ACTIVE", "5: LinkUp", "Ethernet");
    let gids = [
        ("fe80:0000:0000:0000:5054:00ff:fe12:3456", "RoCE v2", "eth0"),
        ("0000:0000:0000:0000:0000:ffff:0a00:0004", "RoCE v2", "eth0"),
        ("fd00:0000:0000:0000:0000:0000:0000:0004", "RoCE v2", "eth0"),
        (
            "0000:0000:0000:0000:0000:ffff:0a07:0004",
            "RoCE v2",
            "eth0.7",
        ),
        (ZERO_GID, "", ""),
    ];
    for (index, (gid, kind, ndev)) in gids.iter().enumerate() {
        tree.gid("rxe0", 1, index as u16, gid, kind, ndev);
    }
    tree.usable("uverbs0", "rxe0");
    tree
}

/// A ConnectX with two Ethernet ports, the second down. Each address has GIDs of RoCE v1 and v2.
pub fn mlx5_dual_port() -> Tree {
    let tree = empty();
    for (port, name) in [(0, "ens1f0"), (1, "ens1f1")] {
        tree.netdev(name, &format!("0c:42:a1:65:4b:6{port}"), 9000);
    }
    tree.device(
        "mlx5_0",
        &[
            ("node_guid", "0c42:a103:0065:4b6e"),
            ("sys_image_guid", "0c42:a103:0065:4b6e"),
            ("fw_ver", "16.35.2000"),
            ("node_type", "1: CA"),
            ("node_desc", "storage1 mlx5_0"),
        ],
    );
    tree.file("sys/devices/pci0/0000:3b:00.0/numa_node", "1");
    tree.link(
        "sys/devices/pci0/0000:3b:00.0/driver",
        "../../../bus/pci/drivers/mlx5_core",
    );
    tree.link(
        "sys/class/infiniband/mlx5_0/device",
        "../../../devices/pci0/0000:3b:00.0",
    );
    tree.port("mlx5_0", 1, "4: ACTIVE", "5: LinkUp", "Ethernet");
    tree.port("mlx5_0", 2, "1: DOWN", "3: Disabled", "Ethernet");
    for (port, ndev, last) in [(1, "ens1f0", "0a00:0104"), (2, "ens1f1", "0a00:0204")] {
        let ip = format!("0000:0000:0000:0000:0000:ffff:{last}");
        tree.gid("mlx5_0", port, 0, &ip, "IB/RoCE v1", ndev);
        tree.gid("mlx5_0", port, 1, &ip, "RoCE v2", ndev);
    }
    tree.usable("uverbs0", "mlx5_0");
    tree
}

/// InfiniBand with a subnet manager, and IPoIB on it.
pub fn infiniband() -> Tree {
    let tree = empty();
    tree.netdev(
        "ib0",
        "00:00:10:49:fe:80:00:00:00:00:00:00:0c:42:a1:03:00:65:4b:6e",
        2044,
    );
    tree.device(
        "mlx5_2",
        &[
            ("node_guid", "0c42:a103:0065:4b6e"),
            ("sys_image_guid", "0c42:a103:0065:4b6e"),
            ("fw_ver", "20.31.1014"),
            ("node_type", "1: CA"),
            ("node_desc", "MT4123"),
        ],
    );
    tree.file("sys/devices/pci0/0000:5e:00.0/numa_node", "-1");
    tree.link(
        "sys/devices/pci0/0000:5e:00.0/driver",
        "../../../bus/pci/drivers/mlx5_core",
    );
    tree.link(
        "sys/class/infiniband/mlx5_2/device",
        "../../../devices/pci0/0000:5e:00.0",
    );
    tree.port("mlx5_2", 1, "4: ACTIVE", "5: LinkUp", "InfiniBand");
    tree.file("sys/class/infiniband/mlx5_2/ports/1/lid", "0x11");
    tree.file("sys/class/infiniband/mlx5_2/ports/1/sm_lid", "0x1");
    // Types of an InfiniBand port read as v1; ndevs cannot be read.
    let gid = "fe80:0000:0000:0000:0c42:a103:0065:4b6e";
    tree.file("sys/class/infiniband/mlx5_2/ports/1/gids/0", gid);
    tree.file(
        "sys/class/infiniband/mlx5_2/ports/1/gid_attrs/types/0",
        "IB/RoCE v1",
    );
    tree.usable("uverbs2", "mlx5_2");
    tree
}

/// Soft-iWARP on eth0. The only link to eth0 is its MAC address in the device's GID.
pub fn siw() -> Tree {
    let tree = empty();
    tree.netdev("eth0", "52:54:00:12:34:56", 1500);
    tree.device(
        "siw0",
        &[
            ("node_guid", "5254:0012:3456:0000"),
            ("sys_image_guid", "5254:0012:3456:0000"),
            ("fw_ver", ""),
            ("node_type", "4: RNIC"),
            ("node_desc", "Software iWARP stack"),
        ],
    );
    tree.port("siw0", 1, "4: ACTIVE", "5: LinkUp", "Ethernet");
    tree.file(
        "sys/class/infiniband/siw0/ports/1/gids/0",
        "5254:0012:3456:0000:0000:0000:0000:0000",
    );
    tree.usable("uverbs0", "siw0");
    tree
}
