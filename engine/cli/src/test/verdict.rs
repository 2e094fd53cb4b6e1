//! The plan of a failover test, and the decision whether it passed.

use nacre_engine_load::multipath::{ContentsReport, PassReport, PhaseReport, Second, TestPhase};
use nacre_nvmf::address::IpTransport;
use serde::Serialize;

use super::super::address::ListenUrl;
use super::hosts::{Behaviour, HostReport};
use super::paths::TestedListener;

/// The index of the listener to take out of use, if the test can run.
pub(super) fn plan(
    listeners: &[TestedListener],
    withdraw: &ListenUrl,
    to: Option<IpTransport>,
) -> Result<usize, String> {
    let found = listeners.iter().position(|one| one.url == *withdraw);
    let index = found.ok_or_else(|| {
        let have: Vec<String> = listeners.iter().map(|one| one.url.to_string()).collect();
        format!(
            "--listener: the subsystem does not listen on {withdraw}; it listens on {}",
            have.join(", ")
        )
    })?;
    let one = &listeners[index];
    if one.states.is_empty() {
        return Err(
            "the subsystem does not report ANA states, so its hosts would not move their I/O: \
                create it with --ana, or publish the volume"
                .into(),
        );
    }
    if !one.is_accessible() {
        let states = one.states.join(", ");
        return Err(format!("--listener: {withdraw} is not in use ({states})"));
    }
    let others = || {
        let all = listeners.iter().enumerate();
        all.filter(move |(at, other)| *at != index && other.is_accessible())
    };
    if others().next().is_none() {
        return Err(format!(
            "no listener other than {withdraw} is accessible: add one, or see `nacre listener list`"
        ));
    }
    if let Some(to) = to
        && !others().any(|(_, other)| other.url.transport == to)
    {
        let word = to.word();
        return Err(format!("--to: no other listener is accessible over {word}"));
    }
    Ok(index)
}

/// Everything that a test found.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Findings {
    pub schema: &'static str,
    pub subsystem: String,
    pub listener: String,
    pub nsid: u32,
    /// The paths of this program; `withdrawn_path` is the index of the tested listener's path.
    pub paths: Vec<String>,
    pub withdrawn_path: usize,
    /// Transport that must take over: `tcp` or `rdma`; `None`: any.
    pub to: Option<String>,
    pub writes: bool,
    /// Samples of each second.
    pub seconds: Vec<Second>,
    pub phases: Vec<PhaseReport>,
    pub contents: ContentsReport,
    pub errors: std::collections::BTreeMap<String, u64>,
    pub unfinished: usize,
    /// Passes over the whole block range of a path that had failures.
    pub failed_passes: Vec<PassReport>,
    pub connections_lost: u64,
    pub hosts: Vec<HostReport>,
    /// The reason why the ANA states may not have been restored.
    pub not_restored: Option<String>,
    pub interrupted: bool,
    /// Longest pause allowed.
    pub max_pause_ms: f64,
    pub failures: Vec<String>,
    pub warnings: Vec<String>,
}

impl Findings {
    pub(super) const SCHEMA: &'static str = "nacre-test-failover/1";

    fn phase(&self, phase: TestPhase) -> Option<&PhaseReport> {
        self.phases.iter().find(|one| one.phase == phase)
    }

    /// The longest pause after the listener was withdrawn.
    pub(super) fn longest_pause_ms(&self) -> f64 {
        let later = self
            .phases
            .iter()
            .filter(|one| one.phase != TestPhase::Before);
        later.map(|one| one.longest_pause_ms).fold(0.0, f64::max)
    }

    /// I/Os of this program in a phase: over the listener, and over others.
    fn split(&self, phase: TestPhase) -> (u64, u64) {
        let mut split = (0, 0);
        let paths = self.phase(phase).map_or(&[][..], |one| &one.paths);
        for (index, path) in paths.iter().enumerate() {
            if index == self.withdrawn_path {
                split.0 += path.ios;
            } else {
                split.1 += path.ios;
            }
        }
        split
    }

    /// I/Os of this program over other paths of a transport while the listener was withdrawn.
    fn withdrawn_over(&self, transport: &str) -> u64 {
        let scheme = format!("{transport}://");
        let phase = self.phase(TestPhase::Withdrawn);
        let paths = phase.map_or(&[][..], |one| &one.paths);
        let names = self.paths.iter().zip(paths).enumerate();
        names
            .filter(|(index, (name, _))| *index != self.withdrawn_path && name.starts_with(&scheme))
            .map(|(_, (_, path))| path.ios)
            .sum()
    }

