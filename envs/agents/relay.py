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
STACK = 1 << 18  # of a thread; the usual one counts 8 MB of the memory that a process may allocate


def main(path, port, command):
    threading.stack_size(STACK)
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
            client = server.accept()[0]
            start(connect, client, path, ends=[client])


def connect(client, path):
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gateway = socket.socket(socket.AF_UNIX)
    try:
        gateway.connect(path)
    except OSError:  # the episode is over
        client.close()
        return
    back = start(carry, gateway, client, ends=[client, gateway])
    if back is not None:
        carry(client, gateway)
        back.join()
        client.close()
        gateway.close()


def start(target, *args, ends):
    """Start a thread; None: there is no memory for it, so that ``ends`` are closed."""
    thread = threading.Thread(target=target, args=args, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        for end in ends:
            end.close()
        return None
    return thread


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
