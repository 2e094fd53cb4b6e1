//! Rebuilds of a store on a real etcd. The nodes are stand-ins that report.

use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_core::NodeId;
use nacre_cluster_etcd::{Client, Copies, Prefix, Txn};
use tokio::time::sleep;

use super::super::*;
use super::{labelled_three, node};
use crate::backup::{BackupError, Source, Writer};
use crate::operator::Operator;
use crate::testing;

struct Lab {
    client: Arc<Client>,
    prefix: Prefix,
}

impl Lab {
    fn operator(&self) -> Operator {
        Operator::new(Arc::clone(&self.client), self.prefix.clone())
    }

    async fn change(&self, txn: Txn) {
        let answer = self.client.transact(txn, Copies::Several).await;
        assert!(answer.expect("an answer").is_made);
    }

    async fn keys(&self) -> Vec<String> {
        let page = self.client.list(&self.prefix.to_string()).await;
        let keys = page.expect("a list").keys.into_iter();
        let text = |key: Vec<u8>| String::from_utf8(key).expect("text");
        let key = |key: String| key.strip_prefix("/nacre/lab/").map(str::to_owned);
        keys.filter_map(|kv| key(text(kv.key))).collect()
    }

    /// Nodes that report to each run, until the store is there.
    async fn report(&self, nodes: Vec<Found>) {
        loop {
            if let Ok(Some(request)) = self.operator().rebuild_request().await {
                for found in &nodes {
                    let _ = self.operator().report_found(request, found).await;
                }
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    async fn rebuild(&self, without: &[&str], nodes: Vec<Found>) -> Result<Rebuilt, RebuildError> {
        self.rebuild_within(Duration::from_secs(1), without, nodes)
            .await
    }

    async fn rebuild_within(
        &self,
        wait: Duration,
        without: &[&str],
        nodes: Vec<Found>,
    ) -> Result<Rebuilt, RebuildError> {
        let rebuild = Rebuild {
            options: Options {
                without: without.iter().map(|name| (*name).to_owned()).collect(),
                ..Options::default()
            },
            publish: false,
            wait,
        };
        tokio::select! {
            rebuilt = rebuild.run(&self.client, &self.prefix, "lab", |_, _| {}) => rebuilt,
            () = self.report(nodes) => unreachable!("the reports do not end"),
        }
    }

    /// A rebuild that waits for reports.
    async fn collecting(&self) -> (Writer<'_>, Request) {
        let writer = Writer::claim(&self.client, &self.prefix, Source::Rebuild).await;
        let mut writer = writer.expect("claimed");
        writer.collect().await.expect("collecting");
        let request = self.operator().rebuild_request().await;
        (writer, request.expect("an answer").expect("a request"))
    }
}

fn on_etcd(test: &str, work: impl AsyncFnOnce(Lab)) {
    testing::on_etcd(test, async |client, prefix| {
        work(Lab { client, prefix }).await;
    });
}

/// Goal: a rebuild writes only where no key of the cluster is, leaves no key when it refuses, and
/// takes no report to a former run. An interrupted one is repeated, also with other options.
#[test]
fn a_rebuild_refuses_and_is_repeated() {
    on_etcd("a_rebuild_refuses_and_is_repeated", async |lab: Lab| {
        let foreign = format!("{}pub/x", lab.prefix);
        lab.change(Txn::default().put(&foreign, b"{}".to_vec()))
            .await;
        let refused = lab.rebuild(&[], labelled_three()).await;
        let refused = refused.expect_err("a foreign key");
        assert!(matches!(
            refused,
            RebuildError::Backup(BackupError::NotEmpty { .. })
        ));
        assert_eq!(lab.keys().await, ["pub/x"]);
        lab.change(Txn::default().delete(&foreign)).await;

        let two = || labelled_three().into_iter().take(2).collect::<Vec<_>>();
        let refused = lab
            .rebuild(&[], two())
            .await
            .expect_err("a node is missing");
        assert!(matches!(&refused, RebuildError::Missing { nodes, .. } if *nodes == ["cow"]));
        assert_eq!(lab.keys().await, Vec::<String>::new());
        let refused = lab.rebuild(&[], Vec::new()).await.expect_err("no node");
        assert_eq!(refused, RebuildError::NoNode { waited_s: 1 });

        // A run that dies after some keys, with a report to it.
        let (writer, request) = lab.collecting().await;
        let all = labelled_three();
        assert_eq!(
            lab.operator().report_found(request, &all[2]).await,
            Ok(true)
        );
        let left = [(format!("{}vol/left", lab.prefix), b"{}".to_vec())];
        writer.put(&left).await.expect("written");

        let init = crate::keys::Cluster::new("lab", Duration::from_secs(1)).expect("a lease");
        assert!(init.init(&lab.client, &lab.prefix).await.is_err());
        // The report of the third node was to the former run.
        let refused = lab
            .rebuild(&[], two())
            .await
            .expect_err("a node is missing");
        assert!(matches!(refused, RebuildError::Missing { .. }));
        assert_eq!(lab.keys().await, Vec::<String>::new());
        assert_eq!(
            lab.operator().report_found(request, &all[2]).await,
            Ok(false)
        );

        let (writer, _) = lab.collecting().await;
        writer.put(&left).await.expect("written");
        let rebuilt = lab.rebuild(&["cow"], two()).await.expect("rebuilt");
        assert_eq!(
            (rebuilt.volumes, rebuilt.nodes, rebuilt.is_repeated),
            (1, 2, true)
        );
        let keys = lab.keys().await;
        assert!(keys.iter().any(|key| key == "meta"), "{keys:?}");
        let is_rest = |key: &String| key.starts_with("found/") || key == "restoring";
        assert!(!keys.iter().any(is_rest), "{keys:?}");
        assert!(!keys.contains(&"vol/left".to_owned()), "{keys:?}");
        // The cluster is there.
        let again = lab
            .rebuild(&[], labelled_three())
            .await
            .expect_err("it exists");
        assert!(
            matches!(again, RebuildError::Backup(BackupError::NotEmpty { .. })),
            "{again}"
        );
        assert_eq!(lab.keys().await, keys);
        assert_eq!(NodeId(node(0)), NodeId(all[0].node));
    });
}

/// Goal: a report larger than one value of etcd arrives whole, and one with a missing part does not
/// count.
#[test]
fn a_large_report_has_parts() {
    on_etcd("a_large_report_has_parts", async |lab: Lab| {
        let (_writer, request) = lab.collecting().await;
        let mut found = labelled_three().remove(0);
        found.description.version = "x".repeat(1_200_000);
        assert_eq!(lab.operator().report_found(request, &found).await, Ok(true));
        let reports = async || {
            let page = lab
                .client
                .list(&lab.prefix.all_found())
                .await
                .expect("a list");
            report::read(&lab.prefix, request.run, &page.keys)
        };
        let node = NodeId(found.node);
        assert_eq!(reports().await.found.get(&node), Some(&found));
        assert_eq!(lab.keys().await.len(), 1 + 49 + 1);
        let part = format!("{}0001", lab.prefix.found(node));
        lab.change(Txn::default().delete(&part)).await;
        assert_eq!(reports().await, report::Collected::default());
    });
}

/// Goal: the operator sees at once why a node cannot report. Method: a report that is larger than
/// all parts, and a rebuild that waits for it.
#[test]
fn a_report_that_is_too_large_is_named() {
    on_etcd("a_report_that_is_too_large_is_named", async |lab: Lab| {
        let mut found = labelled_three();
        found[0].description.name = "ant".to_owned();
        found[0].description.version = "x".repeat(34 << 20);
        // A busy machine takes a while to count so many bytes.
        let wait = Duration::from_secs(60);
        let refused = lab.rebuild_within(wait, &[], found).await;
        let refused = refused.expect_err("it is too large");
        assert!(
            matches!(&refused, RebuildError::Refused { name, why }
                if name == "ant" && why.contains("detach devices")),
            "{refused}"
        );
        assert_eq!(lab.keys().await, Vec::<String>::new());
    });
}
