//! Data of the tests: a number, and the granule that stands for it.
//!
//! The number names the family and the place that it was written to, so a reader recognises data
//! of another place. Every sector differs, so a torn granule is recognised too.

use std::sync::Arc;

use super::disk::Block;
use crate::format::data_checksum;
use crate::geometry::PAGE;
use nacre_random::mix;

/// 0 is a granule of zeroes.
pub(crate) type Value = u64;

pub(crate) fn value(family: u64, granule: u64, number: u64) -> Value {
    family << 52 | granule << 40 | number
}

pub(crate) fn is_of(value: Value, family: u64, granule: u64) -> bool {
    value == 0 || (value >> 52 == family && value >> 40 & 0xfff == granule)
}

pub(crate) fn bytes(value: Value) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    if value == 0 {
        return bytes;
    }
    for (at, sector) in bytes.chunks_exact_mut(512).enumerate() {
        sector[..8].copy_from_slice(&value.to_le_bytes());
        sector[8..16].copy_from_slice(&mix(value ^ at as u64).to_le_bytes());
    }
    bytes
}

pub(crate) fn block(value: Value) -> Block {
    Arc::new(bytes(value))
}

pub(crate) fn checksum(value: Value) -> u32 {
    data_checksum(&bytes(value))
}

/// The number of a granule. `None`: it is torn, or not data.
pub(crate) fn read(granule: &[u8; PAGE]) -> Option<Value> {
    let value = Value::from_le_bytes(granule[..8].try_into().expect("eight bytes"));
    (bytes(value) == *granule).then_some(value)
}
