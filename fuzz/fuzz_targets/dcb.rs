//! Fuzz target: parsing DCB settings in netlink replies.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_transport_rdma_link::fuzzing::dcb(input));
