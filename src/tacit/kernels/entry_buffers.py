"""Lists of selected entries, the memory they are collected in, and the sample that `select` begins with."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

RUN = 16
"""Neighbours that a sample takes together, as they come from memory together."""
MARGIN = 1024
"""Entries of a buffer beyond those that are filled, so that the compiled pass need not check each entry."""


class EntryBuffer(NamedTuple):
    """Memory to collect entries in: positions (int32) and values, both of `buffer_size` entries."""

    positions: Tensor
    values: Tensor


class Selection(NamedTuple):
    """Rising positions (int32) and the values there: the first entries of an `EntryBuffer`."""

    positions: Tensor
    values: Tensor


def first_of(buffer: EntryBuffer | Selection, count: int) -> Selection:
    """The first entries of it."""
    return Selection(buffer.positions[:count], buffer.values[:count])


@cache
def buffer_size(numel: int, k: int) -> int:
    """How large an `EntryBuffer` must be to select k of `numel` entries."""
    sample = sample_size(numel, 1)
    wanted = sample_rank(numel, k, sample)
    # As likely as not there are as many as wanted; 4 sigma more are so rare that the slow algorithm suffices.
    most = math.ceil((wanted + 4 * math.sqrt(wanted)) * numel / max(sample, 1))
    return min(numel, max(k, most)) + MARGIN


def new_buffer(x: Tensor, k: int) -> EntryBuffer:
    """An `EntryBuffer` to select k entries of `x`."""
    size = buffer_size(x.numel(), k)
    return EntryBuffer(x.new_empty(size, dtype=torch.int32), x.new_empty(size))


@cache
def sample_step(numel: int, effort: int) -> int:
    """Entries from one run of the sample to the next.

    Of a small tensor `effort` times 4096 entries are sampled, else `effort` times 65536.
    """
    sample = effort << (12 if numel < 1 << 20 else 16)
    return (numel * RUN // sample) | 1  # odd, so that it does not march in step with the rows of a matrix


@cache
def sample_size(numel: int, effort: int) -> int:
    """How many entries are sampled."""
    step = sample_step(numel, effort)
    return numel if step <= RUN else ((numel - RUN) // step + 1) * RUN


@cache
def sample_rank(numel: int, k: int, sample: int) -> int:
    """How many of the sample shall reach the threshold, so that in all likelihood k of all entries do."""
    if sample == numel:
        return k
    expected = k * sample / numel
    return min(sample, math.ceil(1.05 * expected + 4 * math.sqrt(expected)))
