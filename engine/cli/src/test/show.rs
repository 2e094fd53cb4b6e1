//! Prints the results of `nacre test` as tables.

use nacre_engine_load::multipath::{PhaseReport, Second};

use super::super::{Failure, output};
use super::hosts::{Behaviour, HostReport};
use super::verdict::Findings;

/// One second of a failover test.
pub(super) fn second(second: &Second, names: &[String]) -> String {
    let path = |(index, name): (usize, &String)| {
        let access = second.access.get(index).copied().unwrap_or_default();
        format!("{name} {access} {}/s", second.ios[index])
    };
    let paths: Vec<String> = names.iter().enumerate().map(path).collect();
    let mut text = format!(
        "{:>4} s  {}  pause {:.1} ms",
        second.second,
        paths.join("  "),
        second.longest_pause_ms
    );
    if second.moved > 0 {
        text.push_str(&format!("  {} moved", output::count(second.moved, "I/O")));
    }
    if second.errors > 0 {
        text.push_str(&format!("  {}", output::count(second.errors, "error")));
    }
    text
}

pub(super) fn findings(found: &Findings) -> Result<(), Failure> {
    output::line("")?;
    output::table(
        &[
            "phase",
            "seconds",
            "path",
            "I/Os",
            "first ms",
            "last ms",
            "longest pause ms",
            "moved",
            "errors",
        ],
        found
            .phases
            .iter()
            .flat_map(|phase| phase_rows(phase, &found.paths)),
    )?;
    if !found.hosts.is_empty() {
        output::line("")?;
        output::table(
            &["host", "behaviour", "before", "withdrawn", "after"],
            found.hosts.iter().map(host_row),
        )?;
        output::line("I/Os of hosts: on the listener + on others")?;
    }
    output::line("")?;
    for line in summary(found) {
        output::line(&line)?;
    }
    Ok(())
}

fn phase_rows(phase: &PhaseReport, names: &[String]) -> Vec<Vec<String>> {
    let millis = |value: Option<f64>| value.map_or(String::new(), |ms| format!("{ms:.1}"));
    let row = |(index, name): (usize, &String)| {
        let path = &phase.paths[index];
        let once = |text: String| if index == 0 { text } else { String::new() };
        vec![
            once(phase.phase.name().to_owned()),
            once(format!("{:.1}", phase.seconds)),
            name.clone(),
            path.ios.to_string(),
            millis(path.first_ms),
            millis(path.last_ms),
            once(format!("{:.1}", phase.longest_pause_ms)),
            once(phase.moved.to_string()),
            once(phase.errors.to_string()),
        ]
    };
    names.iter().enumerate().map(row).collect()
}

fn host_row(host: &HostReport) -> Vec<String> {
    let behaviour = match (host.behaviour, host.returned) {
        (Behaviour::Moved, true) => "moved and returned",
        (Behaviour::Moved, false) => "moved",
        (Behaviour::NotThere, _) => "used other listeners",
        (Behaviour::Idle, _) => "idle",
        (Behaviour::Stopped, _) => "stopped",
        (Behaviour::Stayed, _) => "stayed",
    };
    let split = |(here, others): (u64, u64)| format!("{here} + {others}");
    vec![
        host.hostnqn.clone(),
        behaviour.to_owned(),
        split(host.before),
        split(host.withdrawn),
        split(host.after),
    ]
}

/// The verdict, and the numbers that it rests on.
pub(super) fn summary(found: &Findings) -> Vec<String> {
    let contents = &found.contents;
    let written = if found.writes {
        let written = output::count(contents.units_written, "place");
        format!("{written} written, ")
    } else {
        String::new()
    };
    let mut lines = vec![
        format!(
            "verified: {written}{} compared, {} wrong",
            contents.units_compared, contents.units_wrong
        ),
        format!("longest pause: {:.1} ms", found.longest_pause_ms()),
    ];
    if let Some(last) = found.last_io_ms() {
        let listener = &found.listener;
        lines.push(format!(
            "last I/O over {listener}: {last:.1} ms after it was withdrawn"
        ));
    }
    lines.extend(found.warnings.iter().map(|text| format!("warning: {text}")));
    lines.extend(found.failures.iter().map(|text| format!("failure: {text}")));
    lines.push(match found.failures[..] {
        [] => "passed".into(),
        _ => "failed".into(),
    });
    lines
}

#[cfg(test)]
mod tests {
    use nacre_engine_load::multipath::TestPhase;

    use super::*;

    #[test]
    fn a_second_is_a_line() {
        let mut one = Second {
            second: 7,
            phase: TestPhase::Withdrawn,
            ios: vec![0, 998],
            moved: 0,
            errors: 0,
            longest_pause_ms: 1.26,
            longest_latency_ms: 3.0,
            access: vec!["inaccessible", "non-optimized"],
        };
        let names = [
            "rdma://192.0.2.1:4420".into(),
            "tcp://192.0.2.1:4420".into(),
        ];
        assert_eq!(
            second(&one, &names),
            "   7 s  rdma://192.0.2.1:4420 inaccessible 0/s  \
                tcp://192.0.2.1:4420 non-optimized 998/s  pause 1.3 ms"
        );
        (one.moved, one.errors) = (1, 2);
        assert!(second(&one, &names).ends_with("  1 I/O moved  2 errors"));
    }

    #[test]
    fn hosts_are_rows() {
        let host = HostReport {
            hostnqn: "nqn.h".into(),
            behaviour: Behaviour::Moved,
            before: (10, 0),
            withdrawn: (0, 20),
            after: (30, 1),
            returned: true,
        };
        assert_eq!(
            host_row(&host),
            ["nqn.h", "moved and returned", "10 + 0", "0 + 20", "30 + 1"]
        );
    }
}
