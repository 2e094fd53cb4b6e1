//! Test data for [`super::values`]: the keys, remote targets, devices and volume store of the
//! configuration file.

use super::values_rows::{BOOL, NO_BOOL, NO_UUID, Row, SIZE_WORDS, UUID};

const NO_TEXT: (&str, &str) = ("true", "true is not text in quotes");

const NO_NAME: &[(&str, &str)] = &[("\"\"", "a name of 1 to 128 bytes"), NO_TEXT];
const NO_FILE: &[(&str, &str)] = &[
    ("\"\"", "the path is empty"),
    ("true", "true is not a path in quotes"),
];
const SEVERITY: &[&str] = &["\"info\"", "\"error\""];
const NO_SEVERITY: &[(&str, &str)] = &[("\"bad\"", "\"bad\" is not \"info\", \"warning\"")];
const CATEGORIES: &[&str] = &["[]", "[\"volume\", \"replica\"]"];
const NO_CATEGORIES: &[(&str, &str)] = &[("true", "true is not a list")];
const EXCEPT: &[&str] = &["[\"nvme_reset\"]"];
const NO_EXCEPT: &[(&str, &str)] = &[("true", "true is not a list")];
const SECONDS: &[&str] = &["0", "60"];
const NO_GATHER: &[(&str, &str)] = &[
    ("3601", "3601 is not from 0 to 3600"),
    ("\"soon\"", "\"soon\" is not"),
];
const NO_RETRY: &[(&str, &str)] = &[
    ("86401", "86401 is not from 0 to 86400"),
    ("-1", "-1 is not"),
];

