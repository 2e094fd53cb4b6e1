//! Replays the corpora of the fuzz targets: inputs that once caused a failure, or reach rare code.

use std::fs;
use std::path::Path;

use nacre_nvmf_wire::fuzzing::TARGETS;

/// Every target has a corpus, and no input of it breaks a promise. A failure names the file; run
/// that one with the target's binary (fuzz/README.md) to look closer.
#[test]
fn every_input() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for (target, run) in TARGETS {
        let folder = root.join(target);
        let inputs: Vec<_> = fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
            .map(|entry| entry.expect("a readable folder").path())
            .collect();
        assert!(!inputs.is_empty(), "{target} has no corpus");
        for input in inputs {
            let bytes = fs::read(&input).expect("a readable input");
            if std::panic::catch_unwind(|| run(&bytes)).is_err() {
                panic!("{target} broke on {}", input.display());
            }
        }
    }
}
