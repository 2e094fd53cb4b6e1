#!/usr/bin/env python3
"""Makes messages.txt: bytes of CSI messages, encoded by protobuf's own code.

    python3 -m venv venv && venv/bin/pip install grpcio-tools
    venv/bin/python make.py csi.proto > messages.txt

csi.proto is that of https://github.com/container-storage-interface/spec, version 1.13.
"""

import importlib
import pathlib
import sys
import tempfile

from grpc_tools import protoc

WELL_KNOWN = pathlib.Path(protoc.__file__).parent / "_proto"


def load(proto):
    out = tempfile.mkdtemp()
    proto = pathlib.Path(proto).resolve()
    code = protoc.main(["protoc", f"-I{proto.parent}", f"-I{WELL_KNOWN}", f"--python_out={out}", str(proto)])
    assert code == 0, "protoc failed"
    sys.path.insert(0, out)
    return importlib.import_module("csi_pb2")


def main():
    csi = load(sys.argv[1])
    mode = csi.VolumeCapability.AccessMode
    mount = csi.VolumeCapability(
        mount=csi.VolumeCapability.MountVolume(fs_type="xfs", mount_flags=["noatime", "nodev"], volume_mount_group="g"),
        access_mode=mode(mode=mode.SINGLE_NODE_SINGLE_WRITER),
    )
    block = csi.VolumeCapability(
        block=csi.VolumeCapability.BlockVolume(), access_mode=mode(mode=mode.MULTI_NODE_MULTI_WRITER)
    )
    size = csi.CapacityRange(required_bytes=1 << 40, limit_bytes=-1)
    place = csi.Topology(segments={"zone": "a"})
    plugin, controller, node = csi.PluginCapability, csi.ControllerServiceCapability, csi.NodeServiceCapability
    usage = csi.VolumeUsage
    source = csi.VolumeContentSource(snapshot=csi.VolumeContentSource.SnapshotSource(snapshot_id="s"))
    clone = csi.VolumeContentSource(volume=csi.VolumeContentSource.VolumeSource(volume_id="w"))
    volume = csi.Volume(
        capacity_bytes=5, volume_id="v", volume_context={"a": "b"}, content_source=clone, accessible_topology=[place]
    )
    snapshot = csi.Snapshot(
        size_bytes=5, snapshot_id="s", source_volume_id="v", creation_time={"seconds": 7, "nanos": 8},
        ready_to_use=True, group_snapshot_id="g",
    )
    messages = [
        csi.GetPluginInfoResponse(name="n", vendor_version="1", manifest={"k": "v"}),
        csi.GetPluginCapabilitiesResponse(
            capabilities=[
                plugin(service=plugin.Service(type=plugin.Service.CONTROLLER_SERVICE)),
                plugin(volume_expansion=plugin.VolumeExpansion(type=plugin.VolumeExpansion.ONLINE)),
            ]
        ),
        csi.ProbeResponse(ready={"value": True}),
        csi.CreateVolumeRequest(
            name="n", capacity_range=size, volume_capabilities=[mount, block], parameters={"p": "q"},
            secrets={"never": "read"}, volume_content_source=source,
            accessibility_requirements=csi.TopologyRequirement(requisite=[place], preferred=[place]),
            mutable_parameters={"m": "n"},
        ),
        csi.CreateVolumeResponse(volume=volume),
        csi.DeleteVolumeRequest(volume_id="v", secrets={"never": "read"}),
        csi.ControllerPublishVolumeRequest(
            volume_id="v", node_id="h", volume_capability=block, readonly=True, secrets={"never": "read"},
            volume_context={"c": "d"},
        ),
        csi.ControllerPublishVolumeResponse(publish_context={"nqn": "x"}),
        csi.ControllerUnpublishVolumeRequest(volume_id="v", node_id="h", secrets={"never": "read"}),
        csi.ValidateVolumeCapabilitiesRequest(
            volume_id="v", volume_context={"c": "d"}, volume_capabilities=[mount], parameters={"p": "q"},
            secrets={"never": "read"}, mutable_parameters={"m": "n"},
        ),
        csi.ValidateVolumeCapabilitiesResponse(
            confirmed=csi.ValidateVolumeCapabilitiesResponse.Confirmed(
                volume_context={"c": "d"}, volume_capabilities=[mount], parameters={"p": "q"}
            ),
            message="m",
        ),
        csi.ListVolumesRequest(max_entries=-3, starting_token="t"),
        csi.ListVolumesResponse(
            entries=[
                csi.ListVolumesResponse.Entry(
                    volume=volume, status=csi.ListVolumesResponse.VolumeStatus(published_node_ids=["a", "b"])
                )
            ],
            next_token="t",
        ),
        csi.GetCapacityRequest(volume_capabilities=[mount], parameters={"p": "q"}, accessible_topology=place),
        csi.GetCapacityResponse(
            available_capacity=7, maximum_volume_size={"value": 8}, minimum_volume_size={"value": 9}
        ),
        csi.ControllerGetCapabilitiesResponse(
            capabilities=[
                controller(rpc=controller.RPC(type=kind))
                for kind in (
                    controller.RPC.CREATE_DELETE_VOLUME, controller.RPC.PUBLISH_UNPUBLISH_VOLUME,
                    controller.RPC.LIST_VOLUMES, controller.RPC.GET_CAPACITY, controller.RPC.EXPAND_VOLUME,
                    controller.RPC.LIST_VOLUMES_PUBLISHED_NODES, controller.RPC.SINGLE_NODE_MULTI_WRITER,
                    controller.RPC.CREATE_DELETE_SNAPSHOT, controller.RPC.LIST_SNAPSHOTS,
                    controller.RPC.CLONE_VOLUME,
                )
            ]
        ),
        csi.ControllerExpandVolumeRequest(
            volume_id="v", capacity_range=size, secrets={"never": "read"}, volume_capability=mount
        ),
        csi.ControllerExpandVolumeResponse(capacity_bytes=6, node_expansion_required=True),
        csi.CreateSnapshotRequest(
            source_volume_id="v", name="n", secrets={"never": "read"}, parameters={"p": "q"}
        ),
        csi.CreateSnapshotResponse(snapshot=snapshot),
        csi.DeleteSnapshotRequest(snapshot_id="s", secrets={"never": "read"}),
        csi.ListSnapshotsRequest(
            max_entries=-3, starting_token="t", source_volume_id="v", snapshot_id="s", secrets={"never": "read"}
        ),
        csi.ListSnapshotsResponse(entries=[csi.ListSnapshotsResponse.Entry(snapshot=snapshot)], next_token="t"),
        csi.NodeStageVolumeRequest(
            volume_id="v", publish_context={"n": "x"}, staging_target_path="/s", volume_capability=mount,
            secrets={"never": "read"}, volume_context={"c": "d"},
        ),
        csi.NodeUnstageVolumeRequest(volume_id="v", staging_target_path="/s"),
        csi.NodePublishVolumeRequest(
            volume_id="v", publish_context={"n": "x"}, staging_target_path="/s", target_path="/t",
            volume_capability=block, readonly=True, secrets={"never": "read"}, volume_context={"c": "d"},
        ),
        csi.NodeUnpublishVolumeRequest(volume_id="v", target_path="/t"),
        csi.NodeGetVolumeStatsRequest(volume_id="v", volume_path="/p", staging_target_path="/s"),
        csi.NodeGetVolumeStatsResponse(
            usage=[
                usage(available=1, total=2, used=3, unit=usage.BYTES),
                usage(available=4, total=5, used=6, unit=usage.INODES),
            ]
        ),
        csi.NodeGetCapabilitiesResponse(
            capabilities=[
                node(rpc=node.RPC(type=kind))
                for kind in (
                    node.RPC.STAGE_UNSTAGE_VOLUME, node.RPC.GET_VOLUME_STATS, node.RPC.EXPAND_VOLUME,
                    node.RPC.SINGLE_NODE_MULTI_WRITER,
                )
            ]
        ),
        csi.NodeGetInfoResponse(node_id="h", max_volumes_per_node=9, accessible_topology=place),
        csi.NodeExpandVolumeRequest(
            volume_id="v", volume_path="/p", capacity_range=size, staging_target_path="/s", volume_capability=block,
            secrets={"never": "read"},
        ),
        csi.NodeExpandVolumeResponse(capacity_bytes=6),
    ]
    print("# Made by make.py.")
    for message in messages:
        # Twice: as it is, and without the secrets, which this driver does not read.
        whole = message.SerializeToString(deterministic=True)
        if any(field.name == "secrets" for field in message.DESCRIPTOR.fields):
            message.ClearField("secrets")
        read = message.SerializeToString(deterministic=True)
        print(message.DESCRIPTOR.name, whole.hex(), read.hex())


main()
