//! Goal: every key accepts valid values. It refuses invalid ones with line, key, value and the
//! allowed values, in plain English. Method: a table with one row per key of the schema; a key
//! without a row fails the test.

use std::collections::BTreeSet;

use super::super::*;
use super::values_rows::Row;
use crate::methods::testing::TestDaemon;

fn rows() -> impl Iterator<Item = &'static Row> {
    let rows = super::values_rows::ROWS.iter();
    rows.chain(super::values_list_rows::ROWS)
}

const MAIL: [(&str, &str); 4] = [
    ("name", "\"a\""),
    ("server", "\"mail.example.org\""),
    ("from", "\"a@example.org\""),
    ("to", "[\"b@example.org\"]"),
];

/// Other keys that an item of a list of tables needs.
fn context(key: &str) -> &'static [(&'static str, &'static str)] {
    match key {
        "bdev.path" | "bdev.read_only" => {
            &[("name", "\"a\""), ("type", "\"file\""), ("path", "\"/a\"")]
        }
        _ if key.starts_with("bdev.") => &[
            ("name", "\"a\""),
            ("type", "\"malloc\""),
            ("size", "\"1MiB\""),
        ],
        "remote.selector" | "remote.min_io" => &[
            ("address", "\"tcp://192.0.2.7/nqn.2026-01.org.example:a\""),
            ("policy", "\"active_active\""),
        ],
        _ if key.starts_with("remote.") => {
            &[("address", "\"tcp://192.0.2.7/nqn.2026-01.org.example:a\"")]
        }
        "alert.webhook.url_file" | "alert.webhook.url_key" => &[("name", "\"a\"")],
        _ if key.starts_with("alert.webhook.") => {
            &[("name", "\"a\""), ("url", "\"https://a.example.org\"")]
        }
        "alert.mail.user" => &[
            MAIL[0],
            MAIL[1],
            MAIL[2],
            MAIL[3],
            ("password_file", "\"/a\""),
        ],
        "alert.mail.password_file" | "alert.mail.password_key" => {
            &[MAIL[0], MAIL[1], MAIL[2], MAIL[3], ("user", "\"a\"")]
        }
        _ if key.starts_with("alert.mail.") => &MAIL,
        _ if key.starts_with("key.") => &[("name", "\"a\""), ("path", "\"/a\"")],
        _ if key.starts_with("nvmf.subsystem.host.") => &[
            ("nqn", "\"nqn.2026-01.org.example:h\""),
            ("dhchap_key", "\"a\""),
        ],
        _ if key.starts_with("nvmf.subsystem.namespace.") => &[("bdev", "\"a\"")],
        _ if key.starts_with("nvmf.subsystem.") => &[("nqn", "\"nqn.2026-01.org.example:a\"")],
        "rpc.tls.listen" => &[
            ("cert", "\"/a\""),
            ("key", "\"/a\""),
            ("client_ca", "\"/a\""),
        ],
        "cluster.name" => &[("node", "\"a\"")],
        "cluster.node" | "cluster.replace_after" | "cluster.balance" => &[("name", "\"a\"")],
        "store.endpoints" => &[("prefix", "\"a\"")],
        "store.user" | "store.password_file" => &[
            ("endpoints", "[\"http://127.0.0.1:1\"]"),
            ("prefix", "\"a\""),
            ("user", "\"u\""),
            ("password_file", "\"/a\""),
        ],
        "store.ca" | "store.cert" | "store.key" => &[
            ("endpoints", "[\"https://127.0.0.1:1\"]"),
            ("prefix", "\"a\""),
            ("ca", "\"/a\""),
            ("cert", "\"/a\""),
            ("key", "\"/a\""),
        ],
        _ if key.starts_with("store.") => &[
            ("endpoints", "[\"http://127.0.0.1:1\"]"),
            ("prefix", "\"a\""),
        ],
        "metrics.tls.cert" | "web.cert" => &[("key", "\"/a\"")],
        "metrics.tls.key" | "web.key" => &[("cert", "\"/a\"")],
        "metrics.tls.client_ca" => &[("cert", "\"/a\""), ("key", "\"/a\"")],
        "rpc.tls.client_crl" => &[("client_ca", "\"/a\"")],
        "metrics.tls.client_crl" => &[
            ("cert", "\"/a\""),
            ("key", "\"/a\""),
            ("client_ca", "\"/a\""),
        ],
        _ => &[],
    }
}

