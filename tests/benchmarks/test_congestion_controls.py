"""What `benchmarks/network.py` says of congestion controls that it cannot have."""

from __future__ import annotations

import socket
from unittest.mock import patch

from network import left_out


def test_a_congestion_control_that_is_unknown_or_not_permitted_is_left_out_with_what_to_do() -> None:
    found = left_out(["reno", "none-such"])
    assert [*found] == ["none-such"]
    assert "'none-such', which this kernel does not have (No such file or directory)" in found["none-such"]
    assert "modprobe tcp_none-such" in found["none-such"]
    with patch.object(socket.socket, "setsockopt", side_effect=PermissionError):
        (why,) = left_out(["bbr"]).values()
    assert "'bbr', which is not permitted here" in why
    assert "sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'" in why
