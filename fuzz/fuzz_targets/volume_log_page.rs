//! Fuzz target: parsing a page of the dirty-region log.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_bdev_replica::format::fuzzing::volume_log_page(input));