/// A file that sets the key, the line of the key, and the key as reported.
fn file(key: &str, value: &str) -> (String, usize, String) {
    let mut text = String::new();
    let (table, leaf, full) = if let Some(leaf) = key.strip_prefix("nvmf.subsystem.namespace.") {
        text += "[[nvmf.subsystem]]\nnqn = \"nqn.2026-01.org.example:a\"\n";
        let table = "[[nvmf.subsystem.namespace]]".to_owned();
        let full = format!("nvmf.subsystem[0].namespace[0].{leaf}");
        (table, leaf, full)
    } else if let Some(leaf) = key.strip_prefix("nvmf.subsystem.host.") {
        text += "[[nvmf.subsystem]]\nnqn = \"nqn.2026-01.org.example:a\"\n";
        let table = "[[nvmf.subsystem.host]]".to_owned();
        (table, leaf, format!("nvmf.subsystem[0].host[0].{leaf}"))
    } else if let Some((list, leaf)) = [
        "alert.webhook",
        "alert.mail",
        "key",
        "remote",
        "bdev",
        "nvmf.listener",
        "nvmf.subsystem",
    ]
    .iter()
    .find_map(|list| Some((list, key.strip_prefix(list)?.strip_prefix('.')?)))
    {
        (format!("[[{list}]]"), leaf, format!("{list}[0].{leaf}"))
    } else {
        let (table, leaf) = key.rsplit_once('.').unwrap();
        if table == "cluster" {
            text += "[store]\nendpoints = [\"http://127.0.0.1:1\"]\n";
        }
        (format!("[{table}]"), leaf, key.to_owned())
    };
    text += &table;
    for (other, value) in context(key).iter().filter(|(other, _)| *other != leaf) {
        text += &format!("\n{other} = {value}");
    }
    text += &format!("\n{leaf} = {value}\n");
    let line = text.lines().count();
    (text, line, full)
}

fn plain(message: &str) -> bool {
    let of_libraries = [
        "invalid type",
        "invalid value",
        "invalid socket",
        "variant",
        "expected",
        "unsigned",
        "64-bit",
        "struct ",
        "deserial",
        "`",
    ];
    !of_libraries.iter().any(|word| message.contains(word))
}

#[test]
fn every_key_has_a_row() {
    let mut keys = BTreeSet::new();
    fn walk(path: &str, known: &serde_json::Value, keys: &mut BTreeSet<String>) {
        let known = lists::item_template(path).unwrap_or_else(|| known.clone());
        match known.as_object() {
            Some(table) => table.iter().for_each(|(key, value)| {
                let dot = if path.is_empty() { "" } else { "." };
                walk(&format!("{path}{dot}{key}"), value, keys);
            }),
            None => drop(keys.insert(path.to_owned())),
        }
    }
    let all = serde_json::to_value(Settings::default()).unwrap();
    walk("", &all, &mut keys);
    let named: BTreeSet<String> = rows().map(|(key, ..)| (*key).to_owned()).collect();
    assert_eq!(keys, named);
    for (key, ..) in check::ranges() {
        assert!(keys.contains(&key), "{key} has a range and does not exist");
    }
    assert!(rows().all(|(_, good, bad)| !good.is_empty() && !bad.is_empty()));
}

#[test]
fn every_key_is_read_and_refused_in_plain_english() {
    for (key, good, bad) in rows() {
        for value in *good {
            let (text, ..) = file(key, value);
            if let Err(error) = load_text(Some(("f", &text)), [], &[]) {
                panic!("{text}{error}");
            }
        }
        for (value, expected) in *bad {
            let (text, line, full) = file(key, value);
            let error = load_text(Some(("f", &text)), [], &[]).expect_err(&text);
            let messages: Vec<String> = error.problems.iter().map(ToString::to_string).collect();
            assert_eq!(messages.len(), 1, "{text}: {messages:#?}");
            let message = &messages[0];
            let place = format!("f:{line}: {full}");
            assert!(message.starts_with(&place), "{text}: {message}");
            assert!(message.contains(expected), "{text}: {message}");
            assert!(plain(message), "{text}: {message}");
        }
    }
}

