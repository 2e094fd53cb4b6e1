//! A simulated machine for tests: the files of sysfs, procfs and /dev in a temporary folder, and a
//! [`Kernel`] that changes them as Linux would.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tempfile::TempDir;

use super::{Kernel, System};

/// A simulated machine with PCI functions and NVMe drives. Paths are relative to its folder.
pub struct Machine {
    folder: TempDir,
    pub kernel: Arc<KernelBehaviour>,
}

/// Faults and reactions of the simulated kernel.
#[derive(Default)]
pub struct KernelBehaviour {
    /// Files that another process has open exclusively.
    pub busy: Mutex<Vec<PathBuf>>,
    /// The effect of modprobe by module: it creates the driver's folder, or fails with this error.
    /// It also fails for other modules.
    pub modprobe: Mutex<HashMap<String, Result<(), String>>>,
    /// Writes to files whose paths contain this text fail with this error.
    pub refuse: Mutex<HashMap<String, io::ErrorKind>>,
    /// Binding to vfio-pci fails.
    pub vfio_is_broken: Mutex<bool>,
    /// Binding to vfio-pci creates no device node.
    pub no_nodes: Mutex<bool>,
    /// The successful writes of the code under test: path and text.
    pub writes: Mutex<Vec<(String, String)>>,
    /// The sum of all pauses of the code under test.
    pub paused: Mutex<Duration>,
    /// Processes that exit at the next pause of the code under test.
    pub ends: Mutex<Vec<u32>>,
    /// Files that get these contents at the next pause of the code under test.
    pub changes: Mutex<Vec<(String, String)>>,
}

struct Fake {
    root: PathBuf,
    ways: Arc<KernelBehaviour>,
}

const DEVICES: &str = "sys/bus/pci/devices";

impl Machine {
    /// A machine with an IOMMU and two drives: one has two namespaces, the other one partitioned
    /// namespace.
    pub fn usual() -> Self {
        let machine = Self::bare();
        machine.drive("0000:01:00.0", 14, 0, "S1", &["nvme0n1", "nvme0n2"]);
        machine.drive("0000:02:00.0", 15, 1, "S2", &["nvme1n1"]);
        machine.partition("nvme1n1", "nvme1n1p1", "259:9");
        machine
    }

    /// A machine with an IOMMU and no drive.
    pub fn bare() -> Self {
        let machine = Self {
            folder: TempDir::new().unwrap(),
            kernel: Arc::default(),
        };
        machine.function("0000:00:02.0", "0x030000", Some("i915"), 1);
        machine.file("proc/swaps", "Filename Type Size Used Priority");
        machine.file("proc/self/status", "CapEff:\t000001ffffffffff");
        machine.process(
            1,
            "init",
            "4026531840",
            "22 1 8:1 / / rw - ext4 /dev/sda1 rw",
        );
        machine.driver("nvme");
        machine.driver("vfio-pci");
        machine.file("dev/vfio/vfio", "");
        machine
    }

    pub fn system(&self) -> System {
        let fake = Fake {
            root: self.folder.path().to_owned(),
            ways: Arc::clone(&self.kernel),
        };
        System::at(self.folder.path(), Box::new(fake))
    }

    pub fn path(&self, below: &str) -> PathBuf {
        self.folder.path().join(below)
    }

