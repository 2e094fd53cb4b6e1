//! Chooses the path of the next I/O: the states of the paths in, an index out. No I/O, no clock.
//!
//! Optimized paths come before non-optimized ones under every policy. A path that is not connected
//! or on which the namespace is inaccessible is never chosen.

/// How the I/O of a device is divided among its paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// All I/O uses one path of the best access: the preferred one, or else the first in the order
    /// of attachment. A `Chooser` that stays keeps the present path before the first one.
    #[default]
    ActivePassive,
    ActiveActive(Selector),
}

/// How [`Policy::ActiveActive`] chooses among the paths of the best access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selector {
    /// Changes the path after this number of I/Os.
    RoundRobin { min_io: u32 },
    /// The path with the fewest I/Os in flight.
    QueueDepth,
}

impl Policy {
    /// SPDK's word for the policy.
    pub fn word(self) -> &'static str {
        match self {
            Self::ActivePassive => "active_passive",
            Self::ActiveActive(_) => "active_active",
        }
    }

    /// SPDK's word for the selector of `active_active`.
    pub fn selector_word(self) -> Option<&'static str> {
        match self {
            Self::ActivePassive => None,
            Self::ActiveActive(Selector::RoundRobin { .. }) => Some("round_robin"),
            Self::ActiveActive(Selector::QueueDepth) => Some("queue_depth"),
        }
    }

    /// `rr_min_io` of the selector `round_robin`.
    pub fn min_io(self) -> Option<u32> {
        match self {
            Self::ActiveActive(Selector::RoundRobin { min_io }) => Some(min_io),
            Self::ActiveActive(Selector::QueueDepth) | Self::ActivePassive => None,
        }
    }
}

/// The access to the namespace on a path, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    Optimized,
    NonOptimized,
}

/// The state of a path for the choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct View {
    /// `None`: it is not usable.
    pub class: Option<Class>,
    pub is_preferred: bool,
    /// Accepts no other I/O now.
    pub is_full: bool,
    pub inflight: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    Path(usize),
    /// Every path that could be chosen is full.
    Full,
    /// No path is usable.
    NoPath,
}

/// The choice of the path for one core's queue.
#[derive(Debug, Default)]
pub(crate) struct Chooser {
    pub policy: Policy,
    /// Keep a working path when an earlier path in the list returns.
    pub stays: bool,
    current: usize,
    /// I/Os in a row on the current path.
    run: u32,
}

impl Chooser {
    /// The path that was chosen last.
    pub(crate) fn current(&self) -> usize {
        self.current
    }

    /// Adjusts the state after the path at `index` was removed from the list.
    pub(crate) fn removed(&mut self, index: usize) {
        if index < self.current {
            self.current -= 1;
        }
    }

