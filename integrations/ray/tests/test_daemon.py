"""The node's daemon: started once by whoever needs it first, nobody's child, stopped by command."""
import json
import os
import subprocess
import sys
import threading

import gpushare
import pytest

from gpushare_ray.__main__ import main


def test_first_use_starts_it_and_all_find_the_same(daemon):
    found = []
    threads = [threading.Thread(target=lambda: found.append(daemon.ensure_daemon("host", 2, "64M")["pid"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    status = daemon.status()
    assert [device["capacity_bytes"] for device in status["devices"]] == [64 << 20] * 2
    assert len({device["device"] for device in status["devices"]}) == 2


def test_it_outlives_the_worker_that_started_it(daemon):
    code = "import gpushare_ray.daemon as daemon, os; print(daemon.ensure_daemon('host', 1, '64M')['pid']); os.kill(os.getpid(), 9)"
    worker = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True)
    assert daemon.status()["pid"] == int(worker.stdout)
    with open(f"/proc/{worker.stdout.strip()}/stat", encoding="ascii") as stat:
        assert int(stat.read().rpartition(")")[2].split()[1]) != os.getpid()  # nor was it handed to us


def test_the_command(daemon, capsys):
    assert main(["status"]) == 1
    assert "no daemon answers" in capsys.readouterr().err
    assert main(["start", "--device", "host", "--gpus", "2", "--capacity", "64M"]) == 0
    assert len(json.loads(capsys.readouterr().out)["devices"]) == 2
    assert main(["start"]) == 0  # it runs
    assert main(["stop"]) == 0
    assert "stopped" in capsys.readouterr().out.splitlines()[-1]
    assert main(["stop"]) == 0
    assert "no daemon" in capsys.readouterr().out
    assert main(["start", "--device", "host", "--capacity", "x"]) == 1
    assert "size" in capsys.readouterr().err


def test_a_daemon_that_cannot_start_says_why(daemon, monkeypatch):
    monkeypatch.setattr(daemon, "device_names", lambda *_: ["nonsense:7"])
    said = ""
    while "nonsense" not in said:  # a busy machine starts the daemon late
        with pytest.raises(gpushare.Unavailable) as told:
            daemon.ensure_daemon("host", timeout_s=1.5)
        said = str(told.value)


def test_devices_of_a_node(daemon):
    assert daemon.device_names("cuda", 2, 0) == ["cuda:0", "cuda:1"]
    assert len(set(daemon.device_names("host", 3, 64 << 20))) == 3
