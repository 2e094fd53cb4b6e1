//! The corpus of the fuzz target, and inputs near it.

use std::path::Path;

use proptest::prelude::*;

use crate::tls::fuzzing::tls_hello;

fn corpus() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/tls_hello");
    let entries = std::fs::read_dir(folder).expect("the corpus is in the repository");
    let read = |entry: std::io::Result<std::fs::DirEntry>| std::fs::read(entry?.path());
    entries.map(|entry| read(entry).expect("a file")).collect()
}

#[test]
fn replay() {
    let inputs = corpus();
    assert!(inputs.len() >= 6, "the corpus is complete");
    inputs.iter().for_each(|input| tls_hello(input));
}

proptest! {
    /// Goal: damaged inputs do not panic. Method: a byte of each input of the corpus, changed.
    #[test]
    fn damaged(which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), to: u8) {
        let inputs = corpus();
        let mut input = which.get(&inputs).clone();
        let at = at.index(input.len());
        input[at] = to;
        tls_hello(&input);
    }

    #[test]
    fn anything(input in proptest::collection::vec(any::<u8>(), 0..200)) {
        tls_hello(&input);
    }
}
