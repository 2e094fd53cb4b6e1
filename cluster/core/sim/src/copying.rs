//! Copies between members: the merge of a take, and the copy to a member that returns.

use std::collections::BTreeMap;

use nacre_cluster_core::mutation::Mutation;

use crate::events::Core;
use crate::member::{Io, IoResult};
use crate::names::{BLOCKS, member_id, member_index};
use crate::node::{Copying, Target};
use crate::world::World;

impl World {
    pub(crate) fn start_copy(&mut self, node: usize, target: Target) {
        if let Target::Merge(number) = target
            && Mutation::SkipMerge.is_active()
        {
            return self.merged(node, number);
        }
        let is_full = matches!(target, Target::Member(_));
        if self.nodes[node].copy.is_some() {
            // Ending its sessions makes the volume ask again.
            return self.end_copy(node);
        }
        let place = &self.nodes[node];
        let Some(record) = place.control.record() else {
            return;
        };
        let sources: Vec<usize> = record
            .in_sync()
            .filter(|member| place.control.has_gate(member.id))
            .map(|member| member_index(member.id))
            .collect();
        let mut missing = BTreeMap::new();
        for member in sources {
            let id = self.send_io(node, Core::Management, member, Io::ReadAll);
            missing.insert(id, member);
            if is_full {
                break;
            }
        }
        self.nodes[node].copy = Some(Copying {
            target,
            began: self.now,
            missing,
            source: None,
            dirty: [is_full; BLOCKS],
            writes: false,
        });
    }

    pub(crate) fn copied(&mut self, node: usize, id: u64, result: IoResult) {
        let place = &mut self.nodes[node];
        let Some(copy) = &mut place.copy else { return };
        let Some(member) = copy.missing.remove(&id) else {
            return;
        };
        match result {
            IoResult::Refused(current) => {
                self.end_copy(node);
                self.gate_said_no(node, member, current);
                self.nodes[node].control.put_out(member_id(member));
                return;
            }
            IoResult::All(blocks, dirty) => {
                copy.source.get_or_insert(blocks);
                for (of_all, of_this) in copy.dirty.iter_mut().zip(dirty) {
                    *of_all |= of_this;
                }
            }
            IoResult::Done(_) => {}
        }
        if !copy.missing.is_empty() {
            return;
        }
        if copy.writes {
            let target = copy.target;
            self.end_copy(node);
            match target {
                Target::Merge(number) => self.merged(node, number),
                Target::Member(member) => {
                    self.report.promotions += 1;
                    self.nodes[node].filled.insert(member);
                    self.nodes[node].control.promote(member_id(member));
                    self.plan_promotion(node);
                }
            }
            return;
        }
        copy.writes = true;
        let Some(source) = copy.source else { return };
        let blocks: Vec<(usize, u64)> = (0..BLOCKS)
            .filter(|block| copy.dirty[*block])
            .map(|block| (block, source[block]))
            .collect();
        let targets: Vec<usize> = match copy.target {
            Target::Member(target) => vec![target],
            Target::Merge(_) => {
                let record = place.control.record();
                let members = record.into_iter().flat_map(|record| record.in_sync());
                members.map(|member| member_index(member.id)).collect()
            }
        };
        let mut missing = BTreeMap::new();
        for member in targets {
            let blocks = blocks.clone();
            let id = self.send_io(node, Core::Management, member, Io::WriteSome { blocks });
            missing.insert(id, member);
        }
        if let Some(copy) = &mut self.nodes[node].copy {
            copy.missing = missing;
        }
    }

    /// The members are equal: the volume opens to hosts.
    fn merged(&mut self, node: usize, number: u64) {
        if !self.nodes[node].control.merged(number) {
            return;
        }
        self.report.takes += 1;
        self.note(|| format!("node {node} serves"));
        self.open_lanes(node);
        let place = &mut self.nodes[node];
        place.volume.opened(place.control.opening());
    }

    /// Ends the copy. Its I/O under way must not land later, so the sessions end with it.
    pub(crate) fn end_copy(&mut self, node: usize) {
        let place = &mut self.nodes[node];
        place.lane.frozen = false;
        let missing = place.copy.take().map(|copy| copy.missing);
        for member in missing.unwrap_or_default().into_values() {
            self.lose_session(node, member);
        }
    }

    /// A promotion is about to be sent: sometimes its answer is lost, and the holder is cut off
    /// from all other nodes just then.
    pub(crate) fn plan_promotion(&mut self, node: usize) {
        if self.lively && self.random.one_in(3) {
            self.nodes[node].link.is_cut_by_commit = true;
        }
    }
}
