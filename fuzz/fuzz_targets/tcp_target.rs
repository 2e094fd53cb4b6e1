//! Fuzz target: the controller's NVMe/TCP connection machine, with any byte stream from the host.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_nvmf::tcp::fuzzing::target(input));
