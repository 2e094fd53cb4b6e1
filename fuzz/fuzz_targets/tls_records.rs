//! Fuzz target: TLS sessions, with records that are changed, split and inserted on their way.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_transport_tls::fuzzing::tls_records(input));
