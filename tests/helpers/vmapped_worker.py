"""A worker process that vmaps devices on a CPU as on a GPU."""

from __future__ import annotations

from fedstrata.device import jobs
from fedstrata.device.pool.worker_process import WorkerServer


def main() -> None:
    setattr(jobs, "ALONE_ON", frozenset())  # noqa: B010 - a constant
    WorkerServer().serve()


if __name__ == "__main__":
    main()
