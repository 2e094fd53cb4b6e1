//! Selects the path of the next I/O, by ANA state.

use nacre_nvmf_wire::log::ana::AnaState;
use nacre_reactor::Nanos;

/// The state of a path that the choice depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    /// `None`: not connected.
    pub access: Option<AnaState>,
    /// The path is not used before this time, because it refused I/O.
    pub avoid_until: Nanos,
}

/// The index of the first optimized path, else of the first non-optimized one, among those that
/// need not be avoided. `None`: there is no such path.
pub(super) fn choose(candidates: &[Candidate], now: Nanos) -> Option<usize> {
    [AnaState::Optimized, AnaState::NonOptimized]
        .into_iter()
        .find_map(|wanted| {
            let fits = |c: &Candidate| c.access == Some(wanted) && now >= c.avoid_until;
            candidates.iter().position(fits)
        })
}

/// The state's name in reports, also for a path that is not connected.
pub fn access_name(access: Option<AnaState>) -> &'static str {
    match access {
        Some(AnaState::Optimized) => "optimized",
        Some(AnaState::NonOptimized) => "non-optimized",
        Some(AnaState::Inaccessible) => "inaccessible",
        Some(AnaState::PersistentLoss) => "persistent loss",
        Some(AnaState::Change) => "change",
        None => "not connected",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(access: Option<AnaState>) -> Candidate {
        Candidate {
            access,
            avoid_until: Nanos(0),
        }
    }

    /// Goal: the better state wins, then the earlier path; refused and lost paths are left out.
    #[test]
    fn the_best_state_wins() {
        use AnaState::{Inaccessible, NonOptimized, Optimized};
        let [good, fair, bad, lost] = [
            Some(Optimized),
            Some(NonOptimized),
            Some(Inaccessible),
            None,
        ]
        .map(path);
        let now = Nanos(10);
        assert_eq!(choose(&[fair, good, good], now), Some(1));
        assert_eq!(choose(&[bad, fair, fair], now), Some(1));
        assert_eq!(choose(&[bad, lost], now), None);
        let avoided = Candidate {
            avoid_until: Nanos(11),
            ..good
        };
        assert_eq!(choose(&[avoided, fair], now), Some(1));
        assert_eq!(choose(&[avoided, fair], Nanos(11)), Some(0));
    }
}
