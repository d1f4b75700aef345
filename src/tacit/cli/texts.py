"""Read lists as they are typed."""

from __future__ import annotations

from tacit.errors import ConfigError

__all__ = ["split_algorithms"]


def split_algorithms(text: str) -> list[str]:
    """Split a list at its commas, although commas also stand between an algorithm's parameters.

    A piece such as `momentum=0.9`, with "=" but without ":", goes on with the algorithm before it, so
    `topk:ratio=0.1,momentum=0.9,ddp` is a list of two.

    Raises:
        ConfigError: A name is missing.
    """
    texts: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if not piece:
            raise ConfigError(f"an algorithm is missing in {text!r}: write for example ddp,topk:ratio=0.01")
        if "=" not in piece or ":" in piece:
            texts.append(piece)
        elif texts and ":" in texts[-1]:
            texts[-1] += f",{piece}"
        else:
            raise ConfigError(
                f"the parameter {piece!r} belongs to no algorithm: write topk:{piece}, for example"
            )
    return texts
