"""The worker process, which trains for the devices of another process; started by `device.pool.executors`.

    {"ready"}                              -> {"ready"}
    {"accelerators"}                       -> {"accelerators"} of this machine
    {"experiment": TEXT, "digest"}            a new experiment
    {"prepare": DEVICE}                    -> {"layout", "samples", "partition", "kept_bytes", "tests", "folder"}
    {"train": [{"job", "device", "epochs", "round", "scores", "scores_trained", "folder", "noise"}, ...],
     "row_bytes", "out_bytes"}
                                           -> for each job {"job", "steps", "of"} ..., then {"job", "result"}
    {"cancel": JOB}
    {"forget": DIGEST}                        an experiment that no device is in any more

A DEVICE is [digest, name, accelerator, a file of the cloud's frozen arrays or null]. The shared memory has two rows for
each job, one to read and one to write.
A job has a "failure" instead of a result, an empty one if it was cancelled. An error is the outcome of all remaining
jobs; after one by which the accelerator is lost the agent replaces this process.
"""

from __future__ import annotations

import threading
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path
from typing import Any

from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.host.memory import frozen_imports, keep_large_buffers
from common.host.subprocess_channel import AgentChannel, Record, error_record
from device.jobs import Cancelled, Ending, HostedDevice, LocalResult, Order
from device.pool.trainers import Trainers


class WorkerServer:
    """Serves the process of one agent. It imports torch, which takes seconds, when that is needed."""

    def __init__(self) -> None:
        self._experiments: dict[str, Experiment] = {}
        self._cancelled: dict[int, threading.Event] = {}
        self._channel = AgentChannel(self._cancel)
        self._trainers = Trainers()

    def serve(self) -> None:
        """Process the agent's requests until it ends."""
        while True:
            request = self._channel.receive()
            try:
                if "experiment" in request:
                    self._experiments[request["digest"]] = parse(request["experiment"])
                elif "prepare" in request:
                    with frozen_imports():
                        prepared = self._trainers.prepare(*self._device(request["prepare"]))
                    facts = {field.name: getattr(prepared, field.name) for field in fields(prepared)}
                    self._channel.send(**facts | {"layout": prepared.layout.to_json()})
                elif "forget" in request:
                    del self._experiments[request["forget"]]
                    self._trainers.forget(request["forget"])
                elif "train" in request:
                    self._train(request["train"], request["row_bytes"], request["out_bytes"])
                elif "accelerators" in request:
                    with frozen_imports():
                        self._channel.send(accelerators=self._trainers.accelerators())
                else:
                    self._channel.send(ready=True)
            except Exception as error:  # noqa: BLE001 - the agent passes it on
                self._channel.send(**error_record(error))

    def _train(self, orders: list[dict[str, Any]], row_bytes: int, out_bytes: int) -> None:
        rows = self._channel.memory.rows(2 * len(orders), max(row_bytes, out_bytes))
        work = []
        for wanted, row, out in zip(orders, rows[::2, :row_bytes], rows[1::2, :out_bytes], strict=True):
            row.flags.writeable = False
            device, accelerator = self._device(wanted["device"])
            report, cancelled = partial(self._report, wanted["job"]), self._cancelled[wanted["job"]]
            folder, facts = wanted["folder"] and Path(wanted["folder"]), (wanted["epochs"], wanted["round"])
            scores = wanted["scores"], wanted["scores_trained"]
            noise = bytes.fromhex(wanted["noise"])
            work.append((device, Order(row, out, *facts, report, cancelled, *scores, folder, noise)))

        def done(place: int, how: Ending) -> None:
            number = orders[place]["job"]
            if isinstance(how, LocalResult):
                *facts, _, start_loss, _ = astuple(how)
                costs = {"cpu_s": how.costs.cpu_s, "memory_bytes": how.costs.memory_bytes}
                tests = None if how.tests is None else how.tests.to_json()
                self._channel.send(job=number, result=[*facts, tests, start_loss, costs])
            else:
                self._channel.send(job=number, failure={} if isinstance(how, Cancelled) else error_record(how))

        self._trainers.train(work, accelerator, done)

    def _device(self, sent: list[Any]) -> tuple[HostedDevice, str]:
        digest, node, accelerator, frozen = sent
        return HostedDevice(self._experiments[digest], digest, node, frozen=frozen and Path(frozen)), accelerator

    def _report(self, job: int, steps: int, of: int) -> None:
        self._channel.send(job=job, steps=steps, of=of)

    def _cancel(self, request: Record) -> bool:
        """Cancel a job while this process trains; return whether the request is a cancellation."""
        if "train" in request:  # all earlier jobs have ended
            self._cancelled = {job["job"]: threading.Event() for job in request["train"]}
        if "cancel" in request and (event := self._cancelled.get(request["cancel"])) is not None:
            event.set()
        return "cancel" in request


if __name__ == "__main__":
    keep_large_buffers()
    WorkerServer().serve()