pub(super) const ROWS: &[Row] = &[
    ("alert.webhook.name", &["\"pager\""], NO_NAME),
    (
        "alert.webhook.url",
        &["\"https://a.example.org/b?c=d\"", "\"http://[::1]:8080\""],
        &[
            ("\"a.example.org\"", "no scheme http:// or https://"),
            ("\"https://u:p@a/\"", "a user or a password"),
            NO_TEXT,
        ],
    ),
    (
        "alert.webhook.url_file",
        &["\"/etc/nacre/keys/a\""],
        NO_FILE,
    ),
    ("alert.webhook.url_key", &["\"a\""], NO_NAME),
    ("alert.webhook.secret_file", &["\"/a\""], NO_FILE),
    ("alert.webhook.secret_key", &["\"a\""], NO_NAME),
    ("alert.webhook.token_key", &["\"a\""], NO_NAME),
    ("alert.webhook.token_file", &["\"/a\""], NO_FILE),
    ("alert.webhook.ca", &["\"/a.pem\""], NO_FILE),
    ("alert.webhook.severity", SEVERITY, NO_SEVERITY),
    ("alert.webhook.categories", CATEGORIES, NO_CATEGORIES),
    ("alert.webhook.except", EXCEPT, NO_EXCEPT),
    ("alert.webhook.gather_s", SECONDS, NO_GATHER),
    ("alert.webhook.retry_for_s", SECONDS, NO_RETRY),
    ("alert.mail.name", &["\"ops\""], NO_NAME),
    (
        "alert.mail.server",
        &["\"mail.example.org\"", "\"[::1]:25\""],
        &[
            ("\"a:b\"", "is not a host with an optional port"),
            ("\"\"", "is not a host with an optional port"),
            NO_TEXT,
        ],
    ),
    (
        "alert.mail.tls",
        &["\"starttls\"", "\"implicit\"", "\"off\""],
        &[("\"ssl\"", "\"ssl\" is not \"starttls\", \"implicit\"")],
    ),
    ("alert.mail.user", &["\"nacre\""], &[NO_TEXT]),
    ("alert.mail.password_file", &["\"/a\""], NO_FILE),
    ("alert.mail.password_key", &["\"a\""], NO_NAME),
    ("alert.mail.ca", &["\"/a.pem\""], NO_FILE),
    (
        "alert.mail.from",
        &["\"a@example.org\"", "\"A <a@example.org>\""],
        &[("\"a\"", "is not a mail address"), NO_TEXT],
    ),
    (
        "alert.mail.to",
        &["[\"a@example.org\", \"b@example.org\"]"],
        &[("[]", "mail without a recipient")],
    ),
    ("alert.mail.severity", SEVERITY, NO_SEVERITY),
    ("alert.mail.categories", CATEGORIES, NO_CATEGORIES),
    ("alert.mail.except", EXCEPT, NO_EXCEPT),
    ("alert.mail.gather_s", SECONDS, NO_GATHER),
    ("alert.mail.retry_for_s", SECONDS, NO_RETRY),
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
        "key.expires",
        &["\"2027-01-31\"", "\"2027-01-31T12:00:00Z\""],
        &[("\"tomorrow\"", "is not a date"), NO_TEXT],
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
            "[\"rdma://192.0.2.7/nqn.2026-01.org.example:a?nsid=1\", \"tcp://192.0.2.7/nqn.2026-01.org.example:a\"]",
        ],
        &[
            ("\"\"", "a target without an address; add address"),
            ("\"192.0.2.7\"", "is not an address: write auto://"),
            ("\"tcp://192.0.2.7\"", "names no subsystem"),
            ("true", "true is not text in quotes, nor a list"),
            ("[]", "a target without an address; add address"),
            ("[true]", "true is not text in quotes"),
        ],
    ),
    (
        "remote.policy",
        &["\"active_passive\"", "\"active_active\""],
        &[(
            "\"both\"",
            "\"both\" is not \"active_passive\" or \"active_active\"",
        )],
    ),
    (
        "remote.selector",
        &["\"round_robin\"", "\"queue_depth\""],
        &[(
            "\"random\"",
            "\"random\" is not \"round_robin\" or \"queue_depth\"",
        )],
    ),
    (
        "remote.min_io",
        &["1", "32"],
        &[
            ("0", "a path gets at least one I/O"),
            ("-1", "-1 is not a whole number"),
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
    (
        "cluster.name",
        &["\"lab\"", "\"a.b_c-1\""],
        &[
            ("\"a/b\"", "\"a/b\" is not 1 to 64 letters"),
            ("\"\"", "is not 1 to 64 letters"),
            NO_TEXT,
        ],
    ),
    (
        "cluster.node",
        &["\"ant\""],
        &[
            ("\"\"", "is not 1 to 63 bytes"),
            ("\"a\\tb\"", "without control characters"),
            NO_TEXT,
        ],
    ),
    (
        "cluster.replace_after",
        &["\"10m\"", "\"90s\"", "\"off\""],
        &[
            ("\"soon\"", "or \"off\""),
            ("\"0s\"", "longer than 0"),
            NO_TEXT,
        ],
    ),
    ("cluster.balance", BOOL, NO_BOOL),
    (
        "store.endpoints",
        &["[\"http://127.0.0.1:2379\"]"],
        &[
            ("\"x\"", "\"x\" is not a list"),
            ("[\"127.0.0.1:2379\"]", "not a URL like"),
            ("[\"http://h:1/x\"]", "not a URL like"),
            (
                "[\"http://h\",\"http://h\",\"http://h\",\"http://h\",\"http://h\",\"http://h\"]",
                "6 endpoints, and 5 are the most",
            ),
        ],
    ),
    (
        "store.prefix",
        &["\"node1\""],
        &[("\"a/b\"", "\"a/b\" is not 1 to 64 letters"), NO_TEXT],
    ),
    ("store.ca", &["\"/a\""], NO_FILE),
    ("store.cert", &["\"/a\""], NO_FILE),
    ("store.key", &["\"/a\""], NO_FILE),
    ("store.user", &["\"nacre\""], &[NO_TEXT]),
    ("store.password_file", &["\"/a\""], NO_FILE),
    (
        "store.deadline_ms",
        &["5000", "\"2s\""],
        &[("10", "10 is not from 500 to 60000")],
    ),
    ("store.compact", BOOL, NO_BOOL),
    (
        "store.take_over",
        UUID,
        &[
            ("\"7\"", "\"7\" is not a UUID, such as"),
            ("true", "true is not text in quotes"),
        ],
    ),
];
