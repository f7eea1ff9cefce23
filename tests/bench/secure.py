"""`make bench NAME=secure`: what a secure sum costs a child and its parent, in CPU seconds and bytes.

    python tests/bench/secure.py [--children N...] [--columns N...]

One exchange in this process, without a network. CPU seconds of a child are those of its keys and
shares, of its upload (rounding and masks), and of its answer; of the parent those of the sum, with
all children present and with one lost. Beside them the seconds of the plain mean. Bytes are those
of keys, shares and answers of one child, down and up; a word of an upload has as many as a value of
fp32 where all sums fit into 32 bits.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np

from fedstrata.common.methods.mixing import Mixture, apply, whole
from fedstrata.common.model.layout import ModelLayout, Section
from fedstrata.common.protocol.messages import Key, RoundTurn
from fedstrata.common.secure.exchange import SecureExchange
from fedstrata.common.secure.member import SecureMember
from fedstrata.common.secure.ring import Ring
from fedstrata.common.settings.secure import SecureSettings
from tests.bench.running import Table, on_one_core, run


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


class MeasuredSum:
    """One exchange of children that all have one model; `lost`: how many send no upload."""

    def __init__(self, children: int, columns: int, *, lost: int) -> None:
        layout = ModelLayout.build([("w", (columns,), Section.PARAMETER)])
        settings = SecureSettings()
        self.ring = Ring(settings, layout, settings.word_bits(children))
        self.names = [f"device-{place}" for place in range(children)]
        self.members = {
            name: SecureMember(self.ring, node=name, seed=1, noise=secrets.token_bytes)
            for name in self.names
        }
        self.received = np.zeros(layout.row_bytes, np.uint8)
        self.row = self.received.copy()
        layout.floats(self.row)[:] = np.random.default_rng(1).normal(0, 0.01, columns)
        self.exchange = SecureExchange(self.ring, exchange=secrets.token_bytes(16))
        self.present = self.names[: children - lost]
        self.seconds = dict.fromkeys(("keys, shares", "upload", "answer", "sum"), 0.0)
        self.down = self.up = 0

    def ask(self, turn: RoundTurn, name: str, question: bytes, what: str) -> bytes:
        """Ask a child, and count."""
        answers = []
        key = Key(0, 0, 0, turn)
        self.seconds[what] += cpu_s(
            lambda: answers.append(self.members[name].answer(key, question))
        )
        self.down += len(question)
        self.up += len(answers[0])
        return answers[0]

    def play(self) -> None:
        """Play it to its end."""
        begin = self.exchange.begin()
        for name in self.names:
            answer = self.ask(RoundTurn.KEYS, name, begin, "keys, shares")
            self.exchange.take_keys(name, answer)
        roster = self.exchange.roster(self.names, samples_most=1)
        for name in self.names:
            answer = self.ask(RoundTurn.SHARES, name, roster, "keys, shares")
            self.exchange.take_shares(name, answer)
        key = Key(0, 0, 0, RoundTurn.MODEL)
        rows = []
        member = self.members[self.names[0]]
        self.seconds["upload"] = cpu_s(
            lambda: rows.append(member.masked(key, self.row, self.received, samples=1, loss=1.0))
        )
        words = self.ring.words(rows[0])
        questions = self.exchange.unmask(self.present)
        needed = self.exchange.answers_needed(self.present)
        answers = {
            name: self.ask(RoundTurn.UNMASK, name, questions[name], "answer")
            for name in self.present[:needed]
        }
        for what, count in (("keys, shares", len(self.names)), ("answer", needed)):
            self.seconds[what] /= count
        weights = [1.0] * len(self.present)

        def summed() -> None:
            total = self.exchange.total([words] * len(self.present), answers)
            self.ring.mean(total, self.received, weights=weights)

        self.seconds["sum"] = cpu_s(summed)

    def plain_s(self) -> float:
        """Return the CPU seconds of a mean of four uploads, for as many as the children are."""
        layout = self.ring.model
        rows_K = np.stack([self.row] * 4)
        mean = [Mixture.of([0.25] * 4)]
        out = [layout.empty()]
        seconds = cpu_s(lambda: apply(whole(layout, mean), rows_K, layout=layout, out=out))
        return seconds * len(self.names) / 4


def main(
    *, children: Sequence[int] = (4, 20, 100), columns: Sequence[int] = (62_500, 11_250_000)
) -> None:
    """Measure each size on one core."""
    on_one_core()
    table = Table(
        "children", "model MB", "keys and shares s", "upload s", "answer s", "sum s",
        "sum, one lost s", "plain mean s", "down kB", "up kB",
    )  # fmt: skip
    for size in columns:
        for count in children:
            whole_sum = MeasuredSum(count, size, lost=0)
            whole_sum.play()
            without = MeasuredSum(count, size, lost=1)
            without.play()
            found = whole_sum.seconds
            table.add(
                count,
                f"{4 * size / 1e6:g}",
                *(f"{found[what]:.4f}" for what in ("keys, shares", "upload", "answer", "sum")),
                f"{without.seconds['sum']:.4f}",
                f"{whole_sum.plain_s():.4f}",
                f"{whole_sum.down / count / 1e3:.1f}",
                f"{whole_sum.up / count / 1e3:.1f}",
            )


if __name__ == "__main__":
    run(main)
