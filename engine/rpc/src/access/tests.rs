//! Goal: each role may call its classes and no other. Method: tables of credentials.

use super::*;

fn caller(uid: u32, gid: u32, groups: &[u32]) -> Caller {
    Caller {
        identity: Identity::Local(Credentials {
            pid: Some(7),
            uid,
            gid,
            groups: groups.to_vec(),
        }),
        program: "script".into(),
    }
}

fn members(texts: &[&str]) -> Members {
    let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
    let (members, unknown) = Members::resolve(&texts);
    assert_eq!(unknown, [""; 0]);
    members
}

fn access() -> Access {
    Access {
        own_uid: 900,
        admin: members(&["uid:0"]),
        operator: members(&["gid:50", "uid:1001"]),
        viewer: members(&["gid:60"]),
        ..Access::default()
    }
}

#[test]
fn the_highest_role_counts() {
    for (uid, gid, groups, role) in [
        (0, 0, &[][..], Some(Role::Admin)),
        (900, 900, &[], Some(Role::Admin)),
        (1001, 1001, &[], Some(Role::Operator)),
        (1002, 50, &[], Some(Role::Operator)),
        (1002, 1002, &[7, 50, 60], Some(Role::Operator)),
        (1002, 1002, &[60], Some(Role::Viewer)),
        (1002, 60, &[], Some(Role::Viewer)),
        (50, 1002, &[], None),
        (1002, 0, &[0], None),
    ] {
        let of = caller(uid, gid, groups);
        assert_eq!(access().role(&of.identity), role, "{uid} {gid} {groups:?}");
    }
    let mut rootless = access();
    rootless.admin = Members::default();
    assert_eq!(rootless.role(&caller(0, 0, &[]).identity), None);
}

#[test]
fn the_subject_of_a_certificate_has_the_highest_role_that_lists_it() {
    let mut access = access();
    let rule = |text: &str, role| (text.parse::<Subject>().unwrap(), role);
    access.certificates = vec![
        rule("CN=ops", Role::Operator),
        rule("O=Example", Role::Viewer),
        rule("CN=root,O=Example", Role::Admin),
    ];
    let of = |subject: &str| Caller {
        identity: Identity::Certificate {
            subject: subject.parse().unwrap(),
            address: "192.0.2.7:9".parse().unwrap(),
        },
        program: String::new(),
    };
    for (subject, role) in [
        ("CN=ops", Some(Role::Operator)),
        ("CN=ops,OU=x,O=Other", Some(Role::Operator)),
        ("O=Example,CN=root", Some(Role::Admin)),
        ("CN=root,O=Other", None),
        ("CN=web,O=Example", Some(Role::Viewer)),
        ("CN=Ops", None),
        ("OU=ops", None),
    ] {
        assert_eq!(access.role(&of(subject).identity), role, "{subject}");
    }
    let error = access.stranger(&of("CN=web"));
    let facts = error.data.unwrap();
    assert_eq!(
        facts.cause,
        "certificate CN=web at 192.0.2.7:9 has no role: it may not command this daemon"
    );
    assert_eq!(
        facts.remedy.unwrap(),
        "set roles = { \"CN=web\" = \"viewer\" } (or operator, or admin) in [rpc.tls] of the \
         configuration, and reload it"
    );
    let error = access.refusal(&of("CN=ops"), Role::Operator, "m", Class::Admin);
    let remedy = error.data.unwrap().remedy.unwrap();
    assert!(
        remedy.contains("roles = { \"CN=ops\" = \"admin\" } in [rpc.tls]"),
        "{remedy}"
    );
}

/// Goal: a name service that does not answer costs the names, not the numbers.
#[test]
fn numbers_need_no_name_service() {
    let texts = ["uid:7", "group:root", "gid:8"].map(str::to_owned);
    let (members, unknown) = Members::without_names(&texts, Duration::from_secs(5));
    assert_eq!(
        members.principals,
        [Principal::User(7), Principal::Group(8)]
    );
    assert_eq!(unknown.len(), 1);
    assert!(
        unknown[0].contains("not answered within 5 s"),
        "{unknown:?}"
    );
}

