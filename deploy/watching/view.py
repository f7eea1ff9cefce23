"""Terminal view of a watched lab. Lines are laid out by hand: a rich table of 200 rows takes too long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.cells import set_cell_size
from rich.text import Text

from common.protocol.messages import NodeState
from deploy.console.tabular import size
from deploy.watching.formatting import GONE, activity, counts, seconds, step
from deploy.watching.lab import Flow, WatchedLab
from deploy.watching.node import Node, NodeStep

# Okabe and Ito's colours, safe for colour-blind readers. All information is in the text, too.
GREEN, ORANGE, SKY, RED = "#009e73", "#e69f00", "#56b4e9", "#d55e00"
STYLES: Final[Mapping[str, str]] = {
    **dict.fromkeys(GONE, f"bold {RED}"), "refused": f"bold {RED}", "done": GREEN, NodeState.FINISHED: GREEN,
    "training": ORANGE, "fetching": SKY, "offering": SKY, "measuring": SKY, "absent": "dim", "left": "dim",
}  # fmt: skip
NOTES: Final = 3
WIDE: Final = 90


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """A column: its width on narrow and on wide terminals, and the terminal width from which it is shown."""

    title: str
    narrow: int
    wide: int
    from_width: int = 0


NAME = ViewColumn("node", 18, 22)
STATE = ViewColumn("state", 8, 12)
ROUND = ViewColumn("round", 6, 8)
UP = ViewColumn("up", 11, 11, WIDE)
DOWN = ViewColumn("down", 11, 11, WIDE)
LOSS = ViewColumn("loss", 8, 8, 110)
EPOCHS = ViewColumn("epochs", 6, 6, 120)
COLUMNS: Final = (NAME, STATE, ROUND, UP, DOWN, LOSS, EPOCHS)


@dataclass(frozen=True, slots=True)
class View:
    """View settings. `devices`: true = one by one, false = counts, None = by the room there is; `plain`: ASCII only."""

    width: int
    height: int
    devices: bool | None = None
    plain: bool = False

    def picture(self, lab: WatchedLab, now: float, notes: list[str]) -> list[Text]:
        """Return the lines of the current state, with the last of the notes below."""
        head = self._head(lab, now)
        shown_notes = [Text(note, style=RED) for note in notes[-NOTES:]]
        each = self.devices
        if each is None:
            each = len(head) + 2 + len(lab.nodes) + NOTES < self.height
        rows = self._rows(lab, lab.cloud, now, 0, each=each)
        titles = Text(style="dim")
        self._cells(titles, {column: column.title for column in COLUMNS})
        lines = [*head, Text(), titles, *rows, *shown_notes]
        for line in lines:
            line.truncate(self.width, overflow="crop" if self.plain else "ellipsis")
            line.no_wrap = True
        return lines

    def _head(self, lab: WatchedLab, now: float) -> list[Text]:
        title = Text.assemble((lab.experiment.name, "bold"), f"  round {lab.global_round}/{lab.experiment.rounds}")
        if lab.loss is not None:
            title.append(f"  training loss {lab.loss:.4f}")
        if lab.cloud.alive and (left_s := lab.left_s(now)) is not None:
            title.append(f"  about {left_s:.0f} s left")
        lines = [title, Text(lab.run, style="dim")]
        for broker in lab.brokers:
            if not broker.up:
                text = f"broker {broker.address} disconnected for {now - broker.since:.0f} s"
                lines.append(Text(text, f"bold {RED}"))
        flows = lab.flows(now)
        tiers = lab.experiment.tier_names
        for tier in tiers:
            up, down = flows[f"{tier}_up"], flows[f"{tier}_down"]
            lines.append(Text(f"{tier.upper():<{max(map(len, tiers))}}  up {_flow(up)}  down {_flow(down)}"))
        return lines

    def _rows(self, lab: WatchedLab, node: Node, now: float, depth: int, *, each: bool) -> list[Text]:
        """Return the rows of a node and of those below it; without `each`, one row for all devices of a parent."""
        rows = [self._row(lab, node, now, depth)]
        children = node.children.values()
        if not each and any(child.role == "device" for child in children):
            return [*rows, Text(f"{'  ' * (depth + 1)}{counts(node)}", style="dim")]
        return rows + [row for child in children for row in self._rows(lab, child, now, depth + 1, each=each)]

    def _row(self, lab: WatchedLab, node: Node, now: float, depth: int) -> Text:
        state = node.state if node.proven or not node.alive else f"{node.state}?"  # ?: only a retained presence
        cells = {NAME: "  " * depth + node.name, STATE: state, ROUND: _round(lab, node)}
        if node.up.known:
            cells |= {UP: f"{size(node.up.rate(now))}/s", DOWN: f"{size(node.down.rate(now))}/s"}
        last = node.result or node.report
        if last is not None and last.epochs:
            cells |= {LOSS: f"{last.loss:.4f}", EPOCHS: str(node.epochs or "")}
        line = Text()
        self._cells(line, cells)
        self._part(line, lab, node)
        return line

    def _cells(self, line: Text, cells: Mapping[ViewColumn, str]) -> None:
        for column in COLUMNS:
            if self.width < column.from_width:
                continue
            width, text = column.wide if self.width >= WIDE else column.narrow, cells.get(column, "")
            if column in (NAME, STATE):
                line.append(
                    set_cell_size(text, width) + " ", style=STYLES.get(text.rstrip("?"), "") if column is STATE else ""
                )
            else:
                line.append(f"{text[:width]:>{width}} ")

    def _part(self, line: Text, lab: WatchedLab, node: Node) -> None:
        """Add the node's activity: a progress bar if there is a measure of it, and text."""
        children = list(node.children.values())
        working = [child for child in node.participants() if child.state not in GONE]
        done = sum(child.step >= NodeStep.DONE for child in working)
        if node is lab.cloud and working:
            self._bar(line, done / len(working), "done" if done == len(working) else "training")
            line.append(f"{done}/{len(working)} results")
        elif children and node.key is None:
            waits_for = f", waits for {node.waits_for}" if node.waits_for else ""
            line.append(f"{sum(child.alive for child in children)}/{len(children)} present{waits_for}")
        elif node.preparing:
            line.append(f"waits for {node.waits_for}" if node.waits_for else "prepares", style="dim")
        elif node.step is NodeStep.TRAINING and working and activity(node) == "training":
            share = (_local_round(node) + done / len(working)) / _rounds(lab, node)
            self._bar(line, share, "training")
            line.append(f"{done}/{len(working)} {lab.experiment.tier_below(node.name).children}s")
        elif node.key is None and node.report is not None and node.report.rounds:
            line.append(f"{seconds(node.report):.1f} s in its last global round", style="dim")
        elif node.key is not None or node.measuring:
            name = activity(node)
            if (
                node.step in (NodeStep.FETCHING, NodeStep.TRAINING, NodeStep.OFFERING)
                and name == node.step.name.lower()
            ):
                self._bar(line, node.done, name)
            line.append(step(node), style=STYLES.get(name, ""))
            self._size(line, node)

    def _size(self, line: Text, node: Node) -> None:
        """Add the received bytes of a model, if its manifest is known and the line has room."""
        transfer = {NodeStep.FETCHING: node.fetch, NodeStep.OFFERING: node.upload}.get(node.step)
        if transfer is None or not transfer.size or activity(node) != node.step.name.lower():
            return
        text = f"  {size(transfer.share * transfer.size)} of {size(transfer.size)}"
        if line.cell_len + len(text) <= self.width:
            line.append(text, style="dim")

    def _bar(self, line: Text, share: float, name: str) -> None:
        width = 20 if self.width >= 140 else 8
        full, empty = ("#", ".") if self.plain else ("\u2588", "\u2591")
        filled = round(min(1.0, share) * width)
        line.append(full * filled, style=STYLES.get(name, "")).append(empty * (width - filled) + " ", style="dim")


def _round(lab: WatchedLab, node: Node) -> str:
    if node is lab.cloud:
        return f"{lab.global_round}/{lab.experiment.rounds}"
    if node.role == "institution":
        return f"{_local_round(node) + 1}/{_rounds(lab, node)}" if node.participants() else ""
    return f"{node.key.global_round + 1}.{node.key.local_round + 1}" if node.key is not None else ""


def _rounds(lab: WatchedLab, node: Node) -> int:
    """Return how many rounds an institution runs in a global round."""
    return lab.experiment.rounds_of(lab.experiment.tree.depth(node.name))


def _local_round(node: Node) -> int:
    """Return the current local round of an institution, counted from 0; 0 before the first of its global round."""
    key = node.round_key
    if key is None or (node.key is not None and key.global_round != node.key.global_round):
        return 0
    return key.local_round


def _flow(flow: Flow) -> str:
    return f"{size(flow.total):>9} {size(flow.rate) + '/s':>11}"