    /// The last I/O over the listener, in milliseconds after it was withdrawn.
    pub(super) fn last_io_ms(&self) -> Option<f64> {
        let phase = self.phase(TestPhase::Withdrawn)?;
        phase.paths.get(self.withdrawn_path)?.last_ms
    }

    /// Adds the failures and warnings.
    pub(super) fn evaluate(&mut self) {
        let mut failures = Vec::new();
        let mut warnings = Vec::new();
        let failed: u64 = self.errors.values().sum();
        if failed > 0 {
            failures.push(format!("{failed} I/Os failed"));
        }
        if self.contents.units_wrong > 0 {
            let first = self.contents.first_wrong.as_deref().unwrap_or_default();
            let count = self.contents.units_wrong;
            failures.push(format!("{count} places have wrong data; first: {first}"));
        }
        if self.unfinished > 0 {
            failures.push(format!("{} I/Os did not complete", self.unfinished));
        }
        for pass in &self.failed_passes {
            if !(self.interrupted && pass.errors.is_empty() && pass.unfinished == 0) {
                let failed: u64 = pass.errors.values().sum::<u64>() + pass.unfinished;
                failures.push(format!(
                    "{}: {failed} I/Os of a whole pass failed",
                    pass.path
                ));
            }
        }
        if let Some(why) = &self.not_restored {
            failures.push(why.clone());
        }
        if self.phase(TestPhase::Withdrawn).is_some() {
            if self.split(TestPhase::Withdrawn).1 == 0 && !self.interrupted {
                failures.push("no I/O of this program went over another listener".into());
            } else if let Some(to) = &self.to
                && self.withdrawn_over(to) == 0
                && !self.interrupted
            {
                failures.push(format!("no I/O of this program went over {to}"));
            }
            let pause = self.longest_pause_ms();
            if pause > self.max_pause_ms {
                failures.push(format!(
                    "I/O paused for {pause:.0} ms, of at most {:.0} ms",
                    self.max_pause_ms
                ));
            }
        }
        if self.connections_lost > 0 {
            warnings.push(format!("{} connections were lost", self.connections_lost));
        }
        let first_use = self.split(TestPhase::Before);
        if self.phase(TestPhase::After).is_some()
            && first_use.0 > 0
            && self.split(TestPhase::After).0 == 0
            && !self.interrupted
        {
            failures.push(format!(
                "I/O of this program did not return to {}",
                self.listener
            ));
        }
        if first_use.0 == 0 && first_use.1 > 0 {
            warnings.push(format!(
                "another path is preferred: no I/O of this program used {}",
                self.listener
            ));
        }
        if !self.writes && self.contents.units_changed > 0 {
            let count = self.contents.units_changed;
            warnings.push(format!(
                "{count} reads found new data: another host writes there"
            ));
        }
        for host in &self.hosts {
            let name = &host.hostnqn;
            match host.behaviour {
                Behaviour::Stayed => {
                    failures.push(format!("{name} kept I/O on the inaccessible listener"));
                }
                Behaviour::Stopped => {
                    failures.push(format!("{name} had I/O before, and none meanwhile"));
                }
                Behaviour::Moved if !host.returned && self.phase(TestPhase::After).is_some() => {
                    warnings.push(format!("{name} has not returned yet"));
                }
                Behaviour::Moved | Behaviour::NotThere | Behaviour::Idle => {}
            }
        }
        if self.interrupted {
            failures.push("interrupted".into());
        }
        (self.failures, self.warnings) = (failures, warnings);
    }
}

#[cfg(test)]
mod tests {
    use nacre_engine_load::multipath::PathTotals;

    use super::*;

    fn listener(url: &str, states: &[&str]) -> TestedListener {
        TestedListener {
            url: url.parse().unwrap(),
            states: states.iter().map(ToString::to_string).collect(),
            withheld: false,
        }
    }

    /// Goal: a test runs only if hosts can move their I/O, and each refusal names its cause.
    #[test]
    fn plans() {
        let rdma = listener("rdma://192.0.2.1", &["optimized"]);
        let tcp = listener("tcp://192.0.2.1", &["non_optimized"]);
        let both = [rdma.clone(), tcp.clone()];
        let url = |text: &str| text.parse::<ListenUrl>().unwrap();
        assert_eq!(plan(&both, &rdma.url, Some(IpTransport::Tcp)), Ok(0));
        assert_eq!(plan(&both, &tcp.url, None), Ok(1));
        let refused = |listeners: &[TestedListener], at: &str, to| {
            plan(listeners, &url(at), to).expect_err("it is refused")
        };
        let said = refused(&both, "tcp://192.0.2.9", None);
        assert!(
            said.contains("it listens on rdma://192.0.2.1:4420, tcp://"),
            "{said}"
        );
        let said = refused(&both, "rdma://192.0.2.1", Some(IpTransport::Rdma));
        assert!(said.starts_with("--to: no other"), "{said}");
        let said = refused(&both[..1], "rdma://192.0.2.1", None);
        assert!(said.contains("add one"), "{said}");
        let lost = [rdma.clone(), listener("tcp://192.0.2.1", &["inaccessible"])];
        assert!(refused(&lost, "rdma://192.0.2.1", None).contains("add one"));
        assert!(refused(&lost, "tcp://192.0.2.1", None).contains("not in use (inaccessible)"));
        let withheld = TestedListener {
            withheld: true,
            ..tcp
        };
        assert!(refused(&[rdma, withheld], "rdma://192.0.2.1", None).contains("add one"));
        let silent = [
            listener("rdma://192.0.2.1", &[]),
            listener("tcp://192.0.2.1", &[]),
        ];
        assert!(refused(&silent, "rdma://192.0.2.1", None).contains("--ana"));
    }

