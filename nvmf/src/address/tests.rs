//! Tests of the parser: accepted addresses with their parts, refused ones with their errors.

use std::path::Path;

use proptest::prelude::*;
use uuid::Uuid;

use super::AddressError as E;
use super::*;

const NQN: &str = "nqn.2019-05.io.openebs:8c8f0a5d";
const UUID: &str = "8c8f0a5d-7d1e-4c9f-9c53-5d3a3f8f0a11";

fn parse(text: &str) -> Endpoint {
    text.parse()
        .unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refused(grammar: Grammar, text: &str) -> AddressError {
    grammar.parse(text).expect_err(text)
}

/// Goal: canonical texts are read back as they are written.
#[test]
fn formatting_reverses_parsing() {
    for text in [
        "127.0.0.1",
        "storage-1.example.com:1",
        "host_1",
        "[::1]:8009",
        "[fe80::1%eth0]",
        "tcp://127.0.0.1:4420/nqn.2025-01.io.nacre:v?nsid=7",
        "tcp://127.0.0.1/nqn.2025-01.io.nacre:v",
        "rdma://192.0.2.1:4420/nqn.2025-01.io.nacre:v",
        "auto://[fd00::1]/nqn.2025-01.io.nacre:v?nsid=2",
        "rdma+tcp://192.0.2.1:65535/a/b?nsid=7&hostnqn=nqn.2025-01.io.example:b",
        "auto://192.0.2.1:8420/v?uuid=8c8f0a5d-7d1e-4c9f-9c53-5d3a3f8f0a11",
        "tcp://[2001:db8::1]:4420/v?nsid=4294967294",
        "rdma://h:1/v?hostnqn=nqn.2025-01.io.example:b",
        "pcie://0000:5e:00.0",
        "pcie://5e:00.0?nsid=2",
    ] {
        assert_eq!(parse(text).to_string(), text);
    }
}

/// Goal: every accepted spelling means the same as the canonical one.
#[test]
fn spellings() {
    for (text, canonical) in [
        ("nvmf://h/v", "auto://h/v"),
        ("NVMF+TCP://::1/v", "tcp://[::1]/v"),
        ("nvmf+rdma://[h]/v", "rdma://h/v"),
        ("Nvmf+Rdma+Tcp://h:1/v", "rdma+tcp://h:1/v"),
        ("TCP://fe80::1%eth0", "tcp://[fe80::1%eth0]"),
        ("vfio://5E:00.0/?nsid=2", "pcie://5E:00.0?nsid=2"),
        ("PCIE://0000:5e:00.0", "pcie://0000:5e:00.0"),
        ("tcp://h/?", "tcp://h"),
        ("h?nsid=1&", "h?nsid=1"),
        (
            "nvmf://h/v?hostnqn=nqn.2025-01.io.example:b&uuid=8C8F0A5D7D1E4C9F9C535D3A3F8F0A11",
            "auto://h/v?uuid=8c8f0a5d-7d1e-4c9f-9c53-5d3a3f8f0a11&hostnqn=nqn.2025-01.io.example:b",
        ),
    ] {
        assert_eq!(parse(text).to_string(), canonical, "{text}");
        assert_eq!(parse(text), parse(canonical), "{text}");
    }
}

#[test]
fn transports_of_schemes() {
    use TransportChoice as C;
    for (scheme, choice, fallback, trtype) in [
        ("tcp://h", Some(C::Tcp), None, "TCP"),
        ("rdma://h", Some(C::Rdma), Some(Fallback::None), "RDMA"),
        ("rdma+tcp://h", Some(C::Rdma), Some(Fallback::Tcp), "RDMA"),
        ("auto://h", Some(C::Auto), None, "AUTO"),
        ("pcie://5e:00.0", None, None, "PCIe"),
        ("h", None, None, "AUTO"),
    ] {
        let endpoint = parse(scheme);
        let fields = endpoint.spdk_fields();
        assert_eq!(endpoint.choice(), choice, "{scheme}");
        assert_eq!((fields.fallback, fields.trtype), (fallback, trtype));
    }
    let fields = parse(&format!("tcp://[fe80::1%eth0]:1/{NQN}")).spdk_fields();
    assert_eq!(fields.traddr, "fe80::1%eth0");
    assert_eq!(fields.trsvcid.as_deref(), Some("1"));
    assert_eq!(fields.subnqn.as_deref(), Some(NQN));
    let drive = parse("pcie://5e:00.0").spdk_fields();
    assert_eq!((drive.traddr.as_str(), drive.trsvcid), ("5e:00.0", None));
}

#[test]
fn transports_by_word() {
    for choice in TransportChoice::ALL {
        assert_eq!(choice.word().parse(), Ok(choice));
        assert_eq!(choice.trtype().parse(), Ok(choice));
    }
    for transport in [IpTransport::Tcp, IpTransport::Rdma] {
        assert_eq!(transport.word().parse(), Ok(transport));
        assert_eq!(transport.trtype().parse(), Ok(transport));
    }
    for fallback in [Fallback::Tcp, Fallback::None] {
        assert_eq!(fallback.word().parse(), Ok(fallback));
    }
    let error = "fc".parse::<TransportChoice>().unwrap_err().to_string();
    assert_eq!(error, "\"fc\" is not a transport: write tcp, rdma or auto");
}

#[test]
fn malformed_texts() {
    for text in [
        "",
        ":1",
        "tcp://",
        "nvmf:///x",
        "tcp://[::1",
        "[::1]1",
        "::1]:1",
        "a b",
        "user@h",
        "h%eth0",
        "::1%",
        "pcie://",
        "pcie://5e:00.0/v",
    ] {
        let error = refused(Grammar::ANY, text);
        assert!(matches!(error, E::Form { .. }), "{text}: {error:?}");
    }
    for port in ["", "0", "65536", "+1", "http"] {
        let found = refused(Grammar::ANY, &format!("tcp://127.0.0.1:{port}/v"));
        assert_eq!(found, E::Port { found: port.into() });
    }
    for scheme in ["", "fc", "nvme", "nvmf+fc", "tcp+rdma", "iscsi"] {
        let error = refused(Grammar::ANY, &format!("{scheme}://h/v"));
        assert_eq!(
            error.to_string(),
            format!("\"{scheme}\" is not a transport: write tcp, rdma, rdma+tcp, auto or pcie")
        );
    }
    for (text, key) in [
        (format!("h/{}", "v".repeat(224)), "subsystem"),
        (format!("h?hostnqn={}", "h".repeat(224)), "hostnqn"),
        ("h?hostnqn=".into(), "hostnqn"),
    ] {
        let error = refused(Grammar::ANY, &text);
        assert!(matches!(error, E::Nqn { key: found, .. } if found == key));
    }
    for nsid in ["", "0", "4294967295", "-1", "+1", "one"] {
        let error = refused(Grammar::ANY, &format!("h?nsid={nsid}"));
        assert_eq!(error, E::Nsid { found: nsid.into() });
    }
    for uuid in ["", "7", "00000000-0000-0000-0000-000000000000"] {
        let error = refused(Grammar::ANY, &format!("h?uuid={uuid}"));
        assert_eq!(error, E::Uuid { found: uuid.into() });
    }
    for (text, unknown) in [
        ("h?size=1", "size"),
        ("h?nsid", "nsid"),
        ("pcie://5e:00.0?uuid=1", "uuid"),
        ("pcie://5e:00.0?hostnqn=v", "hostnqn"),
    ] {
        let error = refused(Grammar::ANY, text);
        assert!(matches!(&error, E::Parameter { key, .. } if key == unknown));
    }
    assert_eq!(
        refused(Grammar::ANY, "h?nsid=1&nsid=1"),
        E::Twice { key: "nsid" }
    );
    assert_eq!(
        refused(Grammar::ANY, &format!("h?nsid=1&uuid={UUID}")),
        E::TwoNames
    );
}

#[test]
fn each_use_refuses_the_parts_that_it_lacks() {
    for text in ["192.0.2.1", "h/v", "", "nvmf", "nvmf:/x"] {
        let error = refused(Grammar::NAMESPACE, text);
        assert!(matches!(error, E::Form { .. }), "{text}: {error:?}");
    }
    for text in ["nvmf://h:1", "nvmf://h:1/", "nvmf://h:1?nsid=1"] {
        let error = refused(Grammar::NAMESPACE, text);
        assert!(matches!(error, E::NoSubsystem { .. }), "{text}: {error:?}");
    }
    for text in ["h/v", "h?nsid=1", "tcp://h?"] {
        let error = refused(Grammar::LISTENER, text);
        assert!(matches!(error, E::Form { .. }), "{text}: {error:?}");
    }
    for (grammar, text, allowed) in [
        (Grammar::LISTENER, "auto://h", "tcp or rdma"),
        (Grammar::DRIVE, "tcp://h", "pcie"),
        (
            Grammar::CONTROLLER,
            "pcie://5e:00.0",
            "tcp, rdma, rdma+tcp or auto",
        ),
    ] {
        let error = refused(grammar, text).to_string();
        assert!(error.ends_with(&format!("write {allowed}")), "{error}");
    }
}

#[test]
fn corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/address");
    let files = std::fs::read_dir(&folder).expect("the corpus is in the repository");
    let inputs: Vec<_> = files
        .map(|file| std::fs::read(file.unwrap().path()).unwrap())
        .collect();
    assert!(!inputs.is_empty(), "no corpus");
    inputs.iter().for_each(|input| fuzzing::address(input));
}

