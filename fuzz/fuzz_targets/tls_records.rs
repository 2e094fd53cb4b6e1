#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_transport_tls::fuzzing::tls_records(input));
