//! Writes and reads the keys `found/N/…` in etcd, in which nodes report to a rebuild of the store.
//!
//! ```text
//!   found/N/0000 …   parts of the report's JSON, each below etcd's limit for one value
//!   found/N/end      run of the rebuild, number of parts, CRC-64 of all parts; or no part, and why
//! ```
//!
//! Each write compares the key `restoring`, the mark of the rebuild, so that a report to a former
//! run changes nothing.

use std::collections::BTreeMap;

use nacre_cluster_core::NodeId;
use nacre_cluster_etcd::{Client, Copies, KeyValue, Prefix, Txn};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::facts::Found;
use crate::backup::{Mark, crc};
use crate::error::Error;
use crate::keys::{self, FORMAT};
use crate::operator::Operator;

/// Bytes of a part. A page of 500 keys stays below the largest answer of etcd's client.
const PART: usize = 24 << 10;
/// Most parts of a report: facts of 1024 devices, and of 8192 volumes.
const MOST: usize = 1366;

/// The request of a rebuild.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The run of the rebuild.
    pub run: Uuid,
    /// The revision of its mark.
    revision: i64,
}

/// The last key of a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ReportEnd {
    v: u64,
    run: Uuid,
    parts: usize,
    crc64: String,
    /// The reason why there is no report, and so no parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    refused: Option<Refused>,
}

/// A node that cannot report, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Refused {
    /// The name of the node.
    pub(super) name: String,
    pub(super) why: String,
}

/// The reports to a run.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Collected {
    pub(super) found: BTreeMap<NodeId, Found>,
    /// Nodes that cannot report.
    pub(super) refused: Vec<Refused>,
}

impl Operator {
    /// The request of a rebuild that waits for reports; `None`: no rebuild waits.
    pub async fn rebuild_request(&self) -> Result<Option<Request>, Error> {
        let key = self.prefix.restoring();
        let found = self.client.get(&key).await.map_err(Error::at(&key))?;
        let Some(kv) = found else { return Ok(None) };
        let mark: Mark = keys::decode(&kv)?;
        Ok(mark.asks().then_some(Request {
            run: mark.run,
            revision: kv.mod_revision,
        }))
    }

    /// Writes the report of this node. False: the rebuild has ended.
    pub async fn report_found(&self, request: Request, found: &Found) -> Result<bool, Error> {
        put(&self.client, &self.prefix, request, found).await
    }
}

pub(super) async fn put(
    client: &Client,
    prefix: &Prefix,
    request: Request,
    found: &Found,
) -> Result<bool, Error> {
    let (mark, own) = (prefix.restoring(), prefix.found(NodeId(found.node)));
    let text = keys::bytes(found);
    let parts: Vec<&[u8]> = text.chunks(PART).collect();
    if parts.len() > MOST {
        let (bytes, most) = (text.len(), MOST * PART);
        let why = format!(
            "the report has {bytes} bytes, and {most} are the most: detach devices that the \
             cluster does not need"
        );
        // The operator waits at the command's terminal.
        let end = ReportEnd {
            v: FORMAT,
            run: request.run,
            parts: 0,
            crc64: crc(&[]),
            refused: Some(Refused {
                name: found.description.name.clone(),
                why: why.clone(),
            }),
        };
        let key = format!("{own}end");
        let txn = Txn::default()
            .if_modified(&mark, request.revision)
            .put(&key, keys::bytes(&end));
        let answer = client.transact(txn, Copies::Several).await;
        answer.map_err(Error::at(&key))?;
        return Err(Error::Invalid {
            field: "found",
            why,
        });
    }
    let end = ReportEnd {
        v: FORMAT,
        run: request.run,
        parts: parts.len(),
        crc64: crc(&text),
        refused: None,
    };
    let values = parts.iter().enumerate();
    let values = values.map(|(at, part)| (format!("{own}{at:04}"), part.to_vec()));
    let values = values.chain([(format!("{own}end"), keys::bytes(&end))]);
    for (key, value) in values {
        let txn = Txn::default()
            .if_modified(&mark, request.revision)
            .put(&key, value);
        let answer = client.transact(txn, Copies::Several).await;
        if !answer.map_err(Error::at(&key))?.is_made {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The whole reports to this run. A report that is being written, or damaged, is left out: its node
/// writes it again.
pub(super) fn read(prefix: &Prefix, run: Uuid, keys: &[KeyValue]) -> Collected {
    let mut of_node: BTreeMap<Uuid, BTreeMap<&str, &[u8]>> = BTreeMap::new();
    let all = prefix.all_found();
    for kv in keys {
        let key = std::str::from_utf8(&kv.key).unwrap_or_default();
        let rest = key.strip_prefix(&all).and_then(|key| key.split_once('/'));
        if let Some((node, part)) = rest
            && let Ok(node) = node.parse()
        {
            of_node.entry(node).or_default().insert(part, &kv.value);
        }
    }
    let mut refused = Vec::new();
    let mut whole = |(node, parts): (Uuid, BTreeMap<&str, &[u8]>)| {
        let end: ReportEnd = serde_json::from_slice(parts.get("end")?).ok()?;
        if end.run != run || end.v > FORMAT || end.parts > MOST {
            return None;
        }
        if let Some(why) = end.refused {
            refused.push(why);
            return None;
        }
        let mut text = Vec::new();
        for at in 0..end.parts {
            text.extend_from_slice(parts.get(format!("{at:04}").as_str())?);
        }
        let found: Found = serde_json::from_slice(&text).ok()?;
        let is_whole = crc(&text) == end.crc64 && found.node == node && found.v <= FORMAT;
        is_whole.then_some((NodeId(node), found))
    };
    let found = of_node.into_iter().filter_map(&mut whole).collect();
    Collected { found, refused }
}
