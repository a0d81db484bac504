"""The manifests of docs/kubernetes: their fields, and their commands as processes."""

import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_adpsgd.islands.rendezvous import ENVIRONMENT_VARIABLE, RendezvousAddress
from lightning_adpsgd.transport.links.credentials import FOLDER
from lightning_adpsgd.transport.links.issuing import issue
from tests import warm
from tests.helpers import PROGRAM_S, free_port

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "docs" / "kubernetes"
BIN = "bin"
FILES = ("islands.yaml", "job.yaml")
# Of the container's environment, those that the package or torch reads by name.
KNOWN = {
    ENVIRONMENT_VARIABLE,
    FOLDER,
    "OMP_NUM_THREADS",
    "RUN_FOLDER",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
}


@cache
def documents(file: str) -> dict[str, dict[str, Any]]:
    """The documents of a manifest, by kind."""
    found = list(yaml.safe_load_all((MANIFESTS / file).read_text(encoding="utf-8")))
    assert len({document["kind"] for document in found}) == len(found)
    return {document["kind"]: document for document in found}


def template(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["template"]


def container(document: dict[str, Any]) -> dict[str, Any]:
    (only,) = template(document)["spec"]["containers"]
    return only


def environment(document: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container(document).get("env", ())}


def workloads(file: str) -> list[dict[str, Any]]:
    found = documents(file)
    return [found[kind] for kind in ("Deployment", "Job") if kind in found]


# --- fields


@pytest.mark.parametrize("file", FILES)
def test_kubernetes_own_schema_takes_each_document(file: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    version = kubernetes_validate.latest_version()
    for document in documents(file).values():
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("file", FILES)
def test_services_select_pods_that_there_are_and_open_their_ports(file: str) -> None:
    service = documents(file)["Service"]["spec"]
    (owner,) = [
        w
        for w in workloads(file)
        if template(w)["metadata"]["labels"] == service["selector"]
    ]
    if (selector := owner["spec"].get("selector")) is not None:
        assert selector["matchLabels"] == service["selector"]
    opened = {port["containerPort"] for port in container(owner)["ports"]}
    assert {port["port"] for port in service["ports"]} == opened


@pytest.mark.parametrize("file", FILES)
def test_every_volume_that_is_mounted_is_there_and_the_other_way_round(
    file: str,
) -> None:
    for workload in workloads(file):
        mounts = {m["name"] for m in container(workload).get("volumeMounts", ())}
        volumes = {v["name"] for v in template(workload)["spec"].get("volumes", ())}
        assert mounts == volumes


@pytest.mark.parametrize("file", FILES)
def test_pods_have_no_sidecar_and_may_start_again(file: str) -> None:
    for workload in workloads(file):
        notes = template(workload)["metadata"]["annotations"]
        assert notes["sidecar.istio.io/inject"] == "false"
    pod = template(documents(file)["Job"])["spec"]
    assert pod["restartPolicy"] == "OnFailure"
    assert documents(file)["Job"]["spec"]["backoffLimit"] > 0
    assert pod["terminationGracePeriodSeconds"] > 30  # to merge and save


@pytest.mark.parametrize("file", FILES)
def test_variables_are_ones_that_somebody_reads(file: str) -> None:
    names = set(environment(documents(file)["Job"]))
    assert names <= KNOWN
    program = (MANIFESTS / "train.py").read_text()
    assert "RUN_FOLDER" in names
    assert '"RUN_FOLDER"' in program


def test_islands_find_the_service_and_the_secret() -> None:
    found = documents("islands.yaml")
    variables = environment(found["Job"])
    address = RendezvousAddress.parse(variables[ENVIRONMENT_VARIABLE])
    assert address.host == found["Service"]["metadata"]["name"]
    assert address.port == found["Service"]["spec"]["ports"][0]["port"]
    mounts = {
        m["name"]: m["mountPath"] for m in container(found["Job"])["volumeMounts"]
    }
    assert variables[FOLDER] == mounts["secrets"]
    secrets = next(
        v for v in template(found["Job"])["spec"]["volumes"] if "secret" in v
    )
    # YAML 1.1 reads 0400 as an octal number, as Kubernetes does.
    assert secrets["secret"]["defaultMode"] == 0o400


def test_the_jobs_command_has_its_size_and_its_first_pod() -> None:
    found = documents("job.yaml")
    job, words = found["Job"], torchrun_words(found["Job"])
    spec, name = job["spec"], job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert words["--nnodes"] == str(spec["completions"]) == str(spec["parallelism"])
    service = found["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert template(job)["spec"]["subdomain"] == service["metadata"]["name"]
    assert words["--master-addr"] == f"{name}-0.{service['metadata']['name']}"
    assert words["--master-port"] == str(service["spec"]["ports"][0]["port"])


def torchrun_words(job: dict[str, Any]) -> dict[str, str]:
    words = shlex.split(" ".join(container(job)["command"]))
    return dict(
        word.split("=", 1) for word in words if word.startswith("--") and "=" in word
    )


def test_the_image_is_made_of_files_that_there_are() -> None:
    lines = (MANIFESTS / "Dockerfile").read_text().splitlines()
    copied = [shlex.split(line)[1:-1] for line in lines if line.startswith("COPY")]
    for name in (name for names in copied for name in names):
        assert (ROOT / name).exists(), name
    assert [line for line in lines if line.startswith("FROM")] == [
        "FROM python:3.11-slim"
    ]


# --- the commands, as processes of this machine


class Pod:
    """A container's command as a process, with its own group and output.

    Its programs are those beside the output.
    """

    def __init__(
        self, words: Sequence[str], variables: dict[str, str], output: Path
    ) -> None:
        self._output = output
        with output.open("w") as file:
            self._process = subprocess.Popen(
                words,
                cwd=MANIFESTS,
                env={**inherited(output.parent / BIN), **variables, "EPOCHS": "2"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> str:
        """What it printed, once it has ended well."""
        code = self._process.wait(PROGRAM_S)
        text = self._output.read_text()
        assert code == 0, text
        return text

    def end(self) -> None:
        """Ends it and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PROGRAM_S)


@pytest.fixture
def pod_folder(tmp_path: Path) -> Path:
    """A folder with the programs of the image: Python and torchrun, as warm programs.

    They are written once: a file cannot be written again while a pod executes it.
    """
    (tmp_path / BIN).mkdir()
    options = {"python": "", "torchrun": " -m torch.distributed.run"}
    for name, words in options.items():
        program = tmp_path / BIN / name
        command = shlex.quote(warm.python())
        program.write_text(f'#!/bin/sh\nexec {command}{words} "$@"\n')
        program.chmod(0o700)
    return tmp_path


def inherited(programs: Path) -> dict[str, str]:
    """This process's environment, with the package and the programs in reach."""
    folders = (str(programs), os.environ.get("PATH", ""))
    return {
        **os.environ,
        "PATH": os.pathsep.join(folders),
        "PYTHONPATH": str(ROOT),
    }


@contextmanager
def pods() -> Iterator[list[Pod]]:
    """A list of pods that are ended at the end."""
    started: list[Pod] = []
    try:
        yield started
    finally:
        for pod in started:
            pod.end()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_islands_command_trains_as_two_pods(pod_folder: Path) -> None:
    found = documents("islands.yaml")
    port = str(free_port())
    issue(pod_folder / "credentials", days=1)
    variables = environment(found["Job"]) | {
        FOLDER: str(pod_folder / "credentials"),
        ENVIRONMENT_VARIABLE: f"tcp://127.0.0.1:{port}/my-job",
        "RUN_FOLDER": str(pod_folder / "runs"),
    }
    command = [
        "--nproc-per-node=1" if word.startswith("--nproc-per-node") else word
        for word in container(found["Job"])["command"]
    ]
    serve = [
        port if word == "29400" else word
        for word in container(found["Deployment"])["command"]
    ]
    with pods() as started:
        started.append(Pod(serve, {}, pod_folder / "rendezvous.out"))
        for index in range(2):
            own = {**variables, "JOB_COMPLETION_INDEX": str(index)}
            started.append(Pod(command, own, pod_folder / f"{index}.out"))
        texts = [pod.wait() for pod in started[1:]]
    assert all(re.search(r"learner 0: loss \d", text) for text in texts)
    for index in range(2):
        assert (pod_folder / "runs" / str(index) / "last.ckpt").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_jobs_command_trains_as_two_pods(pod_folder: Path) -> None:
    job = documents("job.yaml")["Job"]
    shell, flag, line = container(job)["command"]
    line = re.sub(r"--nnodes=\d+", "--nnodes=2", line)
    line = re.sub(r"--nproc-per-node=\d+", "--nproc-per-node=1", line)
    line = line.replace("learners-0.learners", socket.gethostbyname("localhost"))
    line = line.replace("29400", str(free_port()))
    variables = environment(job) | {
        "RUN_FOLDER": str(pod_folder / "runs"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with pods() as started:
        for index in range(2):
            own = {**variables, "JOB_COMPLETION_INDEX": str(index)}
            started.append(Pod([shell, flag, line], own, pod_folder / f"{index}.out"))
        texts = [pod.wait() for pod in started]
    losses = [re.findall(r"learner \d: loss (\S+)", text) for text in texts]
    assert losses[0] == losses[1]
    saved = torch.load(pod_folder / "runs" / "last.ckpt", weights_only=True)
    assert saved["state_dict"]["layer.weight"].isfinite().all()
