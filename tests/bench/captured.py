"""Local rounds with captured gradients against the same ones with autograd: CPU milliseconds of a step, by turns.

python tests/bench/captured.py
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

from common.experiment import reading
from common.host.memory import keep_large_buffers
from common.learning import datasets, models
from device.training import network
from device.training.trainer import Trainer

TURNS = 15
BATCH = 10
CASES = (  # model, shape of an image, samples
    ("mlp_digits", [1, 8, 8], 600),
    ("cnn_digits", [1, 8, 8], 600),
    ("lenet5", [1, 28, 28], 300),
    ("lenet_cifar", [3, 32, 32], 200),
    ("cnn_fedavg_padded", [1, 28, 28], 100),
)


def local_round(model: str, shape: list[int], samples: int, *, captured: bool) -> Callable[[], float]:
    """Return a device's local round of one epoch, which gives its CPU milliseconds a step."""
    data = {"dataset": "synthetic", "image_shape": shape, "classes": 10, "samples": samples}
    lab = reading.parse({"data": data, "model": {"name": model}, "training": {"batch_size": BATCH}})
    chosen = network.is_captured
    network.is_captured = chosen if captured else lambda *_, **__: False
    trainer = Trainer(lab, node="device-0", accelerator="cpu")
    trainer.prepare()
    network.is_captured = chosen
    row, out = trainer.layout.empty(), trainer.layout.empty()
    first = models.build(model, lab.seed, inputs=datasets.load(lab.data).inputs)
    models.write_row(first, trainer.layout, row)
    never = threading.Event()

    def train() -> float:
        begun = time.process_time()
        steps = trainer.train(row, out, epochs=1, local_round=0, progress=lambda *_: None, cancelled=never).steps
        return (time.process_time() - begun) / steps * 1e3

    return train


def main() -> None:
    """Measure all models."""
    keep_large_buffers()
    for model, shape, samples in CASES:
        rounds = [local_round(model, shape, samples, captured=captured) for captured in (True, False)]
        for train in rounds:
            train()
        captured, autograd = zip(*([train() for train in rounds] for _ in range(TURNS)), strict=True)
        with_it, without = statistics.median(captured), statistics.median(autograd)
        print(
            f"{model:18} captured {with_it:.3f} ms, autograd {without:.3f} ms: {without / with_it:.2f} times as fast, "
            f"{min(autograd) / min(captured):.2f} of the fastest turns"
        )


if __name__ == "__main__":
    main()
