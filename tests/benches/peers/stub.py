"""An OpenAI-compatible server that answers at once with fixed bytes, for what stands before it. Usage: stub.py PORT"""

import asyncio
import json
import sys

try:
    import uvloop
except ImportError:
    uvloop = None


def http(body, kind="application/json"):
    """A whole answer."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


CHOICE = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
BASE = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": "stub"}
USAGE = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
WHOLE = http(json.dumps({**BASE, "choices": [{**CHOICE, "finish_reason": "length"}], "usage": USAGE}).encode())
CARD = {"id": "stub", "object": "model", "created": 1, "owned_by": "stub", "max_model_len": 4096}
LISTING = http(json.dumps({"object": "list", "data": [CARD], "model_path": "stub", "is_generation": True}).encode())
EVENT = b"data: " + json.dumps({**BASE, "choices": [CHOICE]}).encode() + b"\n\n"
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
OPENING = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ENDING = b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE), DONE)


class Connection(asyncio.Protocol):
    """Requests one after the other on one connection."""

    def __init__(self):
        self.received = b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.received += data
        while (request := self.take()) is not None:
            head, body = request
            if head.startswith(b"GET"):
                self.transport.write(LISTING)
            elif b'"stream":true' in body.replace(b" ", b""):
                asyncio.ensure_future(self.stream(json.loads(body).get("max_tokens", 1)))
            else:
                self.transport.write(WHOLE)

    def take(self):
        """The next whole request, or None: bodies have a length, or come in chunks."""
        head, found, rest = self.received.partition(b"\r\n\r\n")
        if not found:
            return None
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        if b"chunked" in fields.get(b"transfer-encoding", b""):
            body, found, left = rest.partition(b"\r\n0\r\n\r\n")
            if not found:
                return None
            self.received = left
            return head, body.partition(b"\r\n")[2]
        length = int(fields.get(b"content-length", b"0"))
        if len(rest) < length:
            return None
        self.received = rest[length:]
        return head, rest[:length]

    async def stream(self, n):
        """One write for each chunk."""
        self.transport.write(OPENING)
        for _ in range(n):
            self.transport.write(CHUNK)
            await asyncio.sleep(0)
        self.transport.write(ENDING)


async def main(port):
    """Serves until it is ended."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    run = uvloop.run if uvloop else asyncio.run
    run(main(int(sys.argv[1])))
