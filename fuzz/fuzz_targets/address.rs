//! Fuzz target: parsing the address of a controller or namespace.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_nvmf::address::fuzzing::address(input));
