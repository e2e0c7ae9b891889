"""What Kubernetes and JobSet accept, as far as manifests here use it.

A schema is a type, a pattern, a set of values, a list with the schema of its items, or a dict: a
name with `?` may be missing, `*` stands for any name, and no other field is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
)
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGT]i|[kMGT]|m)?")
ABSOLUTE = re.compile(r"/[^:]*")
RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")

METADATA = {
    "name": LABEL,
    "namespace?": LABEL,
    "labels?": {"*": re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")},
}
CONTAINER = {
    "name": LABEL,
    "image": str,
    "command": [str],
    "env": [
        {"name": ENV_NAME, "value?": str, "valueFrom?": {"fieldRef": {"fieldPath": str}}},
    ],
    "resources?": {"limits": {"*": QUANTITY}, "requests": {"*": QUANTITY}},
    "volumeMounts?": [{"name": LABEL, "mountPath": ABSOLUTE, "readOnly?": bool}],
}
POD = {
    "restartPolicy?": {"Never", "OnFailure", "Always"},
    "terminationGracePeriodSeconds": int,
    "containers": [CONTAINER],
    "volumes?": [
        {
            "name": LABEL,
            "persistentVolumeClaim?": {"claimName": SUBDOMAIN},
            "secret?": {"secretName": SUBDOMAIN, "defaultMode": int},
        }
    ],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": {"Indexed", "NonIndexed"},
    "backoffLimit": int,
    "activeDeadlineSeconds?": int,
    "podFailurePolicy?": {
        "rules": [
            {
                "action": {"FailJob", "FailIndex", "Ignore", "Count"},
                "onExitCodes?": {
                    "containerName": LABEL,
                    "operator": {"In", "NotIn"},
                    "values": [int],
                },
                "onPodConditions?": [{"type": str, "status": {"True", "False", "Unknown"}}],
            }
        ]
    },
    "template": {"spec": POD},
}
FAILURES = {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "PodFailurePolicy"}
JOBSET = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"},
    "kind": {"JobSet"},
    "metadata": METADATA,
    "spec": {
        "network": {"enableDNSHostnames": bool},
        "failurePolicy": {
            "maxRestarts": int,
            "rules?": [
                {
                    "name": RULE_NAME,
                    "action": {
                        "FailJobSet",
                        "RestartJobSet",
                        "RestartJobSetAndIgnoreMaxRestarts",
                    },
                    "onJobFailureReasons": [FAILURES],
                }
            ],
        },
        "replicatedJobs": [{"name": LABEL, "replicas": int, "template": {"spec": JOB}}],
    },
}


def faults(document: dict[str, Any]) -> list[str]:
    """What an API server, or the controller of the kind, would refuse."""
    return list(_fit(document, JOBSET, "manifest")) or list(_refused_jobset(document))


def _fit(value: Any, schema: Any, path: str) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from _fit_object(value, schema, path)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{path} is no list: {value!r}"
            return
        for index, item in enumerate(value):
            yield from _fit(item, schema[0], f"{path}[{index}]")
    elif isinstance(schema, set):
        if value not in schema:
            yield f"{path} is {value!r}, not one of {sorted(schema)}"
    elif isinstance(schema, re.Pattern):
        if not isinstance(value, str) or schema.fullmatch(value) is None:
            yield f"{path} is {value!r}, against {schema.pattern}"
    elif type(value) is not schema or (schema is int and value < 0):
        yield f"{path} is {value!r}, no {schema.__name__}"


def _fit_object(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path} is no object: {value!r}"
        return
    known = {name.removesuffix("?"): fields for name, fields in schema.items()}
    for name in schema:
        if name != "*" and not name.endswith("?") and name not in value:
            yield f"{path}.{name} is missing"
    for name, item in value.items():
        fields = known.get(name, known.get("*"))
        if fields is None:
            yield f"{path}.{name} is unknown"
        else:
            yield from _fit(item, fields, f"{path}.{name}")


def _refused_jobset(document: dict[str, Any]) -> Iterator[str]:
    for replicated in document["spec"]["replicatedJobs"]:
        job = replicated["template"]["spec"]
        longest = (
            f"{document['metadata']['name']}-{replicated['name']}-0-{job['completions']}-abcde"
        )
        if len(longest) > 63:
            yield f"the name of a pod is too long: {longest}"
        pod = job["template"]["spec"]
        yield from _refused_pod(pod)
        if pod.get("restartPolicy") not in ("Never", "OnFailure"):
            yield "pods of a Job have a restart policy: Never or OnFailure"
        for rule in job.get("podFailurePolicy", {}).get("rules", []):
            yield from _refused_rule(rule, pod)


def _refused_rule(rule: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    if pod["restartPolicy"] != "Never":
        yield "a podFailurePolicy needs the restart policy Never"
    if ("onExitCodes" in rule) == ("onPodConditions" in rule):
        yield "a rule has exit codes or conditions: one of them"
    codes = rule.get("onExitCodes", {"values": [1], "containerName": pod["containers"][0]["name"]})
    if codes["values"] != sorted({code for code in codes["values"] if 0 < code < 256}):
        yield f"exit codes are no ordered set of 1 to 255: {codes['values']}"
    if codes["containerName"] not in [container["name"] for container in pod["containers"]]:
        yield f"there is no container {codes['containerName']}"


def _refused_pod(pod: dict[str, Any]) -> Iterator[str]:
    volumes = [volume["name"] for volume in pod.get("volumes", [])]
    for container in pod["containers"]:
        mounts = container.get("volumeMounts", [])
        named = [variable["name"] for variable in container["env"]]
        paths = [mount["mountPath"] for mount in mounts]
        for what, names in (("variable", named), ("mount path", paths), ("volume", volumes)):
            if len(set(names)) < len(names):
                yield f"a {what} is there twice: {names}"
        if {mount["name"] for mount in mounts} != set(volumes):
            yield f"mounts {mounts} of volumes {volumes}"
        for variable in container["env"]:
            if ("value" in variable) == ("valueFrom" in variable):
                yield f"{variable['name']} has a value and a source, or neither"
