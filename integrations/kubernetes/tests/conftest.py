"""Fixtures: a daemon on the host device, a cluster, and the agent as a process. GPUSHARE_TOOL_FOLDER has the gpushare tool."""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from cluster import ApiServer, DraKubelet, Scheduler

TOOL = str(pathlib.Path(os.environ["GPUSHARE_TOOL_FOLDER"]) / "gpushare")
DRIVER = "gpushare.dev"
STEP = 16 << 20
CAPACITY = 256 << 20


def eventually(condition, what, timeout_s=60):
    """Waits for something that happens soon. The time is a limit against hanging, no expectation."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        result = condition()
        if result:
            return result
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {timeout_s} s")


class Process:
    def __init__(self, command, log, **options):
        self.command, self.log, self.options, self.process = command, log, options, None

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, **self.options)
        return self

    def stop(self, number=signal.SIGTERM):
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60) if self.process else None


class Node:
    """A machine: folders as on a node, the daemon, and the agent."""

    def __init__(self, folder, api):
        self.folder, self.api = folder, api
        self.socket = folder / "run" / "daemon.sock"
        self.socket.parent.mkdir()
        self.kubelet_dir, self.cdi = folder / "kubelet", folder / "cdi"
        self.daemon = Process([TOOL, "daemon", "--socket", str(self.socket), "--device", "host", "--capacity", f"{CAPACITY}B"],
                              folder / "daemon.log")
        self.agents = []

    def start_daemon(self):
        self.daemon.start()
        eventually(lambda: subprocess.run([TOOL, "top", "--once", "--socket", str(self.socket)], capture_output=True).returncode == 0,
                   "the daemon's answer")

    def agent(self, *more):
        agent = Process([sys.executable, "-m", "gpushare_kubernetes", "--node", "node-1", "--socket", str(self.socket), "--server",
                         self.api.url, "--kubelet-dir", str(self.kubelet_dir), "--cdi-dir", str(self.cdi), "--memory-step", "16Mi",
                         "--tool", TOOL, "--interval", "0.1", *more], self.folder / "agent.log").start()
        self.agents.append(agent)
        return agent

    def log(self):
        return (self.folder / "agent.log").read_text()

    def offered(self):
        entry = self.api.slices.get(f"node-1-{DRIVER}")
        return entry["spec"]["devices"] if entry else []

    def files(self):
        return sorted(path.name for path in self.cdi.iterdir()) if self.cdi.exists() else []

    def stop(self):
        for agent in self.agents:
            agent.stop()
        self.daemon.stop()


@pytest.fixture
def api():
    server = ApiServer()
    yield server
    server.stop()


@pytest.fixture
def node(api):
    with tempfile.TemporaryDirectory(prefix="gs-") as folder:  # pytest's own folders are too long for sockets
        made = Node(pathlib.Path(folder), api)
        try:
            made.start_daemon()
            yield made
        finally:
            made.stop()


@pytest.fixture
def scheduler(api):
    return Scheduler(api)


@pytest.fixture
def kubelet(node):
    return DraKubelet(node.kubelet_dir)


@pytest.fixture
def dra(node):
    """A node whose agent serves claims."""
    node.agent()
    eventually(node.offered, "the ResourceSlice")
    return node
