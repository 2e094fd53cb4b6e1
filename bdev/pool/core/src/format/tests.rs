use proptest::prelude::*;
use uuid::Uuid;

use super::fuzzing::TARGETS;
use super::leaf::{Linear, Stamp};
use super::log_page::{LogHead, LogPage, PageBuilder};
use super::record::{Cut, Identity, PassKind, Record};
use super::superblock::{PoolState, Superblock};
use super::*;
use crate::disks::DiskTable;
use crate::geometry::Geometry;
use crate::ids::VersionId;
use crate::map::{Entry, Part};

fn geometry() -> Geometry {
    Geometry {
        disk_bytes: 0x1000_0000,
        edge_bytes: 0x10_0000,
        log_pages: 0x400,
        granules_per_unit: 16,
        units_per_leaf: 4,
        fan_out: 2,
        levels: 2,
        added_units: 0,
    }
}

fn superblock() -> Superblock {
    Superblock {
        features: 5,
        required: 5,
        pool: Uuid::from_bytes([0x11; 16]),
        disk: Uuid::from_bytes([0x22; 16]),
        name: "gold".to_owned(),
        sequence: 7,
        imports: 3,
        state: PoolState::Open,
        holder: Uuid::from_bytes([0x33; 16]),
        geometry: geometry(),
        disks: DiskTable::new(Uuid::from_bytes([0x22; 16]), &geometry()),
        checkpoint: 0x10,
        settled: 0x12,
        log_sequence: 9,
        log_previous: 0xabcd,
        directory: Place { a: 1, b: 2, sum: 3 },
        page_map: Place { a: 4, b: 5, sum: 6 },
        next_generation: 8,
        reserve_units: 64,
    }
}

