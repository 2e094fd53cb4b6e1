//! Fuzz target: both ends of a DH-HMAC-CHAP transaction.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_nvmf::auth::fuzzing::authentication(input));