    pub fn file(&self, below: &str, text: impl AsRef<[u8]>) {
        let path = self.path(below);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub fn link(&self, below: &str, target: &str) {
        let path = self.path(below);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    /// Adds a PCI driver.
    pub fn driver(&self, name: &str) {
        fs::create_dir_all(self.path(&format!("sys/bus/pci/drivers/{name}"))).unwrap();
    }

    pub fn without_driver(&self, name: &str) {
        fs::remove_dir(self.path(&format!("sys/bus/pci/drivers/{name}"))).unwrap();
    }

    /// Adds a PCI function in an IOMMU group, bound to `driver`. `class`: the class code, such as
    /// `0x010802`.
    pub fn function(&self, address: &str, class: &str, driver: Option<&str>, group: u32) {
        let at = format!("{DEVICES}/{address}");
        self.file(&format!("{at}/class"), format!("{class}\n"));
        self.file(&format!("{at}/vendor"), "0x1b36\n");
        self.file(&format!("{at}/device"), "0x0010\n");
        self.file(&format!("{at}/numa_node"), "0\n");
        self.file(&format!("{at}/driver_override"), "(null)\n");
        if let Some(driver) = driver {
            self.link(&format!("{at}/driver"), &format!("../../drivers/{driver}"));
        }
        self.join_group(address, group);
    }

    pub fn join_group(&self, address: &str, group: u32) {
        let target = format!("../../../../kernel/iommu_groups/{group}");
        self.link(&format!("{DEVICES}/{address}/iommu_group"), &target);
        self.file(&format!("sys/kernel/iommu_groups/{group}/type"), "DMA\n");
        self.file(
            &format!("sys/kernel/iommu_groups/{group}/devices/{address}"),
            "",
        );
    }

    /// Adds an NVMe drive, bound to the kernel's driver as controller `nvme<number>`. `disks`: the
    /// names of the block devices of its namespaces.
    pub fn drive(&self, address: &str, group: u32, number: u32, serial: &str, disks: &[&str]) {
        self.function(address, "0x010802", Some("nvme"), group);
        let at = format!("{DEVICES}/{address}/nvme/nvme{number}");
        self.file(
            &format!("{at}/serial"),
            format!("{serial}                \n"),
        );
        self.file(&format!("{at}/model"), "QEMU NVMe Ctrl\n");
        self.file(&format!("{at}/firmware_rev"), "7.2\n");
        self.file(&format!("{at}/state"), "live\n");
        for (index, disk) in disks.iter().enumerate() {
            // As a kernel with multipath shows it.
            let path = disk
                .replacen('n', "\0", 1)
                .replacen('n', &format!("c{number}n"), 1);
            let path = path.replacen('\0', "n", 1);
            fs::create_dir_all(self.path(&format!("{at}/{path}"))).unwrap();
            let block = format!("sys/class/block/{disk}");
            self.file(
                &format!("{block}/dev"),
                format!("259:{}\n", number * 4 + index as u32),
            );
            self.file(&format!("{block}/size"), "2048\n");
            // The later namespace was found first, as happens.
            self.file(
                &format!("{block}/nsid"),
                format!("{}\n", disks.len() - index),
            );
            self.file(&format!("{block}/queue/logical_block_size"), "512\n");
            self.file(&format!("dev/{disk}"), vec![0; 1 << 20]);
        }
    }

    /// Adds partition 1 of `disk`. `number`: its device number, `MAJOR:MINOR`.
    pub fn partition(&self, disk: &str, name: &str, number: &str) {
        self.file(&format!("sys/class/block/{disk}/{name}/partition"), "1\n");
        self.file(
            &format!("sys/class/block/{name}/dev"),
            format!("{number}\n"),
        );
        self.file(&format!("sys/class/block/{name}/size"), "1024\n");
        self.file(&format!("dev/{name}"), vec![0; 512 << 10]);
    }

    /// Adds a process. `namespace`: the inode number of its mount namespace; `mounts`: the lines of
    /// its mountinfo.
    pub fn process(&self, pid: u32, name: &str, namespace: &str, mounts: &str) {
        self.file(&format!("proc/{pid}/comm"), format!("{name}\n"));
        self.file(&format!("proc/{pid}/mountinfo"), format!("{mounts}\n"));
        self.link(&format!("proc/{pid}/ns/mnt"), &format!("mnt:[{namespace}]"));
    }

    /// The texts written to files whose paths contain `file`.
    pub fn writes_to(&self, file: &str) -> Vec<String> {
        let writes = self.kernel.writes.lock();
        let those = writes.iter().filter(|(name, _)| name.contains(file));
        those.map(|(_, text)| text.clone()).collect()
    }
}

impl Fake {
    fn probe(&self, address: &str) {
        let at = self.root.join(DEVICES).join(address);
        let overridden = fs::read_to_string(at.join("driver_override")).unwrap();
        let (driver, stash) = (overridden.trim(), self.root.join("stash").join(address));
        match driver {
            "vfio-pci" => {
                if *self.ways.vfio_is_broken.lock() {
                    return;
                }
                symlink("../../drivers/vfio-pci", at.join("driver")).unwrap();
                let group = at.join("iommu_group");
                if !group.exists() {
                    // Made up for the mode without an IOMMU.
                    let made = self.root.join("sys/kernel/iommu_groups/0");
                    fs::create_dir_all(made.join("devices")).unwrap();
                    fs::write(made.join("name"), "vfio-noiommu\n").unwrap();
                    symlink("../../../../kernel/iommu_groups/0", &group).unwrap();
                }
                let number = fs::read_link(&group).unwrap();
                let number = number.file_name().unwrap().to_str().unwrap();
                let named = self
                    .root
                    .join(format!("sys/kernel/iommu_groups/{number}/name"));
                let node = if named.exists() {
                    format!("noiommu-{number}")
                } else {
                    number.to_owned()
                };
                if !*self.ways.no_nodes.lock() {
                    fs::write(self.root.join("dev/vfio").join(node), "").unwrap();
                }
            }
            "" | "(null)" => {
                symlink("../../drivers/nvme", at.join("driver")).unwrap();
                if stash.exists() {
                    fs::rename(stash, at.join("nvme")).unwrap();
                }
            }
            other => panic!("an override of {other:?}"),
        }
    }

    fn leave(&self, address: &str) {
        let at = self.root.join(DEVICES).join(address);
        fs::remove_file(at.join("driver")).unwrap();
        if at.join("nvme").exists() {
            fs::create_dir_all(self.root.join("stash")).unwrap();
            fs::rename(at.join("nvme"), self.root.join("stash").join(address)).unwrap();
        }
    }
}

impl Kernel for Fake {
    fn write(&self, file: &Path, text: &str) -> io::Result<()> {
        let name = file.strip_prefix(&self.root).unwrap().to_str().unwrap();
        for (part, kind) in self.ways.refuse.lock().iter() {
            if name.contains(part) {
                return Err((*kind).into());
            }
        }
        let is_action = name.ends_with("drivers_probe") || name.ends_with("/driver/unbind");
        if !is_action && !file.exists() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let written = (name.to_owned(), text.to_owned());
        self.ways.writes.lock().push(written);
        match name {
            "sys/bus/pci/drivers_probe" => self.probe(text),
            name if name.ends_with("/driver/unbind") => self.leave(text),
            _ => fs::write(file, text)?,
        }
        Ok(())
    }

    fn modprobe(&self, module: &str) -> Result<(), String> {
        let ways = self.ways.modprobe.lock();
        let done = ways.get(module).cloned();
        done.unwrap_or_else(|| Err(format!("modprobe: FATAL: Module {module} not found.")))?;
        fs::create_dir_all(self.root.join("sys/bus/pci/drivers").join(module)).unwrap();
        Ok(())
    }

    fn open_exclusively(&self, device: &Path) -> io::Result<()> {
        if self.ways.busy.lock().iter().any(|busy| busy == device) {
            Err(io::ErrorKind::ResourceBusy.into())
        } else {
            Ok(())
        }
    }

    fn open_group(&self, group: &Path) -> io::Result<()> {
        self.open_exclusively(group)
    }

    fn pause(&self, time: Duration) {
        *self.ways.paused.lock() += time;
        for pid in self.ways.ends.lock().drain(..) {
            fs::remove_dir_all(self.root.join(format!("proc/{pid}"))).unwrap();
        }
        for (file, text) in self.ways.changes.lock().drain(..) {
            fs::write(self.root.join(file), text).unwrap();
        }
    }
}
