//! Features: uses of the format that older versions do not know.
//!
//! A version that does not know a feature refuses a superblock that names it, and may then take an
//! older one. So a feature is used only when the last two roots name it: no other place has a root.

use super::store::Store;
use crate::format::superblock::{Feature, Superblock};
use crate::mutation::Mutation;

impl Store {
    /// True when records of a feature may be appended. If not, two roots will name it.
    pub(super) fn may_use(&mut self, feature: Feature) -> bool {
        let bit = feature as u64;
        if self.next_root.named & bit != 0 || Mutation::FeatureUnnamed.is_active() {
            return true;
        }
        if self.next_root.features & bit == 0 {
            self.next_root.features |= bit;
            self.want_root();
        }
        false
    }

    /// A root is durable: notes the features that it and the root before name.
    pub(super) fn advance_features(&mut self, before: &Superblock) {
        self.next_root.named = before.required & self.superblock.required;
        self.next_root.features &= !self.next_root.named;
        if self.next_root.features != 0 {
            self.want_root();
        }
    }
}
