"""A manifest for Kubernetes: a JobSet.

A pod is a node. With one worker it runs the script itself, with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT; with several it runs torchrun. Pods reach the first one by its name in the headless
service of the JobSet. The text is JSON, which is YAML, too.

    exit status 143 (preempted), or a pod that is evicted    the JobSet starts again
    any other failure                                        as often as `restarts` says
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from shoal.commands.submit_request import MARK, SubmitRequest, memory_mib, seconds_of
from shoal.errors import BadInput
from shoal.runtime.config import variable_name
from shoal.runtime.preemption import EXIT_STATUS

_CONTAINER = "worker"
_PORT = 29500  # every pod has an address of its own
_SECRET_FOLDER = "/etc/shoal"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_SET_HERE = ("RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Document = dict[str, Any]


def checkpoint_warning(folder: str, claims: Sequence[str]) -> str | None:
    """What a pod writes elsewhere than in a volume is lost with it."""
    paths = [claim.partition(":")[2] for claim in claims]
    if any(PurePosixPath(posixpath.normpath(folder)).is_relative_to(path) for path in paths):
        return None
    where = f"below {' or '.join(paths)}" if paths else "in a volume (--claim NAME:/PATH)"
    return f"the checkpoint {folder} is not {where}: it is lost with its pod"


def manifest(asked: SubmitRequest) -> str:
    """The text of the manifest."""
    if asked.workers_per_node is None:
        raise BadInput(
            f"pods are alike, and {asked.workers} workers do not divide by --nodes {asked.nodes}"
        )
    for name in _SET_HERE:
        if name in asked.environ:
            raise BadInput(f"--env {name}: the job gives each pod its own, so leave it out")
    return json.dumps(_jobset(asked), indent=2, ensure_ascii=False) + "\n"


def _jobset(asked: SubmitRequest) -> Document:
    job: Document = {
        "parallelism": asked.nodes,
        "completions": asked.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # the JobSet starts all pods again, or none
        "template": {"spec": _pod(asked)},
    }
    if asked.time is not None:
        job["activeDeadlineSeconds"] = seconds_of(asked.time)
    if asked.requeues:
        codes = {"containerName": _CONTAINER, "operator": "In", "values": [EXIT_STATUS]}
        evicted = {"type": "DisruptionTarget", "status": "True"}
        rules: list[Document] = [{"onExitCodes": codes}, {"onPodConditions": [evicted]}]
        job["podFailurePolicy"] = {"rules": [{"action": "FailJob", **rule} for rule in rules]}
    rule = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    policy = {"maxRestarts": asked.max_restarts, **({"rules": [rule]} if asked.requeues else {})}
    place = {"namespace": asked.namespace} if asked.namespace else {}
    labels = {"app.kubernetes.io/managed-by": MARK}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": asked.name, **place, "labels": labels},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": policy,
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(asked: SubmitRequest) -> Document:
    volumes, mounts = _volumes(asked)
    container: Document = {"name": _CONTAINER, "image": asked.image, **_process(asked)}
    own = dict(asked.environ)
    if asked.secret is not None:
        own[variable_name("secret_file")] = f"{_SECRET_FOLDER}/secret"
    container["env"] += _variables(own)
    per_node = asked.workers_per_node or 1
    limits = {
        "cpu": None if asked.cpus is None else str(asked.cpus * per_node),
        "memory": None if asked.memory is None else f"{memory_mib(asked.memory)}Mi",
        "nvidia.com/gpu": str(asked.gpus_per_node) if asked.gpus_per_node else None,
    }
    if limits := {name: limit for name, limit in limits.items() if limit is not None}:
        container["resources"] = {"limits": limits, "requests": limits}
    if mounts:
        container["volumeMounts"] = mounts
    pod: Document = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": asked.notice,
        "containers": [container],
    }
    return {**pod, "volumes": volumes} if volumes else pod


def _process(asked: SubmitRequest) -> Document:
    """The command, and the variables that the job gives each pod."""
    own = [escaped(word) for word in asked.command]
    master = f"{asked.name}-workers-0-0.{asked.name}"
    given = {"MASTER_ADDR": master, "MASTER_PORT": str(_PORT)}
    index = {"valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    if asked.workers_per_node == 1:
        variables = _variables({**given, "WORLD_SIZE": str(asked.workers)})
        return {"command": own, "env": [*variables, {"name": "RANK", **index}]}
    python, *program = own
    torchrun = [
        *(python, "-m", "torch.distributed.run"),
        *("--node-rank=$(NODE_RANK)", f"--nnodes={asked.nodes}"),
        *(f"--master-addr={master}", f"--master-port={_PORT}"),
        *(f"--nproc-per-node={asked.workers_per_node}", *program),
    ]
    return {"command": torchrun, "env": [*_variables(given), {"name": "NODE_RANK", **index}]}


def _variables(environ: dict[str, str]) -> list[Document]:
    return [{"name": name, "value": escaped(value)} for name, value in environ.items()]


def escaped(text: str) -> str:
    """Kubernetes replaces $(NAME) in commands and variables; $$ stands for $."""
    return text.replace("$", "$$")


def _volumes(asked: SubmitRequest) -> tuple[list[Document], list[Document]]:
    volumes: list[Document] = []
    mounts: list[Document] = []
    for number, claim in enumerate(asked.claim or ()):
        name, _, path = claim.partition(":")
        volume = {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": name}}
        volumes.append(volume)
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    if asked.secret is not None:
        source = {"secretName": asked.secret, "defaultMode": 0o400}
        volumes.append({"name": "secret", "secret": source})
        mounts.append({"name": "secret", "mountPath": _SECRET_FOLDER, "readOnly": True})
    return volumes, mounts
