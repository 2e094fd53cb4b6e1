//! Buffers of an I/O, cut into parts and joined again.

use nacre_bdev::Extents;
use nacre_hugepages::{Buf, Pool};

/// The buffers of one part of a read: of granules that adjoin on the disk, or of zeroes.
pub(super) struct Part {
    pub data: Extents,
    /// Offset in the I/O.
    pub offset: usize,
}

/// Removes `len` bytes from the front of `data`. The result shares no byte with the rest.
pub(super) fn split_front(data: &mut Extents, len: usize) -> Extents {
    let mut front = Extents::new();
    let mut left = len;
    while left > 0
        && let Some(first) = data.first_mut()
    {
        if first.len() <= left {
            left -= first.len();
            front.push(data.remove(0));
        } else {
            let rest = first.split_off(left);
            front.push(std::mem::replace(first, rest));
            left = 0;
        }
    }
    front
}

/// Handles on `len` bytes of `data` from `offset` on.
pub(super) fn slice(data: &Extents, offset: usize, len: usize) -> Extents {
    let mut slices = Extents::new();
    let (mut skip, mut left) = (offset, len);
    for buf in data {
        let here = buf.len().saturating_sub(skip).min(left);
        if here > 0 {
            slices.push(buf.slice(skip, here));
        }
        skip = skip.saturating_sub(buf.len());
        left -= here;
    }
    slices
}

/// Copies the bytes of `data` from `offset` on.
pub(super) fn copy_out(data: &Extents, offset: usize, into: &mut [u8]) {
    let mut at = 0;
    for buf in &slice(data, offset, into.len()) {
        into[at..at + buf.len()].copy_from_slice(buf);
        at += buf.len();
    }
}

/// Fills buffers with zeroes. Returns false if another handle shares one of them.
#[must_use]
pub(super) fn zero(data: &mut Extents) -> bool {
    data.iter_mut().all(|buf| match buf.bytes_mut() {
        Some(bytes) => {
            bytes.fill(0);
            true
        }
        None => false,
    })
}

/// Joins parts to buffers of the original lengths: `first_len` bytes, then the rest. The device may
/// have exchanged buffers; then the bytes are copied. `None`: no buffer for that is free.
pub(super) fn join(mut parts: Vec<Part>, first_len: usize, memory: &Pool) -> Option<Extents> {
    parts.sort_by_key(|part| part.offset);
    let mut bufs: Vec<Buf> = Vec::with_capacity(2);
    let mut len = 0;
    for buf in parts.iter_mut().flat_map(|part| part.data.drain(..)) {
        let here = buf.len();
        let refused = match bufs.last_mut() {
            Some(last) if len != first_len => last.unsplit(buf).err(),
            _ => Some(buf),
        };
        bufs.extend(refused);
        len += here;
    }
    let first = bufs.first().map_or(0, Buf::len);
    if bufs.len() <= 2 && first == first_len.min(len) {
        return Some(bufs.into_iter().collect());
    }
    let mut joined = Extents::new();
    let mut bytes = bufs.iter().flat_map(|buf| buf.iter().copied());
    for len in [first_len, len - first_len] {
        if len > 0 {
            let mut buf = memory.acquire(len)?;
            let into = buf.bytes_mut()?;
            into.iter_mut()
                .zip(&mut bytes)
                .for_each(|(to, from)| *to = from);
            joined.push(buf);
        }
    }
    Some(joined)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_hugepages::ClassSpec;

    fn pool() -> Pool {
        let class = ClassSpec { size: 64, count: 8 };
        Pool::heap(&[class])
    }

    fn numbered(pool: &Pool, len: usize, from: u8) -> Buf {
        let mut buf = pool.acquire(len).unwrap();
        let bytes = buf.bytes_mut().unwrap().iter_mut();
        bytes.zip(from..).for_each(|(byte, value)| *byte = value);
        buf
    }

    fn bytes(data: &Extents) -> Vec<u8> {
        data.iter().flat_map(|buf| buf.to_vec()).collect()
    }

    /// Parts of two buffers return in their order and lengths, exchanged or not.
    #[test]
    fn parts_are_joined() {
        for exchanges in [false, true] {
            let pool = pool();
            let mut data = Extents::new();
            data.push(numbered(&pool, 20, 0));
            data.push(numbered(&pool, 30, 20));
            let mut cut = Vec::new();
            for (offset, len) in [(0, 8), (8, 16), (24, 26)] {
                let data = split_front(&mut data, len);
                cut.push(Part { data, offset });
            }
            if exchanges {
                cut[1].data = Extents::new();
                cut[1].data.push(numbered(&pool, 16, 8));
            }
            cut.reverse();
            let joined = join(cut, 20, &pool).unwrap();
            let lens: Vec<usize> = joined.iter().map(Buf::len).collect();
            assert_eq!(lens, [20, 30]);
            assert_eq!(bytes(&joined), (0..50).collect::<Vec<u8>>());
            assert_eq!(
                bytes(&slice(&joined, 15, 10)),
                (15..25).collect::<Vec<u8>>()
            );
        }
    }
}
