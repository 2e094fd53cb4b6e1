//! The disks of this machine: block devices of the kernel that have hardware below them, and NVMe
//! drives that are bound to vfio-pci.

use std::fs;

use serde::Serialize;

use super::{Address, Drive, Driver, System, Use};

const BLOCK: &str = "sys/class/block";
const LINKS: &str = "dev/disk/by-id";
/// Most disks in a list; the rest is left out, drives of vfio-pci first.
const DISKS_MAX: usize = 1024;
/// Bytes before the serial number in the page 80h of a SCSI disk (SPC-4, 7.8.15).
const PAGE_HEADER: usize = 4;

/// A whole disk, not a partition. Of a drive bound to vfio-pci, only `address` and `uses` are
/// known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MachineDisk {
    /// The kernel's name, such as `sda`. `None`: bound to vfio-pci, so there is no block device.
    pub name: Option<String>,
    /// A link in /dev/disk/by-id, which stays the same over restarts; without one, the device node,
    /// which may change. `None`: bound to vfio-pci.
    pub path: Option<String>,
    /// The PCI address of an NVMe drive; `None` for other disks.
    pub address: Option<Address>,
    /// `None`: the kernel does not know it.
    pub serial: Option<String>,
    pub model: Option<String>,
    /// 0: unknown.
    pub bytes: u64,
    /// Bytes of a logical block; 0: unknown.
    pub block_size: u32,
    pub is_read_only: bool,
    /// The kernel's names of the disk and of its partitions.
    pub devices: Vec<String>,
    /// Users of the disk and of its partitions. A use that only an exclusive open would find, such
    /// as ZFS, is missing: that open would keep other users out for a moment.
    pub uses: Vec<Use>,
}

impl System {
    /// The disks of this machine, at most 1024, by name; drives bound to vfio-pci come last. Reads
    /// the first bytes of disks to find the signatures of RAID, LVM and swap space, so a disk that
    /// does not answer delays the call.
    pub fn machine_disks(&self) -> Vec<MachineDisk> {
        let drives = self.drives();
        let mut names = self.entries(BLOCK);
        names.retain(|name| self.is_disk(name));
        names.truncate(DISKS_MAX);
        let mut disks: Vec<MachineDisk> = names
            .into_iter()
            .map(|name| self.machine_disk(name, &drives))
            .collect();
        let devices = disks.iter().flat_map(|disk| disk.devices.clone());
        let devices: Vec<String> = devices.collect();
        let mut uses = self.uses_of(&devices, false);
        for disk in &mut disks {
            let (own, others) = uses
                .into_iter()
                .partition(|of| disk.devices.iter().any(|name| name == of.device()));
            (disk.uses, uses) = (own, others);
        }
        let taken = drives
            .iter()
            .filter(|drive| drive.driver == Driver::VfioPci);
        let room = DISKS_MAX - disks.len();
        disks.extend(taken.take(room).map(|drive| self.of_vfio(drive)));
        disks
    }

    /// Loop devices, RAM disks, RAID and device mapper have no device. Optical and floppy drives
    /// have one. A hidden entry is one path to an NVMe disk, without a device node.
    fn is_disk(&self, name: &str) -> bool {
        let at = format!("{BLOCK}/{name}");
        let is_there = |file: &str| self.path(&format!("{at}/{file}")).exists();
        let is_disk = is_there("device") && !is_there("partition");
        let has_removable_medium = name.starts_with("sr") || name.starts_with("fd");
        let is_hidden = self.number(name, "hidden") != 0;
        is_disk && !has_removable_medium && !is_hidden && self.number(name, "size") > 0
    }

    fn machine_disk(&self, name: String, drives: &[Drive]) -> MachineDisk {
        let text = |file: &str| {
            let text = self.text(&format!("{BLOCK}/{name}/{file}"));
            text.filter(|text| !text.is_empty())
        };
        let has_disk = |drive: &&Drive| drive.disks.iter().any(|disk| disk.name == name);
        let drive = drives.iter().find(has_disk);
        let controller = drive.and_then(|drive| drive.controller.as_ref());
        let serial = controller
            .map(|controller| controller.serial.clone())
            .filter(|serial| !serial.is_empty())
            .or_else(|| text("device/serial"))
            .or_else(|| text("serial"))
            .or_else(|| self.scsi_serial(&name));
        let model = controller.map(|controller| controller.model.clone());
        MachineDisk {
            path: Some(self.lasting_path(&name, serial.as_deref())),
            address: drive.map(|drive| drive.address),
            model: model.or_else(|| text("device/model")),
            serial,
            // The kernel counts in units of 512 bytes here, whatever the block size.
            bytes: self.number(&name, "size").saturating_mul(512),
            block_size: self.number(&name, "queue/logical_block_size") as u32,
            is_read_only: self.number(&name, "ro") != 0,
            devices: self.with_partitions(&name),
            uses: Vec::new(),
            name: Some(name),
        }
    }