    #[inline]
    pub(crate) fn choose(&mut self, views: &[View]) -> Choice {
        let Some(best) = views.iter().filter_map(|view| view.class).min() else {
            return Choice::NoPath;
        };
        let fits = |view: &View| view.class == Some(best);
        let free = |view: &View| fits(view) && !view.is_full;
        let current = views.get(self.current);
        let chosen = match self.policy {
            Policy::ActivePassive => {
                let preferred = views
                    .iter()
                    .position(|view| fits(view) && view.is_preferred);
                let stays = self.stays && current.is_some_and(fits);
                let chosen = match preferred {
                    Some(at) => at,
                    None if stays => self.current,
                    None => views.iter().position(fits).unwrap_or(0),
                };
                (!views[chosen].is_full).then_some(chosen)
            }
            Policy::ActiveActive(Selector::RoundRobin { min_io }) => {
                if current.is_some_and(free) && self.run < min_io {
                    self.run += 1;
                    Some(self.current)
                } else {
                    self.run = 1;
                    let mut after =
                        (1..=views.len()).map(|step| (self.current + step) % views.len());
                    after.find(|at| free(&views[*at]))
                }
            }
            Policy::ActiveActive(Selector::QueueDepth) => {
                let all = views.iter().enumerate().filter(|(_, view)| free(view));
                all.min_by_key(|(_, view)| view.inflight).map(|(at, _)| at)
            }
        };
        match chosen {
            None => Choice::Full,
            Some(at) => {
                self.current = at;
                Choice::Path(at)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const O: Option<Class> = Some(Class::Optimized);
    const N: Option<Class> = Some(Class::NonOptimized);

    fn views(classes: &[Option<Class>]) -> Vec<View> {
        let view = |class: &Option<Class>| View {
            class: *class,
            is_preferred: false,
            is_full: false,
            inflight: 0,
        };
        classes.iter().map(view).collect()
    }

    fn chooser(policy: Policy) -> Chooser {
        Chooser {
            policy,
            ..Chooser::default()
        }
    }

    fn chosen(chooser: &mut Chooser, views: &[View], times: usize) -> Vec<usize> {
        let mut one = || match chooser.choose(views) {
            Choice::Path(at) => at,
            other => panic!("{other:?}"),
        };
        (0..times).map(|_| one()).collect()
    }

    /// Goal: one path at a time, optimized before non-optimized; the path before returns, unless it
    /// must not; the preferred path comes first within its class.
    #[test]
    fn active_passive() {
        let mut choice = chooser(Policy::ActivePassive);
        assert_eq!(chosen(&mut choice, &views(&[N, O, O]), 3), [1, 1, 1]);
        assert_eq!(chosen(&mut choice, &views(&[N, None, O]), 1), [2]);
        assert_eq!(chosen(&mut choice, &views(&[N, O, O]), 1), [1]);
        assert_eq!(chosen(&mut choice, &views(&[N, None, None]), 1), [0]);
        assert_eq!(choice.choose(&views(&[None, None])), Choice::NoPath);
        let mut preferred = views(&[O, O, N]);
        preferred[1].is_preferred = true;
        assert_eq!(chosen(&mut choice, &preferred, 1), [1]);
        preferred[1].is_full = true;
        assert_eq!(choice.choose(&preferred), Choice::Full);
        preferred[1].class = N;
        assert_eq!(chosen(&mut choice, &preferred, 1), [0], "ANA comes first");
        choice.stays = true;
        assert_eq!(chosen(&mut choice, &views(&[None, O, O]), 1), [1]);
        assert_eq!(chosen(&mut choice, &views(&[O, O, O]), 2), [1, 1]);
        assert_eq!(chosen(&mut choice, &views(&[O, N, O]), 1), [0]);
    }

    /// Goal: round robin over the best class only, each path for `min_io` I/Os, without full paths.
    #[test]
    fn round_robin() {
        let mut choice = chooser(Policy::ActiveActive(Selector::RoundRobin { min_io: 2 }));
        let all = views(&[O, N, O, O]);
        assert_eq!(chosen(&mut choice, &all, 8), [0, 0, 2, 2, 3, 3, 0, 0]);
        let mut full = all.clone();
        full[2].is_full = true;
        assert_eq!(chosen(&mut choice, &full, 4), [3, 3, 0, 0]);
        assert_eq!(chosen(&mut choice, &views(&[None, N, None]), 3), [1, 1, 1]);
        choice.removed(0);
        assert_eq!(chosen(&mut choice, &views(&[N, N]), 4), [0, 1, 1, 0]);
        let mut each = chooser(Policy::ActiveActive(Selector::RoundRobin { min_io: 1 }));
        assert_eq!(chosen(&mut each, &views(&[O, O]), 4), [0, 1, 0, 1]);
    }

    /// Goal: the fewest I/Os in flight within the best class.
    #[test]
    fn queue_depth() {
        let mut choice = chooser(Policy::ActiveActive(Selector::QueueDepth));
        let mut all = views(&[O, O, N]);
        (all[0].inflight, all[1].inflight) = (3, 2);
        assert_eq!(chosen(&mut choice, &all, 1), [1]);
        all[1].inflight = 4;
        assert_eq!(chosen(&mut choice, &all, 1), [0]);
        all[0].class = None;
        assert_eq!(chosen(&mut choice, &all, 1), [1]);
    }
}
