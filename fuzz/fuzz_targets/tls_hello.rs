//! Fuzz target: parsing a ClientHello, a PSK identity, or a configured PSK.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_nvmf::tls::fuzzing::tls_hello(input));