    fn phase(phase: TestPhase, ios: [u64; 2], pause: f64) -> PhaseReport {
        let path = |ios| PathTotals {
            ios,
            first_ms: (ios > 0).then_some(1.0),
            last_ms: (ios > 0).then_some(40.0),
        };
        PhaseReport {
            phase,
            seconds: 1.0,
            paths: ios.map(path).to_vec(),
            moved: 0,
            errors: 0,
            longest_pause_ms: pause,
        }
    }

    fn findings() -> Findings {
        Findings {
            schema: Findings::SCHEMA,
            subsystem: "nqn.a".into(),
            listener: "rdma://192.0.2.1:4420".into(),
            nsid: 1,
            paths: vec![
                "rdma://192.0.2.1:4420".into(),
                "tcp://192.0.2.1:4420".into(),
            ],
            withdrawn_path: 0,
            to: Some("tcp".into()),
            writes: true,
            seconds: Vec::new(),
            phases: vec![
                phase(TestPhase::Before, [100, 0], 2.0),
                phase(TestPhase::Withdrawn, [3, 100], 30.0),
                phase(TestPhase::After, [90, 10], 4.0),
            ],
            contents: ContentsReport::default(),
            errors: Default::default(),
            unfinished: 0,
            failed_passes: Vec::new(),
            connections_lost: 0,
            hosts: Vec::new(),
            not_restored: None,
            interrupted: false,
            max_pause_ms: 5000.0,
            failures: Vec::new(),
            warnings: Vec::new(),
        }
    }

    fn host(behaviour: Behaviour) -> HostReport {
        HostReport {
            hostnqn: "nqn.h".into(),
            behaviour,
            before: (1, 0),
            withdrawn: (0, 1),
            after: (0, 1),
            returned: false,
        }
    }

    /// Goal: each fault fails the test with its own sentence; a clean run passes.
    #[test]
    fn judgements() {
        type Change = fn(&mut Findings);
        let cases: [(Change, &str); 12] = [
            (
                |f| f.errors = [("gone".to_owned(), 2)].into(),
                "2 I/Os failed",
            ),
            (|f| f.contents.units_wrong = 1, "wrong data"),
            (|f| f.unfinished = 3, "3 I/Os did not complete"),
            (
                |f| f.phases[1].longest_pause_ms = 6000.0,
                "paused for 6000 ms",
            ),
            (
                |f| f.phases[2].longest_pause_ms = 5001.0,
                "paused for 5001 ms",
            ),
            (|f| f.phases[1].paths[1].ios = 0, "over another listener"),
            (|f| f.to = Some("rdma".into()), "went over rdma"),
            (|f| f.phases[2].paths[0].ios = 0, "did not return"),
            (|f| f.hosts = vec![host(Behaviour::Stayed)], "kept I/O"),
            (
                |f| f.hosts = vec![host(Behaviour::Stopped)],
                "none meanwhile",
            ),
            (
                |f| f.not_restored = Some("not restored".into()),
                "not restored",
            ),
            (|f| f.interrupted = true, "interrupted"),
        ];
        for (change, said) in cases {
            let mut found = findings();
            change(&mut found);
            found.evaluate();
            let [failure] = &found.failures[..] else {
                panic!("{said}: {:?}", found.failures)
            };
            assert!(failure.contains(said), "{failure}");
        }
        let mut found = findings();
        found.hosts = vec![host(Behaviour::Moved), host(Behaviour::Idle)];
        found.evaluate();
        assert_eq!(found.failures, Vec::<String>::new());
        assert_eq!(found.warnings, ["nqn.h has not returned yet"]);
        assert_eq!(found.last_io_ms(), Some(40.0));
        assert_eq!(found.longest_pause_ms(), 30.0);
    }
}
