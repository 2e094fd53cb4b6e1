//! The publish context: the facts about a volume that the controller gives to a node.

use std::net::SocketAddr;

use tonic::Status;
use uuid::Uuid;

use crate::messages::Texts;

const NQN: &str = "nqn";
const UUID: &str = "uuid";
const PORTALS: &str = "portals";
/// Most addresses of a volume: 16 nodes with 4 each.
const MAX_PORTALS: usize = 64;

/// An address of a volume.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Portal {
    /// `tcp` or `rdma`.
    pub transport: String,
    pub address: SocketAddr,
}

impl Portal {
    pub fn read(text: &str) -> Option<Self> {
        let (transport, address) = text.split_once("://")?;
        Some(Self {
            transport: Some(transport)
                .filter(|t| ["tcp", "rdma"].contains(t))?
                .to_owned(),
            address: address.parse().ok()?,
        })
    }
}

impl std::fmt::Display for Portal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}://{}", self.transport, self.address)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    pub nqn: String,
    /// The UUID of the namespace, which is the volume's id.
    pub uuid: Uuid,
    pub portals: Vec<Portal>,
}

pub(crate) fn write(nqn: &str, uuid: Uuid, portals: &[String]) -> Texts {
    let text = |key: &str, value: String| (key.to_owned(), value);
    [
        text(NQN, nqn.to_owned()),
        text(UUID, uuid.to_string()),
        text(PORTALS, portals.join(",")),
    ]
    .into()
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
        // The kernel takes the options as one text, separated by commas.
        let is_plain =
            nqn.starts_with("nqn.") && nqn.chars().all(|c| c.is_ascii_graphic() && c != ',');
        if !is_plain {
            return Err(wrong(NQN));
        }
        let portals = field(PORTALS)?.split(',').map(Portal::read);
        let portals: Option<Vec<Portal>> = portals.collect();
        let portals = portals.filter(|all| all.len() <= MAX_PORTALS);
        Ok(Self {
            nqn: nqn.clone(),
            uuid: Uuid::parse_str(field(UUID)?).map_err(|_| wrong(UUID))?,
            portals: portals.ok_or_else(|| wrong(PORTALS))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_read_as_it_was_written() {
        let uuid = Uuid::from_u128(7);
        let portals = ["tcp://192.0.2.1:4420", "rdma://[2001:db8::1]:4420"].map(str::to_owned);
        let texts = write("nqn.2025-01.io.nacre:v", uuid, &portals);
        let read = Context::read(&texts).expect("it is good");
        assert_eq!(
            (read.nqn.as_str(), read.uuid),
            ("nqn.2025-01.io.nacre:v", uuid)
        );
        let shown: Vec<String> = read.portals.iter().map(ToString::to_string).collect();
        assert_eq!(shown, portals);
        for (key, value) in [
            (NQN, "nqn.a,hostnqn=b"),
            (NQN, "v"),
            (UUID, "7"),
            (PORTALS, "fc://192.0.2.1:1"),
            (PORTALS, "tcp://host:4420"),
            (PORTALS, ""),
        ] {
            let mut bad = texts.clone();
            bad.insert(key.to_owned(), value.to_owned());
            let refused = Context::read(&bad).expect_err(value);
            assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        }
    }
}
