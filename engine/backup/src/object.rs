//! One object: a header, then up to 4 MiB of a volume.
//!
//! ```text
//!   0  "NBO1"
//!   4  encoding, u32         0: not compressed; 1: LZ4 block
//!   8  uncompressed size, u32
//!  12  size of the rest, u32
//!  16  the data
//! ```
//!
//! Sizes and offsets are in bytes, numbers little-endian. The manifest has the SHA-256 of the
//! uncompressed data.

use crate::Damage;
use uuid::Uuid;

/// The name of an object: its index, and the backup that wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ObjectName {
    pub(crate) source: Uuid,
    pub(crate) index: u32,
}

/// Bytes of a volume in one object, uncompressed. The last object of a volume can be smaller.
pub const OBJECT_BYTES: usize = 4 << 20;
pub(crate) const HEADER: usize = 16;
/// Most bytes of an object: data that compression does not make smaller is stored as it is.
pub(crate) const LARGEST: usize = HEADER + OBJECT_BYTES;
const MAGIC: [u8; 4] = *b"NBO1";
const PLAIN: u32 = 0;
const LZ4: u32 = 1;

/// A SHA-256 digest: of the uncompressed data of an object, or of a part of a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest(pub(crate) [u8; 32]);

impl Digest {
    pub(crate) fn of(data: &[u8]) -> Self {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, data);
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest.as_ref());
        Self(bytes)
    }

    pub(crate) fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Only lower case: each digest has one text.
    pub(crate) fn of_hex(text: &str) -> Option<Self> {
        let text: &[u8; 64] = text.as_bytes().try_into().ok()?;
        let nibble = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
            *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
        }
        Some(Self(bytes))
    }
}

/// The bytes of an object with this data.
pub(crate) fn encode(data: &[u8]) -> Vec<u8> {
    let room = lz4_flex::block::get_maximum_output_size(data.len());
    let mut object = vec![0; HEADER + room];
    let packed = lz4_flex::block::compress_into(data, &mut object[HEADER..]);
    let encoding = match packed {
        Ok(packed) if packed < data.len() => {
            object.truncate(HEADER + packed);
            LZ4
        }
        _ => {
            object.truncate(HEADER);
            object.extend_from_slice(data);
            PLAIN
        }
    };
    let follow = object.len() - HEADER;
    let numbers = [encoding, data.len() as u32, follow as u32];
    object[..4].copy_from_slice(&MAGIC);
    for (field, number) in object[4..HEADER].chunks_exact_mut(4).zip(numbers) {
        field.copy_from_slice(&number.to_le_bytes());
    }
    object
}

/// The uncompressed data of an object, which must have `bytes` bytes and this digest.
pub(crate) fn decode(object: &[u8], bytes: usize, digest: Digest) -> Result<Vec<u8>, Damage> {
    let Some((header, follow)) = object.split_at_checked(HEADER) else {
        return Err(Damage::Magic);
    };
    let number = |at: usize| {
        let field = header[at..at + 4].try_into().unwrap_or([0xff; 4]);
        u32::from_le_bytes(field)
    };
    let size = |found: u64, expected: usize| Damage::Size {
        found,
        expected: expected as u64,
    };
    if header[..4] != MAGIC {
        return Err(Damage::Magic);
    }
    if number(8) as usize != bytes {
        return Err(size(number(8).into(), bytes));
    }
    if number(12) as usize != follow.len() {
        return Err(size(follow.len() as u64, number(12) as usize));
    }
    let data = match number(4) {
        PLAIN if follow.len() == bytes => follow.to_vec(),
        PLAIN => return Err(size(follow.len() as u64, bytes)),
        LZ4 => {
            let mut data = vec![0; bytes];
            let unpacked = lz4_flex::block::decompress_into(follow, &mut data);
            if !unpacked.is_ok_and(|unpacked| unpacked == bytes) {
                return Err(Damage::Compression);
            }
            data
        }
        _ => return Err(Damage::Compression),
    };
    if Digest::of(&data) != digest {
        return Err(Damage::Checksum);
    }
    Ok(data)
}

/// True if all bytes are zero.
pub(crate) fn is_zero(data: &[u8]) -> bool {
    let (chunks, rest) = data.as_chunks::<16>();
    rest.iter().all(|byte| *byte == 0)
        && chunks.iter().all(|chunk| u128::from_ne_bytes(*chunk) == 0)
}