fn host() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<std::net::IpAddr>().prop_map(|ip| ip.to_string()),
        "fe80::[1-9a-f]{1,4}%[a-z][a-z0-9.]{0,8}",
        "[a-zA-Z0-9][a-zA-Z0-9._-]{0,20}",
    ]
}

fn nqn() -> impl Strategy<Value = nacre_nvmf_wire::Nqn> {
    "nqn\\.20[0-9]{2}-01\\.io\\.[a-z]{1,8}:[a-zA-Z0-9._:/=-]{1,30}"
        .prop_map(|text| nacre_nvmf_wire::Nqn::foreign(&text).unwrap())
}

fn select() -> impl Strategy<Value = Select> {
    prop_oneof![
        Just(Select::All),
        (1..u32::MAX).prop_map(Select::Nsid),
        (1..u128::MAX).prop_map(|bits| Select::Uuid(Uuid::from_u128(bits))),
    ]
}

fn network() -> impl Strategy<Value = Endpoint> {
    let scheme = proptest::option::of(prop_oneof![
        Just(Scheme::Auto),
        Just(Scheme::Tcp),
        Just(Scheme::Rdma),
        Just(Scheme::RdmaThenTcp),
    ]);
    let port = proptest::option::of(1..=u16::MAX);
    let (subnqn, hostnqn) = (proptest::option::of(nqn()), proptest::option::of(nqn()));
    (scheme, host(), port, subnqn, select(), hostnqn).prop_map(
        |(scheme, host, port, subnqn, select, hostnqn)| Endpoint {
            scheme,
            host,
            port,
            subnqn,
            select,
            hostnqn,
        },
    )
}

fn drive() -> impl Strategy<Value = Endpoint> {
    let select = proptest::option::of(1..u32::MAX);
    ("([0-9a-f]{4}:)?[0-9a-f]{2}:[01][0-9a-f]\\.[0-7]", select).prop_map(|(host, nsid)| Endpoint {
        scheme: Some(Scheme::Pcie),
        select: nsid.map_or(Select::All, Select::Nsid),
        ..Endpoint::of_host(&host)
    })
}

proptest! {
    #[test]
    fn any_endpoint_is_read_back(endpoint in prop_oneof![network(), drive()]) {
        prop_assert_eq!(endpoint.to_string().parse::<Endpoint>(), Ok(endpoint));
    }

    /// Goal: texts near the grammar keep the promises of the fuzz target.
    #[test]
    fn any_text_is_handled(text in "((nvmf|tcp|rdma|pcie|[+a-z]{0,4})://)?[a-z0-9:.%\\[\\]]{0,12}[/?&=:a-z0-9]{0,24}") {
        fuzzing::address(text.as_bytes());
    }
}
