//! Parses the processor time of a process and of the machine in files of `/proc`, in clock ticks.

/// The time of a process in user mode and in the kernel. `stat`: the text of `/proc/PID/stat`.
/// `None`: it has another form.
pub fn process_ticks(stat: &str) -> Option<u64> {
    // The name, in parentheses, may contain anything.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

/// The busy time of all processors together. `stat`: the text of `/proc/stat`. Includes interrupts
/// and the kernel's own threads, not time that a hypervisor took away (steal).
pub fn machine_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Option<Vec<u64>> = line
        .split_ascii_whitespace()
        .map(|ticks| ticks.parse().ok())
        .collect();
    let [user, nice, system, _idle, _wait, irq, softirq, ..] = *ticks?.as_slice() else {
        return None;
    };
    Some(user + nice + system + irq + softirq)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_a_process() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 4 0 99";
        assert_eq!(process_ticks(stat), Some(300));
        assert_eq!(process_ticks("7 (nacre) S 1 7"), None);
        assert_eq!(process_ticks(""), None);
    }

    #[test]
    fn time_of_the_machine() {
        let stat = "cpu  100 1 50 9000 7 2 3 40 0 0\ncpu0 1 2 3\n";
        assert_eq!(machine_ticks(stat), Some(156));
        assert_eq!(machine_ticks("cpu  1 2"), None);
        assert_eq!(machine_ticks("intr 1"), None);
    }
}