/// Goal: values of variables are parsed as in the file.
#[test]
fn variables_are_parsed_as_in_the_file() {
    let mut read = 0;
    for (key, good, bad) in rows() {
        if lists::item_template(key.rsplit_once('.').unwrap().0).is_some()
            || key.starts_with("nvmf.listener.")
            || !context(key).is_empty()
        {
            continue;
        }
        let load = |value: &str| {
            let items = value.trim_matches(['[', ']']);
            let text = items.replace('"', "");
            let variable = source::variable(key);
            load_text(None, [(variable.into(), text.into())], &[])
        };
        for value in *good {
            let (text, ..) = file(key, value);
            let of_file = load_text(Some(("f", &text)), [], &[]).unwrap().settings;
            let of_variable = load(value).unwrap_or_else(|e| panic!("{key} {value}: {e}"));
            assert_eq!(of_variable.settings, of_file, "{key} {value}");
            read += 1;
        }
        for (value, _) in *bad {
            // A variable's text for a list key is always a list.
            let Err(error) = load(value) else { continue };
            let message = error.problems[0].to_string();
            let place = format!("${}: {key}", source::variable(key));
            assert!(
                message.starts_with(&place) && plain(&message),
                "{key} {value}: {message}"
            );
        }
    }
    assert!(read > 50, "{read}");
}

#[test]
fn all_errors_are_reported_at_once() {
    let text = "[reactor]\nmode = \"fast\"\ncoers = \"2\"\nbusy_poll_us = \"x\"\n\
                [[bdev]]\nname = \"a\"\ntype = \"aio\"\nsize = \"1k\"\n\
                [[bdev]]\nname = \"a\"\ntype = \"malloc\"\nsize = \"1000\"\n\
                [[nvmf.subsystem]]\nnqn = \"foo\"\nhosts = [\"\"]\nnamespace = [{ bdev = \"\", nsid = 99 }]\n";
    let environment = [("NACRE_LOG_LEVEL".into(), "loud".into())];
    let error = load_text(Some(("f", text)), environment, &[]).unwrap_err();
    let mut places: Vec<String> = error
        .problems
        .iter()
        .map(|p| format!("{} {}", p.origin, p.key))
        .collect();
    places.sort();
    assert_eq!(
        places,
        [
            "$NACRE_LOG_LEVEL log.level",
            "f:10 bdev[1].name",
            "f:12 bdev[1].size",
            "f:14 nvmf.subsystem[0].nqn",
            "f:15 nvmf.subsystem[0].hosts[0]",
            "f:16 nvmf.subsystem[0].namespace[0].bdev",
            "f:16 nvmf.subsystem[0].namespace[0].nsid",
            "f:2 reactor.mode",
            "f:3 reactor.coers",
            "f:4 reactor.busy_poll_us",
            "f:7 bdev[0].type",
        ]
    );
}

/// Goal: the daemon creates every object with an accepted value, without retries.
#[test]
fn accepted_objects_are_created() {
    for (key, good, _) in rows() {
        let declares = key.starts_with("bdev.") || key.starts_with("nvmf.subsystem.");
        // Files depend on the machine, and a namespace needs a device.
        let needs_file =
            context(key).contains(&("type", "\"file\"")) || key.starts_with("nvmf.subsystem.host.");
        if !declares || needs_file {
            continue;
        }
        for value in *good {
            let (text, ..) = file(key, value);
            let devices = "[[bdev]]\nname = \"a\"\ntype = \"null\"\nsize = \"1MiB\"\n";
            let text = if key.starts_with("bdev.") {
                text
            } else {
                format!("{devices}{}{text}", devices.replace("\"a\"", "\"b\""))
            };
            let settings = load_text(Some(("f", &text)), [], &[]).unwrap().settings;
            let daemon = TestDaemon::with(settings, None);
            let missing = daemon.engine.declared.missing();
            assert!(missing.is_empty(), "{text}: {missing:#?}");
        }
    }
}
