//! Test data for [`super::values`]: one row per key of the configuration file.

/// One row: the key; the accepted values; the refused values, each with a part of the error
/// message. Values are TOML text.
pub(super) type Row = (
    &'static str,
    &'static [&'static str],
    &'static [(&'static str, &'static str)],
);

pub(super) const BOOL: &[&str] = &["true", "false", "\"yes\""];
const NOT_TEXT: (&str, &str) = ("true", "true is not text in quotes");
pub(super) const NO_BOOL: &[(&str, &str)] = &[
    ("\"maybe\"", "\"maybe\" is not true or false"),
    ("3", "3 is not true or false"),
    ("[true]", "a list is not true or false"),
];
const ENDPOINT: &[&str] = &["\"127.0.0.1:9464\"", "\"[::]:9464\""];
const NO_ENDPOINT: &[(&str, &str)] = &[
    (
        "\"9464\"",
        "an IP address and a port, such as 127.0.0.1:9464",
    ),
    ("\":9464\"", "an IP address and a port"),
    ("\"localhost:9464\"", "an IP address and a port"),
    ("9464", "an IP address and a port"),
];
const ROLE: &[&str] = &["[]", "[\"uid:0\", \"group:a\"]"];
const NO_ROLE: &[(&str, &str)] = &[("[\"root\"]", "names no user and no group")];
const NO_PATH: &[(&str, &str)] = &[("\"\"", "the path is empty")];
const NAMES: &[(&str, &str)] = &[
    ("{ a = 1 }", "is not a list"),
    ("[[]]", "is not text in quotes"),
];
pub(super) const NO_UUID: &[(&str, &str)] = &[
    ("\"7\"", "\"7\" is not a UUID, such as"),
    ("true", "true is not text in quotes"),
    (
        "\"00000000-0000-0000-0000-000000000000\"",
        "a UUID of zeroes identifies no",
    ),
];
pub(super) const SIZE_WORDS: &[(&str, &str)] = &[
    (
        "\"many\"",
        "\"many\" is not a size: write a number and a unit",
    ),
    ("-1", "-1 is not a size"),
    ("true", "true is not a size"),
];
pub(super) const UUID: &[&str] = &["\"6a3f2d1e-5b4c-4d3e-8f2a-1b0c9d8e7f6a\""];

const NO_DSCP: &[(&str, &str)] = &[
    ("64", "64 is not from 0 to 63"),
    ("\"x\"", "\"x\" is not a whole number from 0 to 63"),
];
const NO_PRIO: &[(&str, &str)] = &[("8", "8 is not from 0 to 7")];
const NO_SHARE: &[(&str, &str)] = &[("101", "101 is not from 1 to 100")];

