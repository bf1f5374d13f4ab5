"""Traffic for `test_box.py`, run inside nodes: `python box_traffic.py KIND ARG ...`. Standard library only."""

import socket
import statistics
import sys
import time

CONTROL_TOS = 0x10


def sink(port: int) -> None:
    """Read everything from everyone."""
    import threading

    def drain(connection: socket.socket) -> None:
        buffer = bytearray(1 << 18)
        while connection.recv_into(buffer):
            pass

    with socket.create_server(("", port)) as server:
        print("ready", flush=True)
        while True:
            threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()


def flood(address: str, port: int) -> None:
    """Send as fast as the network takes it, until killed."""
    data = bytes(1 << 18)
    with socket.create_connection((address, port), timeout=10) as connection:
        print("ready", flush=True)
        connection.settimeout(None)
        while True:
            connection.sendall(data)


def echo(port: int) -> None:
    """Send every datagram back, marked as it came."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", port))
        server.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, CONTROL_TOS)
        print("ready", flush=True)
        while True:
            data, peer = server.recvfrom(2048)
            server.sendto(data, peer)


def ping(address: str, port: int, count: int, tos: int, timeout_s: float) -> None:
    """Print the median round trip in seconds of `count` datagrams, and how many came back."""
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        client.connect((address, port))
        client.settimeout(timeout_s)
        for number in range(count):
            begin = time.monotonic()
            try:
                client.send(number.to_bytes(4, "little"))
                while int.from_bytes(client.recv(2048), "little") != number:
                    pass
            except (TimeoutError, ConnectionRefusedError):
                continue
            times.append(time.monotonic() - begin)
            time.sleep(0.005)
    print(statistics.median(times) if times else "nan", len(times))


def connect(address: str, port: int, timeout_s: float) -> None:
    """Print `connected`, or the name of the error."""
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
        print("connected")
    except OSError as error:
        print(type(error).__name__, error)


def main() -> None:
    kind, *rest = sys.argv[1:]
    if kind == "sink":
        sink(int(rest[0]))
    elif kind == "flood":
        flood(rest[0], int(rest[1]))
    elif kind == "echo":
        echo(int(rest[0]))
    elif kind == "ping":
        ping(rest[0], int(rest[1]), int(rest[2]), int(rest[3], 0), float(rest[4]))
    elif kind == "connect":
        connect(rest[0], int(rest[1]), float(rest[2]))
    else:
        raise SystemExit(f"no traffic of kind {kind}")


if __name__ == "__main__":
    main()
