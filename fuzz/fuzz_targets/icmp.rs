//! Fuzz target: parsing ICMP echo replies.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_transport_rdma_link::fuzzing::icmp(input));