pub(super) const ROWS: &[Row] = &[
    (
        "reactor.cores",
        &[
            "\"auto\"",
            "\"auto:2\"",
            "\"auto-numa\"",
            "\"auto-numa:1\"",
            "\"0,2-5\"",
            "\"0x3\"",
            "3",
        ],
        &[
            (
                "\"1-\"",
                "\"1-\" in \"1-\" is not a core or a range; write auto",
            ),
            ("\"\"", "write auto"),
            ("[1]", "a list is not text in quotes"),
        ],
    ),
    (
        "reactor.mode",
        &["\"poll\"", "\"adaptive\"", "\"interrupt\""],
        &[
            (
                "\"Poll\"",
                "\"Poll\" is not \"poll\", \"adaptive\" or \"interrupt\"; did you mean \"poll\"?",
            ),
            ("7", "7 is not \"poll\", \"adaptive\" or \"interrupt\""),
        ],
    ),
    (
        "reactor.busy_poll_us",
        &["0", "100", "\"100us\"", "\"1ms\""],
        &[
            ("\"x\"", "\"x\" is not a time: write a number and a unit"),
            ("-1", "-1 is not a time"),
            ("2000000", "2000000 is not from 0 to 1000000"),
            ("1.5", "1.5 is not a time"),
        ],
    ),
    (
        "memory.hugepages",
        &["\"auto\"", "\"2M\"", "\"1G\"", "\"off\""],
        &[(
            "\"4M\"",
            "\"4M\" is not \"auto\", \"2M\", \"1G\" or \"off\"",
        )],
    ),
    (
        "memory.size_mb",
        &["0", "512", "\"2GiB\""],
        &[
            ("\"1000k\"", "\"1000k\" is not a whole number of MiB"),
            ("99999999", "99999999 is not from 0 to 16777216"),
        ],
    ),
    (
        "memory.numa_mb",
        &["[]", "[0]", "[512]"],
        &[
            ("[\"1000k\"]", "is not a whole number"),
            ("512", "512 is not a list"),
            ("[99999999]", "99999999 is not from 0 to 16777216"),
        ],
    ),
    ("rpc.enabled", BOOL, NO_BOOL),
    (
        "rpc.socket",
        &["\"auto\"", "\"/run/x.sock\""],
        &[
            ("\"\"", "the path is empty"),
            ("true", "true is not text in quotes"),
        ],
    ),
    (
        "rpc.max_clients",
        &["1", "\"64\""],
        &[
            ("0", "0 is not from 1 to 1024"),
            ("\"x\"", "\"x\" is not a whole number from 1 to 1024"),
        ],
    ),
    (
        "rpc.deadline_s",
        &["1", "\"1m\""],
        &[
            ("0", "0 is not from 1 to 3600"),
            ("\"500ms\"", "\"500ms\" is not a whole number of 1s"),
        ],
    ),
    ("rpc.allowed", &["[]", "[\"bdev_get_bdevs\"]"], NAMES),
    ("rpc.access.admin", ROLE, NO_ROLE),
    ("rpc.access.operator", ROLE, NO_ROLE),
    ("rpc.access.viewer", ROLE, NO_ROLE),
    ("rpc.access.methods.operator", &["[]"], NAMES),
    ("rpc.access.methods.viewer", &["[\"volume_list\"]"], NAMES),
    ("rpc.audit.file", &["\"auto\"", "\"/a\""], NO_PATH),
    ("rpc.audit.max_size_mb", &["1"], &[("0", "from 1")]),
    ("security.sandbox", &["\"log\""], &[("1", "1 is not")]),
    ("security.capabilities", &["[\"CAP_KILL\"]"], NAMES),
    ("security.core_dumps", BOOL, NO_BOOL),
    ("rpc.audit.files", &["2"], &[("1", "not from 2 to 100")]),
    ("metrics.token_file", &["\"/a\""], NO_PATH),
    ("rpc.tls.cert", &["\"/a\""], NO_PATH),
    ("rpc.tls.key", &["\"/a\""], NO_PATH),
    ("rpc.tls.client_ca", &["\"/a\""], NO_PATH),
    ("rpc.tls.client_crl", &["\"/a\""], NO_PATH),
    ("metrics.tls.cert", &["\"/a\""], NO_PATH),
    ("metrics.tls.key", &["\"/a\""], NO_PATH),
    ("metrics.tls.client_ca", &["\"/a\""], NO_PATH),
    ("metrics.tls.client_crl", &["\"/a\""], NO_PATH),
    (
        "web.listen",
        &["\"https://0.0.0.0:8443\"", "[]", "[\"http://[::1]:80\"]"],
        &[
            ("\"0.0.0.0:8443\"", "does not begin with https://"),
            ("\"https://host:8443\"", "is not an IP address with a port"),
            (
                "\"http://0.0.0.0:80\"",
                "passwords would cross the network in clear",
            ),
            ("true", "a list of addresses"),
        ],
    ),
    ("web.cert", &["\"/a\""], NO_PATH),
    ("web.key", &["\"/a\""], NO_PATH),
    (
        "log.level",
        &["\"error\"", "\"debug\""],
        &[(
            "\"verbose\"",
            "\"verbose\" is not \"error\", \"warning\", \"notice\", \"info\" or \"debug\"",
        )],
    ),
    (
        "log.format",
        &["\"text\"", "\"json\""],
        &[("\"xml\"", "\"xml\" is not \"text\" or \"json\"")],
    ),
    (
        "log.file",
        &["\"/var/log/nacre.log\""],
        &[
            ("\"\"", "the path is empty"),
            ("true", "true is not a path in quotes"),
        ],
    ),
    ("log.timestamps", BOOL, NO_BOOL),
    (
        "log.flags",
        &["[]", "[\"nvmf\"]"],
        &[
            ("3", "is not a list"),
            ("[[]]", "is not text in quotes"),
            (
                "[\"rpc\", \"nvmff\"]",
                "no log flag is called \"nvmff\"; did you mean \"nvmf\"?",
            ),
        ],
    ),
    ("metrics.listen", ENDPOINT, NO_ENDPOINT),
    ("rpc.tls.listen", ENDPOINT, NO_ENDPOINT),
    (
        "data.dir",
        &["\"auto\"", "\"none\"", "\"/srv\""],
        &[
            ("\"\"", "the path is empty"),
            ("[]", "a list is not text in quotes"),
        ],
    ),
    (
        "data.retry_s",
        &["0", "\"10s\""],
        &[("\"soon\"", "\"soon\" is not a time")],
    ),
    (
        "nvmf.max_subsystems",
        &["1"],
        &[("0", "0 is not from 1 to 65536")],
    ),
    (
        "nvmf.max_connections",
        &["1"],
        &[("-1", "-1 is not a whole number from 1 to 1000000")],
    ),
    (
        "nvmf.max_pending_connections",
        &["1"],
        &[("99999", "99999 is not from 1 to 65536")],
    ),
    (
        "nvmf.max_queue_depth",
        &["2", "4096"],
        &[
            ("1", "1 is not from 2 to 4096"),
            ("70000", "70000 is not a whole number from 2 to 4096"),
        ],
    ),
    (
        "nvmf.max_io_qpairs_per_ctrlr",
        &["1"],
        &[("0", "0 is not from 1 to 65534")],
    ),
    (
        "nvmf.in_capsule_data_size",
        &["0", "\"8KiB\"", "\"16k\""],
        &[
            ("100", "100 is not a multiple of 16"),
            ("\"2MiB\"", "2097152 is not from 0 to 1048576"),
            ("\"8Kib/s\"", "is not a size"),
        ],
    ),
    (
        "nvmf.max_io_size",
        &["1048576", "\"1MiB\""],
        &[
            ("1000000", "1000000 is not a power of two"),
            ("\"64MiB\"", "67108864 is not from 4096 to 16777216"),
            ("\"9GiB\"", "is more than 4294967295"),
        ],
    ),
    (
        "nvmf.discovery_port",
        &["0", "8009"],
        &[("70000", "70000 is not a whole number from 0 to 65535")],
    ),
    (
        "nvmf.discovery_nqn",
        &[
            "\"auto\"",
            "\"well-known\"",
            "\"nqn.2026-01.org.example:d\"",
        ],
        &[("\"me\"", "\"me\": the name does not begin with")],
    ),
    (
        "nvmf.rdma",
        &["\"off\"", "\"require\""],
        &[(
            "\"yes\"",
            "\"yes\" is not \"off\", \"prefer\" or \"require\"",
        )],
    ),
    (
        "nvmf.dhchap_digests",
        &["[\"sha512\", \"sha256\"]"],
        &[
            ("[]", "none is allowed"),
            ("[\"md5\"]", "\"md5\" is not one of sha256, sha384, sha512"),
        ],
    ),
    (
        "nvmf.dhchap_dhgroups",
        &["[\"ffdhe2048\"]"],
        &[
            ("[]", "none is allowed"),
            (
                "[\"ffdhe1024\"]",
                "\"ffdhe1024\" is not one of null, ffdhe2048",
            ),
        ],
    ),
    ("nvmf.tls_key_updates", BOOL, NO_BOOL),
    (
        "nvmf.listen",
        &["[]", "[\"tcp://10.0.0.4\", \"rdma://[fd00::4]:4420\"]"],
        &[
            (
                "[\"eth0:4420\"]",
                "\"eth0:4420\" is not an address: write tcp://",
            ),
            ("[\"tcp://h:70000\"]", "\"70000\" is not a port"),
            ("\"tcp://10.0.0.4\"", "\"tcp://10.0.0.4\" is not a list"),
        ],
    ),
    (
        "nvmf.listener.name",
        &["\"data\""],
        &[("\"\"", "a listener without a name")],
    ),
    (
        "nvmf.listener.iface",
        &["[]", "[\"name:eth0\", \"subnet:fd00::/64\"]"],
        &[
            ("\"name:eth0\"", "\"name:eth0\" is not a list"),
            ("[\"eth0\"]", "\"eth0\" is no selector; write name:eth0"),
            ("[\"ip:10.0\"]", "\"10.0\" is not an IP address"),
        ],
    ),
    (
        "nvmf.listener.address",
        &["\"127.0.0.1\"", "\"::1\"", "\"[::1]\""],
        &[("\"localhost\"", "\"localhost\" is not an IP address")],
    ),
    (
        "nvmf.listener.port",
        &["4420", "\"4420\""],
        &[
            ("0", "0 is not from 1 to 65535"),
            ("70000", "70000 is not a whole number from 1 to 65535"),
            ("\"x\"", "\"x\" is not a whole number from 1 to 65535"),
        ],
    ),
    (
        "nvmf.listener.transports",
        &["[\"tcp\"]", "[\"rdma\", \"tcp\"]"],
        &[
            ("[\"fc\"]", "\"fc\" is not \"tcp\" or \"rdma\""),
            ("\"tcp\"", "\"tcp\" is not a list"),
            ("[\"rdma\"]", "it would listen on nothing"),
        ],
    ),
    (
        "nvmf.listener.rdma",
        &["\"off\"", "\"prefer\""],
        &[("true", "true is not \"off\", \"prefer\" or \"require\"")],
    ),
    (
        "nvmf.listener.tcp_fallback",
        &["true"],
        &[
            ("false", "false without RDMA leaves hosts no way"),
            ("\"maybe\"", "is not true or false"),
        ],
    ),
    (
        "nvmf.listener.ana.rdma",
        &["\"optimized\""],
        &[(
            "\"good\"",
            "\"good\" is not \"auto\", \"optimized\", \"non-optimized\" or \"inaccessible\"",
        )],
    ),
    (
        "nvmf.listener.ana.tcp",
        &["\"auto\"", "\"inaccessible\""],
        &[("\"non_optimized\"", "did you mean \"non-optimized\"?")],
    ),
    (
        "nvmf.listener.rdma_device",
        &["\"mlx5_0\""],
        &[("[]", "a list is not text in quotes")],
    ),
    (
        "nvmf.listener.rdma_port",
        &["1"],
        &[("300", "300 is not a whole number from 1 to 255")],
    ),
    (
        "nvmf.listener.rdma_gid_index",
        &["3"],
        &[("-1", "-1 is not a whole number from 0 to 65535")],
    ),
    ("nvmf.listener.allow_software", BOOL, NO_BOOL),
    (
        "nvmf.listener.tls",
        &["\"off\"", "\"allow\"", "\"require\""],
        &[("\"on\"", "\"on\" is not \"off\", \"allow\" or \"require\"")],
    ),
    (
        "nvmf.listener.fabric",
        &["\"infiniband\"", "\"roce\"", "\"roce_v2\"", "\"iwarp\""],
        &[(
            "\"ethernet\"",
            "\"ethernet\" is not \"infiniband\", \"roce\", \"roce_v2\" or \"iwarp\"",
        )],
    ),
    (
        "nvmf.listener.in_capsule_data_size",
        &["8192", "\"8KiB\""],
        &[("100", "100 is not a multiple of 16"), SIZE_WORDS[0]],
    ),
    (
        "nvmf.listener.max_queue_depth",
        &["2"],
        &[("1", "1 is not from 2 to 4096")],
    ),
    (
        "nvmf.listener.tos",
        &["0", "104"],
        &[("256", "256 is not a whole number from 0 to 255")],
    ),
    (
        "nvmf.listener.idle_timeout_s",
        &["0", "300", "\"5min\""],
        &[
            ("86401", "86401 is not from 0 to 86400"),
            ("\"soon\"", "\"soon\" is not a time"),
        ],
    ),
    (
        "nvmf.subsystem.nqn",
        &["\"nqn.2026-01.org.example:b\""],
        &[
            ("\"\"", "a subsystem without an NQN"),
            ("\"foo\"", "\"foo\": the name does not begin with"),
            ("\"nqn.2026-13.org.example:a\"", "is not a date"),
            ("\"nqn.2014-08.org.nvmexpress.discovery\"", "exists"),
        ],
    ),
    (
        "nvmf.subsystem.serial_number",
        &["\"S1\"", "7"],
        &[("\"123456789012345678901\"", "at most 20 printable ASCII")],
    ),
    (
        "nvmf.subsystem.model_number",
        &["\"M\""],
        &[("\"\u{e4}\"", "at most 40 printable ASCII")],
    ),
    ("nvmf.subsystem.allow_any_host", BOOL, NO_BOOL),
    ("nvmf.subsystem.ana_reporting", BOOL, NO_BOOL),
    (
        "nvmf.subsystem.controller_model",
        &["\"dynamic\"", "\"static\""],
        &[("\"both\"", "\"both\" is not \"dynamic\" or \"static\"")],
    ),
    (
        "nvmf.subsystem.min_cntlid",
        &["1"],
        &[
            ("0", "0 is not from 1 to 65519"),
            ("65520", "65520 is not from"),
        ],
    ),
    (
        "nvmf.subsystem.max_cntlid",
        &["65519"],
        &[("65520", "65520 is not from 1 to 65519")],
    ),
    (
        "nvmf.subsystem.host.nqn",
        &["\"nqn.2026-01.org.example:h\""],
        &[("\"\"", "the name is empty")],
    ),
    (
        "nvmf.subsystem.host.dhchap_key",
        &["\"web1\""],
        &[
            ("\"\"", "a host without a key"),
            ("true", "true is not text in quotes"),
        ],
    ),
    (
        "nvmf.subsystem.host.dhchap_ctrlr_key",
        &["\"target1\""],
        &[("true", "true is not text in quotes")],
    ),
    (
        "nvmf.subsystem.host.psk",
        &["\"web1-tls\""],
        &[("true", "true is not text in quotes")],
    ),
    ("nvmf.subsystem.host.concat", BOOL, NO_BOOL),
    (
        "nvmf.subsystem.hosts",
        &["[]", "[\"nqn.2026-01.org.example:h\"]"],
        &[
            ("[\"\"]", "the name is empty"),
            ("\"x\"", "\"x\" is not a list"),
        ],
    ),
    (
        "nvmf.subsystem.listeners",
        &["[]"],
        &[("[\"x\"]", "no [[nvmf.listener]] is named \"x\"")],
    ),
    (
        "nvmf.subsystem.namespace.nsid",
        &["0", "32"],
        &[
            ("33", "33 is not from 0 to 32"),
            (
                "4294967296",
                "4294967296 is not a whole number from 0 to 32",
            ),
        ],
    ),
    (
        "nvmf.subsystem.namespace.bdev",
        &["\"b\""],
        &[("\"\"", "a namespace without a device")],
    ),
    ("nvmf.subsystem.namespace.uuid", UUID, NO_UUID),
    (
        "rdma.device",
        &["\"mlx5_0\""],
        &[("[]", "a list is not text in quotes")],
    ),
    ("rdma.port", &["1"], &[("0", "0 is not from 1 to 255")]),
    (
        "rdma.gid_index",
        &["3"],
        &[("70000", "70000 is not a whole number from 0 to 65535")],
    ),
    ("rdma.allow_software", BOOL, NO_BOOL),
    ("rdma.rxe", &["[]", "[\"eth0\"]"], NAMES),
    (
        "rdma.max_qpairs",
        &["1"],
        &[("0", "0 is not from 1 to 1048576")],
    ),
    (
        "rdma.in_capsule_data_size",
        &["4096", "\"4k\""],
        &[("100", "100 is not a multiple of 16"), SIZE_WORDS[1]],
    ),
    (
        "rdma.srq_size",
        &["0", "2048"],
        &[("300000", "300000 is not from 0 to 262144")],
    ),
    (
        "rdma.cq_size",
        &["1"],
        &[("0", "0 is not from 1 to 4194304")],
    ),
    ("rdma.max_sge", &["16"], &[("65", "65 is not from 1 to 64")]),
    (
        "rdma.max_inline_data",
        &["0", "\"64B\""],
        &[
            SIZE_WORDS[0],
            ("\"1MiB\"", "1048576 is not from 0 to 65536"),
        ],
    ),
    (
        "rdma.read_depth",
        &["1"],
        &[("256", "256 is not a whole number from 1 to 255")],
    ),
    (
        "rdma.max_mr_size",
        &["1073741824", "\"1GiB\""],
        &[SIZE_WORDS[0], ("\"1MiB\"", "1048576 is not from 16777216")],
    ),
    (
        "rdma.poll_batch",
        &["1"],
        &[("2000", "2000 is not from 1 to 1024")],
    ),
    ("rdma.backlog", &["1"], &[("0", "0 is not from 1 to 65535")]),
    (
        "rdma.connect_timeout_ms",
        &["20000", "\"20s\""],
        &[("\"x\"", "\"x\" is not a time"), ("0", "0 is not from 1")],
    ),
    (
        "rdma.tos",
        &["0"],
        &[("\"x\"", "\"x\" is not a whole number from 0 to 255")],
    ),
    (
        "rdma.ack_timeout",
        &["31"],
        &[("32", "32 is not from 0 to 31")],
    ),
    ("qos.storage.dscp", &["26"], NO_DSCP),
    ("qos.storage.prio", &["3"], NO_PRIO),
    ("qos.storage.share", &["50"], NO_SHARE),
    ("qos.replication.dscp", &["26"], NO_DSCP),
    ("qos.replication.prio", &["3"], NO_PRIO),
    ("qos.replication.share", &["50"], NO_SHARE),
    ("qos.default.prio", &["3"], NO_PRIO),
    (
        "qos.lossless",
        &["false"],
        &[
            ("\"maybe\"", "\"maybe\" is not true or false"),
            ("true", "needs prio in storage or replication"),
        ],
    ),
    (
        "replication.transport",
        &["\"auto\"", "\"rdma\"", "\"tcp\""],
        &[("\"fc\"", "\"fc\" is not \"auto\", \"rdma\" or \"tcp\"")],
    ),
    (
        "replication.fallback",
        &["\"tcp\"", "\"none\""],
        &[("\"off\"", "\"off\" is not \"tcp\" or \"none\"")],
    ),
    (
        "replication.iface",
        &["[]", "[\"mac:02:00:5e:00:53:01\"]"],
        &[("[\"eth0\"]", "\"eth0\" is no selector; write name:eth0")],
    ),
    (
        "replication.connection_retries",
        &["1"],
        &[
            ("2000", "2000 is not from 0 to 1000"),
            ("0", "0 tries RDMA forever"),
        ],
    ),
    (
        "replication.retry_delay_ms",
        &["10", "\"1s\""],
        &[("0", "0 is not from 10 to 600000")],
    ),
    (
        "replication.cm_timeout_ms",
        &["100", "\"5s\""],
        &[("99", "99 is not from 100 to 600000")],
    ),
    (
        "replication.rdma_reprobe_s",
        &["0", "\"1m\""],
        &[("100000", "100000 is not from 0 to 86400")],
    ),
    (
        "replication.keep_alive_ms",
        &["0", "500", "\"5s\""],
        &[("499", "499 is neither 0 nor from 500 to 600000")],
    ),
    ("replication.dhchap_key", &["\"own\""], &[NOT_TEXT]),
    ("replication.psk", &["\"far-tls\""], &[NOT_TEXT]),
    ("replication.dhchap_ctrlr_key", &["\"far\""], &[NOT_TEXT]),
    (
        "replication.tls",
        &["\"prefer\"", "\"require\""],
        &[("\"off\"", "\"off\" is not \"prefer\" or \"require\"")],
    ),
    (
        "replication.max_inline_data",
        &["0", "\"512B\""],
        &[
            SIZE_WORDS[0],
            ("\"1MiB\"", "1048576 is not from 0 to 65536"),
        ],
    ),
    (
        "replication.fast_fail_ms",
        &["0", "\"5s\""],
        &[("\"x\"", "\"x\" is not a time")],
    ),
];
