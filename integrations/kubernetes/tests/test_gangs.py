"""Gangs of pods: none starts before all fit, and what they hold survives the controller."""
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml

from cluster import ApiServer
from gpushare_kubernetes import gangs
from gpushare_kubernetes.api import Api, ApiError
from gpushare_kubernetes.gangs import GATE, LABEL, NEEDS, PLACE, SIZE, GangController

_uids = itertools.count()


@pytest.fixture
def api():
    server = ApiServer()
    for node in ("n1", "n2"):
        add_node(server, node)
    yield server
    server.stop()


def add_node(server, node, driver="gpushare.dev"):
    devices = [{"name": f"cuda-{i}", "capacity": {"share": {"value": "100"}, "memory": {"value": "16Gi"}}} for i in range(2)]
    server.slices[node] = {"metadata": {"name": node}, "spec": {"driver": driver, "nodeName": node, "devices": devices}}


def add_pods(server, gang, count, needs="share=100,memory=8Gi", size=None, first=0):
    for i in range(first, first + count):
        name = f"{gang}-{i}"
        server.pods["default", name] = {
            "metadata": {"namespace": "default", "name": name, "uid": f"uid-{next(_uids)}", "labels": {LABEL: gang},
                         "annotations": {SIZE: str(size or count), NEEDS: needs}},
            "spec": {"schedulingGates": [{"name": GATE}, {"name": "another.dev/gate"}]}, "status": {"phase": "Pending"}}


def places(server, gang):
    """Where the gang's pods are; only those without the gate."""
    found = {}
    for (_, name), pod in server.pods.items():
        if pod["metadata"]["labels"][LABEL] == gang and {"name": GATE} not in pod["spec"]["schedulingGates"]:
            found[name] = pod["metadata"]["annotations"][PLACE]
            assert pod["spec"]["nodeSelector"] == {"kubernetes.io/hostname": found[name].partition("/")[0]}
            assert pod["spec"]["schedulingGates"] == [{"name": "another.dev/gate"}]
    return found


def controller(server):
    return GangController(Api(server.url), "gpushare.dev")


def test_a_gang_over_nodes_starts_when_all_of_it_is_there_and_fits(api):
    one = controller(api)
    add_pods(api, "a", 2, size=3)
    one.step()
    assert places(api, "a") == {}  # one is missing
    add_pods(api, "a", 1, size=3, first=2)
    one.step()
    assert len(set(places(api, "a").values())) == 3
    add_pods(api, "b", 2)
    one.step()
    assert places(api, "b") == {}  # only one device is left, and b takes no part of it
    add_pods(api, "c", 2, needs="share=50,memory=4Gi")
    one.step()
    assert len(places(api, "c")) == 2  # fits beside, and may pass b
    for gang in ("a", "c"):
        for name in places(api, gang):
            api.pods["default", name]["status"]["phase"] = "Succeeded"
        one.step()
    one.step()
    assert len(places(api, "b")) == 2


def test_claims_of_other_pods_count(api):
    def allocation(driver):
        return {"devices": {"results": [{"driver": driver, "pool": "n1", "device": "cuda-0", "request": "gpu",
                                         "consumedCapacity": {"share": "25", "memory": "4Gi"}}]}}

    one = controller(api)
    api.claims["default", "other"] = {"status": {"allocation": allocation("gpushare.dev"), "reservedFor": [{"uid": "none of ours"}]}}
    api.claims["default", "free"] = {"status": None}
    api.claims["default", "nvidia"] = {"status": {"allocation": allocation("gpu.nvidia.com")}}
    add_pods(api, "a", 4)
    one.step()
    assert places(api, "a") == {}
    del api.claims["default", "other"]
    one.step()
    held = places(api, "a")
    assert sorted(held.values()) == ["n1/cuda-0", "n1/cuda-1", "n2/cuda-0", "n2/cuda-1"]
    mine = next(name for name, place in held.items() if place == "n1/cuda-0")  # its own claim does not count a second time
    api.claims["default", "own"] = {"status": {"allocation": allocation("gpushare.dev"),
                                               "reservedFor": [{"uid": api.pods["default", mine]["metadata"]["uid"]}]}}
    one.step()
    assert places(api, "a") == held


def test_a_new_controller_finds_what_pods_hold(api):
    add_pods(api, "a", 3)
    controller(api).step()
    held = places(api, "a")
    assert len(held) == 3
    # The one before stopped before the last patch.
    late = next(iter(held))
    pod = api.pods["default", late]
    del pod["metadata"]["annotations"][PLACE], pod["spec"]["nodeSelector"]
    pod["spec"]["schedulingGates"].append({"name": GATE})
    add_pods(api, "b", 2)
    again = controller(api)
    again.step()
    assert places(api, "b") == {}
    kept = places(api, "a")
    assert {name: kept[name] for name in held if name != late} == {name: held[name] for name in held if name != late}
    assert len(set(kept.values())) == 3


