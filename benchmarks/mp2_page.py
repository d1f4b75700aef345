"""The page of MP²: its claims, and what was measured, next to one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grid import Done
from markdown_tables import markdown
from paper_page import DIFFERENCES, about, failed

HELD = ("lowbit", "lowbit, two bits", "mp2")
"""The arms that the claims are held against: ours, and what can be read from the paper."""
TRAFFIC, TIME = 0.8898, 0.4732
LACKS = (
    "The paper has published no shapes, inputs or subset of its predictor: ours are in docs/papers/mp2.md.",
    "It trains networks of full size on CIFAR-10 and CIFAR-100, whole; here are small ones on 10,000 images.",
    "Runs are short: 132 steps of `digits`, and 234 to 624 on images, far from where accuracy ends. At the "
    "learning rates that suit plain pushing they measure how fast an arm makes progress, and not the "
    "accuracy that the paper speaks of, which is that of a long training.",
    "Ratios are chosen so that all but plain pushing and WNN send about a ninth, both ways, with positions.",
    "Local SGD and QSGD use no server, but a ring, so that their bytes are a ring's.",
    "DGC is without momentum factor masking, which at a ratio this high takes its momentum from just the "
    "entries that matter; its warm-up is a twentieth of the training.",
    "WNN trains half as many epochs, leaps five times or more and trains on, and is compared with plain "
    "pushing of all epochs. What has one dimension does not leap.",
    "Runs of before (mp2-runs.jsonl) are not among these: there the network of `mp2` was switched off in "
    "most layers after some rounds, WNN leaped once, at its very end, DGC was masked and had no warm-up, and "
    "MP²'s budget was planned for 100 steps.",
)


def page(
    command: str,
    rows: Sequence[Mapping[str, Any]],
    done: Sequence[Done],
    share: float | None,
    spent: Mapping[str, float],
    slow: str,
) -> str:
    """The page, in Markdown: `rows` and what is behind them; the share (0..1) and links of the slow part."""
    fast = [row for row in rows if row["cluster"] != slow]
    good = [each for each in done if each.status == "ok"]
    parts = [
        ("The claims", _claims(rows, slow)),
        ("Accuracy and bytes", _accuracies(fast)),
        ("Time", _times([row for row in rows if row["cluster"] == slow], slow, share, spent)),
        ("What differs from the paper", "\n".join(f"* {each}" for each in (DIFFERENCES[0], *LACKS))),
        ("What failed", failed(done)),
    ]
    body = [line for title, text in parts if text for line in ("", f"## {title}", "", text)]
    title = "# MP² (Liu et al., Computer Networks 255, 2024, 110883)"
    return "\n".join([title, "", about(command, [(f"{len(good)} training runs", good)]), *body, ""])


def _claims(rows: Sequence[Mapping[str, Any]], slow: str) -> str:
    told = []
    for row in (each for each in rows if each["arm"] in HELD):
        where = [f"`{row['attached']}`", f"{row['task']}, {row['cluster']}"]
        if row["cluster"] == slow:
            saved = 1 - row["time"]
            told.append(
                [
                    "up to 47.32 % less training time",
                    *where,
                    f"{saved:.1%} less",
                    f"{100 * (saved - TIME):+.1f} points",
                ]
            )
            continue
        less = 1 - row["bytes"]
        told += [
            [
                "up to 88.98 % less traffic",
                *where,
                f"{less:.1%} less",
                f"{100 * (less - TRAFFIC):+.1f} points",
            ],
            [
                "no accuracy is lost",
                *where,
                f"{_difference(row)} points",
                f"{100 * row['difference']:+.2f} points",
            ],
        ]
    head = ["the abstract says", "held to it", "measured with", "measured", "measured - claimed"]
    return markdown(head, sorted(told, key=lambda line: line[0]))


def _difference(row: Mapping[str, Any]) -> str:
    half = row["half_interval"]
    return f"{100 * row['difference']:+.2f} " + ("(one seed)" if half is None else f"± {100 * half:.2f}")


def _accuracies(rows: Sequence[Mapping[str, Any]]) -> str:
    told = [
        [
            f"{row['task']}, {row['epochs']} epochs",
            row["arm"],
            f"`{row['attached']}`",
            f"{row['bytes']:.1%}",
            f"{row['baseline_accuracy']:.4f}",
            f"{row['accuracy']:.4f}",
            _difference(row),
            str(row["seeds"]),
        ]
        for row in rows
    ]
    head = ["trained", "arm", "attached", "bytes, of plain pushing's", "plain pushing", "accuracy"]
    return markdown([*head, "difference in points (95 %)", "seeds"], told) + (
        "\n\nOn 4 workers and a server, links of 1 Gbit/s; held out, 0..1, after the last epoch, means over "
        "the seeds; differences are paired by seed, with half the 95 % interval of Student's t. Bytes are "
        "those of all interfaces, both ways."
    )


def _times(
    rows: Sequence[Mapping[str, Any]], slow: str, share: float | None, spent: Mapping[str, float]
) -> str:
    if not rows:
        return ""
    told = [
        [
            f"{row['task']}, {row['epochs']} epochs",
            row["arm"],
            f"`{row['attached']}`",
            f"{1 - row['time']:+.1%}",
        ]
        for row in rows
    ]
    text = markdown(["trained", "arm", "attached", "time saved"], told)
    text += f"\n\nWhole runs on {slow} with a server, from one seed."
    if share is not None:
        text += f" Communication is {share:.0%} of a step of plain pushing."
    if "of_plain_step" in spent:
        text += f" Predicting, summed over all ranks, is {spent['of_plain_step']:.1%} of one."
    return text
