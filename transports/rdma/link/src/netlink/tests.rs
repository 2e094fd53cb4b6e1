//! Tests of netlink messages: bytes of requests and replies, and arguments that are refused before
//! the kernel is asked.

use super::*;
use crate::nlmsg::{HEADER, parts, u16_at, u32_at};
use crate::testing::{self as tree, Tree};

#[test]
fn a_request_is_a_header_and_padded_attributes() {
    let bytes = message(
        command::NEWLINK,
        NLM_F_REQUEST | NLM_F_ACK,
        &[
            (attribute::DEV_NAME, c_string("rxe0")),
            (attribute::LINK_TYPE, c_string("rxe")),
            (attribute::NDEV_NAME, c_string("eth0")),
        ],
    );
    assert_eq!(bytes.len(), 16 + 12 + 8 + 12);
    assert_eq!(u32_at(&bytes, 0), Some(48));
    // Client 5, command 3, as iproute2 sends it.
    assert_eq!(u16_at(&bytes, 4), Some(0x1403));
    assert_eq!(u16_at(&bytes, 6), Some(5));
    let attributes = &bytes[16..];
    for (kind, value) in [(2, "rxe0"), (65, "rxe"), (51, "eth0")] {
        assert_eq!(attribute_of(attributes, kind), Some(&c_string(value)[..]));
    }
    assert_eq!(attribute_of(attributes, 1), None);
}

fn answer(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
    bytes.extend(body);
    let length = bytes.len() as u32;
    bytes[..4].copy_from_slice(&length.to_ne_bytes());
    bytes
}

#[test]
fn answers_are_read_also_when_cut_off() {
    let mut bytes = answer(NLMSG_ERROR, &0i32.to_ne_bytes());
    bytes.extend(answer(NLMSG_ERROR, &(-17i32).to_ne_bytes()));
    bytes.extend(answer(NLMSG_DONE, &[]));
    let read: Vec<_> = parts(&bytes).map(read_answer).collect();
    assert_eq!(read, [Some(Ok(())), Some(Err(Errno::EXIST)), None]);
    // Truncated at any length, parsing does not read past the end.
    for length in 0..bytes.len() {
        let whole = parts(&bytes[..length]).count();
        assert_eq!(
            whole,
            [20, 40, 56].iter().filter(|end| **end <= length).count()
        );
    }
    // Wrong length fields.
    let mut lying = answer(NLMSG_ERROR, &[0; 4]);
    for length in [0u32, 15, 21, u32::MAX] {
        lying[..4].copy_from_slice(&length.to_ne_bytes());
        assert_eq!(parts(&lying).count(), 0, "{length}");
    }
    assert_eq!(attribute_of(&[3, 0, 1, 0, 0, 0, 0, 0], 1), None);
    assert_eq!(attribute_of(&[0, 0, 9, 0], 1), None);
}

fn refusal(tree: &Tree, name: &str, netdev: &str) -> String {
    check_add(&tree.roots(), name, netdev)
        .expect_err("it cannot be added")
        .to_string()
}

#[test]
fn invalid_links_are_refused_before_a_request() {
    let tree = tree::rxe_on_eth();
    tree.netdev("eth0.7", "02:00:00:00:00:01", 1500);
    tree.file(
        "sys/class/net/eth0.7/uevent",
        "DEVTYPE=vlan\nINTERFACE=eth0.7",
    );
    tree.netdev("eth1", "02:00:00:00:00:02", 1500);

    assert!(check_add(&tree.roots(), "rxe1", "eth1").is_ok());
    assert_eq!(
        refusal(&tree, "rxe0", "eth1"),
        "there is an RDMA device \"rxe0\" already, on eth0; remedy: choose another name"
    );
    assert_eq!(
        refusal(&tree, "rxe1", "eth0"),
        "interface \"eth0\" has the soft-RoCE device \"rxe0\" already; remedy: use it, or delete it \
         first: `nacre rdma rxe del rxe0`"
    );
    assert_eq!(
        refusal(&tree, "rxe1", "eth9"),
        "there is no network interface \"eth9\"; have: eth0, eth0.7, eth1"
    );
    assert!(refusal(&tree, "rxe1", "eth0.7").contains("is a VLAN"));
    for name in ["", "rxe 0", "a/b", &"x".repeat(64)] {
        assert!(
            refusal(&tree, name, "eth1").contains("is not a name"),
            "{name}"
        );
    }
}

#[test]
fn a_kernel_error_becomes_a_reason() {
    let tree = tree::empty();
    let said = |errno| refused_add(&tree.roots(), "rxe0", "eth0", errno).to_string();
    assert_eq!(
        said(Errno::PERM),
        "not permitted: adding and deleting RDMA links takes CAP_NET_ADMIN; remedy: run it as root"
    );
    assert_eq!(
        said(Errno::INVAL),
        "the kernel module rdma_rxe is not loaded, and this kernel has none that can be seen; remedy: \
         install the kernel package that has rdma_rxe (often linux-modules-extra), or use another kernel"
    );
    tree.modules(&[], &["kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz"]);
    assert_eq!(
        said(Errno::INVAL),
        "the kernel module rdma_rxe is not loaded; remedy: `modprobe rdma_rxe` as root"
    );
    tree.modules(&["rdma_rxe"], &[]);
    // With the module loaded, EINVAL has another cause.
    assert!(said(Errno::INVAL) == "the kernel refused to add rxe0");
    let no_family = no_netlink(&tree.roots(), Errno::PROTONOSUPPORT.into());
    let no_family = no_family.to_string();
    assert!(
        no_family.starts_with("this kernel has no RDMA: it has no module ib_core; remedy: "),
        "{no_family}"
    );
    assert!(said(Errno::EXIST).starts_with("there is an RDMA device \"rxe0\" already"));
}

#[test]
fn only_soft_roce_is_deleted() {
    let tree = tree::mlx5_dual_port();
    let said = |name| rxe_del(&tree.roots(), name).unwrap_err().to_string();
    assert_eq!(
        said("mlx5_0"),
        "RDMA device \"mlx5_0\" is not soft-RoCE but mlx5_core: it cannot be deleted"
    );
    assert_eq!(
        said("rxe0"),
        "there is no RDMA device \"rxe0\"; have: mlx5_0"
    );
}
