//! Users and passwords.

use nacre_bdev_replica::store::suite::{block_on, record};
use nacre_bdev_replica::store::{StoreError, VolumeStore};
use nacre_cluster_etcd::{Before, Credentials, Endpoints, Error, EtcdStore, Update, Watch};

use crate::owners::node;
use crate::{client, next, prefix, runtime, settled};
use nacre_cluster_etcd_members::{Members, administer, program};

fn admin(url: &str, path: &str, token: &str, body: &str) -> String {
    administer(url, &format!("auth/{path}"), token, body)
}

/// A user for the keys of `/nacre/lab/` only.
fn add_users(url: &str) {
    let add = |path: &str, body: &str| drop(admin(url, path, "", body));
    add("user/add", r#"{"name":"root","password":"secret"}"#);
    add("user/grant", r#"{"user":"root","role":"root"}"#);
    add("user/add", r#"{"name":"nacre","password":"open"}"#);
    add("role/add", r#"{"name":"lab"}"#);
    // From "/nacre/lab/" to "/nacre/lab0".
    add(
        "role/grant",
        r#"{"name":"lab","perm":{"permType":"READWRITE","key":"L25hY3JlL2xhYi8=","range_end":"L25hY3JlL2xhYjA="}}"#,
    );
    add("user/grant", r#"{"user":"nacre","role":"lab"}"#);
}

fn enable(url: &str) -> String {
    admin(url, "enable", "", "{}");
    let answer = admin(
        url,
        "authenticate",
        "",
        r#"{"name":"root","password":"secret"}"#,
    );
    let (_, token) = answer.split_once(r#""token":""#).expect("a token");
    let (token, _) = token.split_once('"').expect("its end");
    token.to_owned()
}

fn with_user(endpoints: &Endpoints, user: &str, password: &str) -> Endpoints {
    Endpoints {
        credentials: Some(Credentials {
            user: user.to_owned(),
            password: password.to_owned(),
        }),
        ..endpoints.clone()
    }
}

/// The store of a user works before etcd demands users, after that, and after etcd has forgotten
/// its token, watches included.
#[test]
fn a_token_is_renewed() {
    let Some(program) = program("a_token_is_renewed") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let endpoints = with_user(&members.endpoints(), "nacre", "open");
    let url = &endpoints.urls[0];
    let store = EtcdStore::open(&endpoints, prefix("lab"), None).expect("it opens");
    let runtime = runtime();
    runtime.block_on(async {
        settled(&members.endpoints()).await;
        let claimed = store.claim(&node(1, 1), Before::default()).await;
        claimed.expect("etcd demands no user yet");
    });
    let mut ant = record("ant");
    block_on(store.create(ant.clone())).expect("created");
    add_users(url);
    let root = enable(url);
    let mut swap = || {
        let wanted = next(&ant);
        block_on(store.swap(ant.version(), wanted.clone())).expect("swapped");
        ant = wanted;
    };
    swap();
    let mut watch = runtime.block_on(async {
        let client = client(&endpoints);
        let page = client.list("/nacre/lab/vol/").await.expect("keys");
        Watch::new(client, "/nacre/lab/vol/", page.revision + 1)
    });
    let mut seen = |swap: &mut dyn FnMut()| {
        swap();
        let update = runtime.block_on(watch.next());
        assert!(matches!(update, Update::Put(_)), "{update:?}");
    };
    seen(&mut swap);
    for _ in 0..2 {
        // etcd forgets the tokens of a user whose password changes.
        let same = r#"{"name":"nacre","password":"open"}"#;
        admin(url, "user/changepw", &root, same);
        seen(&mut swap);
    }
}

#[test]
fn users_that_are_refused() {
    let Some(program) = program("users_that_are_refused") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let plain = members.endpoints();
    let url = &plain.urls[0];
    runtime().block_on(async { settled(&plain).await });
    add_users(url);
    enable(url);
    let cases = [
        (
            with_user(&plain, "nacre", "closed"),
            "lab",
            "wrong password",
        ),
        (with_user(&plain, "nobody", "open"), "lab", "no user"),
        // Its role is for other keys.
        (
            with_user(&plain, "nacre", "open"),
            "lab2",
            "permission denied",
        ),
        (plain.clone(), "lab", "user name is empty"),
    ];
    for (endpoints, name, word) in cases {
        let store = EtcdStore::open(&endpoints, prefix(name), None).expect("it opens");
        let refused = runtime().block_on(store.claim(&node(1, 1), Before::default()));
        println!("{refused:?}");
        let Err(Error::Denied { why }) = &refused else {
            panic!("{refused:?}");
        };
        assert!(why.contains(word), "{why}");
        let refused = block_on(store.create(record("ant")));
        assert!(
            matches!(refused, Err(StoreError::Unavailable { .. })),
            "{refused:?}"
        );
    }
    let shown = format!("{:?}", with_user(&plain, "nacre", "open"));
    assert!(!shown.contains("open"), "{shown}");
}
