//! Tests of the fuzz target `tls_hello`: its corpus, damaged inputs of the corpus, and random
//! bytes.

use proptest::prelude::*;

use crate::tests::corpus;
use crate::tls::fuzzing::tls_hello;

#[test]
fn replay() {
    corpus::replay("tls_hello", 6, tls_hello);
}

proptest! {
    /// Goal: damaged inputs do not panic. Method: inputs of the corpus with one changed byte.
    #[test]
    fn damaged(input in corpus::damaged("tls_hello")) {
        tls_hello(&input);
    }

    #[test]
    fn anything(input in proptest::collection::vec(any::<u8>(), 0..200)) {
        tls_hello(&input);
    }
}