    fn number(&self, name: &str, file: &str) -> u64 {
        let text = self.text(&format!("{BLOCK}/{name}/{file}"));
        text.and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    fn scsi_serial(&self, name: &str) -> Option<String> {
        let page = fs::read(self.path(&format!("{BLOCK}/{name}/device/vpd_pg80"))).ok()?;
        let serial = String::from_utf8_lossy(page.get(PAGE_HEADER..)?);
        let serial = serial.trim_matches(|c: char| c.is_whitespace() || c == '\0');
        (!serial.is_empty()).then(|| serial.to_owned())
    }

    /// The link with the serial number, which a person can compare with the label of the disk; else
    /// the first link, else the device node.
    fn lasting_path(&self, name: &str, serial: Option<&str>) -> String {
        let mut links = self.entries(LINKS);
        links.retain(|link| self.link(&format!("{LINKS}/{link}")).as_deref() == Some(name));
        let has_serial = |link: &&String| serial.is_some_and(|serial| link.contains(serial));
        match links.iter().find(has_serial).or_else(|| links.first()) {
            Some(link) => format!("/{LINKS}/{link}"),
            None => format!("/dev/{name}"),
        }
    }

    fn of_vfio(&self, drive: &Drive) -> MachineDisk {
        let group = drive.iommu.node().map(|node| format!("vfio/{node}"));
        let group: Vec<String> = group.into_iter().collect();
        MachineDisk {
            name: None,
            path: None,
            address: Some(drive.address),
            serial: None,
            model: None,
            bytes: 0,
            block_size: 0,
            is_read_only: false,
            devices: Vec::new(),
            uses: self.openers(&group),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Machine;
    use super::*;

    /// Goal: disks of each kind have their serial number, a lasting path and their users; devices
    /// without hardware and optical drives are left out. Method: the simulated machine with a SCSI
    /// and a virtio disk, a loop device, an optical drive, and a drive that vfio-pci has.
    #[test]
    fn disks_of_each_kind() {
        let machine = Machine::usual();
        for disk in ["nvme0n1", "nvme0n2", "nvme1n1"] {
            machine.file(&format!("sys/class/block/{disk}/device/x"), "");
        }
        for (disk, sectors) in [
            ("sda", 4096),
            ("vda", 8192),
            ("loop0", 64),
            ("sr0", 64),
            ("sdb", 0),
        ] {
            machine.file(
                &format!("sys/class/block/{disk}/size"),
                format!("{sectors}\n"),
            );
            if disk != "loop0" {
                machine.file(&format!("sys/class/block/{disk}/device/model"), "DISK  \n");
            }
            machine.file(
                &format!("sys/class/block/{disk}/queue/logical_block_size"),
                "512\n",
            );
            machine.file(&format!("dev/{disk}"), vec![0; 1 << 20]);
        }
        machine.file(
            "sys/class/block/sda/device/vpd_pg80",
            b"\0\x80\0\x08 SCSI-1\0",
        );
        for file in ["size", "hidden"] {
            machine.file(&format!("sys/class/block/nvme0c0n1/{file}"), "1\n");
        }
        machine.file("sys/class/block/nvme0c0n1/device/serial", "S1\n");
        machine.file("sys/class/block/vda/serial", "VIRT-1\n");
        machine.partition("vda", "vda1", "253:1");
        machine.link("dev/disk/by-id/wwn-0x5000", "../../sda");
        machine.link("dev/disk/by-id/ata-DISK_SCSI-1", "../../sda");
        machine.link("dev/disk/by-id/ata-DISK_SCSI-1-part1", "../../sda1");
        machine.file(
            "proc/swaps",
            "Filename Type Size Used Priority\n/dev/vda1 partition 1 0 -2",
        );
        machine.drive("0000:03:00.0", 16, 2, "S3", &[]);
        let system = machine.system();
        let address = "0000:03:00.0".parse().unwrap();
        system.bind(address, &Default::default()).unwrap();
        machine.process(7, "spdk_tgt", "1", "");
        machine.link("proc/7/fd/3", "/dev/vfio/16");

        let disks = system.machine_disks();
        let shown: Vec<_> = disks
            .iter()
            .map(|disk| {
                let text = |text: &Option<String>| text.clone().unwrap_or_default();
                (text(&disk.name), text(&disk.serial), text(&disk.path))
            })
            .collect();
        let expected = [
            ("nvme0n1", "S1", "/dev/nvme0n1"),
            ("nvme0n2", "S1", "/dev/nvme0n2"),
            ("nvme1n1", "S2", "/dev/nvme1n1"),
            ("sda", "SCSI-1", "/dev/disk/by-id/ata-DISK_SCSI-1"),
            ("vda", "VIRT-1", "/dev/vda"),
            ("", "", ""),
        ];
        let expected = expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned()));
        assert_eq!(shown, expected);
        let (sda, vda, taken) = (&disks[3], &disks[4], &disks[5]);
        assert_eq!((sda.bytes, sda.block_size), (2 << 20, 512));
        assert_eq!(sda.devices, ["sda"]);
        assert_eq!(sda.uses, []);
        assert_eq!(vda.devices, ["vda", "vda1"]);
        let device = "vda1".to_owned();
        assert_eq!(vda.uses, [Use::Swap { device }]);
        assert_eq!(taken.address, Some(address));
        let user = taken.uses[0].to_string();
        assert_eq!(user, "vfio/16 is open in spdk_tgt (process 7)");
        assert_eq!(disks[0].address, Some("0000:01:00.0".parse().unwrap()));
    }
}
