"""Gangs over Ray's nodes: all at once or nothing, apart, soft, and what ends with whom. The table is the real one; nodes are the test's."""
import pickle
import sys
import threading
import time

import gpushare
import pytest

import gpushare_ray
from gpushare_ray import __main__ as tool, reservations


@pytest.fixture
def nodes(ray, monkeypatch):
    """Three nodes, of which the test changes the list. The table looks at it whenever it is asked."""
    monkeypatch.setattr(reservations, "_LOOK_S", 0.01)
    listed = [{"NodeID": f"n{i}", "Alive": True, "Resources": {"GPU": 2.0, "CPU": 8.0, f"node:10.0.0.{i}": 1.0}} for i in range(3)]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    return listed


def until(condition, timeout_s=60):
    """Waits for something that happens soon. The time is a limit against hanging, no expectation."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def used(ray, name="GPU"):
    return sum(row["used"] for row in ray.get(reservations.table().status.remote())["resources"] if row["name"] == name)


def test_a_gang_has_its_nodes_at_once_and_gives_them_back(nodes, ray):
    with gpushare_ray.reserve([{"needs": {"GPU": 1, "CPU": 2}, "count": 4}, {"needs": {"CPU": 1}}]) as gang:
        assert len(gang) == 5 and used(ray) == 4 and used(ray, "CPU") == 9
        assert sorted({node for node, _ in gang.places}) <= ["n0", "n1", "n2"]
        assert max([node for node, needs in gang.places if "GPU" in needs].count(name) for name in ("n0", "n1", "n2")) <= 2
        assert gang.options(0) == {"scheduling_strategy": ("on", gang.places[0][0], False), "num_gpus": 1, "num_cpus": 2, "resources": {}}
        assert gang.options(4)["num_gpus"] == 0
    assert used(ray) == 0
    gang.close()


def test_two_gangs_that_do_not_fit_beside_each_other_take_turns(nodes, ray):
    first = gpushare_ray.reserve([{"needs": {"GPU": 1}, "count": 4}], owner="a")
    with pytest.raises(TimeoutError, match="4 of 6 held by 'a'"):
        gpushare_ray.reserve([{"needs": {"GPU": 1}, "count": 4}], timeout=0)
    assert used(ray) == 4  # the second one holds no part of what it lacks
    got = []
    waits = threading.Thread(target=lambda: got.append(gpushare_ray.reserve([{"needs": {"GPU": 1}, "count": 4}])))
    waits.start()
    until(lambda: ray.get(reservations.table().status.remote())["waiting"] == 1)
    first.close()
    waits.join()
    assert len(got[0]) == 4 and used(ray) == 4
    got[0].close()


def test_apart_soft_and_never(nodes, ray):
    with gpushare_ray.reserve([{"needs": {"GPU": 1}, "count": 3, "apart": True}]) as gang:
        assert sorted(node for node, _ in gang.places) == ["n0", "n1", "n2"]
        with gpushare_ray.reserve(alternatives=[[{"needs": {"GPU": 2}}], [{"needs": {"CPU": 8}}]]) as soft:
            assert soft.alternative == 1 and soft.options(0)["num_cpus"] == 8
    with pytest.raises(gpushare.Error):
        gpushare_ray.reserve([{"needs": {"GPU": 3}}], timeout=0)
    for wrong in ({}, {"parts": [], "alternatives": []}):
        with pytest.raises(ValueError):
            gpushare_ray.reserve(**wrong)


def test_what_an_owner_has_set_is_matched_and_goes_with_the_owner(nodes, ray):
    table = reservations.table()
    ray.get(table.set.remote("cache", "near-cache", 4, {"node": "n1"}))
    with gpushare_ray.reserve([{"needs": {"near-cache": 1, "CPU": 1}}]) as near:
        assert near.places[0][0] == "n1" and near.options(0)["resources"] == {}  # Ray does not know the name
    ray.get(table.end_owner.remote("cache"))
    assert used(ray, "near-cache") == 0


def test_a_lost_node_ends_the_gang_and_a_new_one_helps_who_waits(nodes, ray):
    gang = gpushare_ray.reserve([{"needs": {"GPU": 2}, "count": 3}], lease=4)
    nodes[1]["Alive"] = False
    until(lambda: used(ray) == 0 and gang.lost is not None)
    gang.close()
    nodes.append({"NodeID": "n3", "Resources": {"GPU": 2.0}})
    with gpushare_ray.reserve([{"needs": {"GPU": 2}, "count": 3}]) as other:
        assert sorted(node for node, _ in other.places) == ["n0", "n2", "n3"]


def test_a_lease_that_would_end_before_its_waiter_looks_is_refused(nodes, ray):
    with pytest.raises(ValueError, match="lease: 0.5 s; at least 4.0 s"):
        gpushare_ray.reserve([{"needs": {"GPU": 1}}], lease=0.5)


def test_the_grant_of_a_process_that_is_gone_ends_with_its_lease(nodes, ray, monkeypatch):
    table = reservations.table()
    gone = ray.get(table.submit.remote({"owner": "gone", "parts": [{"needs": {"GPU": 2}, "count": 3}], "lease_ms": 3000}))
    assert ray.get(table.wait.remote(gone, 0)) is not None
    renewed = []
    renew = reservations.Table.renew

    async def counted(self, number):
        await renew(self, number)
        renewed.append(number)

    monkeypatch.setattr(reservations.Table, "renew", counted)
    with gpushare_ray.reserve([{"needs": {"GPU": 1}}], lease=4) as kept:
        until(lambda: used(ray) == 1 or kept.lost)  # that of the other one has ended
        until(lambda: len(renewed) > 12 or kept.lost)  # three leases long: who lives keeps what it has
        assert used(ray) == (0 if kept.lost else 1)


def test_a_program_runs_while_the_tool_holds_its_gang(nodes, ray, capfd, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda **_: None, raising=False)
    program = [sys.executable, "-c", "import os, sys; print(os.environ['GPUSHARE_NODES']); sys.exit(5)"]
    assert tool.main(["reserve", "--needs", "GPU=1,CPU=2", "--count", "3", "--apart", "--"] + program) == 5
    assert sorted(capfd.readouterr().out.strip().split(",")) == ["n0", "n1", "n2"]
    assert used(ray) == 0
    assert tool.main(["reserve", "--needs", "GPU=4", "--timeout", "0", "--"] + program) == 1
    assert "gpushare-ray: " in capfd.readouterr().err
    assert tool.main(["reservations"]) == 0
    assert '"name": "GPU"' in capfd.readouterr().out
    for wrong in (["--needs", "GPU"], ["--needs", "GPU=x"], ["--needs", "GPU=1", "--count", "0"]):
        with pytest.raises(SystemExit):
            tool.main(["reserve"] + wrong + ["--"] + program)


def test_what_the_table_raises_reaches_other_processes():
    error = pickle.loads(pickle.dumps(gpushare.TimedOut("why", gpushare.lib.GPUSHARE_TIMED_OUT)))
    assert isinstance(error, TimeoutError) and "why" in str(error)