def test_a_pod_made_in_place_of_one_that_is_gone_takes_its_place(api):
    one = controller(api)
    add_pods(api, "a", 3)
    one.step()
    gone = places(api, "a")["a-1"]
    del api.pods["default", "a-1"]
    add_pods(api, "a", 1, size=3, first=7)
    one.step()
    assert places(api, "a")["a-7"] == gone


def test_a_lost_node_and_pods_that_are_wrong(api, caplog):
    one = controller(api)
    add_pods(api, "a", 4)
    one.step()
    assert len(places(api, "a")) == 4
    add_pods(api, "next", 2)
    one.step()
    lost = api.slices.pop("n2")
    for i, needs in enumerate(("", "share", "share=x", "share=0", "gpus=1", "share=50,memory=8 Gi of it", "share=1e999")):
        add_pods(api, f"wrong{i}", 1, needs=needs)
    add_pods(api, "size", 1, size="many")
    add_pods(api, "never", 1, needs="share=101")
    one.step()
    one.step()
    assert places(api, "next") == {}  # where pods of the gang still run nobody else goes
    api.slices["n2"] = lost
    one.step()
    assert places(api, "next") == {}  # nor there, when the node is back
    del api.slices["n2"]
    one.step()
    for i in range(2):
        del api.pods["default", f"next-{i}"]
    one.step()
    kept = [name for name, place in places(api, "a").items() if place.startswith("n1/")]  # what is not lost stays held
    for name in list(places(api, "a")):
        if name not in kept:
            del api.pods["default", name]
    assert caplog.text.count("wrong2 waits: gpushare.dev/gang-needs: 'share=x'") == 1  # told once
    assert "gang default/size waits: gpushare.dev/gang-size: 'many'" in caplog.text
    assert all(places(api, f"wrong{i}") == {} for i in range(7)) and places(api, "never") == {}
    add_node(api, "n3")
    add_pods(api, "later", 2)
    one.step()
    assert set(places(api, "later").values()) == {"n3/cuda-0", "n3/cuda-1"}
    add_pods(api, "a", 2, size=4, first=8)  # made anew in place of the lost ones
    one.step()
    assert len(places(api, "a")) == 2
    add_node(api, "n4")
    one.step()
    assert sorted(places(api, "a").values()) == ["n1/cuda-0", "n1/cuda-1", "n4/cuda-0", "n4/cuda-1"]


def test_gangs_that_go_at_once_leave_nothing_held(api):
    one = controller(api)
    add_pods(api, "a", 4)
    add_pods(api, "b", 4)
    one.step()
    assert len(places(api, "a")) == 4 and places(api, "b") == {}
    api.pods.clear()
    one.step()
    add_pods(api, "c", 4)
    one.step()
    assert len(places(api, "c")) == 4


def test_a_gang_that_loses_a_pod_while_it_waits_starts_whole_or_not(api):
    one = controller(api)
    add_pods(api, "a", 4)
    add_pods(api, "b", 3)
    one.step()
    del api.pods["default", "b-1"]
    for i in range(4):
        del api.pods["default", f"a-{i}"]
    one.step()
    one.step()
    assert places(api, "b") == {}
    add_pods(api, "b", 1, size=3, first=5)
    one.step()
    assert len(places(api, "b")) == 3


def test_the_program_goes_on_when_the_server_is_away(api):
    with pytest.raises(ApiError):
        api.away = True
        controller(api).step()
    program = subprocess.Popen([sys.executable, "-m", "gpushare_kubernetes.gangs", "--server", api.url, "--interval", "0.02"], stderr=subprocess.PIPE)
    try:
        assert b"away" in program.stderr.readline()
        api.away = False
        add_pods(api, "a", 2)
        end = time.monotonic() + 60  # a limit against hanging
        while len(places(api, "a")) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 0
        program.stderr.close()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
    alone = subprocess.run([sys.executable, "-m", "gpushare_kubernetes.gangs"], env=environment, capture_output=True, text=True, check=False)
    assert alone.returncode == 2 and "--server" in alone.stderr
    assert gangs.parser().parse_args([]).driver == "gpushare.dev"


def test_the_manifest_has_the_rights_that_the_controller_uses(api):
    documents = {document["kind"]: document for document in yaml.safe_load_all((pathlib.Path(__file__).parent.parent / "manifests/gangs.yaml").read_text())}
    add_pods(api, "a", 1)
    controller(api).step()
    assert len(places(api, "a")) == 1
    rights = {(resource, verb) for rule in documents["ClusterRole"]["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    used = {(re.search(r"(resourceslices|resourceclaims|pods)", path)[1], {"GET": "list", "PATCH": "patch"}[verb]) for verb, path in api.calls}
    assert rights == used
    command = documents["Deployment"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command == ["python3", "-m", "gpushare_kubernetes.gangs"] and documents["Deployment"]["spec"]["replicas"] == 1
