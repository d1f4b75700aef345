"""Makes the second table of docs/support.md of what attach refuses: python dev/support_page.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
BEGIN, END = "<!-- made by dev/support_page.py -->\n", "<!-- until here -->"
COLUMNS = ("algorithms", "FSDP2", "`GradScaler`", "`find_unused_parameters`", "bare hook", "needs")
NAMED = "`sync_every` or `steps_per_epoch`"


def page() -> str:
    """The whole page, with the table of today in its place."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{after}"


def table() -> str:
    """A row for all algorithms of a family that work with the same."""
    from tacit_lab.algorithm_facts import by_family

    lines = [f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"]
    for family, names in by_family().items():
        rows: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            rows.setdefault(tuple(cells(name)), []).append(f"`{name}`")
        lines += [f"| {family}: {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    return "\n".join(lines)


def cells(name: str) -> Iterator[str]:
    """Whether the algorithm works with each of the columns, and what it needs."""
    from torch.amp import GradScaler

    from tacit.algorithms import parse
    from tacit.attaching import requirements
    from tacit.strategy import AutoStrategy

    strategy = parse(name)
    if isinstance(strategy, AutoStrategy):
        yield from ("yes", "yes", "yes", "no", "")
        return
    near, last = strategy.levels[0], strategy.levels[-1]
    given: Any = SimpleNamespace(
        strategy=strategy,
        scaler=GradScaler("cpu"),
        model=SimpleNamespace(find_unused_parameters=True, module=SimpleNamespace(named_modules=list)),
    )
    yield sharded(strategy)
    yield "no" if list(requirements.scaler(given)) else "yes"
    refused = [*requirements.unused(given), *requirements.pairs(given)]
    yield "no" if refused else "yes"
    momentum = near.compressor.takes_momentum is not None
    hooked = len(strategy.levels) == 1 and near.subject == "gradient" and not near.overlap.layerwise
    yield "yes" if hooked and not momentum else "no"
    needs = [
        "servers" if requirements.needs_servers(strategy) else "",
        "SGD with momentum" if momentum and not adam(name) else "",
        "Adam or AdamW" if adam(name) else "",
        "the loss and epochs" if last.rounds.phased else NAMED * bool(last.rounds.needs),
    ]
    yield ", ".join(filter(None, needs))


def adam(name: str) -> bool:
    """Whether it is for Adam and AdamW alone."""
    return name.endswith("-adam")


def sharded(strategy: Any) -> str:
    """Whether a model that FSDP2 shards takes it."""
    from tacit.errors import AttachError
    from tacit.fsdp.model import far_level

    try:
        far_level(strategy, 2)
    except AttachError:
        try:
            far_level(strategy, 1)
        except AttachError:
            return "no"
        return "one replica"
    return "yes"


if __name__ == "__main__":
    PAGE.write_text(page())
