//! Fuzz target: parsing a submission queue entry.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_nvmf_wire::fuzzing::command(input));
