//! Fuzz target: the host's NVMe/TCP connection machine, with any byte stream from the controller.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_nvmf::tcp::fuzzing::host(input));
