//! Goal: layers override in order, every error names the place and a suggestion, and the committed
//! sample is complete and equal to the defaults.

mod values;
mod values_list_rows;
mod values_rows;

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use super::*;
use serde_json::json;

const SAMPLE: &str = include_str!("../../../../nacre.sample.toml");

fn env(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs
        .iter()
        .map(|(k, v)| ((*k).into(), (*v).into()))
        .collect()
}

fn problems(text: &str) -> Vec<String> {
    let error = load_text(Some(("nacre.toml", text)), [], &[]).unwrap_err();
    error.problems.iter().map(ToString::to_string).collect()
}

#[test]
fn each_layer_overrides_the_one_before() {
    let file = "[reactor]\ncores = \"2\"\nbusy_poll_us = 7\n[rpc]\nsocket = \"/file\"\n";
    let vars = env(&[
        ("NACRE_REACTOR_BUSY_POLL_US", "8"),
        ("NACRE_SERVE_RPC_SOCKET", "/env"),
        ("NACRE_RPC_ALLOWED", "a, b"),
        ("HOME", "/"),
    ]);
    let flags = [Flag {
        key: "rpc.socket",
        value: json!("/flag"),
        flag: "--rpc-socket",
    }];
    let loaded = load_text(Some(("nacre.toml", file)), vars, &flags).unwrap();
    let s = &loaded.settings;
    assert_eq!((s.reactor.cores.as_str(), s.reactor.busy_poll_us), ("2", 8));
    assert_eq!(
        (s.rpc.socket.as_str(), s.rpc.allowed.clone()),
        ("/flag", vec!["a".into(), "b".into()])
    );
    assert_eq!(s.log, settings::Log::default());
    for (key, origin) in [
        ("reactor.cores", "nacre.toml:2"),
        ("reactor.busy_poll_us", "$NACRE_REACTOR_BUSY_POLL_US"),
        ("rpc.socket", "--rpc-socket"),
        ("log.level", "default"),
    ] {
        assert_eq!(origin_of(&loaded.origins, key), origin, "{key}");
    }
}

#[test]
fn unknown_keys_are_refused_with_a_suggestion() {
    assert_eq!(
        problems(
            "[reactor]\ncoers = \"2\"\n\n[metrix]\nlisten = \"x\"\n[[nvmf.subsystem]]\nnqn = \"nqn.2026-01.a:b\"\nallow_any_hosts = true\n"
        ),
        [
            "nacre.toml:2: unknown key \"reactor.coers\"; did you mean \"reactor.cores\"?",
            "nacre.toml:4: unknown key \"metrix\"; did you mean \"metrics\"?",
            "nacre.toml:8: unknown key \"nvmf.subsystem.allow_any_hosts\"; did you mean \"nvmf.subsystem.allow_any_host\"?",
        ]
    );
    let error = load_text(None, env(&[("NACRE_REACTOR_CORE", "1")]), &[]).unwrap_err();
    assert_eq!(
        error.problems[0].to_string(),
        "$NACRE_REACTOR_CORE: unknown variable NACRE_REACTOR_CORE; did you mean NACRE_REACTOR_CORES?"
    );
    load_text(
        None,
        env(&[
            ("NACRE_SERVICE_HOST", "10.0.0.1"),
            ("NACRE_PORT_4420_TCP", "x"),
            // Kubernetes variables of services called nacre-rdma and nacre-rpc.
            ("NACRE_RDMA_PORT", "tcp://10.0.0.1:4420"),
            ("NACRE_RDMA_SERVICE_PORT_NVMF", "4420"),
            ("NACRE_RPC_PORT_9009_UDP_PROTO", "udp"),
            ("NACRE_RPC_SERVICE_HOST", "10.0.0.2"),
            // Variables of a developer's shell.
            ("NACRE_VM_CACHE", "/srv/vm"),
            ("NACRE_SPDK_DIR", "/opt/spdk"),
            ("NACRE_TEST_SEED", "7"),
            // Variables of the commands that connect to a target.
            ("NACRE_HOSTNQN", "nqn.2014-08.org.nvmexpress:uuid:1"),
            ("NACRE_HOSTID", "1"),
            ("NACRE_CONFIG", "/etc/nacre.toml"),
        ]),
        &[],
    )
    .unwrap();
}

