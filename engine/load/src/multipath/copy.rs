//! `nacre test copy`: each path alone reads, and on request writes, the whole block range; then all
//! paths at once.

use serde::Serialize;

use super::compare::{Compare, KeepGoing, one};
use super::contents::{Contents, ContentsReport};
use super::mount::Mount;
use super::pass::PassReport;

/// Results of one path.
#[derive(Debug, Clone, Serialize)]
pub struct CopyPath {
    pub path: String,
    /// The write pass over this path alone; `None` in a test that only reads.
    pub write: Option<PassReport>,
    /// The read pass over this path alone; `None` if the test ended before it.
    pub read: Option<PassReport>,
    /// Sum of the checksums of all units, as this path alone read them. `None` if the read failed,
    /// and in a test that writes, because each path then reads its own data.
    pub checksum: Option<String>,
    /// A pass for each other path, with writes: reads over this path the data that the other wrote.
    pub cross_reads: Vec<PassReport>,
    /// The passes over all paths at once; each path writes an equal share, and reads all.
    pub write_together: Option<PassReport>,
    pub read_together: Option<PassReport>,
    /// I/Os of all passes that completed without an error.
    pub ios: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub connections_lost: u64,
    /// The reason why the path is not connected at the end. `None` if it is, or if no attempt to
    /// reconnect has failed.
    pub failure: Option<String>,
}

impl CopyPath {
    /// All passes of the path that took place.
    pub fn passes(&self) -> impl Iterator<Item = &PassReport> {
        self.write
            .iter()
            .chain(&self.read)
            .chain(&self.cross_reads)
            .chain(&self.write_together)
            .chain(&self.read_together)
    }

    fn add(&mut self, pass: &PassReport) {
        self.ios += pass.ios;
        match pass.op {
            nacre_bdev::Op::Write => self.bytes_written += pass.bytes,
            _ => self.bytes_read += pass.bytes,
        }
    }
}

/// The results of all paths.
#[derive(Debug, Clone, Serialize)]
pub struct CopyReport {
    pub paths: Vec<CopyPath>,
    pub contents: ContentsReport,
    /// Number of units in the range, and their size.
    pub units: u64,
    pub unit_bytes: u64,
    /// True if the caller ended the test early.
    pub interrupted: bool,
}

/// Runs the test, which overwrites the range if `writes` is true. Up to `depth` I/Os are in flight
/// on each path; `seed` distinguishes the patterns of runs. `log` is called with the name of each
/// pass. `watch` is called often; `false` ends the test.
pub fn copy(
    mount: &mut Mount,
    (writes, depth, seed): (bool, u16, u64),
    log: &mut dyn FnMut(&str),
    watch: KeepGoing,
) -> CopyReport {
    let (namespace, range) = mount.geometry();
    let run = (mount.now().0 ^ seed).max(1);
    let mut contents = Contents::new(namespace, range, writes, run);
    let (units, unit_bytes) = (mount.units(), mount.unit_bytes());
    let names = mount.names();
    let empty = |name: &String| CopyPath {
        path: name.clone(),
        write: None,
        read: None,
        checksum: None,
        cross_reads: Vec::new(),
        write_together: None,
        read_together: None,
        ios: 0,
        bytes_read: 0,
        bytes_written: 0,
        connections_lost: 0,
        failure: None,
    };
    let mut paths: Vec<CopyPath> = names.iter().map(empty).collect();
    let all: Vec<usize> = (0..names.len()).collect();
    let mut unequal = Vec::new();
    let mut stopped = false;
    let mut goes_on = || {
        stopped |= !watch();
        !stopped
    };
    let mut compare = Compare {
        mount,
        contents: &mut contents,
        depth,
    };
    for path in &all {
        if !goes_on() {
            break;
        }
        if writes {
            log(&format!("{}: write", names[*path]));
            let pass = compare
                .write(&[one(*path, 0..units)], &mut goes_on)
                .remove(0);
            paths[*path].add(&pass);
            paths[*path].write = Some(pass);
            // This path's writes, over the others.
            for other in all.iter().filter(|other| *other != path) {
                log(&format!(
                    "{}: read of what {} wrote",
                    names[*other], names[*path]
                ));
                let plan = [one(*other, 0..units)];
                let (mut passes, _) = compare.read(&plan, None, &mut unequal, &mut goes_on);
                let pass = passes.remove(0);
                paths[*other].add(&pass);
                paths[*other].cross_reads.push(pass);
            }
        }
        log(&format!("{}: read", names[*path]));
        let plan = [one(*path, 0..units)];
        let reference = all.first().copied();
        let (mut passes, sums) = compare.read(&plan, reference, &mut unequal, &mut goes_on);
        let pass = passes.remove(0);
        paths[*path].add(&pass);
        let comparable = !writes && pass.is_good();
        paths[*path].checksum = comparable.then(|| format!("{:016x}", sums[0]));
        paths[*path].read = Some(pass);
    }
    let found = std::mem::take(&mut unequal);
    compare.recheck(found, &all, &mut goes_on);
    if all.len() > 1 && goes_on() {
        if writes {
            log("all paths: write");
            let share = |path: usize| {
                let at = |path: usize| units * path as u64 / all.len() as u64;
                one(path, at(path)..at(path + 1))
            };
            let plans: Vec<_> = all.iter().map(|path| share(*path)).collect();
            for (path, pass) in paths.iter_mut().zip(compare.write(&plans, &mut goes_on)) {
                path.add(&pass);
                path.write_together = Some(pass);
            }
        }
        log("all paths: read");
        let plans: Vec<_> = all.iter().map(|path| one(*path, 0..units)).collect();
        let (passes, _) = compare.read(&plans, None, &mut unequal, &mut goes_on);
        for (path, pass) in paths.iter_mut().zip(passes) {
            path.add(&pass);
            path.read_together = Some(pass);
        }
        compare.recheck(unequal, &all, &mut goes_on);
    }
    for (report, path) in paths.iter_mut().zip(mount.paths()) {
        report.connections_lost = path.losses();
        report.failure = path.access().is_none().then(|| path.failure()).flatten();
    }
    CopyReport {
        paths,
        contents: contents.report().clone(),
        units,
        unit_bytes,
        interrupted: stopped,
    }
}
