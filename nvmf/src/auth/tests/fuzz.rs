//! Tests of the fuzz target `authentication`: its corpus, damaged inputs of the corpus, and random
//! bytes.

use proptest::prelude::*;

use crate::auth::fuzzing::authentication;
use crate::tests::corpus;

#[test]
fn replay() {
    corpus::replay("authentication", 15, authentication);
}

proptest! {
    /// Goal: damaged inputs do not panic. Method: inputs of the corpus with one changed byte.
    #[test]
    fn damaged(input in corpus::damaged("authentication")) {
        authentication(&input);
    }

    #[test]
    fn anything(input in proptest::collection::vec(any::<u8>(), 0..200)) {
        authentication(&input);
    }
}
