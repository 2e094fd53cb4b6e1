//! Tests that an invalid stream ends only its own connection: random bytes, damaged sessions, and
//! the corpora of the fuzz targets.

use std::path::Path;

use nacre_nvmf_wire::tcp::Digests;
use proptest::prelude::*;

use super::pair::{Pair, io_queue};
use crate::tcp::{HostConfig, TcpTargetConfig, fuzzing};

/// Everything that each side sends in a session with reads, writes with and without R2T.
fn session(digests: Digests) -> (Vec<u8>, Vec<u8>) {
    let host = HostConfig {
        digests,
        ..HostConfig::default()
    };
    let mut pair = Pair::with_buffers(TcpTargetConfig::default(), host, 16, 2);
    pair.run();
    pair.target.established(io_queue(true));
    pair.host.set_in_capsule_bytes(4096);
    // The identifiers and lengths are those of the fuzz target's host.
    for round in 0..2 {
        pair.outcomes.clear();
        pair.read(1, round, 4096);
        pair.write(2, round, 40_000);
        pair.read(3, round, 9000);
        pair.write(4, round, 4096);
        pair.run();
        assert_eq!(pair.outcomes.len(), 4);
    }
    (pair.sent_to_target, pair.sent_to_host)
}

/// The fuzz targets accept a good session too: otherwise they would test only refusals.
#[test]
fn good_sessions() {
    for (flags, digests) in [
        (0, Digests::NONE),
        (
            0x40,
            Digests {
                header: true,
                data: false,
            },
        ),
        (
            0x80,
            Digests {
                header: false,
                data: true,
            },
        ),
        (0xc0, Digests::BOTH),
    ] {
        let (up, down) = session(digests);
        for seed in 0..32 {
            fuzzing::target(&[&[seed], &up[..]].concat());
            fuzzing::host(&[&[flags | seed], &down[..]].concat());
        }
    }
}

/// Every input of the corpora. A failure names the file.
#[test]
fn corpora() {
    for (name, target) in [
        ("tcp_target", fuzzing::target as fn(&[u8])),
        ("tcp_host", fuzzing::host),
    ] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../fuzz/corpus")
            .join(name);
        let mut count = 0;
        for entry in std::fs::read_dir(&folder).expect("the corpus is in the repository") {
            let path = entry.expect("a readable folder").path();
            eprintln!("{}", path.display());
            target(&std::fs::read(&path).expect("a readable file"));
            count += 1;
        }
        assert!(count > 0, "{} is empty", folder.display());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Noise, and noise behind a good handshake.
    #[test]
    fn noise(bytes in proptest::collection::vec(any::<u8>(), 0..2000), seed: u8, behind: bool) {
        let (up, down) = session(Digests::NONE);
        let prefix = if behind { 128 } else { 0 };
        fuzzing::target(&[&[seed], &up[..prefix], &bytes].concat());
        fuzzing::host(&[&[seed & 0x3f], &down[..prefix], &bytes].concat());
    }

    /// A good session with some bytes changed, cut off somewhere, or with a piece left out.
    #[test]
    fn mutated_sessions(
        seed in 0u8..64,
        header: bool,
        data: bool,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        near_start in proptest::collection::vec((0usize..600, any::<u8>()), 0..3),
        cut in any::<prop::sample::Index>(),
        hole in proptest::option::of((any::<prop::sample::Index>(), 1usize..100)),
    ) {
        let (mut up, mut down) = session(Digests { header, data });
        for stream in [&mut up, &mut down] {
            for (at, value) in &changes {
                let at = at.index(stream.len());
                stream[at] = *value;
            }
            for (at, value) in &near_start {
                stream[*at] = *value;
            }
            if let Some((at, len)) = &hole {
                let at = at.index(stream.len());
                let end = (at + len).min(stream.len());
                stream.drain(at..end);
            }
            let end = cut.index(stream.len() * 2).min(stream.len());
            stream.truncate(end);
        }
        let flags = u8::from(header) << 6 | u8::from(data) << 7;
        fuzzing::target(&[&[seed], &up[..]].concat());
        fuzzing::host(&[&[flags | seed], &down[..]].concat());
    }
}
