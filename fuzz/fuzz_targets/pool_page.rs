//! Fuzz target: parsing a metadata page of a storage pool.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nacre_bdev_pool_core::format::fuzzing::pool_page(input));
