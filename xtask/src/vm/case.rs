//! Lists the tests of the virtual machine: the scripts in `tests/vm/cases`. Comments at the start
//! of a script declare its limit, hardware, kernel and transports.
//!
//! ```text
//! # limit: SECONDS        see tests/vm/guest.sh
//! # hardware: drives      boots a machine with NVMe drives
//! # kernel: newer         boots a newer kernel of Debian (see kernel.rs)
//! # also: rdma            makes a second case NAME-over-rdma
//! # A sentence on the goal.
//! ```

use std::path::Path;

use anyhow::{Context, Result, bail};

use super::Machine;

/// One run of a script. Its name is that of the script, with the transport if that is not TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) machine: Machine,
}

/// The cases whose names contain one of `filter`, in the order of their names.
pub(super) fn list(root: &Path, filter: &[String]) -> Result<Vec<Case>> {
    let dir = root.join("tests/vm/cases");
    let mut cases = Vec::new();
    for entry in std::fs::read_dir(&dir).with_context(|| format!("reading {}", dir.display()))? {
        let path = entry?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let Some(name) = file.strip_suffix(".sh") else {
            continue;
        };
        let script = std::fs::read_to_string(&path)
            .with_context(|| format!("reading {}", path.display()))?;
        cases.extend(cases_of(name, &script).with_context(|| format!("in {}", path.display()))?);
    }
    cases.retain(|case| {
        filter.is_empty() || filter.iter().any(|part| case.name.contains(part.as_str()))
    });
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(cases)
}

fn cases_of(name: &str, script: &str) -> Result<Vec<Case>> {
    let head = |key: &str| script.lines().find_map(|line| line.strip_prefix(key));
    let machine = match (head("# hardware: "), head("# kernel: ")) {
        (None, None) => Machine::Plain,
        (Some("drives"), None) => Machine::Drives,
        (None, Some("newer")) => Machine::NewerKernel,
        (Some(_), Some(_)) => bail!("a case has drives or another kernel, not both"),
        (Some(other), None) => bail!("there is no hardware {other:?}, only \"drives\""),
        (None, Some(other)) => bail!("there is no kernel {other:?}, only \"newer\""),
    };
    let mut names = vec![name.to_owned()];
    match head("# also: ") {
        None => {}
        Some("rdma") => names.push(format!("{name}-over-rdma")),
        Some(other) => bail!("a case cannot run over {other:?} also, only over \"rdma\""),
    }
    let cases = names.into_iter().map(|name| Case { name, machine });
    Ok(cases.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(script: &str) -> Option<Vec<(String, Machine)>> {
        let cases = cases_of("070-fio", script).ok()?;
        Some(cases.into_iter().map(|c| (c.name, c.machine)).collect())
    }

    #[test]
    fn a_script_selects_its_hardware() {
        let one = |machine| Some(vec![("070-fio".to_owned(), machine)]);
        assert_eq!(of("# A goal.\nserve"), one(Machine::Plain));
        assert_eq!(
            of("# A goal.\n# hardware: drives\nserve"),
            one(Machine::Drives)
        );
        assert_eq!(of("# kernel: newer\n# A goal."), one(Machine::NewerKernel));
        assert_eq!(of("# hardware: disks"), None);
        assert_eq!(of("# kernel: 6.18"), None);
        assert_eq!(of("# kernel: newer\n# hardware: drives"), None);
    }

    #[test]
    fn a_script_can_run_over_rdma_also() {
        let both = ["070-fio", "070-fio-over-rdma"].map(|name| (name.to_owned(), Machine::Plain));
        assert_eq!(of("# also: rdma\n# A goal."), Some(both.to_vec()));
        assert_eq!(of("# also: fc\n# A goal."), None);
    }

    /// Goal: the scripts of the repository are valid, and a filter selects by transport.
    #[test]
    fn filters_select_cases_by_name_and_transport() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let names = |filter: &[&str]| -> Vec<String> {
            let filter: Vec<String> = filter.iter().map(|part| (*part).to_owned()).collect();
            let cases = list(root, &filter).unwrap();
            cases.into_iter().map(|case| case.name).collect()
        };
        assert_eq!(
            names(&["070-"]),
            ["070-fio-verify", "070-fio-verify-over-rdma"]
        );
        assert_eq!(
            names(&["connect-all-over", "fio-verify-over"]),
            ["030-connect-all-over-rdma", "070-fio-verify-over-rdma"]
        );
        assert!(names(&["over-rdma"]).len() >= 20);
        assert!(names(&["no such case"]).is_empty());
    }
}