/// Goal: a variable has one meaning. The commands' socket variable does not change the daemon's
/// socket, and a port from Kubernetes is not a setting.
#[test]
fn the_socket_of_the_daemon_has_its_own_variable() {
    let file = "[rpc]\nsocket = \"/file\"\n";
    let socket = |vars: &[(&str, &str)]| {
        let loaded = load_text(Some(("nacre.toml", file)), env(vars), &[]).unwrap();
        (loaded.settings.rpc.socket, loaded.settings.rdma.port)
    };
    assert_eq!(
        socket(&[("NACRE_RPC_SOCKET", "/commands")]),
        ("/file".into(), None)
    );
    assert_eq!(
        socket(&[
            ("NACRE_SERVE_RPC_SOCKET", "/daemon"),
            ("NACRE_RDMA_PORT", "2")
        ]),
        ("/daemon".into(), Some(2))
    );
    let url = ("NACRE_RDMA_PORT", "tcp://10.0.0.1:4420");
    assert_eq!(socket(&[url]), ("/file".into(), None));
}

/// Goal: variables of other programs may contain any bytes; a Nacre variable that is not UTF-8 is
/// refused by name.
#[test]
fn only_variables_of_nacre_must_be_utf8() {
    let bytes = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    let others = [
        (bytes(b"LC_\xff"), bytes(b"\xff")),
        (bytes(b"NACRE_HOSTID"), bytes(b"\xff")),
    ];
    load_text(None, others, &[]).unwrap();
    let ours = [
        (bytes(b"NACRE_DATA_DIR"), bytes(b"/\xff")),
        (bytes(b"NACRE_RPC_\xff"), bytes(b"x")),
    ];
    let error = load_text(None, ours, &[]).unwrap_err();
    let messages: Vec<String> = error.problems.iter().map(ToString::to_string).collect();
    assert_eq!(messages[0], "$NACRE_DATA_DIR: NACRE_DATA_DIR is not UTF-8");
    assert!(
        messages[1].starts_with("$NACRE_RPC_\u{fffd}: unknown variable"),
        "{messages:?}"
    );
}

