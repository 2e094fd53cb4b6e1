//! Tests of `nacre cluster backup`, `restore` and `rebuild-store` on a real etcd.

use std::os::unix::fs::PermissionsExt;

use nacre_cluster_etcd_members::{Members, program};

use super::fake::{Outcome, nacre};

/// Goal: a cluster is saved to a private file, and restored into another etcd; an etcd that has the
/// cluster, a damaged file and unknown nodes are refused.
#[test]
fn a_cluster_is_saved_and_restored() {
    let Some(etcd) = program("a_cluster_is_saved_and_restored") else {
        return;
    };
    let [etcd, empty] = [etcd.clone(), etcd].map(|etcd| Members::start(etcd, 1, &[]));
    let [url, to] = [&etcd, &empty].map(|etcd| etcd.endpoints().urls[0].clone());
    let dir = tempfile::tempdir().unwrap();
    let run =
        |words: &str| -> Outcome { nacre(&format!("cluster {words}"), &dir.path().join("none")) };
    let file = dir.path().join("nacre.toml");
    let shown = file.display();
    let init = format!("init lab --join --etcd {url} -c {shown} --listen tcp://192.0.2.1:4420");
    run(&init).printed();
    let backup = dir.path().join("lab.jsonl");
    let saved = run(&format!("backup {} -c {shown}", backup.display())).printed();
    assert!(saved.contains("0 volumes, 1 key"), "{saved}");
    assert_eq!(
        backup.metadata().unwrap().permissions().mode() & 0o777,
        0o600
    );
    let unnamed = run(&format!("backup {} --etcd {to}", backup.display()));
    assert_eq!(unnamed.code, 2, "{unnamed:?}");

    let restore = format!("restore {} -c {shown}", backup.display());
    let refused = run(&restore).failed(1);
    assert!(refused.contains("meta\" exists"), "{refused}");
    let refused = run(&format!("{restore} --without bee")).failed(1);
    assert!(refused.contains("has no node \"bee\""), "{refused}");
    let restored = run(&format!("restore {} --etcd {to}", backup.display())).printed();
    assert!(
        restored.starts_with("Restored cluster lab, id "),
        "{restored}"
    );
    let again = run(&format!("init lab --etcd {to}")).failed(1);
    assert!(again.contains("exists already"), "{again}");

    let text = std::fs::read(&backup).unwrap();
    std::fs::write(&backup, &text[..text.len() - 9]).unwrap();
    let refused = run(&restore).failed(1);
    assert!(refused.contains("cut off"), "{refused}");
    let refused = run(&format!("restore {shown} -c {shown}")).failed(1);
    assert!(refused.contains("no backup of a cluster"), "{refused}");
    for command in ["backup", "restore"] {
        let words = format!("{command} {} -c {shown}", dir.path().display());
        let refused = run(&words).failed(1);
        assert!(refused.contains("not a regular file"), "{refused}");
    }
    let rebuild = format!("rebuild-store lab --wait 1s --etcd {to}");
    let refused = run(&rebuild).failed(1);
    assert!(refused.contains("meta\" exists"), "{refused}");
    let refused = run(&rebuild.replace("lab", "other")).failed(1);
    assert!(
        refused.contains("no node has reported to etcd within 1 s"),
        "{refused}"
    );
    // Nothing is left of it.
    run(&format!("init other --etcd {to}")).printed();
    // A broken configuration is the reason, and not the name that is missing.
    let broken = dir.path().join("broken.toml");
    std::fs::write(&broken, "[cluster]\nname = \"lab\"\nnmae = 1\n").unwrap();
    let words = format!("backup {} -c {}", backup.display(), broken.display());
    let refused = run(&words).failed(1);
    assert!(refused.contains("nmae"), "{refused}");
}
