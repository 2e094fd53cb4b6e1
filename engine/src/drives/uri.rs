//! URI of a drive of this machine: `pcie://0000:5e:00.0`, or `vfio://` with the same meaning.

use serde_json::{Value, json};

use super::bus::address;

/// Parsed `pcie://BDF[?nsid=N]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveUri {
    /// In the form `0000:5e:00.0`.
    pub address: String,
    /// A namespace of the drive; `None`: unspecified.
    pub nsid: Option<u32>,
}

/// Why a text is not a valid drive URI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriveUriError {
    #[error("\"{0}\" is not the URI of a drive: pcie://BDF or vfio://BDF")]
    Scheme(String),
    #[error(
        "\"{0}\" is not a place on the PCI bus, as 0000:5e:00.0: `nacre nvme list` shows the drives"
    )]
    Address(String),
    #[error("\"{0}\" is not a namespace identifier")]
    Nsid(String),
    #[error("\"{0}\" is not known here: there is only nsid")]
    Parameter(String),
}

impl DriveUri {
    /// True if `text` has one of these schemes, valid or not.
    pub fn is_one(text: &str) -> bool {
        text.starts_with("pcie://") || text.starts_with("vfio://")
    }

    /// The parameters of `bdev_nvme_attach_controller`.
    pub fn attach_params(&self, name: &str) -> Value {
        json!({ "name": name, "trtype": "PCIe", "traddr": self.address })
    }

    /// Default prefix of the controller's name, followed by the first free number.
    pub const NAME: &str = "Nvme";
}

impl std::str::FromStr for DriveUri {
    type Err = DriveUriError;

    fn from_str(text: &str) -> Result<DriveUri, DriveUriError> {
        let rest = text
            .strip_prefix("pcie://")
            .or_else(|| text.strip_prefix("vfio://"))
            .ok_or_else(|| DriveUriError::Scheme(text.to_owned()))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let place = place.trim_end_matches('/');
        let address = address(place).ok_or_else(|| DriveUriError::Address(place.to_owned()))?;
        let mut nsid = None;
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let number = pair
                .strip_prefix("nsid=")
                .ok_or_else(|| DriveUriError::Parameter(pair.to_owned()))?;
            let parsed = number.parse().ok().filter(|n| (1..u32::MAX).contains(n));
            nsid = Some(parsed.ok_or_else(|| DriveUriError::Nsid(number.to_owned()))?);
        }
        Ok(DriveUri { address, nsid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris() {
        let one = |address: &str, nsid| DriveUri {
            address: address.to_owned(),
            nsid,
        };
        let parse = |text: &str| text.parse::<DriveUri>();
        assert_eq!(parse("pcie://0000:5e:00.0"), Ok(one("0000:5e:00.0", None)));
        assert_eq!(
            parse("vfio://5E:00.0/?nsid=2"),
            Ok(one("0000:5e:00.0", Some(2)))
        );
        for (text, wrong) in [
            ("nvmf://x", DriveUriError::Scheme("nvmf://x".into())),
            ("pcie://nvme0", DriveUriError::Address("nvme0".into())),
            ("pcie://5e:00.0?nsid=0", DriveUriError::Nsid("0".into())),
            ("pcie://5e:00.0?nsid=x", DriveUriError::Nsid("x".into())),
            (
                "pcie://5e:00.0?uuid=1",
                DriveUriError::Parameter("uuid=1".into()),
            ),
        ] {
            assert_eq!(parse(text), Err(wrong), "{text}");
        }
        assert!(DriveUri::is_one("vfio://") && !DriveUri::is_one("nvmf://x"));
    }
}
