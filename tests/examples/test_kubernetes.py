"""The manifests for Kubernetes say what their operators' definitions allow, and what the programs in them understand.

`FIELDS` is what these manifests may use of the custom resources of Kubeflow Trainer v2 and of the MPI operator, written
down from the definitions that they publish (kubeflow/trainer, manifests/base/crds, and kubeflow/mpi-operator,
manifests/base). The whole ones, which have tens of thousands of lines, have checked the manifests, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fusion_rt.runner.command.cli import make_plan
from fusion_rt.runner.command.flags import make_parser

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))

# A mapping has these fields and no others; a list has one kind of entry; `{str: kind}` has any keys.
RESOURCES = {"limits": {"cpu": str, "memory": str}}
SECRET_KEY = {"secretKeyRef": {"name": str, "key": str}}
CONTAINER = {
    "name": str, "image": str, "command": [str], "args": [str], "securityContext": {"runAsUser": int},
    "env": [{"name": str, "value": str, "valueFrom": SECRET_KEY}], "resources": RESOURCES,
    "readinessProbe": {"tcpSocket": {"port": int}, "initialDelaySeconds": int},
}  # fmt: skip
POD = {"spec": {"securityContext": {"fsGroup": int}, "containers": [CONTAINER]}}
REPLICATED = {
    "name": str,
    "dependsOn": [{"name": str, "status": str}],
    "template": {"metadata": {"labels": {str: str}}, "spec": {"backoffLimit": int, "template": POD}},
}
JOB_SET = {
    "spec": {
        "network": {"publishNotReadyAddresses": bool},
        "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
        "replicatedJobs": [REPLICATED],
    }
}
MPI = {"numProcPerNode": int, "mpiImplementation": str, "sshAuthMountPath": str, "runLauncherAsNode": bool}
FIELDS: dict[tuple[str, str], Any] = {
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "mlPolicy": {"numNodes": int, "torch": {}, "mpi": MPI}, "template": JOB_SET,
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
        "trainer": {"numNodes": int, "numProcPerNode": int, "command": [str], "args": [str]},
    },
    ("kubeflow.org/v2beta1", "MPIJob"): {
        "slotsPerWorker": int, "launcherCreationPolicy": str, "sshAuthMountPath": str,
        "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int},
        "mpiReplicaSpecs": {str: {"replicas": int, "template": POD}},
    },
}  # fmt: skip


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


def wrong(value: Any, kind: Any, where: str) -> list[str]:
    """What in a manifest has no place there, or is of another type."""
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return [f"{where} is no mapping"]
        any_key = kind.get(str)
        unknown = [] if any_key else [f"{where}.{name} is unknown" for name in value if name not in kind]
        inside = ((name, kind.get(name, any_key)) for name in value if any_key or name in kind)
        return unknown + [text for name, each in inside for text in wrong(value[name], each, f"{where}.{name}")]
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [text for number, each in enumerate(value) for text in wrong(each, kind[0], f"{where}[{number}]")]
    return [] if type(value) is kind else [f"{where} is no {kind.__name__}"]


def containers(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        yield from value.get("containers", [])
        for each in value.values():
            yield from containers(each)
    elif isinstance(value, list):
        for each in value:
            yield from containers(each)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Command lines that manifests start, with the files they are in."""
    for name, document in documents():
        trainer = document["spec"].get("trainer")
        for started in [trainer] if trainer else containers(document):
            if "command" in started:
                yield name, [*started["command"], *started.get("args", [])]


def test_fields_are_those_of_the_definitions() -> None:
    found = []
    for name, document in documents():
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", document["metadata"]["name"])
        found += wrong(document["spec"], FIELDS[document["apiVersion"], document["kind"]], name)
    assert found == []
    assert {document["kind"] for _, document in documents()} == {kind for _, kind in FIELDS}


def test_a_field_that_does_not_exist_is_seen() -> None:
    kind = FIELDS["kubeflow.org/v2beta1", "MPIJob"]
    assert wrong({"slotsPerWorkers": 1}, kind, "spec") == ["spec.slotsPerWorkers is unknown"]
    assert wrong({"slotsPerWorker": "1"}, kind, "spec") == ["spec.slotsPerWorker is no int"]
    template = {"spec": {"containers": [{"image": 1}]}}
    assert wrong({"mpiReplicaSpecs": {"Worker": {"template": template}}}, kind, "spec") == [
        "spec.mpiReplicaSpecs.Worker.template.spec.containers[0].image is no str"
    ]


def test_a_job_and_its_runtime_belong_together() -> None:
    """The operator gives its hosts and keys to containers that are named so, and nothing to others."""
    runtimes = {d["metadata"]["name"]: d["spec"] for _, d in documents() if d["kind"] == "TrainingRuntime"}
    for _, document in documents():
        if document["kind"] == "TrainJob":
            runtime = runtimes[document["spec"]["runtimeRef"]["name"]]
            replicated = {each["name"]: each["template"] for each in runtime["template"]["spec"]["replicatedJobs"]}
            assert set(replicated) == ({"node", "launcher"} if "mpi" in runtime["mlPolicy"] else {"node"})
            trained = replicated["launcher" if "launcher" in replicated else "node"]
            assert trained["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
            assert all(each["name"] == "node" for each in containers(runtime))


def test_keys_are_where_the_image_looks_for_them() -> None:
    image = (FOLDER / "Dockerfile").read_text()
    assert "HostKey /home/trainer/.ssh/id_rsa" in image
    assert "Port 2222" in image
    for _, document in documents():
        policy = document["spec"].get("mlPolicy", {}).get("mpi", document["spec"])
        if "sshAuthMountPath" in policy:
            assert policy["sshAuthMountPath"] == "/home/trainer/.ssh"


def test_scripts_and_programs_are_those_of_the_image() -> None:
    programs = set()
    for _, command in commands():
        programs.add(command[0])
        scripts = [part.removeprefix("/opt/fusion_rt/") for part in command if part.startswith("/opt/fusion_rt/")]
        assert all((ROOT / script).is_file() for script in scripts)
        assert len(scripts) == (command[0] != "/usr/sbin/sshd")
    assert programs == {"fusionrun", "torchrun", "/usr/sbin/sshd"}


def test_fusionrun_makes_a_job_of_what_the_operators_mount(tmp_path: Path) -> None:
    hostfile, script = tmp_path / "hostfile", tmp_path / "discover_hosts.sh"
    hostfile.write_text("digits-node-0-0.digits slots=2\ndigits-node-0-1.digits slots=2\n")
    names = [f"digits-elastic-worker-{number}.digits-elastic.default.svc" for number in range(2)]
    script.write_text("#!/bin/sh\n" + "".join(f"echo {name}\n" for name in names))
    script.chmod(0o555)
    mounted = {"/etc/mpi/hostfile": str(hostfile), "/etc/mpi/discover_hosts.sh": str(script)}
    plans = {
        name: make_plan(make_parser().parse_args([mounted.get(part, part) for part in command[1:]]))
        for name, command in commands()
        if command[0] == "fusionrun"
    }
    fixed, elastic = plans["trainjob-fusionrun.yaml"], plans["mpijob-elastic.yaml"]
    assert [(host.name, host.slots) for host in fixed.places.hosts] == [
        ("digits-node-0-0.digits", 2),
        ("digits-node-0-1.digits", 2),
    ]
    assert fixed.elastic is None
    assert [host.name for host in elastic.places.hosts] == names
    assert elastic.elastic is not None
    assert (elastic.elastic.limits.least, elastic.elastic.limits.most) == (1, 8)
    assert {plan.ssh_port for plan in plans.values()} == {2222}