/// Goal: errors that concern several keys, or the file, name key and line. Values of single keys
/// are in `values.rs`.
#[test]
fn errors_of_several_keys_name_key_and_line() {
    for (text, expected) in [
        (
            "[nvmf]\nin_capsule_data_size = 8192\nmax_io_size = 4096",
            "nacre.toml:2: nvmf.in_capsule_data_size: 8192 is more than max_io_size (4096)",
        ),
        (
            "[nvmf]\nmax_io_size = \"16MiB\"\nlisten = [\"rdma://10.0.0.4\"]",
            "nacre.toml:2: nvmf.max_io_size: 16777216 is more than 8388608, the most over RDMA",
        ),
        ("[metrics\n", "nacre.toml:1: not TOML"),
        (
            "[[bdev]]\nname = \"a\"\ntype = \"malloc\"",
            "nacre.toml:1: bdev[0].size: a device without a size; add size",
        ),
        (
            "[[bdev]]\nname = \"a\"",
            "nacre.toml:1: bdev[0].path: a file device without a path; add path",
        ),
        (
            "[[bdev]]\nname = \"a\"\npath = \"/a\"\n[[bdev]]\nname = \"a\"\npath = \"/b\"",
            "nacre.toml:5: bdev[1].name: ",
        ),
        (
            "[[bdev]]\nname = \"a\"\ntype = \"null\"\nsize = \"1MB\"\nblock_size = 4096",
            "nacre.toml:4: bdev[0].size: 1000000 bytes are not whole blocks of 4096: 1003520 are",
        ),
        (
            "[[nvmf.listener]]\nname = \"data\"\n[[nvmf.subsystem]]\nnqn = \"nqn.2026-01.a.b:c\"\nlisteners = [\"dat\"]",
            "nacre.toml:5: nvmf.subsystem[0].listeners[0]: no [[nvmf.listener]] is named \"dat\"; did you mean \"data\"?",
        ),
        (
            "[[nvmf.subsystem]]\nnqn = \"nqn.2026-01.a.b:c\"\n[[nvmf.subsystem]]\nnqn = \"nqn.2026-01.a.b:c\"",
            "nacre.toml:4: nvmf.subsystem[1].nqn: ",
        ),
        (
            "[[nvmf.subsystem]]\nnqn = \"nqn.2026-01.a.b:c\"\nnamespace = [{ bdev = \"x\", nsid = 1 }, { bdev = \"y\", nsid = 1 }]",
            "nacre.toml:3: nvmf.subsystem[0].namespace[1].nsid: a second namespace with the id 1",
        ),
        (
            "[[nvmf.listener]]\ntransports = [\"tcp\"]\nrdma = \"prefer\"",
            "nacre.toml:3: nvmf.listener[0].rdma: rdma = \"prefer\" without \"rdma\" in transports",
        ),
        (
            "[[nvmf.listener]]\n[[nvmf.listener]]",
            "nacre.toml:2: nvmf.listener[1].name: a second listener \"default\"",
        ),
        (
            "[[remote]]\naddress = \"rdma+tcp://192.0.2.7/nqn.2026-01.a.b:c\"\npsk = \"k\"",
            "nacre.toml:3: remote[0].psk: TLS is for TCP",
        ),
        (
            "[[remote]]\naddress = \"tcp://192.0.2.7/nqn.2026-01.a.b:c\"\nnum_io_queues = \"x\"",
            "nacre.toml:3: remote[0].num_io_queues: \"x\" is not a whole number",
        ),
        (
            "[[remote]]\naddress = \"tcp://192.0.2.7/nqn.2026-01.a.b:c\"\nhostaddr = \"::x\"",
            "nacre.toml:3: remote[0].hostaddr: \"::x\" is not an IP address",
        ),
        (
            "[[remote]]\naddress = \"tcp://192.0.2.7/nqn.2026-01.a.b:c\"\nctrlr_loss_timeout_sec = 2\nreconnect_delay_sec = 3",
            "nacre.toml:4: remote[0].reconnect_delay_sec: the first attempt would come after",
        ),
        (
            "[[remote]]\naddress = \"tcp://192.0.2.7/nqn.2026-01.a.b:c\"\n[[remote]]\naddress = \"tcp://192.0.2.8/nqn.2026-01.a.b:c\"",
            "nacre.toml:3: remote[1].name: a second remote target \"c\"; give each",
        ),
        (
            "[[remote]]\naddress = [\"tcp://192.0.2.7/nqn.2026-01.a.b:c\", \"tcp://192.0.2.8\"]",
            "nacre.toml:2: remote[0].address[1]: ",
        ),
        (
            "[[remote]]\naddress = [\"tcp://192.0.2.7/nqn.2026-01.a.b:c\", \"tcp://192.0.2.8/nqn.2026-01.a.b:d\"]",
            "nacre.toml:2: remote[0].address[1]: another subsystem than that of address[0], nqn.2026-01.a.b:c",
        ),
        (
            "[[remote]]\naddress = [\"tcp://192.0.2.7/nqn.2026-01.a.b:c?nsid=1\", \"tcp://192.0.2.8/nqn.2026-01.a.b:c?nsid=2\"]",
            "nacre.toml:2: remote[0].address[1]: it selects another namespace than address[0]",
        ),
        (
            "[[remote]]\naddress = [\"tcp://192.0.2.7/nqn.2026-01.a.b:c\", \"tcp://192.0.2.7:4420/nqn.2026-01.a.b:c\"]",
            "nacre.toml:2: remote[0].address[1]: the same path as address[0]",
        ),
        (
            "[[remote]]\nmultipath = \"disable\"\naddress = [\"tcp://192.0.2.7/nqn.2026-01.a.b:c\", \"rdma://192.0.2.7/nqn.2026-01.a.b:c\"]",
            "nacre.toml:2: remote[0].multipath: it refuses a second path",
        ),
        (
            "[[remote]]\npsk = \"k\"\naddress = [\"tcp://192.0.2.7/nqn.2026-01.a.b:c\", \"rdma://192.0.2.7/nqn.2026-01.a.b:c\"]",
            "nacre.toml:2: remote[0].psk: TLS is for TCP",
        ),
        (
            "[[remote]]\naddress = \"tcp://192.0.2.7/nqn.2026-01.a.b:c\"\nselector = \"queue_depth\"",
            "nacre.toml:3: remote[0].selector: only active_active has a selector",
        ),
        (
            "[[remote]]\naddress = \"tcp://192.0.2.7/nqn.2026-01.a.b:c\"\ntraddr = \"192.0.2.7\"",
            "nacre.toml:3: unknown key \"remote.traddr\"; write it in address",
        ),
        (
            "[rdma]\nallow_software = false\nrxe = [\"eth0\"]",
            "nacre.toml:3: rdma.rxe: soft-RoCE devices that allow_software = false keeps from being used",
        ),
    ] {
        let got = problems(text);
        assert_eq!(got.len(), 1, "{text}: {got:#?}");
        assert!(got[0].starts_with(expected), "{text:?}: {got:?}");
    }
}

