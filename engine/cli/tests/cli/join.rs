//! Tests of `nacre cluster join` and `init --join` on a real etcd.

use std::os::unix::fs::PermissionsExt;

use nacre_cluster_etcd_members::{Members, program};

use super::fake::{Outcome, nacre};

/// Goal: a fresh machine becomes a node by one command; a file with other values stays as it is.
#[test]
fn a_machine_joins() {
    let Some(etcd) = program("a_machine_joins") else {
        return;
    };
    let etcd = Members::start(etcd, 1, &[]);
    let url = &etcd.endpoints().urls[0];
    let dir = tempfile::tempdir().unwrap();
    let run =
        |words: &str| -> Outcome { nacre(&format!("cluster {words}"), &dir.path().join("none")) };
    let file = dir.path().join("fresh/nacre.toml");
    let shown = file.display();
    let join = format!("join lab --etcd {url} -c {shown} --listen tcp://192.0.2.1:4420");

    // The options of a node have no effect without one.
    for option in [
        "--node ant",
        "--label zone=a",
        "--listen tcp://192.0.2.1:4420",
    ] {
        let ignored = run(&format!("init lab --etcd {url} {option}"));
        assert!(
            ignored.code == 2 && ignored.err.contains("add --join"),
            "{ignored:?}"
        );
    }
    let refused = run(&join).failed(1);
    assert!(
        refused.contains("etcd has no cluster of this name"),
        "{refused}"
    );
    assert!(!file.exists(), "nothing is written");
    let first = dir.path().join("first.toml");
    std::fs::write(&first, "[cluster]\nname = \"den\"\n").unwrap();
    let init = format!("init lab --join --etcd {url} -c {}", first.display());
    let refused = run(&init).failed(1);
    assert!(
        refused.contains("cluster.name: the file has \"den\""),
        "{refused}"
    );
    let refused = run(&join).failed(1);
    assert!(
        refused.contains("no cluster"),
        "a refusal creates nothing: {refused}"
    );
    std::fs::write(&first, "# Ours.\n[nvmf] # all\nmax_subsystems = 7\n").unwrap();
    std::fs::set_permissions(&first, std::fs::Permissions::from_mode(0o640)).unwrap();
    let made = run(&init);
    assert!(made.err.contains("has no listener"), "{made:?}");
    assert_eq!(made.code, 0, "{made:?}");
    let made = made.out;
    assert!(
        made.starts_with("Created cluster lab, id ") && made.contains("Wrote "),
        "{made}"
    );
    let text = std::fs::read_to_string(&first).unwrap();
    assert!(
        text.starts_with("# Ours.\n[nvmf] # all\nmax_subsystems = 7\n"),
        "{text}"
    );
    assert!(text.contains("[cluster]\nname = \"lab\"\n"), "{text}");
    assert_eq!(
        first.metadata().unwrap().permissions().mode() & 0o777,
        0o640
    );

    let dry = run(&format!("{join} --dry-run --label zone=a --label rack=7")).printed();
    for expected in [
        "[cluster]",
        "zone = \"a\"",
        "rack = \"7\"",
        url,
        "tcp://192.0.2.1:4420",
    ] {
        assert!(dry.contains(expected), "{expected}: {dry}");
    }
    assert!(!file.exists());
    let joined = run(&join).printed();
    let next = format!("nacre serve -c {shown}");
    for expected in ["Found cluster lab, id ", "no node yet", "Wrote ", &next] {
        assert!(joined.contains(expected), "{expected}: {joined}");
    }
    let again = run(&join).printed();
    assert!(again.contains("has these keys already"), "{again}");
    let other = run(&format!("{join} --node bee --label zone")).code;
    assert_eq!(other, 2, "not KEY=VALUE");
    // The file has the access now.
    let joined = run(&format!("join lab -c {shown} --json")).json();
    assert_eq!(
        (&joined["name"], &joined["is_changed"]),
        (&"lab".into(), &false.into())
    );
    let refused = run(&format!(
        "join lab -c {shown} --listen tcp://192.0.2.2:4420"
    ))
    .failed(1);
    assert!(refused.contains("nvmf.listen: the file has"), "{refused}");
}
