//! Fault injection of the simulated NVMe drive: for the next commands of a kind ([`Rule`]), or at
//! random ([`Chances`]). Tests of the driver configure it through [`crate::Drive`].

use std::time::Duration;

use nacre_nvmf_wire::StatusCode;
use nacre_random::Random;

/// The effect of a fault on one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The command is not executed, and completes with this status.
    Status(StatusCode),
    /// The command is executed, but completes with this status.
    DoneButStatus(StatusCode),
    /// The command does not complete; `done` is true if it is executed. An Abort command completes
    /// it, unless `deaf` is set.
    Never { done: bool, deaf: bool },
    /// The command is executed, and completes this much later.
    Late(Duration),
    /// The command is neither executed nor completed until [`crate::Drive::release`].
    Hold,
    /// The completion has a command identifier that is off by this much.
    WrongCid(u16),
    /// The completion has a submission queue identifier that is off by this much.
    WrongSqid(u16),
    /// The completion has a submission queue head that is off by this much.
    WrongHead(u16),
    /// The command gets two completions, if the completion queue has space.
    Duplicate,
    /// The completion has the phase tag of the previous round: the driver does not detect it.
    WrongPhase,
    /// The completion comes without an interrupt.
    LoseInterrupt,
    /// The controller fails (CSTS.CFS) when it fetches the command.
    Fatal,
    /// The controller resets itself when it fetches the command: CSTS.RDY becomes 0 and all queues
    /// are deleted.
    ResetItself,
    /// The drive is removed when it fetches the command.
    Pulled,
}

/// The commands that a rule applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// All admin commands.
    Admin,
    /// Admin commands with this opcode.
    AdminOp(u8),
    /// All I/O commands.
    Io,
    /// I/O commands with this opcode.
    IoOp(u8),
    /// I/O commands of one queue.
    Queue(u16),
    /// I/O commands for one namespace.
    Namespace(u32),
}

/// Applies an action to `count` commands of a kind (`u32::MAX`: all), after the first `skip`. Only
/// the first rule that matches a command applies to it and counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    pub target: Target,
    pub skip: u32,
    pub count: u32,
    pub action: Action,
}

impl Rule {
    /// A rule for the next command only.
    pub fn next(target: Target, action: Action) -> Self {
        Self {
            target,
            skip: 0,
            count: 1,
            action,
        }
    }

    pub fn times(mut self, count: u32) -> Self {
        self.count = count;
        self
    }

    pub fn after(mut self, skip: u32) -> Self {
        self.skip = skip;
        self
    }

    pub fn always(target: Target, action: Action) -> Self {
        Self::next(target, action).times(u32::MAX)
    }
}

/// Rates of random faults, per million I/O commands to which no rule applies. A command gets at
/// most one fault. Statuses are Internal Error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Chances {
    /// `retryable` and `fatal_status`: a status without and with Do Not Retry; the command is not
    /// executed.
    pub retryable: u32,
    pub fatal_status: u32,
    pub done_but_status: u32,
    pub never: u32,
    pub late: u32,
    /// `late` delays completions by a random time below this.
    pub late_by: Duration,
    pub wrong_cid: u32,
    pub duplicate: u32,
    pub wrong_phase: u32,
    pub lost_interrupt: u32,
    pub controller_fatal: u32,
    pub reset_itself: u32,
}

impl Chances {
    pub(crate) fn roll(&self, random: &mut Random) -> Option<Action> {
        let mut action = None;
        let mut maybe = |chance, then: fn(&Self, &mut Random) -> Action, random: &mut Random| {
            if action.is_none() && random.per_million(chance) {
                action = Some(then(self, random));
            }
        };
        maybe(
            self.retryable,
            |_, _| Action::Status(StatusCode::INTERNAL_ERROR),
            random,
        );
        maybe(
            self.fatal_status,
            |_, _| Action::Status(StatusCode::INTERNAL_ERROR.with_dnr()),
            random,
        );
        maybe(
            self.done_but_status,
            |_, _| Action::DoneButStatus(StatusCode::INTERNAL_ERROR),
            random,
        );
        maybe(
            self.never,
            |_, random| Action::Never {
                done: random.below(2) == 0,
                deaf: random.below(2) == 0,
            },
            random,
        );
        maybe(
            self.late,
            |chances, random| {
                let most = chances.late_by.as_nanos() as u64;
                Action::Late(Duration::from_nanos(random.below(most.max(1))))
            },
            random,
        );
        maybe(
            self.wrong_cid,
            |_, random| Action::WrongCid(1 + random.below(0xfffe) as u16),
            random,
        );
        maybe(self.duplicate, |_, _| Action::Duplicate, random);
        maybe(self.wrong_phase, |_, _| Action::WrongPhase, random);
        maybe(self.lost_interrupt, |_, _| Action::LoseInterrupt, random);
        maybe(self.controller_fatal, |_, _| Action::Fatal, random);
        maybe(self.reset_itself, |_, _| Action::ResetItself, random);
        action
    }
}

/// The injected faults, with their remaining counts.
#[derive(Default)]
pub(crate) struct Faults {
    pub rules: Vec<Rule>,
    pub chances: Chances,
    pub never_ready: bool,
    pub never_disabled: bool,
    pub never_shut_down: bool,
    pub grant: Option<u16>,
    pub reset_fails: bool,
    pub bus_master_fails: bool,
    pub aborts_fail: bool,
    pub careless: bool,
}

impl Faults {
    /// Returns the fault for a command, if a rule or a random draw selects one, and counts the
    /// command for the rule. `qid` 0 is the admin queue.
    pub(crate) fn strike(
        &mut self,
        qid: u16,
        opcode: u8,
        nsid: u32,
        random: &mut Random,
    ) -> Option<Action> {
        let matches = |rule: &Rule| match rule.target {
            Target::Admin => qid == 0,
            Target::AdminOp(wanted) => qid == 0 && opcode == wanted,
            Target::Io => qid != 0,
            Target::IoOp(wanted) => qid != 0 && opcode == wanted,
            Target::Queue(wanted) => qid != 0 && qid == wanted,
            Target::Namespace(wanted) => qid != 0 && nsid == wanted,
        };
        if let Some(at) = self.rules.iter().position(matches) {
            let rule = &mut self.rules[at];
            if rule.skip > 0 {
                rule.skip -= 1;
                return None;
            }
            let action = rule.action;
            if rule.count != u32::MAX {
                rule.count -= 1;
            }
            if rule.count == 0 {
                self.rules.remove(at);
            }
            return Some(action);
        }
        if qid == 0 || self.chances == Chances::default() {
            return None;
        }
        self.chances.roll(random)
    }
}
