//! Goal: calls of a daemon without a cluster, and wrong parameters, are refused with the cause and
//! the remedy. Method: a daemon without sockets; names among given nodes.

pub(in crate::methods) mod real;

use serde_json::{Value, json};
use uuid::Uuid;

use super::named;
use crate::methods::testing::test_daemon;

const NODE: &str = "6f1c1f0a-3c5b-4f0e-9d5e-0f5d7b1c2a34";

#[test]
fn calls_of_a_daemon_without_a_cluster_are_refused() {
    let daemon = test_daemon();
    for (method, params) in [
        ("cluster_get_status", Value::Null),
        ("cluster_get_nodes", Value::Null),
        ("cluster_get_volumes", Value::Null),
        ("cluster_get_events", json!({ "after": 3 })),
        (
            "cluster_set_cordon",
            json!({ "node": NODE, "cordon": true }),
        ),
        ("cluster_drain", json!({ "node": NODE, "drain": true })),
        ("cluster_fence", json!({ "node": NODE, "off": true })),
        ("cluster_remove_node", json!({ "node": NODE })),
        (
            "cluster_move_volume",
            json!({ "volume": NODE, "node": NODE }),
        ),
    ] {
        let error = daemon.refused(method, params);
        assert_eq!(error.message, "Operation not supported", "{method}");
        let text = error.to_string();
        assert!(text.contains("[cluster]"), "{method}: {text}");
    }
}

#[test]
fn wrong_parameters_are_named() {
    let daemon = test_daemon();
    for (method, params, field) in [
        ("cluster_set_cordon", json!({ "node": "a" }), "cordon"),
        (
            "cluster_drain",
            json!({ "node": "a", "drain": true, "wait_s": 601 }),
            "wait_s",
        ),
        (
            "cluster_drain",
            json!({ "node": "a", "drain": false, "wait_s": 1 }),
            "wait_s",
        ),
        (
            "cluster_move_volume",
            json!({ "volume": "v", "node": "a", "wait_s": 601 }),
            "wait_s",
        ),
        ("cluster_get_events", json!({ "from": 1 }), "from"),
        ("cluster_fence", json!({ "off": true }), "node"),
    ] {
        let error = daemon.refused(method, params);
        assert_eq!(error.message, "Invalid parameters", "{method}");
        let found = error.data.and_then(|facts| facts.field);
        assert_eq!(found.as_deref(), Some(field), "{method}");
    }
}

#[test]
fn a_name_that_does_not_name_one_node_has_the_candidates() {
    let id = Uuid::from_u128;
    let known = [(id(1), "ant"), (id(2), "bee"), (id(3), "bee")];
    assert_eq!(named("node", "ant", &known), Ok(id(1)));
    let text = |name| {
        named("node", name, &known)
            .expect_err("refused")
            .to_string()
    };
    let unknown = text("cow");
    for part in ["no node \"cow\"", "\"ant\" (00000000-", "\"bee\""] {
        assert!(unknown.contains(part), "{unknown}");
    }
    let several = text("bee");
    assert!(several.contains("2 nodes have the name"), "{several}");
    assert!(several.contains("000000000003") && !several.contains("ant"));
    let many: Vec<_> = (0..40).map(|n| (id(n), "cat")).collect();
    let long = named("volume", "cat", &many)
        .expect_err("refused")
        .to_string();
    assert!(long.contains("and 24 more"), "{long}");
    let none = named("volume", "cow", &[])
        .expect_err("refused")
        .to_string();
    assert!(none.contains("cluster_get_volumes lists"), "{none}");
}
