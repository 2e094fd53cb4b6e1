//! Fuzz target: parsing a page of a storage pool's log.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_bdev_pool_core::format::fuzzing::pool_log_page(input));
