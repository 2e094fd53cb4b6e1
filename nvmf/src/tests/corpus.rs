//! Replays the corpora of fuzz targets, for the tests of the parsers and machines.

use std::path::Path;

use proptest::prelude::any;
use proptest::sample::Index;
use proptest::strategy::{BoxedStrategy, Strategy};

/// The inputs in `fuzz/corpus/NAME`.
pub(crate) fn inputs(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    let entries = std::fs::read_dir(folder.join(name)).expect("the corpus is in the repository");
    let read = |entry: std::io::Result<std::fs::DirEntry>| std::fs::read(entry?.path());
    entries.map(|entry| read(entry).expect("a file")).collect()
}

/// Runs `target` with each input of a corpus, which has at least `least` inputs.
pub(crate) fn replay(name: &str, least: usize, target: fn(&[u8])) {
    let inputs = inputs(name);
    assert!(inputs.len() >= least, "the corpus is complete");
    inputs.iter().for_each(|input| target(input));
}

/// Inputs of a corpus with one changed byte.
pub(crate) fn damaged(name: &str) -> BoxedStrategy<Vec<u8>> {
    let inputs = inputs(name);
    (any::<Index>(), any::<Index>(), any::<u8>())
        .prop_map(move |(which, at, to)| {
            let mut input = which.get(&inputs).clone();
            let at = at.index(input.len());
            input[at] = to;
            input
        })
        .boxed()
}
