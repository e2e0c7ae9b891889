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
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from shoal.errors import BadInput
from shoal.launch.managers.submit_spec import MARK, SubmitSpec, memory_mib, seconds_of
from shoal.runtime.config import variable_name
from shoal.runtime.preemption import EXIT_STATUS

_CONTAINER = "worker"
_PORT = 29500  # every pod has an address of its own
_SECRET_FOLDER = "/etc/shoal"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_SET_HERE = ("RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Document = dict[str, Any]


@dataclass(frozen=True)
class KubernetesOptions:
    """What only Kubernetes knows."""

    image: str
    namespace: str | None = None
    secret: str | None = None  # the name of a Secret whose key `secret` has the digits
    claims: tuple[str, ...] = ()  # NAME:/PATH, persistent volume claims

    def __post_init__(self) -> None:
        for claim in self.claims:
            if re.fullmatch(r"[^:]+:/[^:\0]*", claim) is None:
                raise BadInput(f"--claim takes NAME:/PATH, not {claim!r}")


def checkpoint_warning(folder: str, options: KubernetesOptions) -> str | None:
    """What a pod writes elsewhere than in a volume is lost with it."""
    paths = [claim.partition(":")[2] for claim in options.claims]
    if any(PurePosixPath(posixpath.normpath(folder)).is_relative_to(path) for path in paths):
        return None
    where = f"below {' or '.join(paths)}" if paths else "in a volume (--claim NAME:/PATH)"
    return f"the checkpoint {folder} is not {where}: it is lost with its pod"


def manifest(spec: SubmitSpec, options: KubernetesOptions) -> str:
    """The text of the manifest."""
    if spec.workers_per_node is None:
        raise BadInput(
            f"pods are alike, and {spec.workers} workers do not divide by --nodes {spec.nodes}"
        )
    for name in _SET_HERE:
        if name in spec.environ:
            raise BadInput(f"--env {name}: the job gives each pod its own, so leave it out")
    return json.dumps(_jobset(spec, options), indent=2, ensure_ascii=False) + "\n"


def _jobset(spec: SubmitSpec, options: KubernetesOptions) -> Document:
    job: Document = {
        "parallelism": spec.nodes,
        "completions": spec.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # the JobSet starts all pods again, or none
        "template": {"spec": _pod(spec, options)},
    }
    if spec.time is not None:
        job["activeDeadlineSeconds"] = seconds_of(spec.time)
    if spec.requeue:
        codes = {"containerName": _CONTAINER, "operator": "In", "values": [EXIT_STATUS]}
        evicted = {"type": "DisruptionTarget", "status": "True"}
        rules: list[Document] = [{"onExitCodes": codes}, {"onPodConditions": [evicted]}]
        job["podFailurePolicy"] = {"rules": [{"action": "FailJob", **rule} for rule in rules]}
    rule = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    policy = {"maxRestarts": spec.restarts, **({"rules": [rule]} if spec.requeue else {})}
    place = {"namespace": options.namespace} if options.namespace else {}
    labels = {"app.kubernetes.io/managed-by": MARK}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": spec.name, **place, "labels": labels},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": policy,
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(spec: SubmitSpec, options: KubernetesOptions) -> Document:
    volumes, mounts = _volumes(options)
    container: Document = {"name": _CONTAINER, "image": options.image, **_process(spec)}
    own = dict(spec.environ)
    if options.secret is not None:
        own[variable_name("secret_file")] = f"{_SECRET_FOLDER}/secret"
    container["env"] += _variables(own)
    per_node = spec.workers_per_node or 1
    limits = {
        "cpu": None if spec.cpus is None else str(spec.cpus * per_node),
        "memory": None if spec.memory is None else f"{memory_mib(spec.memory)}Mi",
        "nvidia.com/gpu": str(spec.gpus_per_node) if spec.gpus_per_node else None,
    }
    if limits := {name: limit for name, limit in limits.items() if limit is not None}:
        container["resources"] = {"limits": limits, "requests": limits}
    if mounts:
        container["volumeMounts"] = mounts
    pod: Document = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": spec.notice_s,
        "containers": [container],
    }
    return {**pod, "volumes": volumes} if volumes else pod


def _process(spec: SubmitSpec) -> Document:
    """The command, and the variables that the job gives each pod."""
    own = [escaped(word) for word in spec.command]
    master = f"{spec.name}-workers-0-0.{spec.name}"
    given = {"MASTER_ADDR": master, "MASTER_PORT": str(_PORT)}
    index = {"valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    if spec.workers_per_node == 1:
        variables = _variables({**given, "WORLD_SIZE": str(spec.workers)})
        return {"command": own, "env": [*variables, {"name": "RANK", **index}]}
    python, *program = own
    torchrun = [
        *(python, "-m", "torch.distributed.run"),
        *("--node-rank=$(NODE_RANK)", f"--nnodes={spec.nodes}"),
        *(f"--master-addr={master}", f"--master-port={_PORT}"),
        *(f"--nproc-per-node={spec.workers_per_node}", *program),
    ]
    return {"command": torchrun, "env": [*_variables(given), {"name": "NODE_RANK", **index}]}


def _variables(environ: dict[str, str]) -> list[Document]:
    return [{"name": name, "value": escaped(value)} for name, value in environ.items()]


def escaped(text: str) -> str:
    """Kubernetes replaces $(NAME) in commands and variables; $$ stands for $."""
    return text.replace("$", "$$")


def _volumes(options: KubernetesOptions) -> tuple[list[Document], list[Document]]:
    volumes: list[Document] = []
    mounts: list[Document] = []
    for number, claim in enumerate(options.claims):
        name, _, path = claim.partition(":")
        volume = {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": name}}
        volumes.append(volume)
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    if options.secret is not None:
        source = {"secretName": options.secret, "defaultMode": 0o400}
        volumes.append({"name": "secret", "secret": source})
        mounts.append({"name": "secret", "mountPath": _SECRET_FOLDER, "readOnly": True})
    return volumes, mounts
