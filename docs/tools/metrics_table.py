"""Generator of the table of all metrics in docs/metrics.md: `python -m docs.tools.metrics_table`
prints it.
"""

from __future__ import annotations

from fedstrata.common.metrics import FAMILIES


def table() -> str:
    """Return a table with the name, the kind, the labels and the meaning of each metric."""
    rows = ["| metric | kind | labels | what it is |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        of = ["node"] if family.of else []
        labels = ", ".join(of + [f"`{label}`" for label in family.labels])
        rows.append(f"| `{family.exposed(name)}` | {family.kind} | {labels} | {family.text} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
