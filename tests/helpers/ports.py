"""Ports of this machine, for servers that are programs of their own."""

import socket


def free_ports(count: int) -> list[int]:
    """Ports at which nothing listens at the moment."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def answers(port: int) -> bool:
    """Whether something listens at a port."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