#[test]
fn keys_of_other_programs_get_a_hint() {
    let text = "[cluster]\nenabled = true\n[rdma]\nrdma_enabled = true\nuse_rdma_write = true\n\
                [memory]\npin_memory = true\n[reactor]\nsocket = \"/x\"\n";
    let got = problems(text);
    for (at, expected) in [
        ":2: unknown key \"cluster.enabled\"; leave it out: name in [cluster]",
        ":4: unknown key \"rdma.rdma_enabled\"; use rdma = \"off\", \"prefer\" or \"require\"",
        ":5: unknown key \"rdma.use_rdma_write\"; leave it out",
        ":7: unknown key \"memory.pin_memory\"; leave it out: DMA memory is always locked",
        ":9: unknown key \"reactor.socket\"; did you mean \"rpc.socket\"?",
    ]
    .iter()
    .enumerate()
    {
        assert!(
            got[at].starts_with(&format!("nacre.toml{expected}")),
            "{got:#?}"
        );
    }
}

#[test]
fn declared_devices_and_subsystems_are_read() {
    let text = r#"
        [[bdev]]
        name = "disk0"
        path = "/srv/disk0"
        size = "1GiB"
        [[nvmf.listener]]
        name = "data"
        address = "::1"
        [[nvmf.subsystem]]
        nqn = "nqn.2026-01.org.example:a"
        allow_any_host = true
        listeners = ["data"]
        namespace = [{ bdev = "disk0", nsid = 3 }]
    "#;
    let s = load_text(Some(("f", text)), [], &[]).unwrap().settings;
    assert_eq!(s.bdev[0].size, Some(settings::Size(1 << 30)));
    assert_eq!(s.nvmf.listener[0].port, 4420);
    assert_eq!(s.nvmf.subsystem[0].namespace[0].nsid, 3);
}

/// Goal: the former name of a kind is read until the next release.
#[test]
fn the_former_name_of_a_kind_is_accepted() {
    for kind in ["fault", "error"] {
        let text = format!("[[bdev]]\ntype = \"{kind}\"\nbase_name = \"disk0\"\n");
        let loaded = load_text(Some(("f", &text)), [], &[]).unwrap();
        let module = loaded.settings.bdev[0].kind.module().expect("a module");
        assert_eq!(module.kind, "fault");
    }
}

/// Goal: a setting for all listeners overrides the setting of each listener.
#[test]
fn short_listeners_and_rdma_for_all_listeners() {
    let text = r#"
        [nvmf]
        listen = ["tcp://10.0.0.4:4421"]
        [[nvmf.listener]]
        name = "data"
        transports = ["tcp"]
    "#;
    let flag = |key, value, flag| Flag { key, value, flag };
    let flags = [flag("nvmf.rdma", serde_json::json!("prefer"), "--rdma")];
    let s = load_text(Some(("f", text)), [], &flags).unwrap().settings;
    let all = s.nvmf.listeners();
    let names: Vec<&str> = all.iter().map(|l| l.name.as_str()).collect();
    assert_eq!(names, ["data", "listen-1"]);
    assert!(all.iter().all(listener::Listener::wants_rdma));
    let flags = [
        flag("nvmf.rdma", serde_json::json!("off"), "--rdma"),
        flag(
            "nvmf.listen",
            serde_json::json!(["tcp://[::1]:4422"]),
            "--listen",
        ),
    ];
    let s = load_text(Some(("f", text)), [], &flags).unwrap().settings;
    let all = s.nvmf.listeners();
    assert!(!all.iter().any(listener::Listener::wants_rdma));
    assert_eq!((all.len(), all[1].port), (2, 4422));
}

#[test]
fn every_notation_of_cores_is_read() {
    let these = |cores: &[usize]| Cores::These(cores.iter().copied().collect());
    for (text, cores) in [
        ("auto", Cores::Auto),
        ("auto:3", Cores::Count(3)),
        ("auto-numa", Cores::NearDevices(None)),
        ("auto-numa:3", Cores::NearDevices(Some(3))),
        ("3", these(&[3])),
        ("0", these(&[0])),
        ("0x5", these(&[0, 2])),
        ("0x100000000000000000", these(&[68])),
        ("0,2-4", these(&[0, 2, 3, 4])),
        ("[7]", these(&[7])),
    ] {
        assert_eq!(Cores::parse(text), Ok(cores), "{text}");
    }
    for text in [
        "",
        "auto:0",
        "auto:",
        "auto:x",
        "auto-numa:",
        "auto-numa:0",
        "numa",
        "0x0",
        "0xg",
        "4-2",
        "1,,2",
        "[1",
    ] {
        assert!(Cores::parse(text).is_err(), "{text}");
    }
}

