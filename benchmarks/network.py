"""Several nodes on one machine: network namespaces, each with a host name and files of its own.

A node is a process that sleeps in its namespaces; they are gone when it and all that was started
in it are. Nothing of it is to be seen outside, so that two test runs cannot collide, and nothing
outlasts a test run that is killed: the sleepers end with their standard input.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

TOOLS = ("unshare", "nsenter", "ip", "mount")


class CannotMake(Exception):
    """One sentence: why there are no namespaces here."""


class Node:
    """A host of its own name and address, on the files of this machine."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._sleeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._sleeper.pid
        self._namespace = Path(f"/proc/{self.pid}/ns/net")
        outside = os.readlink("/proc/self/ns/net")
        while self._sleeper.poll() is None and os.readlink(self._namespace) == outside:
            time.sleep(0.01)
        if self._sleeper.poll() is not None:
            raise CannotMake(self._sleeper.communicate()[1].strip())

    def command(self, *command: object, cwd: Path | str = "/") -> list[str]:
        """Return the command that runs ``command`` in this node."""
        enter = ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *map(str, command)]

    def do(self, *command: object) -> None:
        done = subprocess.run(self.command(*command), capture_output=True, text=True)
        if done.returncode:
            raise CannotMake(f"{' '.join(map(str, command))}: {done.stderr.strip()}")

    def close(self) -> None:
        own = os.readlink(self._namespace)
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(entry / "ns/net") == own:
                    os.kill(int(entry.name), signal.SIGKILL)
        self._sleeper.communicate()


@contextlib.contextmanager
def network(folder: Path, *names: str) -> Iterator[list[Node]]:
    """Yield nodes that reach each other by name, and are 127.0.1.1 to themselves, as on Debian.

    Raises:
        CannotMake: this machine does not let us.
    """
    if os.geteuid() != 0 or (missing := [tool for tool in TOOLS if not shutil.which(tool)]):
        raise CannotMake("not root" if os.geteuid() else f"no {missing[0]} here")
    with contextlib.ExitStack() as stack:
        switch = _node(stack, "switch")
        switch.do("ip", "link", "add", "switch0", "type", "bridge")
        switch.do("ip", "link", "set", "switch0", "up")
        nodes = [_node(stack, name, f"10.77.0.{i}") for i, name in enumerate(names, start=1)]
        for node in nodes:
            _plug(node, switch)
            others = [f"{other.address} {other.name}" for other in nodes if other is not node]
            hosts = folder / f"hosts-{node.name}"
            hosts.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {node.name}", *others]))
            node.do("mount", "--bind", hosts, "/etc/hosts")
            node.do("hostname", node.name)
        yield nodes


def _node(stack: contextlib.ExitStack, name: str, address: str = "") -> Node:
    node = Node(name, address)
    stack.callback(node.close)
    return node


def _plug(node: Node, switch: Node) -> None:
    port = f"to-{node.name}"
    ends = ["ip", "link", "add", port, "netns", switch.pid, "type", "veth"]
    made = subprocess.run(
        [*map(str, ends), "peer", "name", "eth0", "netns", str(node.pid)],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        raise CannotMake(f"veth: {made.stderr.strip()}")
    switch.do("ip", "link", "set", port, "master", "switch0", "up")
    node.do("ip", "addr", "add", f"{node.address}/24", "dev", "eth0")
    node.do("ip", "link", "set", "eth0", "up")
    node.do("ip", "link", "set", "lo", "up")
