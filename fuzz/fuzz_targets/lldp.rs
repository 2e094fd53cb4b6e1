//! Fuzz target: parsing LLDP frames.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_transport_rdma_link::fuzzing::lldp(input));
