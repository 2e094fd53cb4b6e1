//! The Asymmetric Namespace Access log page (0Ch, Base 5.16.1.13): the structures of its header and
//! group descriptors.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::layout::wire;

wire! {
    /// The header of the page.
    16 bytes: pub struct AnaHeader {
        0 change_count: U64,
        8 groups: U16,
        10 reserved10: [u8; 6],
    }
}

wire! {
    /// The descriptor of an ANA group. `namespaces` NSIDs follow it, 4 bytes each, in increasing
    /// order.
    32 bytes: pub struct AnaGroup {
        0 anagrpid: U32,
        /// 0 when the host asked for groups only (RGO).
        4 namespaces: U32,
        8 change_count: U64,
        /// Bits 3:0; see [`AnaGroup::state`].
        16 ana_state: u8,
        17 reserved17: [u8; 15],
    }
}

/// State of a group at the controller that returns the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize, schemars::JsonSchema),
    serde(rename_all = "snake_case")
)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[repr(u8)]
pub enum AnaState {
    Optimized = 0x1,
    NonOptimized = 0x2,
    Inaccessible = 0x3,
    /// The namespaces never become available on this path again.
    PersistentLoss = 0x4,
    /// In transition: hosts wait, at most ANATT seconds.
    Change = 0xf,
}

impl AnaState {
    /// The name in RPC calls: SPDK's names, and two of Nacre for the last two states.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Optimized => "optimized",
            Self::NonOptimized => "non_optimized",
            Self::Inaccessible => "inaccessible",
            Self::PersistentLoss => "persistent_loss",
            Self::Change => "change",
        }
    }

    pub const fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            0x1 => Self::Optimized,
            0x2 => Self::NonOptimized,
            0x3 => Self::Inaccessible,
            0x4 => Self::PersistentLoss,
            0xf => Self::Change,
            _ => return None,
        })
    }

    /// True if commands to the namespaces are executed in this state.
    pub const fn is_accessible(self) -> bool {
        matches!(self, Self::Optimized | Self::NonOptimized)
    }
}

impl AnaHeader {
    /// LSP bit 0 of Get Log Page: groups without their namespaces.
    pub const LSP_GROUPS_ONLY: u8 = 1;

    pub fn new(change_count: u64, groups: u16) -> Self {
        Self {
            change_count: U64::new(change_count),
            groups: U16::new(groups),
            reserved10: [0; 6],
        }
    }
}

impl AnaGroup {
    pub fn new(anagrpid: u32, state: AnaState, change_count: u64, namespaces: u32) -> Self {
        Self {
            anagrpid: U32::new(anagrpid),
            namespaces: U32::new(namespaces),
            change_count: U64::new(change_count),
            ana_state: state as u8,
            reserved17: [0; 15],
        }
    }

    pub fn state(&self) -> Option<AnaState> {
        AnaState::from_u8(self.ana_state & 0xf)
    }
}

/// Appends a group and its namespaces to a page.
pub fn write_group(
    page: &mut Vec<u8>,
    anagrpid: u32,
    state: AnaState,
    change_count: u64,
    nsids: &[u32],
) {
    let group = AnaGroup::new(anagrpid, state, change_count, nsids.len() as u32);
    page.extend_from_slice(group.as_bytes());
    for nsid in nsids {
        page.extend_from_slice(&nsid.to_le_bytes());
    }
}

/// The error of a page that ends within a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ANA log ends at byte {length}, inside group descriptor {group} of {groups}")]
pub struct AnaTruncated {
    pub group: u16,
    pub groups: u16,
    pub length: usize,
}

/// The groups of a page, each with its namespaces.
pub fn groups(page: &[u8]) -> impl Iterator<Item = Result<(&AnaGroup, &[U32]), AnaTruncated>> + '_ {
    let (header, mut rest) = match AnaHeader::ref_from_prefix(page) {
        Ok((header, rest)) => (header.groups.get(), rest),
        // Without a header: one group that is not there.
        Err(_) => (1, &page[..0]),
    };
    let mut index = 0;
    core::iter::from_fn(move || {
        if index == header {
            return None;
        }
        let group = split_group(rest);
        let truncated = AnaTruncated {
            group: index,
            groups: header,
            length: page.len(),
        };
        index = if group.is_some() { index + 1 } else { header };
        Some(group.ok_or(truncated).map(|(group, nsids, tail)| {
            rest = tail;
            (group, nsids)
        }))
    })
}

fn split_group(bytes: &[u8]) -> Option<(&AnaGroup, &[U32], &[u8])> {
    let (group, rest) = AnaGroup::ref_from_prefix(bytes).ok()?;
    let count = usize::try_from(group.namespaces.get()).ok()?;
    let (nsids, rest) = <[U32]>::ref_from_prefix_with_elems(rest, count).ok()?;
    Some((group, nsids, rest))
}

#[cfg(test)]
mod tests {
    use hex_literal::hex;
    use proptest::prelude::*;

    use super::*;

    fn page() -> Vec<u8> {
        let mut page = AnaHeader::new(7, 2).as_bytes().to_vec();
        write_group(&mut page, 1, AnaState::Optimized, 7, &[1, 5]);
        write_group(&mut page, 2, AnaState::Inaccessible, 3, &[]);
        page
    }

    #[test]
    fn two_groups() {
        let page = page();
        assert_eq!(page[..16], hex!("0700000000000000 0200 000000000000"));
        assert_eq!(
            page[16..40],
            hex!("01000000 02000000 0700000000000000 01 00000000000000")
        );
        assert_eq!(page[48..56], hex!("01000000 05000000"));
        let groups: Vec<_> = groups(&page).collect::<Result<_, _>>().unwrap();
        assert_eq!(groups.len(), 2);
        assert_eq!(groups[0].0.state(), Some(AnaState::Optimized));
        assert_eq!(
            groups[0]
                .1
                .iter()
                .map(|nsid| nsid.get())
                .collect::<Vec<_>>(),
            [1, 5]
        );
        assert_eq!(groups[1].0.state(), Some(AnaState::Inaccessible));
        assert!(groups[1].1.is_empty());
    }

    /// Cut anywhere, a page ends in one error and not in a loop.
    #[test]
    fn truncated() {
        let page = page();
        for length in 0..page.len() {
            let results: Vec<_> = groups(&page[..length]).collect();
            assert!(results.len() <= 2);
            assert!(results.last().unwrap().is_err(), "{length}");
        }
    }

    proptest! {
        #[test]
        fn any_page(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(groups(&bytes).count() <= bytes.len() / 32 + 1);
        }
    }
}
