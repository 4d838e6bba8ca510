"""Runs programs and servers with deadlines, and ends them whatever happens."""

import atexit
import http.client
import os
import pathlib
import signal
import socket
import subprocess
import time

# Servers that may still run; each leads a process group of its own.
_running = []


class Failed(Exception):
    """A program failed, was killed or did not answer in time; `log` is the file that says more, if there is one."""

    def __init__(self, reason, log=None):
        super().__init__(reason)
        self.log = log


def run(command, deadline_s, env=None, log=None):
    """Runs a program to its end and returns its standard output; `log` keeps what it says on standard error."""
    name = pathlib.Path(command[0]).name
    with open(log or os.devnull, "a") as errors:
        print("$", *command, file=errors, flush=True)
        child = start(command, env, stdout=subprocess.PIPE, stderr=errors)
        try:
            output, _ = child.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"{name} did not end within {deadline_s} s", log) from None
        finally:
            end(child)
            child.stdout.close()
    if child.returncode < 0:
        raise Failed(f"{name} died of {signal.Signals(-child.returncode).name}", log)
    if child.returncode:
        raise Failed(f"{name} failed with status {child.returncode}", log)
    return output


def start(command, env=None, **pipes):
    """Starts a program as the leader of a process group, so that its children end with it."""
    try:
        child = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **pipes,
        )
    except OSError as error:
        raise Failed(f"cannot start {pathlib.Path(command[0]).name}: {error.strerror}") from None
    _running.append(child)
    return child


def end(child):
    """Ends a program and all it started: kindly first."""
    for sent, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        signal_group(child, sent)
        signal_group(child, signal.SIGCONT)
        try:
            child.wait(seconds)
            break
        except subprocess.TimeoutExpired:
            continue
    signal_group(child, signal.SIGKILL)
    if child in _running:
        _running.remove(child)


def signal_group(child, sent):
    """Sends a signal to a program's group, if any of it is left."""
    try:
        os.killpg(child.pid, sent)
    except ProcessLookupError:
        pass


@atexit.register
def end_all():
    """Ends every program that is still running."""
    for child in list(_running):
        end(child)


def free_port():
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server that runs, or is frozen while another one is measured."""

    def __init__(self, name, command, port, env=None, ready_path="/health", ready_s=600, log=None):
        self.name, self.port, self.url = name, port, f"http://127.0.0.1:{port}"
        self.log = log or os.devnull
        with open(self.log, "a") as output:
            self.child = start(command, env, stdout=output, stderr=output)
        self._wait_until_ready(ready_path, ready_s)

    def _wait_until_ready(self, path, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.child.poll() is not None:
                raise Failed(f"{self.name} ended with status {self.child.returncode} before it was ready", self.log)
            if self._answers(path):
                return
            time.sleep(0.2)
        self.stop()
        raise Failed(f"{self.name} was not ready within {seconds} s", self.log)

    def _answers(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def freeze(self):
        """Takes the server off the cores until it is thawed."""
        signal_group(self.child, signal.SIGSTOP)

    def thaw(self):
        """Lets a frozen server run again."""
        signal_group(self.child, signal.SIGCONT)

    def stop(self):
        """Ends the server."""
        end(self.child)
