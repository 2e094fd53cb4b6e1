#!/usr/bin/env python3
"""Checks deploy/kubernetes: each object against the schemas of Kubernetes, names and flags against each other and the
driver.

    kubernetes.py DIRECTORY NACRE

Needs the module kubernetes_validate, which has the schemas.
"""

import pathlib
import re
import subprocess
import sys

import kubernetes_validate
import yaml

VERSIONS = ["1.30.0", "1.34.1", "1.37.0"]
DRIVER = "csi.nacre.io"
PARAMETERS = {"replicas", "thin", "pool", "class", "spread", "strictSpread", "nodes", "csi.storage.k8s.io/fstype"}
# Seconds: the longest call of the controller, a probe by the helper, and the driver's end. The
# longest call is one of the daemon, and a host that is cut off.
LONGEST, PROBE, DRAIN = 60 + 30 + 60, 5, 25

failed = []


def check(name, good, why=""):
    print(f"{'ok' if good else 'FAILED'}: {name} {'' if good else why}".rstrip())
    if not good:
        failed.append(name)


def pods(documents):
    for document in documents:
        if document["kind"] in ("Deployment", "DaemonSet"):
            yield document, document["spec"]["template"]["spec"]


def load(directory):
    """The objects of a directory, with those of its base and its patches."""
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    patches = [patch["path"] for patch in kustomization.get("patches", [])]
    resources = [name for name in kustomization["resources"] if name != ".."]
    files = sorted(path.name for path in directory.glob("*.yaml"))
    expected = sorted(resources + patches + ["kustomization.yaml"])
    check(f"every file of {directory.name} is a resource or a patch", files == expected, files)
    documents = load(directory.parent) if ".." in kustomization["resources"] else []
    for name in resources:
        documents += yaml.safe_load_all((directory / name).read_text())
    for name in patches:
        patch = yaml.safe_load((directory / name).read_text())
        is_its = [one for one in documents if same(one, patch)]
        check(f"{name} patches one object", len(is_its) == 1)
        added = patch["spec"]["template"]["spec"]["containers"]
        pod = is_its[0]["spec"]["template"]["spec"]
        names = [container["name"] for container in pod["containers"] + added]
        check(f"{name} adds containers", len(names) == len(set(names)), names)
        pod["containers"] = pod["containers"] + added
    return documents


def same(one, other):
    return (one["kind"], one["metadata"]["name"]) == (other["kind"], other["metadata"]["name"])


def snapshot_class(document):
    """The schemas of Kubernetes do not have this kind: it comes with the API of snapshots."""
    known = {"apiVersion", "kind", "metadata", "driver", "deletionPolicy", "parameters"}
    check("the class of snapshots has known fields", set(document) <= known, set(document) - known)
    check("the class of snapshots has its API", document["apiVersion"] == "snapshot.storage.k8s.io/v1")
    check("the class of snapshots has the driver", document["driver"] == DRIVER)
    check("the class of snapshots has a policy", document["deletionPolicy"] in ("Delete", "Retain"))
    check("the class of snapshots has no parameters", not document.get("parameters"))


def main():
    directory, nacre = pathlib.Path(sys.argv[1]), sys.argv[2]
    documents = load(directory / "snapshots")
    for document in [one for one in documents if one["kind"] == "VolumeSnapshotClass"]:
        snapshot_class(document)
    for version in VERSIONS:
        for document in documents:
            if document["kind"] == "VolumeSnapshotClass":
                continue
            name = f"{document['kind']} {document['metadata']['name']} in Kubernetes {version}"
            try:
                kubernetes_validate.validate(document, version, strict=True)
                check(name, True)
            except (kubernetes_validate.ValidationError, kubernetes_validate.InvalidSchemaError) as error:
                check(name, False, str(error))
    broken = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "x"}, "spec": {"templates": {}}}
    try:
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)
        check("a wrong object is refused", False)
    except kubernetes_validate.ValidationError:
        check("a wrong object is refused", True)

    named = {(document["kind"], document["metadata"]["name"]) for document in documents}
    check("the driver has its name", ("CSIDriver", DRIVER) in named)
    for document in documents:
        if document["kind"] == "StorageClass":
            check(f"class {document['metadata']['name']} has the driver", document["provisioner"] == DRIVER)
            unknown = set(document["parameters"]) - PARAMETERS
            check(f"class {document['metadata']['name']} has known parameters", not unknown, unknown)
        if document["kind"] in ("ClusterRoleBinding", "RoleBinding"):
            role = (document["roleRef"]["kind"], document["roleRef"]["name"])
            subjects = {("ServiceAccount", subject["name"]) for subject in document["subjects"]}
            check(f"{document['kind']} names what there is", role in named and subjects <= named)
    help_text = subprocess.run([nacre, "csi", "--help"], capture_output=True, text=True, check=True).stdout
    flags = set(re.findall(r"--[a-z-]+", help_text))
    for document, pod in pods(documents):
        name = document["metadata"]["name"]
        labels = document["spec"]["template"]["metadata"]["labels"]
        check(f"{name} selects its pods", document["spec"]["selector"]["matchLabels"].items() <= labels.items())
        check(f"{name} has its account", ("ServiceAccount", pod["serviceAccountName"]) in named)
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        check(f"{name} mounts its volumes", volumes == mounted, volumes ^ mounted)
        for container in pod["containers"]:
            words = container["args"]
            privileged = container["securityContext"].get("privileged", False)
            is_node = (name, container["name"]) == ("nacre-csi-node", "nacre")
            check(f"{name}/{container['name']} is privileged only if it mounts", privileged == is_node)
            check(f"{name}/{container['name']} has a limit", "memory" in container["resources"]["limits"])
            if container["image"] == "nacre":
                used = {word for word in words if word.startswith("--")}
                check(f"{name}: nacre csi has the flags", words[0] == "csi" and used <= flags, used - flags)
                variables = {variable["name"] for variable in container["env"]}
                probes = [container.get(probe) for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
                check(f"{name}: nacre csi is probed", all(probes))
                check(f"{name}: probes wait longer than their helper", all(p["timeoutSeconds"] > PROBE for p in probes))
                check(f"{name}: nacre csi has time to end", pod["terminationGracePeriodSeconds"] > DRAIN)
                check(f"{name}: nacre csi has the variables", all(v in help_text for v in variables), variables)
            else:
                timeouts = [int(word.removeprefix("--timeout=")[:-1]) for word in words if word.startswith("--timeout=")]
                check(f"{name}/{container['name']} waits for the driver", all(t > LONGEST for t in timeouts), timeouts)
                probed = f"--probe-timeout={PROBE}s" in words
                check(f"{name}/{container['name']} probes in time", probed == (container["name"] == "liveness"))
                check(f"{name}/{container['name']} finds the socket", "--csi-address=/csi/csi.sock" in words)
    sys.exit(1 if failed else 0)


main()
