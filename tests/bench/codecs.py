"""`make bench NAME=codecs`: what each codec costs and saves, a ResNet-18's row encoded and decoded
on one core.

Encoding counts the manifest with its chunk digests; decoding the check of each chunk, which the
kernel has written to its place (common/net/bulk.py), and the views of all tensors. So `fp32`, which
changes nothing, shows what every model pays. All is measured in CPU seconds, beside a memcpy of the
row in the same run: the multiples are what counts. Memory is what both allocate at most beside the
rows and the blob, and the last column is ||x - y||^2 / ||x - z||^2, what is left out of the change.
The model is PyTorch's first one with noise; the reference is its predecessor by 2.4 % of each
tensor's norm, Laplacian, as measured of a local round (20 steps of SGD at 0.01, momentum 0.9, after
40) on digits.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.learning import models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.model.codec_settings import CODEC_TABLES
from fedstrata.common.model.codecs import BUILT_IN, Codec, codec_of
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.protocol.manifest import chunk_digest, describe
from fedstrata.common.protocol.messages import Manifest
from tests.bench.running import MB, Table, least_s, on_one_core, run

REPEATS = 9
MOVED = 0.024
CHANGES: Final[tuple[dict[str, Any], ...]] = (
    {"name": "topk", "share": 0.001},
    {"name": "topk", "share": 0.01},
    {"name": "topk", "share": 0.1},
    {"name": "sign"},
    *({"name": "qsgd", "bits": bits} for bits in (2, 4, 8)),
)


def rows() -> tuple[ModelLayout, Row, Row]:
    """Return a layout, a model and its predecessor."""
    module = models.build("resnet18_cifar", 1, inputs=Inputs((3, 32, 32), 10))
    layout = models.layout_of(module)
    reference = layout.empty()
    models.write_row(module, layout, reference)
    row = reference.copy()
    random = np.random.default_rng(1)
    for entry in layout.entries[: sum(entry.stop <= layout.parameters for entry in layout.entries)]:
        columns = layout.floats(row)[entry.start : entry.stop]
        spread = MOVED * np.sqrt(np.mean(np.square(columns))) / np.sqrt(2)
        columns += random.laplace(0, max(float(spread), 1e-4), columns.size).astype(np.float32)
    return layout, row, reference


def check(manifest: Manifest, buffer: memoryview) -> None:
    """Check each chunk where it lies, as a receiver does."""
    for index in range(manifest.chunks):
        assert (
            chunk_digest(buffer[manifest.span(index)])
            == manifest.digests[8 * index : 8 * index + 8]
        )


def peak(work: Callable[[], object]) -> int:
    """Return the most bytes that a call allocates."""
    tracemalloc.start()
    work()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def measure(
    table: Table, name: str, codec: Codec, layout: ModelLayout, row: Row, reference: Row
) -> float:
    """Measure a codec beside a memcpy, print its row, and return the seconds of the memcpy."""
    out = np.zeros(codec.size(layout), np.uint8)
    got = np.zeros(layout.row_bytes, np.uint8)
    copy = np.zeros_like(row)

    def encode() -> tuple[memoryview, Manifest]:
        blob = codec.encode(
            layout, row, reference=reference, out=out, chance=np.random.default_rng(1)
        )
        chunk_bytes = TransferSettings().chunk_bytes
        return blob, describe(blob, chunk_bytes=chunk_bytes, codec=codec.name, layout=layout.digest)

    blob, manifest = encode()
    buffer = codec.buffer(layout, got, size=blob.nbytes)
    buffer[:] = blob

    def decode() -> None:
        if not codec.is_row:
            buffer[:] = blob  # what decoding may have overwritten
        check(manifest, buffer)
        codec.decode(layout, buffer, got, reference=reference)
        layout.views(got)

    works = (lambda: np.copyto(copy, row), encode, decode)
    memcpy_s, encode_s, decode_s = (
        least_s(REPEATS, work, clock=time.process_time)[0] for work in works
    )
    apart = layout.floats(got) - layout.floats(row)
    change = layout.floats(row) - layout.floats(reference)
    left_out, all_ = (np.sum(np.square(each, dtype=np.float64)) for each in (apart, change))
    table.add(
        name,
        f"{blob.nbytes / MB:.2f}",
        f"{100 * blob.nbytes / layout.row_bytes:.0f} %",
        f"{encode_s * 1e3:.1f} ms",
        f"{decode_s * 1e3:.1f} ms",
        f"{(encode_s + decode_s) / memcpy_s:.1f}",
        f"{max(peak(encode), peak(decode)) / MB:.1f} MB",
        f"{np.abs(apart).max():.1e}",
        f"{left_out / all_:.4f}",
    )
    return memcpy_s


def main() -> None:
    """Measure each codec and print its row."""
    on_one_core()
    layout, row, reference = rows()
    codecs = dict(BUILT_IN)
    for tree in CHANGES:
        codecs[" ".join(map(str, tree.values()))] = codec_of(CODEC_TABLES[tree["name"]](**tree))
    table = Table(
        "codec",
        "MB",
        "of fp32",
        "encode",
        "decode",
        "x memcpy",
        "memory",
        "largest error",
        "left out",
    )
    found = [measure(table, *each, layout, row, reference) for each in codecs.items()]
    print(f"memcpy of {layout.row_bytes / MB:.1f} MB: {min(found) * 1e3:.1f} ms")


if __name__ == "__main__":
    run(main)
