//! Test data for `values_tests`: the keys, remote targets and devices of the configuration file.

use super::values_rows::{BOOL, NO_BOOL, NO_UUID, Row, SIZE_WORDS, UUID};

const NO_TEXT: (&str, &str) = ("true", "true is not text in quotes");

pub const ROWS: &[Row] = &[
    (
        "key.name",
        &["\"web1\""],
        &[("\"\"", "a name of 1 to 128 bytes")],
    ),
    (
        "key.path",
        &["\"/etc/nacre/keys/web1\""],
        &[
            ("\"keys/web1\"", "the path is not absolute"),
            ("true", "true is not a path in quotes"),
        ],
    ),
    (
        "remote.name",
        &["\"far\"", "\"\""],
        &[("\"\\u0007\"", "a name of 1 to 200 characters")],
    ),
    (
        "remote.address",
        &[
            "\"tcp://192.0.2.7/nqn.2026-01.org.example:a\"",
            "\"rdma+tcp://[fd00::7]:4421/nqn.2026-01.org.example:a?nsid=1\"",
        ],
        &[
            ("\"\"", "a target without an address; add address"),
            ("\"192.0.2.7\"", "is not an address: write auto://"),
            ("\"tcp://192.0.2.7\"", "names no subsystem"),
            ("true", "true is not text in quotes"),
        ],
    ),
    ("remote.dhchap_key", &["\"a\""], &[NO_TEXT]),
    ("remote.dhchap_ctrlr_key", &["\"a\""], &[NO_TEXT]),
    ("remote.psk", &["\"a\""], &[NO_TEXT]),
    (
        "bdev.name",
        &["\"b\""],
        &[
            ("\"\"", "a device without a name"),
            ("\" b\"", "white space"),
        ],
    ),
    (
        "bdev.type",
        &["\"malloc\"", "\"null\""],
        &[(
            "\"aio\"",
            "\"aio\" is not \"file\", \"malloc\", \"null\", \"delay\"",
        )],
    ),
    (
        "bdev.path",
        &["\"/srv/b\""],
        &[("true", "true is not a path in quotes")],
    ),
    (
        "bdev.size",
        &["512", "\"1MiB\"", "\"1.5KiB\""],
        &[
            (
                "\"1000\"",
                "1000 bytes are not whole blocks of 512: 1024 are",
            ),
            ("\"1MB\"", "1000000 bytes are not whole blocks of 512"),
            ("0", "0 bytes are not whole blocks"),
            ("\"16EiB\"", "more than 64 bits"),
            SIZE_WORDS[0],
        ],
    ),
    (
        "bdev.block_size",
        &["512", "\"4KiB\""],
        &[
            ("1000", "1000 bytes are not a block: a power of two"),
            ("256", "256 is not from 512 to 65536"),
        ],
    ),
    ("bdev.read_only", BOOL, NO_BOOL),
    ("bdev.uuid", UUID, NO_UUID),
];
