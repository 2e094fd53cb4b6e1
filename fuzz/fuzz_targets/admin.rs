//! Fuzz target: a controller that executes a list of admin commands and events.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_nvmf::fuzzing::admin(input));
