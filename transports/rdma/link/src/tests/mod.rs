//! Tests on machines that are folders of files, read by the same code as a real machine.

mod capabilities;
mod machines;
mod tuning;
use crate::testing as tree;

/// Replays every input of a fuzz target's corpus.
pub(crate) fn replay(target: &str, body: fn(&[u8])) {
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../fuzz/corpus");
    let files = std::fs::read_dir(corpus.join(target)).expect("the corpus is in the repository");
    let inputs: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    assert!(!inputs.is_empty(), "no corpus");
    for input in inputs {
        body(&std::fs::read(input).unwrap());
    }
}
