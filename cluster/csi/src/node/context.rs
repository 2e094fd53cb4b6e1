//! The publish context: the subsystem NQN, namespace UUID and addresses of a volume, which the
//! controller gives to a node (`publish_context` of CSI).

use std::net::SocketAddr;

use nacre_nvmf_wire::Nqn;
use tonic::Status;
use uuid::Uuid;

use crate::messages::Texts;

const NQN: &str = "nqn";
const UUID: &str = "uuid";
const ADDRESSES: &str = "addresses";
/// The key of [`ADDRESSES`] in contexts of the first release: attachments keep their context.
const FORMER_ADDRESSES: &str = "portals";
/// Most addresses of a volume: 16 nodes with 4 each.
const MAX_ADDRESSES: usize = 64;

/// A transport address at which hosts reach a volume; as text `tcp://IP:PORT` or `rdma://IP:PORT`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    /// `tcp` or `rdma`.
    pub transport: String,
    pub socket: SocketAddr,
}

impl Address {
    pub fn read(text: &str) -> Option<Self> {
        let (transport, socket) = text.split_once("://")?;
        Some(Self {
            transport: Some(transport)
                .filter(|t| ["tcp", "rdma"].contains(t))?
                .to_owned(),
            socket: socket.parse().ok()?,
        })
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}://{}", self.transport, self.socket)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    pub nqn: String,
    /// The UUID of the namespace, which is the volume's id.
    pub uuid: Uuid,
    pub addresses: Vec<Address>,
}

/// Makes a context, which has each address once, and at most [`MAX_ADDRESSES`]. Of more, it has
/// some in equal distances: the list is in the order of nodes, and each node keeps some.
pub(crate) fn write(nqn: &str, uuid: Uuid, addresses: &[String]) -> Texts {
    let mut distinct: Vec<&str> = Vec::new();
    for one in addresses {
        if !distinct.contains(&one.as_str()) {
            distinct.push(one);
        }
    }
    let count = distinct.len().min(MAX_ADDRESSES);
    let addresses: Vec<&str> = (0..count)
        .map(|at| distinct[at * distinct.len() / count])
        .collect();
    let text = |key: &str, value: String| (key.to_owned(), value);
    [
        text(NQN, nqn.to_owned()),
        text(UUID, uuid.to_string()),
        text(ADDRESSES, addresses.join(",")),
    ]
    .into()
}

/// True for an NQN that can be an option of `/dev/nvme-fabrics`, which takes its options as one
/// text, separated by commas.
pub(crate) fn is_option(nqn: &str) -> bool {
    let is_plain = nqn.chars().all(|c| c.is_ascii_graphic() && c != ',');
    Nqn::foreign(nqn).is_ok() && nqn.starts_with("nqn.") && is_plain
}

impl Context {
    pub fn read(texts: &Texts) -> Result<Self, Status> {
        let field = |key: &str| {
            texts
                .get(key)
                .filter(|value| !value.is_empty())
                .ok_or_else(|| {
                    Status::invalid_argument(format!(
                        "publish_context has no {key}: it is not one of this driver"
                    ))
                })
        };
        let wrong =
            |key: &str| Status::invalid_argument(format!("publish_context: {key} cannot be read"));
        let nqn = field(NQN)?;
        if !is_option(nqn) {
            return Err(wrong(NQN));
        }
        let addresses = field(ADDRESSES).or_else(|missing| {
            let former = field(FORMER_ADDRESSES);
            former.map_err(|_| missing)
        })?;
        let addresses = addresses.split(',').map(Address::read);
        let addresses: Option<Vec<Address>> = addresses.collect();
        let addresses = addresses.filter(|all| all.len() <= MAX_ADDRESSES);
        Ok(Self {
            nqn: nqn.clone(),
            uuid: Uuid::parse_str(field(UUID)?).map_err(|_| wrong(UUID))?,
            addresses: addresses.ok_or_else(|| wrong(ADDRESSES))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a volume with more addresses than a context has keeps paths to all its nodes.
    #[test]
    fn a_context_has_addresses_of_all_nodes() {
        let at = |node: usize, port: usize| format!("tcp://192.0.2.{node}:{}", 4420 + port);
        let of_node = |node| (0..9).map(move |port| at(node, port));
        let mut all: Vec<String> = (1..=16).flat_map(of_node).collect();
        all.push(all[0].clone());
        let texts = write("nqn.2025-01.io.nacre:v", Uuid::from_u128(7), &all);
        let read = Context::read(&texts).expect("it is good");
        assert_eq!(read.addresses.len(), MAX_ADDRESSES);
        let mut nodes: Vec<_> = read.addresses.iter().map(|one| one.socket.ip()).collect();
        nodes.dedup();
        assert_eq!(nodes.len(), 16);
        let bytes: usize = texts
            .iter()
            .map(|(key, value)| key.len() + value.len())
            .sum();
        assert!(bytes <= 4096, "the interface's limit of a map");
    }

    #[test]
    fn a_context_is_read_as_it_was_written() {
        let uuid = Uuid::from_u128(7);
        let addresses = ["tcp://192.0.2.1:4420", "rdma://[2001:db8::1]:4420"].map(str::to_owned);
        let texts = write("nqn.2025-01.io.nacre:v", uuid, &addresses);
        let read = Context::read(&texts).expect("it is good");
        assert_eq!(
            (read.nqn.as_str(), read.uuid),
            ("nqn.2025-01.io.nacre:v", uuid)
        );
        let shown: Vec<String> = read.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(shown, addresses);
        for (key, value) in [
            (NQN, "nqn.a,hostnqn=b"),
            (NQN, "v"),
            (UUID, "7"),
            (ADDRESSES, "fc://192.0.2.1:1"),
            (ADDRESSES, "tcp://host:4420"),
            (ADDRESSES, ""),
        ] {
            let mut bad = texts.clone();
            bad.insert(key.to_owned(), value.to_owned());
            let refused = Context::read(&bad).expect_err(value);
            assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        }
    }

    /// Goal: a node serves attachments that the controller of the first release made.
    #[test]
    fn a_context_of_the_first_release_is_read() {
        let address = "tcp://192.0.2.1:4420";
        let nqn = "nqn.2025-01.io.nacre:v";
        let new = write(nqn, Uuid::from_u128(7), &[address.to_owned()]);
        let mut old = new.clone();
        let addresses = old.remove(ADDRESSES).expect("its addresses");
        let missing = Context::read(&old).expect_err("it has no addresses");
        assert!(
            missing.message().contains("no addresses"),
            "{}",
            missing.message()
        );
        old.insert("portals".to_owned(), addresses);
        let read = Context::read(&old).expect("it is good");
        assert_eq!(read, Context::read(&new).expect("it is good"));
    }
}
