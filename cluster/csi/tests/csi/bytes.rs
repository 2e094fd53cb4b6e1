//! The messages against bytes that protobuf's own code made (`tests/bytes/make.py`): each message
//! is read, and written again with the same bytes.

use nacre_cluster_csi::messages::{controller, identity, node};
use prost::Message;

const TABLE: &str = include_str!("../bytes/messages.txt");

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = hex.as_bytes().chunks_exact(2);
    pairs
        .map(|pair| {
            let text = str::from_utf8(pair).expect("digits");
            u8::from_str_radix(text, 16).expect("digits")
        })
        .collect()
}

fn written_again<M: Message + Default>(whole: &[u8]) -> Vec<u8> {
    M::decode(whole).expect("it is read").encode_to_vec()
}

macro_rules! messages {
    ($($module:ident: $($name:ident)*;)*) => {
        fn again(name: &str, whole: &[u8]) -> Vec<u8> {
            match name {
                $($(stringify!($name) => written_again::<$module::$name>(whole),)*)*
                other => panic!("no message {other}"),
            }
        }
        const NAMES: &[&str] = &[$($(stringify!($name),)*)*];
    };
}

messages! {
    identity: GetPluginInfoResponse GetPluginCapabilitiesResponse ProbeResponse;
    controller: CreateVolumeRequest CreateVolumeResponse DeleteVolumeRequest
        ControllerPublishVolumeRequest ControllerPublishVolumeResponse
        ControllerUnpublishVolumeRequest ValidateVolumeCapabilitiesRequest
        ValidateVolumeCapabilitiesResponse ListVolumesRequest ListVolumesResponse
        GetCapacityRequest GetCapacityResponse ControllerGetCapabilitiesResponse
        ControllerExpandVolumeRequest ControllerExpandVolumeResponse CreateSnapshotRequest
        CreateSnapshotResponse DeleteSnapshotRequest ListSnapshotsRequest ListSnapshotsResponse;
    node: NodeStageVolumeRequest NodeUnstageVolumeRequest NodePublishVolumeRequest
        NodeUnpublishVolumeRequest NodeGetVolumeStatsRequest NodeGetVolumeStatsResponse
        NodeGetCapabilitiesResponse NodeGetInfoResponse NodeExpandVolumeRequest
        NodeExpandVolumeResponse;
}

/// Goal: field numbers and types are those of csi.proto, and secrets are never kept.
#[test]
fn messages_have_the_bytes_of_protobuf() {
    let lines = TABLE.lines().filter(|line| !line.starts_with('#'));
    let mut seen = Vec::new();
    for line in lines {
        let fields: Vec<&str> = line.split(' ').collect();
        let [name, whole, read] = fields[..] else {
            panic!("{line}");
        };
        let found = again(name, &bytes(whole));
        assert_eq!(found, bytes(read), "{name}");
        assert!(!found.windows(5).any(|part| part == b"never"), "{name}");
        seen.push(name);
    }
    assert_eq!(seen, NAMES, "a message has no bytes");
}
