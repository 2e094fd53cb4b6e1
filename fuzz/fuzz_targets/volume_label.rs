//! Fuzz target: parsing the label of a replica.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_bdev_replica::format::fuzzing::volume_label(input));
