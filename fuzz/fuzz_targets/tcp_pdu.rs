//! Fuzz target: parsing one NVMe/TCP PDU header.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_nvmf_wire::fuzzing::tcp_pdu(input));
