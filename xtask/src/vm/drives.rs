//! NVMe drives for the virtual machine: emulated by QEMU, behind an emulated IOMMU, with hot
//! removal.
//!
//! ```text
//!   pcie-root-port rp0 ── nvme drive0   serial NACRE0: namespace 1, 512-byte blocks; removable
//!   pcie-root-port rp1 ── nvme drive1   serial NACRE1: namespaces 1 (512-byte blocks), 2 (4096)
//!   virtio-serial ── port nacre.monitor ── socket ── QEMU's own monitor (QMP)
//! ```
//!
//! The guest can reach the monitor, so a test script can remove a drive between two of its
//! commands.

use std::path::Path;

use anyhow::{Context, Result, bail};

/// Only guests with drives get an IOMMU, and the kernel's drivers bypass it, which is faster to
/// emulate.
pub(super) const KERNEL_ARGUMENTS: &str = "intel_iommu=on iommu=pt";

/// Sparse files: only written blocks take space.
const IMAGES: [&str; 3] = ["drive0", "drive1-1", "drive1-2"];
const IMAGE_BYTES: u64 = 256 << 20;

/// Longest path of a Unix socket (unix(7)), without the terminating zero.
const SOCKET_PATH_MAX: usize = 107;

/// The storage of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Media {
    /// Files, which QEMU reads and writes on other threads. Flushes need not reach this machine's
    /// disk: the data must survive the guest, not the machine.
    Files,
    /// Zeroes, whatever was written: measurements then exclude this machine's threads and files.
    Zeroes,
}

/// Creates the drives' images in OUT, for [`Media::Files`], and returns QEMU's options for the
/// drives.
pub(super) fn prepare(out: &Path, accelerated: bool, media: Media) -> Result<String> {
    let files = match media {
        Media::Files => &IMAGES[..],
        Media::Zeroes => &[],
    };
    for name in files {
        let path = out.join(name);
        std::fs::File::create(&path)
            .and_then(|file| file.set_len(IMAGE_BYTES))
            .with_context(|| format!("making {}", path.display()))?;
    }
    let monitor = out.join("monitor");
    if monitor.as_os_str().len() > SOCKET_PATH_MAX {
        bail!(
            "{} is too long for a socket: set CARGO_TARGET_DIR to a shorter path",
            monitor.display()
        );
    }
    Ok(options(out, accelerated, media))
}

fn options(out: &Path, accelerated: bool, media: Media) -> String {
    let at = |name: &str| out.join(name).display().to_string();
    // With hardware virtualisation, interrupt remapping needs half of the interrupt controller in
    // QEMU.
    let machine = if accelerated {
        "q35,kernel-irqchip=split"
    } else {
        "q35"
    };
    let mut options = vec![
        format!("-machine {machine}"),
        "-device intel-iommu,intremap=on,aw-bits=48".into(),
    ];
    for name in IMAGES {
        // Separate block nodes outlive the devices on them, so that a pulled drive can be put back.
        let behind = match media {
            Media::Files => format!(
                "driver=raw,node-name={name},cache.no-flush=on,file.driver=file,file.filename={}",
                at(name)
            ),
            Media::Zeroes => {
                format!("driver=null-co,node-name={name},size={IMAGE_BYTES},read-zeroes=on")
            }
        };
        options.push(format!("-blockdev {behind}"));
    }
    options.extend(
        [
            "-device pcie-root-port,id=rp0,chassis=10,slot=10",
            "-device pcie-root-port,id=rp1,chassis=11,slot=11",
            // Shared, because QEMU may keep the pulled device.
            "-device nvme,id=drive0,bus=rp0,serial=NACRE0,drive=drive0,share-rw=on",
            "-device nvme,id=drive1,bus=rp1,serial=NACRE1",
            "-device nvme-ns,id=drive1n1,bus=drive1,nsid=1,drive=drive1-1,logical_block_size=512,physical_block_size=512",
            "-device nvme-ns,id=drive1n2,bus=drive1,nsid=2,drive=drive1-2,logical_block_size=4096,physical_block_size=4096",
        ]
        .map(String::from),
    );
    // QEMU talks to itself: the monitor listens on the socket that the guest's port connects to.
    options.extend([
        format!(
            "-chardev socket,id=monitor0,path={},server=on,wait=off",
            at("monitor")
        ),
        "-mon chardev=monitor0,mode=control".into(),
        format!("-chardev socket,id=monitor1,path={}", at("monitor")),
        "-device virtio-serial-pci,id=ports".into(),
        "-device virtserialport,bus=ports.0,chardev=monitor1,name=nacre.monitor".into(),
    ]);
    options.join(" ")
}

/// Removes the images. A test writes its diagnostics to its log.
pub(crate) fn clean(out: &Path) {
    for name in IMAGES.into_iter().chain(["monitor"]) {
        // A boot without drives created none.
        let _ = std::fs::remove_file(out.join(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_sparse_and_are_removed() {
        let temp = tempfile::tempdir().unwrap();
        let out = temp.path();
        let options = prepare(out, false, Media::Files).unwrap();
        for name in IMAGES {
            assert_eq!(out.join(name).metadata().unwrap().len(), IMAGE_BYTES);
            assert!(options.contains(&format!("node-name={name},")));
        }
        clean(out);
        assert_eq!(std::fs::read_dir(out).unwrap().count(), 0);
        let zeroes = prepare(out, false, Media::Zeroes).unwrap();
        assert!(zeroes.contains("driver=null-co,node-name=drive0,size=268435456"));
        assert_eq!(std::fs::read_dir(out).unwrap().count(), 0);
        assert!(prepare(&out.join("x".repeat(200)), false, Media::Files).is_err());
    }
}
