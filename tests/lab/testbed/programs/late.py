"""Two ranks: one measures round trips by UDP, then sends by several connections; the other says at what rate.

Arguments: how many round trips, how many seconds between two of them, and how many connections.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time

from tacit_lab.testbed.network.nodes import address

IP_MTU_DISCOVER, IP_PMTUDISC_DO = 10, 2
PORT, SECONDS, WINDOW = 5000, 4.0, 0.5


def echo(server: socket.socket) -> None:
    while True:
        data, peer = server.recvfrom(2000)
        server.sendto(data, peer)


def trips(count: int, pause: float) -> list[float]:
    """Seconds of each round trip that came to its end, in the order of their ends."""
    sent: dict[int, float] = {}
    took: list[float] = []

    def listen() -> None:
        while True:
            number = int(client.recv(2000))
            took.append(time.perf_counter() - sent[number])

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((address(1), PORT))
        threading.Thread(target=listen, daemon=True).start()
        for number in range(count):
            sent[number] = time.perf_counter()
            client.send(b"%d" % number)
            time.sleep(pause)
        time.sleep(1)
        return [*took]


def refused() -> list[int]:
    """The smallest size of an IP packet that the node does not send whole."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((address(1), PORT + 1))
        client.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
        for size in range(500, 1600):
            try:
                client.send(bytes(size - 28))
            except OSError as error:
                if error.errno == errno.EMSGSIZE:  # else it says that nobody listens
                    return [size]
    return []


def send(connection: socket.socket, until: float) -> None:
    with connection:
        while time.monotonic() < until:
            connection.sendall(bytes(1 << 18))


def receive(connection: socket.socket, received: list[int]) -> None:
    while data := connection.recv(1 << 20):
        received.append(len(data))


def run(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.start()


def first(count: int, pause: float, connections: int) -> None:
    opened = []
    while len(opened) < connections + 1:
        try:
            opened.append(socket.create_connection((address(1), PORT)))
        except ConnectionRefusedError:  # it has not begun yet
            time.sleep(0.1)
    time.sleep(0.2)
    print(json.dumps({"trips": trips(count, pause)}), flush=True)
    print(json.dumps({"refused": refused()}), flush=True)
    until = time.monotonic() + SECONDS
    threads = [threading.Thread(target=send, args=(each, until)) for each in opened[1:]]
    run(*threads)
    for thread in threads:
        thread.join()
    opened[0].close()


def second(connections: int) -> None:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((address(1), PORT))
    threading.Thread(target=echo, args=(datagrams,), daemon=True).start()
    received: list[int] = []
    with socket.create_server((address(1), PORT), backlog=connections + 1) as server:
        opened = [server.accept()[0] for _ in range(connections + 1)]
    run(*(threading.Thread(target=receive, args=(each, received)) for each in opened[1:]))
    opened[0].settimeout(WINDOW)
    rates, start, before = [], time.monotonic(), 0
    while True:
        try:
            opened[0].recv(1)
            break
        except TimeoutError:
            now, count = time.monotonic(), sum(received)
            rates.append(8 * (count - before) / (now - start))
            start, before = now, count
    print(json.dumps({"rates": rates}), flush=True)


if os.environ["RANK"] == "0":
    first(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
else:
    second(int(sys.argv[3]))
