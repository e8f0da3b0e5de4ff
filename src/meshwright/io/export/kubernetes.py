"""Kubernetes: a JobSet with a pod per server, and the same queued by Kueue. Texts are quoted as JSON, which YAML reads."""

from __future__ import annotations

import json

from .exported import Exporter, Subject, Written
from .launch import RUN_AFTER, job_name, machine_of, resource_of, torchrun, uneven

__all__ = ["JOBSET", "KUEUE"]

_TEXT = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
{labels}spec:
  network:
    enableDNSHostnames: true
  failurePolicy:
    maxRestarts: 0
  replicatedJobs:
    - name: workers
      replicas: 1
      template:
        spec:
          parallelism: {nodes}
          completions: {nodes}
          completionMode: Indexed
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
{selector}              containers:
                - name: train
                  image: "your/image:tag"
                  command: ["bash", "-c"]
                  args: [{command}]
{resources}"""


def _jobset(subject: Subject, labels: str) -> Written:
    machine, name = machine_of(subject), job_name(subject)
    resource = resource_of(machine)
    missing = uneven(subject)
    limits = f"                  resources:\n                    limits:\n                      {resource}: {subject.per_node}\n" if resource else ""
    alias = next((a for a in machine.aliases if "*" not in a), "") if machine else ""
    selector = f"              nodeSelector:\n                node.kubernetes.io/instance-type: {json.dumps(alias)}\n" if alias else ""
    address = f"{name}-workers-0-0.{name}"
    command = json.dumps(torchrun(subject, "$JOB_COMPLETION_INDEX", address))
    text = _TEXT.format(name=name, nodes=len(subject.nodes), labels=labels, selector=selector, command=command, resources=limits)
    if not resource:
        missing.append("which accelerators: the plan's fabric is no preset with GPUs")
    return text, missing, [RUN_AFTER, "the container image with both"]


def _write_jobset(subject: Subject) -> Written:
    return _jobset(subject, "")


def _write_kueue(subject: Subject) -> Written:
    text, missing, to_add = _jobset(subject, "  labels:\n    kueue.x-k8s.io/queue-name: your-queue\n")
    text = text.replace("spec:\n  network:", "spec:\n  suspend: true\n  network:", 1)
    return text, missing, [*to_add, "the name of your LocalQueue"]


JOBSET = Exporter(name="jobset", version="JobSet v1alpha2 at 08dfbdf (2026-08-18), its CRD", write=_write_jobset, launches=True)
KUEUE = Exporter(name="kueue", version="Kueue's queue-name label on a JobSet v1alpha2", write=_write_kueue, launches=True)