#[test]
fn the_sample_is_complete_and_equals_the_defaults() {
    let loaded = load_text(Some(("nacre.sample.toml", SAMPLE)), [], &[]).unwrap();
    assert_eq!(loaded.settings, Settings::default());

    // With its examples uncommented, the sample is still valid and names every key. A node of a
    // cluster has no prefix of its own and no keys in [replication], so that two daemons have all
    // keys together.
    let full = |is_node: bool| {
        let of_the_other: &[&str] = if is_node {
            &[
                "#: prefix = ",
                "#: take_over = ",
                "#: dhchap_key = \"own\"",
                "#: dhchap_ctrlr_key = \"far\"",
                "#: psk = \"far-tls\"",
            ]
        } else {
            &[
                "#: name = \"lab\"",
                "#: node = ",
                "#: labels = ",
                "#: pool_class = ",
            ]
        };
        let is_left = |line: &&str| !of_the_other.iter().any(|key| line.starts_with(key));
        let lines = SAMPLE.lines().filter(is_left);
        let uncommented = lines.map(|l| l.strip_prefix("#: ").unwrap_or(l).to_owned() + "\n");
        let text: String = uncommented.collect();
        load_text(Some(("full", &text)), [], &[]).unwrap()
    };
    let (alone, node) = (full(false), full(true));
    assert!(node.settings.cluster.is_node() && !node.settings.cluster.labels.is_empty());
    let origins = alone.origins.keys().chain(node.origins.keys());
    let set_keys: std::collections::BTreeSet<String> =
        origins.map(|k| k.replace("[0]", "")).collect();
    let mut missing = Vec::new();
    fn walk(
        path: &str,
        known: &serde_json::Value,
        set_keys: &std::collections::BTreeSet<String>,
        missing: &mut Vec<String>,
    ) {
        let known = lists::item_template(path).unwrap_or_else(|| known.clone());
        for (key, value) in known.as_object().into_iter().flatten() {
            let path = if path.is_empty() {
                key.clone()
            } else {
                format!("{path}.{key}")
            };
            if !value.is_object() && !set_keys.contains(&path) {
                missing.push(path.clone());
            }
            walk(&path, value, set_keys, missing);
        }
    }
    walk(
        "",
        &serde_json::to_value(Settings::default()).unwrap(),
        &set_keys,
        &mut missing,
    );
    assert_eq!(missing, Vec::<String>::new(), "keys missing in the sample");
}

/// Goal: receivers of alerts are complete, have names of their own, and send no secret in clear.
#[test]
fn receivers_of_alerts_are_checked() {
    let webhook = "[[alert.webhook]]\nname = \"a\"\nurl = \"http://192.0.2.1/\"\n";
    let mail = "[[alert.mail]]\nname = \"b\"\nserver = \"192.0.2.1\"\nfrom = \"a@b.c\"\nto = [\"a@b.c\"]\n";
    let accepted = |text: &str| drop(load_text(Some(("nacre.toml", text)), [], &[]).unwrap());
    accepted(&format!("{webhook}{mail}"));
    let whole = |of: &str, more: &str| format!("{of}{more}\n");
    for (text, expected) in [
        (
            "[[alert.webhook]]\nname = \"a\"\n".to_owned(),
            "a webhook without a URL; add url",
        ),
        (
            whole(webhook, "token_file = \"/t\""),
            "the token would cross the network in clear",
        ),
        (
            whole(webhook, "except = [\"storm\"]"),
            "there is no event \"storm\"",
        ),
        (
            format!("{webhook}{}", mail.replace("\"b\"", "\"a\"")),
            "a second receiver \"a\"",
        ),
        (
            whole(mail, "user = \"u\""),
            "a user and a password; add password_file",
        ),
        (
            whole(mail, "password_file = \"/p\""),
            "a user and a password; add user",
        ),
        (
            whole(mail, "tls = \"off\"\nuser = \"u\"\npassword_file = \"/p\""),
            "the password would cross the network in clear",
        ),
        (whole(webhook, "severty = \"info\""), "severity"),
        (
            (0..17)
                .map(|n| webhook.replace("\"a\"", &format!("\"{n}\"")))
                .collect(),
            "more than 16 receivers",
        ),
    ] {
        let found = problems(&text);
        assert!(
            found.len() == 1 && found[0].contains(expected),
            "{text}{found:#?}"
        );
    }
    let local = mail.replace("192.0.2.1", "127.0.0.1:2525");
    let login = "tls = \"off\"\nuser = \"u\"\npassword_file = \"/p\"\n";
    accepted(&format!("{local}{login}"));
}

