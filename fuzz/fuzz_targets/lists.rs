//! Fuzz target: parsing the lists that commands carry as data.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_nvmf_wire::fuzzing::lists(input));