fn bytes_at(page: &Page, fields: &[(usize, &[u8])]) -> Page {
    let mut page = *page;
    for (at, bytes) in fields {
        page[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    page
}

/// The table in `superblock.rs`, byte for byte.
#[test]
fn a_superblock_as_bytes() {
    let units = geometry().units().to_le_bytes();
    let mut want = bytes_at(
        &[0; PAGE],
        &[
            (0, b"NACREPOL"),
            (8, &[1]),
            (16, &[5]),
            (32, &[5]),
            (40, &[0x11; 16]),
            (56, &[0x22; 16]),
            (72, &[7]),
            (80, &[3]),
            (88, &[1]),
            (96, &[0x33; 16]),
            (112, &[0, 0, 0, 0x10]),
            (120, &[0, 0, 0x10]),
            (128, &[0, 4]),
            (136, &[16]),
            (140, &[4]),
            (144, &[2]),
            (148, &[2]),
            (152, &[0x10]),
            (160, &[0x12]),
            (168, &[9]),
            (176, &[0xcd, 0xab]),
            (184, &[1]),
            (192, &[2]),
            (200, &[3]),
            (232, &[4]),
            (240, &[5]),
            (248, &[6]),
            (256, &[8]),
            (260, &[1]),
            (264, &[64]),
            (272, b"\x04gold"),
            (528, &[0x22; 16]),
            (552, &units),
            (560, &[1]),
            (3088, b"\x09read-only\x0aset-parent"),
        ],
    );
    // "123456789" has the checksum that every table of CRC-64/NVME gives.
    assert_eq!(checksum(b"123456789"), 0xae8b_1486_0a79_9888);
    superblock::seal(&mut want);
    let mut found = [0xff; PAGE];
    superblock().encode(&mut found);
    assert_eq!(found, want);
    assert_eq!(Superblock::decode(&want), Ok(superblock()));
}

/// The error names the wrong field, and only after the checksum was found correct.
#[test]
fn superblocks_that_are_none() {
    let mut good = [0; PAGE];
    superblock().encode(&mut good);
    let cases: &[(usize, &[u8], &str)] = &[
        (8, &[2], "version"),
        (24, &[1], "feature"),
        (32, &[64], "feature"),
        (32, &[7], "name of a feature"),
        (3088, &[0], "name of a feature"),
        (40, &[0; 16], "id"),
        (88, &[3], "state"),
        (112, &[0; 8], "disk size"),
        (120, &[1], "edge"),
        (128, &[1, 0], "log"),
        (136, &[17], "granules per unit"),
        (140, &[0, 2], "units per leaf"),
        (144, &[65], "fan-out"),
        (148, &[9], "levels"),
        (160, &[0xf], "settled LSN"),
        (208, &[1], "space tree"),
        (256, &[0], "generation"),
        (260, &[2], "number of disks"),
        (264, &[0xff; 8], "reserve"),
        (273, &[0xff], "name"),
        (280, &[1], "name"),
        (544, &[1], "table of disks"),
        (3087, &[1], "table of disks"),
        (4087, &[1], "reserved area"),
    ];
    for (at, bytes, field) in cases {
        let mut page = bytes_at(&good, &[(*at, bytes)]);
        let error = Superblock::decode(&page).unwrap_err();
        assert_eq!(error.field, "checksum", "{at}");
        superblock::seal(&mut page);
        let error = Superblock::decode(&page).unwrap_err();
        assert_eq!(error.field, *field, "{at}");
    }
    assert_eq!(Superblock::decode(&[0; PAGE]).unwrap_err().field, "magic");
}

/// The tables in `log_page.rs` and `record.rs`, byte for byte.
#[test]
fn a_log_page_as_bytes() {
    let map = Record::Map {
        version: VersionId(3),
        place: 0x21,
        unit: 0x45,
        granules: 0b101,
        checksums: vec![0x0a, 0x0b],
    };
    let unmap = Record::Unmap {
        version: VersionId(4),
        first: 0x10,
        granules: 2,
    };
    let mut builder = PageBuilder::default();
    builder.push(&map);
    builder.push(&unmap);
    let head = LogHead {
        tag: 1,
        imports: 2,
        sequence: 3,
        first: 9,
        settled: 8,
        previous: 6,
    };
    let (page, sum) = builder.finish(&head);
    let want = bytes_at(
        &[0; PAGE],
        &[
            (0, &[1]),
            (8, &[2]),
            (16, &[3]),
            (24, &[9]),
            (32, &[8]),
            (40, &[6]),
            (48, &[56, 0, 2]),
            (56, &sum.to_le_bytes()),
            (64, &[1, 0, 32, 0, 3, 0, 0, 0, 0x21]),
            (80, &[0b101, 0, 0x45]),
            (88, &[0x0a, 0, 0, 0, 0x0b]),
            (96, &[2, 0, 24, 0, 4, 0, 0, 0, 0x10]),
            (112, &[2]),
        ],
    );
    assert_eq!(*page, want);
    let read = LogPage::decode(&want).unwrap();
    assert_eq!((read.head, read.sum), (head, sum));
    assert_eq!(read.records, [map, unmap]);
    assert_eq!(read.last(), 10);
    for at in [0, 63, 64, 4095] {
        let torn = bytes_at(&want, &[(at, &[want[at] ^ 1])]);
        assert_eq!(LogPage::decode(&torn).unwrap_err().field, "checksum");
    }
}

/// The table in `leaf.rs`: unit, generation, state and granules in 80 bits.
#[test]
fn a_leaf_as_bytes() {
    let part = |unit, generation, granules| Part {
        unit,
        generation,
        granules,
    };
    let mut entries = vec![Entry::default(); 4];
    entries[0].own = part(0x123, 0x45, 0x8001);
    entries[3].own = part(1, 2, 1);
    entries[3].second = part(2, 1, 2);
    let stamp = Stamp {
        tag: 9,
        lsn: 8,
        first: 7,
    };
    let (mut own, mut rest) = ([0; PAGE], [0; PAGE]);
    leaf::encode_rest(&entries, stamp, &mut rest).unwrap();
    let place = Place { a: 1, b: 2, sum: 3 };
    leaf::encode_own(&entries, stamp, place, &mut own);
    let want = bytes_at(
        &[0; PAGE],
        &[
            (0, &[1, 0, 4]),
            (8, &[9]),
            (16, &[8]),
            (24, &[7]),
            (32, &[1]),
            (40, &[2]),
            (48, &[3]),
            (64, &[0x23, 0x01, 0, 0, 0x50, 0x04, 0, 0x10, 0x01, 0x80]),
            (94, &[1, 0, 0, 0, 0x20, 0, 0, 0x10, 1, 0]),
        ],
    );
    assert_eq!(own, want);
    let (read, next) = leaf::decode_own(&own, &geometry(), 9, 7).unwrap();
    assert_eq!(next, place);
    let read = leaf::decode_rest(read, &rest, &geometry(), 9, 7).unwrap();
    assert_eq!(read, entries);
    let wrong = |at, byte| leaf::decode_own(&bytes_at(&own, &[(at, &[byte])]), &geometry(), 9, 7);
    for (at, byte) in [(0, 2), (2, 5), (8, 1), (24, 8), (68, 0xff), (71, 0x20)] {
        assert!(wrong(at, byte).is_err(), "{at}");
    }
    assert_eq!(Linear::of(&entries, 0xffff), None);
    let linear = Linear {
        first_unit: 40,
        generation: 2,
    };
    let entries = linear.entries(&geometry());
    assert_eq!(Linear::of(&entries, 0xffff), Some(linear));
}

/// Places of an external device, in a leaf and above it: their bytes, and those that are refused.
#[test]
fn external_places_as_bytes() {
    let stamp = Stamp {
        tag: 1,
        lsn: 2,
        first: 0,
    };
    let own = Part::external(3, 0x00f0);
    let second = Part::NONE;
    let entries = [Entry { own, second }; 4];
    let mut page = [0; PAGE];
    leaf::encode_own(&entries, stamp, Place::default(), &mut page);
    assert_eq!(page[64..74], [0, 0, 0, 0, 0x30, 0, 0, 0x20, 0xf0, 0]);
    let (read, _) = leaf::decode_own(&page, &geometry(), 1, 0).unwrap();
    assert_eq!(read, [own; 4]);
    for (at, byte) in [(64, 1), (68, 0), (71, 0x30), (72, 0)] {
        let wrong = bytes_at(&page, &[(at, &[byte])]);
        let refused = leaf::decode_own(&wrong, &geometry(), 1, 0);
        assert_eq!(refused, Err(wrong_field("leaf", "unit")), "{at}");
    }
    let children = [node::Child::External { generation: 3 }, node::Child::None];
    node::encode(&children, stamp, &mut page);
    assert_eq!(page[96..104], [3, 0, 0, 0, 4, 0, 0, 0]);
    assert_eq!(node::decode(&page, &geometry(), 1, 0).unwrap(), children);
    for (at, byte) in [(64, 1), (88, 1), (96, 0), (99, 1), (104, 1)] {
        let wrong = bytes_at(&page, &[(at, &[byte])]);
        let refused = node::decode(&wrong, &geometry(), 1, 0);
        assert_eq!(refused, Err(wrong_field("interior node", "child")), "{at}");
    }
}

fn wrong_field(structure: &'static str, field: &'static str) -> FormatError {
    FormatError { structure, field }
}

fn identities() -> impl Strategy<Value = Identity> {
    (any::<[u8; 16]>(), "[a-z]{1,255}").prop_map(|(id, name)| Identity {
        id: Uuid::from_bytes(id),
        name,
    })
}

fn records() -> impl Strategy<Value = Record> {
    let version = (0..u32::MAX).prop_map(VersionId);
    prop_oneof![
        (
            version.clone(),
            any::<u64>(),
            0..1u64 << 36,
            1..=u16::MAX,
            any::<u32>()
        )
            .prop_map(|(version, place, unit, granules, sum)| Record::Map {
                version,
                place,
                unit,
                granules,
                checksums: (0..granules.count_ones()).map(|n| sum ^ n).collect(),
            }),
        (version.clone(), any::<u64>(), any::<u64>()).prop_map(|(version, first, granules)| {
            Record::Unmap {
                version,
                first,
                granules,
            }
        }),
        (version.clone(), any::<u64>(), identities(), any::<bool>()).prop_map(
            |(version, units, identity, thick)| Record::Create {
                version,
                units,
                identity,
                thick,
            }
        ),
        proptest::collection::vec((version.clone(), version.clone(), identities()), 1..=8)
            .prop_map(|cuts| Record::Snapshot {
                cuts: cuts
                    .into_iter()
                    .map(|(volume, snapshot, identity)| Cut {
                        volume,
                        snapshot,
                        identity,
                    })
                    .collect(),
            }),
        (version.clone(), version.clone(), identities()).prop_map(|(version, source, identity)| {
            Record::Clone {
                version,
                source,
                identity,
                thick: false,
            }
        }),
        (version.clone(), any::<u64>()).prop_map(|(version, leaf)| Record::Step { version, leaf }),
        version.clone().prop_map(|version| Record::Pass {
            version,
            kind: PassKind::Merge,
        }),
        any::<u64>().prop_map(|lsn| Record::Cancel { lsn }),
        (version.clone(), "[a-z]{1,255}")
            .prop_map(|(version, name)| Record::Rename { version, name }),
        (version.clone(), version.clone(), version.clone()).prop_map(|(version, source, old)| {
            Record::Restore {
                version,
                source,
                old,
            }
        }),
        version
            .clone()
            .prop_map(|version| Record::Detach { version }),
        (version.clone(), version.clone())
            .prop_map(|(version, ancestor)| Record::Decouple { version, ancestor }),
        version
            .clone()
            .prop_map(|version| Record::ReadOnly { version }),
        (version.clone(), version.clone(), version.clone()).prop_map(|(version, source, new)| {
            Record::Prepare {
                version,
                source,
                new,
            }
        }),
        (version.clone(), version.clone())
            .prop_map(|(version, new)| Record::Adopt { version, new }),
        (version, any::<u64>(), identities()).prop_map(|(version, units, identity)| {
            Record::External {
                version,
                units,
                identity,
            }
        }),
        any::<(u64, u64, u64)>().prop_map(|(place, from, to)| Record::Move { place, from, to }),
    ]
}

proptest! {
    /// A record is read as it was written, whatever follows it.
    #[test]
    fn records_and_back(record in records(), after in any::<[u8; 8]>()) {
        let mut bytes = vec![0; record.encoded_len()];
        record.encode(&mut bytes);
        let len = bytes.len();
        bytes.extend(after);
        prop_assert_eq!(Record::decode(&bytes), Ok((record, len)));
        prop_assert!(Record::decode(&bytes[..len - 1]).is_err());
    }

    /// No bytes make a parser panic.
    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        for (_, target) in TARGETS {
            target(&bytes);
        }
    }
}

/// Every fuzz target has a corpus, and no input in it breaks a promise.
#[test]
fn corpus() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../fuzz/corpus");
    for (target, run) in TARGETS {
        let inputs: Vec<_> = std::fs::read_dir(root.join(target)).unwrap().collect();
        assert!(!inputs.is_empty(), "{target} has no corpus");
        for input in inputs {
            let path = input.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            if std::panic::catch_unwind(|| run(&bytes)).is_err() {
                panic!("{target} broke on {}", path.display());
            }
        }
    }
}