#[test]
fn classes_and_lists_of_methods() {
    let mut access = access();
    for (role, permitted) in [
        (Role::Viewer, &Class::ALL[..1]),
        (Role::Operator, &Class::ALL[..2]),
        (Role::Admin, &Class::ALL[..]),
    ] {
        for class in Class::ALL {
            let is = access.permits(role, "m", class);
            assert_eq!(is, permitted.contains(&class), "{role:?} {class:?}");
        }
    }
    access.viewer_methods = vec!["volume_resync".into()];
    assert!(access.permits(Role::Viewer, "volume_resync", Class::Operate));
    assert!(!access.permits(Role::Viewer, "volume_list", Class::Read));
    assert!(access.permits(Role::Operator, "volume_list", Class::Read));
}

#[test]
fn refusals_say_which_line_to_add() {
    let mut access = access();
    let of = caller(1005, 60, &[]);
    let error = access.refusal(&of, Role::Viewer, "volume_resync", Class::Operate);
    assert_eq!(
        (error.code, error.message.as_str()),
        (-13, "Permission denied")
    );
    let facts = error.data.unwrap();
    assert_eq!(
        facts.cause,
        "volume_resync is of class operate, and user 1005 (script, process 7) has the role viewer"
    );
    assert_eq!(
        facts.remedy.unwrap(),
        "set operator = [\"gid:50\", \"uid:1001\", \"uid:1005\"] in [rpc.access] of the \
         configuration, and reload it"
    );
    access.viewer_methods = vec!["volume_list".into()];
    let error = access.refusal(&of, Role::Viewer, "volume_resync", Class::Operate);
    assert_eq!(
        error.data.unwrap().remedy.unwrap(),
        "set viewer = [\"volume_list\", \"volume_resync\"] in [rpc.access.methods] of the \
         configuration, and reload it"
    );
    let error = access.stranger(&caller(1009, 1009, &[]));
    assert_eq!(error.code, -13);
    let remedy = error.data.unwrap().remedy.unwrap();
    assert!(
        remedy.contains("viewer = [\"gid:60\", \"uid:1009\"]"),
        "{remedy}"
    );
}

#[test]
fn the_socket_is_open_to_users_with_a_role() {
    let with = |operator: &[&str]| {
        let access = Access {
            own_uid: 900,
            admin: members(&["uid:0", "uid:900"]),
            operator: members(operator),
            ..Access::default()
        };
        access.socket_access()
    };
    assert_eq!(with(&[]), SocketAccess::Owner);
    assert_eq!(with(&["gid:5", "gid:5"]), SocketAccess::Group(5));
    assert_eq!(with(&["gid:5", "gid:6"]), SocketAccess::Everyone);
    assert_eq!(with(&["gid:5", "uid:6"]), SocketAccess::Everyone);
    assert_eq!(with(&["uid:6"]), SocketAccess::Everyone);
}

#[test]
fn members_are_read_and_resolved() {
    for text in [
        "",
        "root",
        "uid:",
        "uid:x",
        "uid:-1",
        "uid:4294967295",
        "group:",
        "role:x",
    ] {
        assert!(text.parse::<Member>().is_err(), "{text}");
    }
    assert_eq!(members(&["user:root"]).principals, [Principal::User(0)]);
    assert_eq!(members(&["group:root"]).principals, [Principal::Group(0)]);
    let (members, unknown) = Members::resolve(&["group:no-such-group".into()]);
    assert_eq!(members.principals, []);
    assert_eq!(
        unknown,
        ["group:no-such-group: this machine has no such name"]
    );
}

#[test]
fn a_parameter_may_need_a_higher_role() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    assert_eq!(require(Class::Admin, "reset"), Ok(()));
    let viewer = Actor {
        role: Role::Viewer,
        local: false,
    };
    let error = runtime
        .block_on(acting_as(viewer, async {
            require(Class::Operate, "reset")
        }))
        .unwrap_err();
    assert_eq!(error.code, -13);
    assert_eq!(error.data.unwrap().field.as_deref(), Some("reset"));
}
