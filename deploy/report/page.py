"""The page of one run or several: figures and tables from the runs' files alone, whole in one HTML file.

Nothing in it asks a network or runs a script; its Content-Security-Policy forbids both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.console.tabular import Table, html, show, size
from deploy.report import link_sections, sections
from deploy.report.figures import STYLE, Figure
from deploy.runs.run import Run, State

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
PAGE = Path(__file__).with_name("report.css")


@dataclass
class Page:
    """The report as it is composed: HTML, and the figures and tables that are in it."""

    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    def head(self, level: int, words: str) -> None:
        """Add a heading."""
        self.parts.append(f"<h{level}>{html(words)}</h{level}>")

    def say(self, words: str, kind: str = "") -> None:
        """Add a paragraph."""
        attribute = f' class="{kind}"' if kind else ""
        self.parts.append(f"<p{attribute}>{html(words)}</p>")

    def draw(self, figures: Sequence[Figure], *, kind: str = "") -> None:
        """Add figures; `curves` stand side by side where there is room."""
        drawn = []
        for figure in figures:
            self.figures.append(figure)
            drawn.append(f'<figure tabindex="0">{figure.inline(f"f{len(self.figures)}")}</figure>')
        self.parts.append(f'<div class="{kind}">{"".join(drawn)}</div>' if kind else "".join(drawn))

    def tell(self, table: Table, *, folded: bool = False) -> None:
        """Add a table, if it has rows; a folded one opens where it is asked for."""
        if not table.rows:
            return
        self.tables.append(table)
        body = table.html()
        if folded:
            body = f"<details><summary>{html(table.title)} ({len(table.rows)} rows)</summary>{body}</details>"
        self.parts.append(body)

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Add names and what they are."""
        lines = "".join(
            f'<tr><th scope="row" class="words">{html(name)}</th><td>{html(value)}</td></tr>' for name, value in rows
        )
        self.parts.append(f'<div class="scroll"><table class="facts"><tbody>{lines}</tbody></table></div>')

    def numbers(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Add the few numbers that come first."""
        cells = "".join(f"<div><dt>{html(name)}</dt><dd>{html(value)}</dd></div>" for name, value in pairs)
        self.parts.append(f"<dl>{cells}</dl>")

    def folded(self, summary: str, words: str) -> None:
        """Add a text as it stands in its file, folded."""
        lines = "\n".join(html(line) for line in words.splitlines())
        self.parts.append(f"<details><summary>{html(summary)}</summary><pre>{lines}</pre></details>")

    def html(self, title: str) -> str:
        """Return the whole page."""
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html(title)}</title>\n<style>\n{STYLE}\n{PAGE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n<main>\n"
            + "\n".join(self.parts)
            + "\n</main>\n</body>\n</html>\n"
        )


def compose(runs: Sequence[Run]) -> tuple[Page, str]:
    """Return the page of some runs, and its title. Raises InvalidExperiment where a run cannot be read."""
    names = sections.labels(runs)
    page = Page()
    title = f"{runs[0].name} {runs[0].id}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}"
    page.parts.append(f"<header><h1>{html(title)}</h1></header>")
    for run in runs:
        if run.state is not State.FINISHED:
            page.say(_unfinished(run), "state")
    if len(runs) == 1:
        page.numbers(list(_first_numbers(runs[0])))
    else:
        page.tell(sections.overview(runs, names))
    if any(run.rounds for run in runs):
        page.head(2, "Accuracy")
        page.say(sections.ACCURACY)
        page.draw(sections.accuracy(runs, names), kind="curves")
        page.head(2, "Where the seconds went")
        page.say(sections.SECONDS)
        page.draw([sections.budget(runs, names), *map(sections.budgets, runs)], kind="curves")
        page.tell(sections.phases(runs, names))
    for run, name in zip(runs, names, strict=True):
        if len(runs) > 1:
            page.head(2, name)
        _one(page, run, 3 if len(runs) > 1 else 2)
    return page, title


def _one(page: Page, run: Run, level: int) -> None:
    """Add what is told of each run by itself."""
    if run.links:
        page.head(level, "Bytes")
        page.say(link_sections.DIRECT if run.direct else link_sections.BYTES)
        page.draw([link_sections.traffic(run)], kind="curves")
        page.tell(link_sections.tiers(run))
        page.tell(link_sections.links(run), folded=len(run.links) > link_sections.FOLD)
    page.head(level, "Topology")
    page.say(link_sections.TOPOLOGY)
    page.draw([link_sections.topology(run)])
    if run.rounds:
        page.head(level, "Epochs and work")
        page.say(sections.EPOCHS)
        page.draw([sections.epochs(run)])
        page.tell(sections.work(run), folded=len(run.children) > 1)
    if picture := sections.partition(run):
        page.head(level, "Data")
        page.say(sections.DATA)
        page.draw([picture])
    page.head(level, "Events")
    told, left_out = sections.events(run)
    page.tell(told)
    if left_out:
        page.say(f"{left_out} earlier ones are in events.jsonl.", "soft")
    page.tell(sections.plans(run), folded=True)
    page.tell(sections.global_rounds(run), folded=True)
    page.head(level, "The run")
    page.facts(sections.facts(run))
    page.folded("experiment.toml", (run.path / "experiment.toml").read_text(encoding="utf-8", errors="replace"))


def _first_numbers(run: Run) -> Iterator[tuple[str, str]]:
    totals = run.totals
    yield "test accuracy", "-" if run.accuracy is None else f"{run.accuracy:.4f}"
    yield "global rounds", f"{len(run.rounds)} of {run.global_rounds}"
    yield "time", f"{show(run.seconds)} s"
    for tier in ("wan", "lan"):
        yield f"{tier.upper()} up / down", f"{size(totals[f'{tier}_up_bytes'])} / {size(totals[f'{tier}_down_bytes'])}"


def _unfinished(run: Run) -> str:
    done = f"{len(run.rounds)} of {run.global_rounds} global rounds are done"
    if run.state is State.RUNNING:
        return f"{run.id} is still going: {done}, and this page tells it so far."
    if run.state is State.FAILED:
        reason = next((str(e.facts.get("reason", "")) for e in reversed(run.events) if e.name == "failed"), "")
        return f"{run.id} failed: {reason} {done}."
    return f"{run.id} was interrupted or killed: {done}, and this page tells it so far. It can be resumed."
