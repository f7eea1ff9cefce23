"""The worker process, which trains for the devices of another process; started by
`device.pool.executors`.

    {"ready"}                              -> {"ready"}
    {"accelerators"}                       -> {"accelerators"} of this machine
    {"experiment": TEXT, "digest"}            a new experiment
    {"prepare": DEVICE}                    -> {"layout", "samples", "partition", "kept_bytes",
    "tests", "folder"} {"train": [{"job", "device", "epochs", "round", "scores", "scores_trained",
    "folder", "noise", "places"}, ...], "row_bytes", "out_bytes"}
                                           -> for each job {"job", "steps", "of"} ..., then {"job",
                                           "result"}
    {"cancel": JOB}
    {"forget": DIGEST}                        an experiment that no device is in any more

A DEVICE is [digest, name, accelerator, a file of the cloud's frozen arrays or null]. The places of
a job are those of two rows of the agent, one to read and one to write; without them the shared
memory has two for it.
A job has a "failure" instead of a result, an empty one if it was cancelled. An error is the outcome
of all remaining jobs; after one by which the accelerator is lost the agent replaces this process.
"""

from __future__ import annotations

import os
import threading
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from fedstrata.common.errors import FedstrataError
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.memory import frozen_imports, keep_large_buffers, release_freed
from fedstrata.common.processes.shared_rows import SHARED_BYTES, row_at
from fedstrata.common.processes.subprocess_channel import AgentChannel, Record, error_record
from fedstrata.device.jobs import Cancelled, Ending, HostedDevice, LocalResult, Order, TrainerFolder
from fedstrata.device.pool.trainers_by_kind import Trainers


class WorkerServer:
    """Serves the process of one agent. It imports torch, which takes seconds, when that is
    needed.
    """

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
                    # it takes 2 ms, and a host may have 1,000 devices
                    if prepared.layout.row_bytes >= SHARED_BYTES:
                        release_freed()
                    facts = {
                        field.name: getattr(prepared, field.name) for field in fields(prepared)
                    }
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
        copied = sum(not wanted["places"] for wanted in orders)
        both = iter(self._channel.memory.rows(2 * copied, max(row_bytes, out_bytes)))
        work = []
        for wanted in orders:
            if places := wanted["places"]:
                row = row_at(places[0], row_bytes, writable=False)
                out = row_at(places[1], out_bytes, writable=True)
            else:
                row = next(both)[:row_bytes]
                out = next(both)[:out_bytes]
                row.flags.writeable = False
            device, accelerator = self._device(wanted["device"])
            report = partial(self._report, wanted["job"])
            cancelled = self._cancelled[wanted["job"]]
            folder = _folder(wanted["folder"])
            facts = (wanted["epochs"], wanted["round"])
            scores = wanted["scores"], wanted["scores_trained"]
            noise = bytes.fromhex(wanted["noise"])
            expired = partial(self._expired, wanted["job"])
            work.append(
                (
                    device,
                    Order(row, out, *facts, report, cancelled, *scores, folder, noise, expired),
                )
            )

        def done(place: int, how: Ending) -> None:
            number = orders[place]["job"]
            if isinstance(how, LocalResult):
                names = ("wall_s", "numbers", "notes", "start_loss")
                more = {name: getattr(how, name) for name in names}
                self._channel.send(job=number, result=how.work.to_json(), more=more)
                return
            failure = {} if isinstance(how, Cancelled) else error_record(how)
            self._channel.send(job=number, failure=failure)

        self._trainers.train(work, accelerator, done)

    def _device(self, sent: list[Any]) -> tuple[HostedDevice, str]:
        digest, node, accelerator, frozen = sent
        return HostedDevice(
            self._experiments[digest], digest, node, frozen=frozen and Path(frozen)
        ), accelerator

    def _report(self, job: int, steps: int, of: int) -> None:
        self._channel.send(job=job, steps=steps, of=of)

    def _expired(self, job: int, error: FedstrataError) -> None:
        """End this process, in which own code waits; the job gets the error."""
        self._channel.send(job=job, failure=error_record(error))
        os._exit(1)

    def _cancel(self, request: Record) -> bool:
        """Cancel a job while this process trains; return whether the request is a cancellation."""
        if "train" in request:  # all earlier jobs have ended
            self._cancelled = {job["job"]: threading.Event() for job in request["train"]}
        if "cancel" in request and (event := self._cancelled.get(request["cancel"])) is not None:
            event.set()
        return "cancel" in request


def _folder(sent: list[str | None] | None) -> TrainerFolder | None:
    if sent is None:
        return None
    before, after = sent
    earlier = None if before is None else Path(before)
    return TrainerFolder(earlier, Path(after or ""))


def main() -> None:
    """Serve one agent until it ends."""
    keep_large_buffers()
    WorkerServer().serve()


if __name__ == "__main__":
    main()
