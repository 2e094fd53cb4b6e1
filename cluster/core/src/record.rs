//! The part of a volume's record that decides where the volume is served.

use arrayvec::ArrayVec;

use crate::ids::{Incarnation, MAX_MEMBERS, MemberId, NodeId};

/// A node in one incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    pub node: NodeId,
    pub incarnation: Incarnation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberState {
    /// It has every acknowledged write.
    InSync,
    /// It lacks writes, or may lack them.
    Out,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    pub id: MemberId,
    pub node: NodeId,
    pub state: MemberState,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Incremented by each take.
    pub epoch: u64,
    /// The last epoch that was served.
    pub serving: u64,
    /// The current holder; `None` after an orderly hand-over.
    pub holder: Option<Holder>,
    /// The node that may take first.
    pub next: Option<NodeId>,
    pub members: ArrayVec<Member, MAX_MEMBERS>,
}

impl Record {
    pub fn in_sync(&self) -> impl Iterator<Item = &Member> {
        self.members
            .iter()
            .filter(|member| member.state == MemberState::InSync)
    }

    pub fn is_in_sync(&self, id: MemberId) -> bool {
        self.in_sync().any(|member| member.id == id)
    }

    pub fn set(&mut self, id: MemberId, state: MemberState) {
        if let Some(member) = self.members.iter_mut().find(|member| member.id == id) {
            member.state = state;
        }
    }
}