/// Goal: a node of a cluster that no other node can reach is refused before it starts. Method: with
/// and without a listener in clear, and without a cluster.
#[test]
fn a_node_of_a_cluster_needs_a_listener_in_clear() {
    let node = "[store]\nendpoints = [\"http://127.0.0.1:1\"]\n[cluster]\nname = \"lab\"\n";
    let listener = |name: &str, port: u16, tls: &str| {
        format!("[[nvmf.listener]]\nname = \"{name}\"\nport = {port}\ntls = \"{tls}\"\n")
    };
    let both = [
        listener("a", 4420, "require"),
        listener("b", 4421, "require"),
    ];
    let found = problems(&format!("{node}{}{}", both[0], both[1]));
    let expected = "nacre.toml:4: cluster.name: all listeners require TLS";
    assert!(
        found.len() == 1 && found[0].starts_with(expected) && found[0].contains("without tls"),
        "{found:?}"
    );
    for other in ["off", "allow"] {
        let text = format!("{node}{}{}", both[0], listener("b", 4421, other));
        load_text(Some(("f", &text)), [], &[]).expect(other);
    }
    load_text(Some(("f", node)), [], &[]).expect("listeners come later");
    load_text(Some(("f", &both[0])), [], &[]).expect("no cluster");
}

/// Goal: a TLS listener has all of its files, and its roles are subjects and roles.
#[test]
fn tls_needs_its_files_and_subjects() {
    let whole = "[rpc.tls]\nlisten = \"[::]:1\"\ncert = \"/c\"\nkey = \"/k\"\nclient_ca = \"/a\"\n";
    let roles = "roles = { \"CN=ops,O=Example\" = \"operator\", \"CN=a.b\" = \"viewer\" }\n";
    let loaded = load_text(Some(("f", &format!("{whole}{roles}"))), [], &[]).unwrap();
    let given: Vec<_> = loaded.settings.rpc.tls.roles.iter().collect();
    assert_eq!(
        given,
        [
            (&"CN=a.b".to_owned(), &crate::rpc::Role::Viewer),
            (&"CN=ops,O=Example".to_owned(), &crate::rpc::Role::Operator),
        ]
    );
    for (text, expected) in [
        (
            "[rpc.tls]\nlisten = \"[::]:1\"\ncert = \"/c\"\nkey = \"/k\"\n",
            "nacre.toml:2: rpc.tls.listen: rpc.tls.client_ca is missing",
        ),
        (
            "[rpc.tls]\nroles = { ops = \"operator\" }\n",
            "nacre.toml:2: rpc.tls.roles.ops: \"ops\" is not a subject",
        ),
        (
            "[rpc.tls]\nroles = { \"CN=a\" = \"boss\" }\n",
            "nacre.toml:2: rpc.tls.roles",
        ),
        (
            "[web]\nlisten = \"http://10.0.0.1:80\"\n",
            "nacre.toml:2: web.listen[0]: 10.0.0.1:80 is no loopback address",
        ),
        (
            "[web]\nkey = \"/k\"\n",
            "nacre.toml:2: web.key: the page needs both cert and key",
        ),
        (
            "[metrics.tls]\ncert = \"/c\"\n",
            "nacre.toml:2: metrics.tls.cert: TLS needs both",
        ),
        (
            "[metrics.tls]\nclient_ca = \"/c\"\n",
            "nacre.toml:2: metrics.tls.client_ca: TLS needs both",
        ),
        (
            "[rpc.tls]\nclient_crl = \"/c\"\n",
            "nacre.toml:2: rpc.tls.client_crl: rpc.tls.client_ca is missing",
        ),
        (
            "[metrics.tls]\nclient_crl = \"/c\"\n",
            "nacre.toml:2: metrics.tls.client_crl: metrics.tls.client_ca is missing",
        ),
    ] {
        let found = problems(text);
        assert!(
            found.len() == 1 && found[0].starts_with(expected),
            "{text}{found:#?}"
        );
    }
}
