"""The relay: a script inside a sandbox that carries 127.0.0.1:8000 to the gateway's unix socket, and runs the agent.

The sandbox has no other network. Called as ``relay.py SOCKET PORT COMMAND...``; its exit status is the command's. Plain
threads and the standard library only, so that it starts in milliseconds with whatever Python the sandbox has.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

CHUNK = 1 << 16


def main(path, port, command):
    server = socket.create_server(("127.0.0.1", port), backlog=128)
    threading.Thread(target=serve, args=(server, path), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the command's to answer
    try:
        status = subprocess.call(command, close_fds=False)  # a function answers on a descriptor that it inherits
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        status = 127
    os._exit(status if status >= 0 else 128 - status)


def serve(server, path):
    while True:
        with contextlib.suppress(OSError):  # no descriptors are left
            threading.Thread(target=connect, args=(server.accept()[0], path), daemon=True).start()


def connect(client, path):
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gateway = socket.socket(socket.AF_UNIX)
    try:
        gateway.connect(path)
    except OSError:  # the episode is over
        client.close()
        return
    back = threading.Thread(target=carry, args=(gateway, client), daemon=True)
    back.start()
    carry(client, gateway)
    back.join()
    client.close()
    gateway.close()


def carry(source, target):
    """Carry bytes one way until the sender is done, then say so to the receiver."""
    try:
        while True:
            data = source.recv(CHUNK)
            if not data:
                break
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
