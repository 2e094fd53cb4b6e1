//! URI of a drive of this machine: `pcie://0000:5e:00.0`, or `vfio://` with the same meaning.

use nacre_nvmf::address::{AddressError, Grammar, Scheme, Select};

use crate::services::bus::address;
use crate::services::nvme::AttachParams;

/// Parsed `pcie://BDF[?nsid=N]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveUri {
    /// PCI address in the form `0000:5e:00.0`.
    pub address: String,
    /// A namespace of the drive; `None`: unspecified.
    pub nsid: Option<u32>,
}

/// The reason that a text is not a valid drive URI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriveUriError {
    #[error(transparent)]
    Text(#[from] AddressError),
    #[error(
        "\"{0}\" is not a place on the PCI bus, as 0000:5e:00.0: `nacre nvme list` shows the drives"
    )]
    Address(String),
}

impl DriveUri {
    /// True if `text` has one of the two schemes, even if it is not a valid URI.
    pub fn is_one(text: &str) -> bool {
        let scheme = text.split_once("://").map(|(scheme, _)| scheme);
        scheme.and_then(Scheme::parse) == Some(Scheme::Pcie)
    }

    /// The parameters that attach the drive.
    pub fn attach_params(&self, name: String) -> AttachParams {
        AttachParams {
            name,
            trtype: "PCIe".to_owned(),
            traddr: self.address.clone(),
            ..AttachParams::default()
        }
    }

    /// Default prefix of the controller's name, followed by the first free number.
    pub const NAME: &str = "Nvme";
}

impl std::str::FromStr for DriveUri {
    type Err = DriveUriError;

    fn from_str(text: &str) -> Result<Self, DriveUriError> {
        let endpoint = Grammar::DRIVE.parse(text)?;
        let address =
            address(&endpoint.host).ok_or_else(|| DriveUriError::Address(endpoint.host.clone()))?;
        let nsid = match endpoint.select {
            Select::Nsid(nsid) => Some(nsid),
            Select::All | Select::Uuid(_) => None,
        };
        Ok(Self { address, nsid })
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
        for (text, said) in [
            ("nvmf://x", "\"nvmf\" is not a transport: write pcie"),
            ("pcie://", "write pcie://BDF[?nsid=N]"),
            ("pcie://nvme0", "\"nvme0\" is not a place on the PCI bus"),
            ("pcie://5e:00.0?nsid=0", "\"0\" is not a namespace"),
            ("pcie://5e:00.0?nsid=x", "\"x\" is not a namespace"),
            ("pcie://5e:00.0?uuid=1", "\"uuid\" is not known here"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        assert!(DriveUri::is_one("vfio://") && !DriveUri::is_one("nvmf://x"));
    }
}
