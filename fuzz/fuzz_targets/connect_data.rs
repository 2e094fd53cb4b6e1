//! Fuzz target: parsing the data of Connect.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_nvmf_wire::fuzzing::connect_data(input));
