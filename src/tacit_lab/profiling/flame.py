"""A flame graph of profiles: one SVG file that needs no other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from zlib import crc32

from tacit_lab.profiling.profile import ENDED, RankProfile

__all__ = ["draw", "merged"]

_WIDTH, _HEIGHT, _MARGIN = 1400, 17, 10
_LEAST = 0.6
_LETTER = 6.6
_SCRIPT = """
const boxes = [...document.querySelectorAll("g.f")];
function widen(event) {
  const {x, w} = event.currentTarget.dataset, scale = %(width)d / w;
  for (const box of boxes) {
    const from = (box.dataset.x - x) * scale, to = from + box.dataset.w * scale;
    const left = Math.max(from, 0), right = Math.min(to, %(width)d), width = right - left;
    box.style.display = width > 0.01 ? "" : "none";
    if (width <= 0.01) continue;
    const rect = box.querySelector("rect"), text = box.querySelector("text");
    rect.setAttribute("x", left + %(margin)d);
    rect.setAttribute("width", width);
    text.setAttribute("x", left + %(margin)d + 3);
    const letters = Math.floor((width - 4) / %(letter)s);
    text.textContent = letters < 3 ? "" : box.dataset.n.slice(0, letters);
  }
}
for (const box of boxes) box.addEventListener("click", widen);
"""


@dataclass(eq=False)
class _Box:
    """A function in the chains that go through it.

    Attributes:
        ms: Processor time a rank and step, with that of all that it calls.
    """

    name: str
    ms: float = 0.0
    inner: dict[str, _Box] = field(default_factory=dict)

    def add(self, names: Sequence[str], ms: float) -> None:
        """One more chain below this."""
        self.ms += ms
        if names:
            self.inner.setdefault(names[0], _Box(names[0])).add(names[1:], ms)

    def depth(self) -> int:
        """How many boxes hang below each other, this one included."""
        return 1 + max((each.depth() for each in self.inner.values()), default=0)


def merged(profiles: Sequence[RankProfile]) -> Mapping[str, float]:
    """ms of processor time a rank and step of each chain `thread;stage;function;...`; they add up to all.

    The time of a stage is exact; within it it is shared out by samples.
    """
    found: dict[str, float] = defaultdict(float)
    for profile in profiles:
        by_stage: dict[str, dict[str, int]] = defaultdict(dict)
        for chain, count in profile.stacks.items():
            by_stage[";".join(chain.split(";")[:2])][chain] = count
        for thread in profile.threads:
            for stage, spent in thread.totals().items():
                top = f"{thread.name};{stage}"
                chains = by_stage.get(top) or {top: 1}
                total = sum(chains.values())
                for chain, count in chains.items():
                    found[chain] += spent * count / total / profile.steps / len(profiles) / 1e6
        rest = [row.ms for row in profile.rows() if row.thread == ENDED]
        found[ENDED] += max(0.0, sum(rest)) / len(profiles)
    return {chain: ms for chain, ms in found.items() if ms > 0}


def draw(chains: Mapping[str, float], title: str) -> str:
    """The graph as SVG, callers above what they call, and the largest on the left.

    A box is as wide as what it stands for has taken; a click on one widens it.

    Args:
        chains: What each has taken, in ms.
    """
    root = _Box("all")
    for chain, ms in chains.items():
        root.add(chain.split(";"), ms)
    height = (root.depth() + 3) * _HEIGHT
    boxes: list[str] = []
    _place(root, 0.0, 2.0 * _HEIGHT, _WIDTH / root.ms if root.ms else 0.0, root.ms, boxes)
    script = _SCRIPT % {"width": _WIDTH, "margin": _MARGIN, "letter": _LETTER}
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + 2 * _MARGIN} {height}" '
        f'width="100%" height="{height}" preserveAspectRatio="xMinYMin" '
        'font-family="monospace" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="{_MARGIN}" y="{_HEIGHT}" font-size="13">{escape(title)}; a click widens a box</text>\n'
        + "\n".join(boxes)
        + f"\n<script>{escape(script)}</script>\n</svg>\n"
    )


def _place(box: _Box, x: float, y: float, scale: float, total: float, into: list[str]) -> None:
    width = box.ms * scale
    if width < _LEAST:
        return
    letters = int((width - 4) / _LETTER)
    label = box.name[:letters] if letters >= 3 else ""
    told = f"{box.name}: {box.ms:.3f} ms, {box.ms / total:.1%}"
    into.append(
        f'<g class="f" data-x="{x:.3f}" data-w="{width:.3f}" data-n="{escape(box.name)}">'
        f"<title>{escape(told)}</title>"
        f'<rect x="{x + _MARGIN:.2f}" y="{y:.0f}" width="{width:.2f}" height="{_HEIGHT - 1}" '
        f'fill="{_colour(box.name)}" rx="2"/>'
        f'<text x="{x + _MARGIN + 3:.2f}" y="{y + _HEIGHT - 5:.0f}">{escape(label)}</text></g>'
    )
    for each in sorted(box.inner.values(), key=lambda inner: (-inner.ms, inner.name)):
        _place(each, x, y + _HEIGHT, scale, total, into)
        x += each.ms * scale


def _colour(name: str) -> str:
    """The same for the same name."""
    return f"hsl({15 + crc32(name.encode()) % 40}, 80%, {62 + crc32(name[::-1].encode()) % 16}%)"
