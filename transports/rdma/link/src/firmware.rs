//! Firmware with known defects that concern NVMe/RDMA. Each entry has its source. Vendors fix more
//! than they publish, so firmware that is not listed is not known to be good.

/// A version in the vendors' numbering, such as `16.35.2000`.
type FirmwareVersion = [u32; 3];

/// A range of versions, and their defect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadFirmware {
    /// The first version that is known to have the defect.
    from: FirmwareVersion,
    /// The first later version without it.
    before: FirmwareVersion,
    /// The oldest version to update to.
    pub update_to: &'static str,
    /// The effect of the defect.
    pub what: &'static str,
    /// The document that describes the defect.
    pub source: &'static str,
}

/// The known defects of a device's firmware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Firmware {
    /// The table has no entry for devices of this driver, or the version has another form.
    Unknown,
    /// The table has entries for devices of this driver, none of them for this version.
    NotListed,
    Bad(Vec<&'static BadFirmware>),
}

/// Looks up the defects of a firmware by the name of the driver and the version as the kernel
/// shows it.
pub fn firmware(driver: &str, version: &str) -> Firmware {
    let parts: Vec<u32> = version
        .split('.')
        .map_while(|part| part.trim().parse().ok())
        .collect();
    let Ok(version) = FirmwareVersion::try_from(parts) else {
        return Firmware::Unknown;
    };
    if !matches!(driver, "mlx5_core" | "mlx5_ib") {
        return Firmware::Unknown;
    }
    // The first number is the family: another one's versions say nothing of this.
    let family = NVIDIA.iter().filter(|bad| bad.from[0] == version[0]);
    if family.clone().next().is_none() {
        return Firmware::Unknown;
    }
    let bad: Vec<_> = family
        .filter(|bad| (bad.from..bad.before).contains(&version))
        .collect();
    if bad.is_empty() {
        Firmware::NotListed
    } else {
        Firmware::Bad(bad)
    }
}

/// ConnectX-4 Lx (14), ConnectX-5 (16), ConnectX-6 Dx (22), BlueField-3 (32).
const NVIDIA: &[BadFirmware] = &[
    BadFirmware {
        from: [14, 20, 1822],
        before: [14, 20, 1823],
        update_to: "14.32.1010",
        what: "it got stuck under an NVMe/RDMA target, and unloading nvme_rdma hung",
        source: "https://github.com/spdk/spdk/issues/2965",
    },
    BadFirmware {
        from: [16, 34, 1002],
        before: [16, 35, 1012],
        update_to: "16.35.1012",
        what: "InfiniBand queue pairs may receive no RDMA traffic (NVIDIA 3147648)",
        source: "https://docs.nvidia.com/networking/display/connectx5firmwarev16352000lts/bug+fixes+history",
    },
    BadFirmware {
        from: [22, 31, 2006],
        before: [22, 40, 1000],
        update_to: "22.40.1000",
        what: "I/O may get stuck after requests that ask for no completion",
        source: "https://delivery04.dhe.ibm.com/sar/CMA/IOA/0ced9/1/Firmware_Readme_EC75_EC76_22.40.1000.html",
    },
    BadFirmware {
        from: [32, 38, 1002],
        before: [32, 40, 1000],
        update_to: "32.40.1000",
        what: "packets lost on RoCE may be sent again only after the timeout (NVIDIA 3708035)",
        source: "https://docs.nvidia.com/networking/display/bluefield3firmwarev32421000/bug+fixes+history",
    },
    BadFirmware {
        from: [32, 39, 2048],
        before: [32, 41, 1000],
        update_to: "32.41.1000",
        what: "congestion control may malfunction (NVIDIA 3729783)",
        source: "https://docs.nvidia.com/networking/display/bluefield3firmwarev32421000/bug+fixes+history",
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Each range ends at the version that its source names as fixed, and does not concern other
    /// families and vendors.
    #[test]
    fn versions() {
        let bad = |driver, version| match firmware(driver, version) {
            Firmware::Bad(all) => all.iter().map(|bad| bad.update_to).collect(),
            Firmware::NotListed => vec!["not listed"],
            Firmware::Unknown => vec!["unknown"],
        };
        for (version, expected) in [
            ("16.34.1001", &["not listed"][..]),
            ("16.34.1002", &["16.35.1012"]),
            ("16.35.1011", &["16.35.1012"]),
            ("16.35.1012", &["not listed"]),
            ("16.35.2000", &["not listed"]),
            ("14.20.1822", &["14.32.1010"]),
            ("14.20.1823", &["not listed"]),
            ("22.39.1002", &["22.40.1000"]),
            ("32.39.2048", &["32.40.1000", "32.41.1000"]),
            ("32.40.1000", &["32.41.1000"]),
            ("28.39.1002", &["unknown"]),
            ("16.34", &["unknown"]),
            ("1.2.3.4", &["unknown"]),
            ("N/A", &["unknown"]),
            ("", &["unknown"]),
        ] {
            assert_eq!(bad("mlx5_core", version), expected, "{version}");
        }
        assert_eq!(bad("bnxt_en", "16.34.1002"), ["unknown"]);
        for listed in NVIDIA {
            assert!(listed.from < listed.before && listed.from[0] == listed.before[0]);
            assert!(listed.source.starts_with("https://"));
            let update = firmware("mlx5_ib", listed.update_to);
            let bad = matches!(update, Firmware::Bad(all) if all.contains(&listed));
            assert!(!bad, "{listed:?}");
        }
    }
}
