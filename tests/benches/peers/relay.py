"""Passes bytes on both ways and looks at none: what any process in a router's place costs. Usage: relay.py PORT HOST:PORT"""

import selectors
import socket
import sys

N_BYTES = 1 << 16


def nodelay(connection):
    """Sends at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def main(port, target):
    """Serves until it is ended."""
    host, target_port = target.rsplit(":", 1)
    selector = selectors.DefaultSelector()
    listener = socket.create_server(("127.0.0.1", port))
    selector.register(listener, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            if key.fileobj.fileno() < 0:
                continue  # Its other side has just ended.
            if key.data is None:
                ours = nodelay(listener.accept()[0])
                theirs = nodelay(socket.create_connection((host, int(target_port))))
                selector.register(ours, selectors.EVENT_READ, theirs)
                selector.register(theirs, selectors.EVENT_READ, ours)
            elif received := key.fileobj.recv(N_BYTES):
                key.data.sendall(received)
            else:
                for ended in (key.fileobj, key.data):
                    selector.unregister(ended)
                    ended.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
