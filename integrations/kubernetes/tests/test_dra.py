"""The agent as a DRA driver: what it offers, claims through their life, restarts in every order, and the CDI file at work."""
import hashlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import uuid

import grpc
import pytest

from cluster import NoRoom
from conftest import CAPACITY, DRIVER, TOOL, eventually
from gpushare_kubernetes import __main__ as agent

MIB = 1 << 20


def cdi(node, claim):
    return json.loads((node.cdi / f"{DRIVER}-claim-{claim['metadata']['uid']}.json").read_text())


def ids(entry):
    assert entry.error == "", entry.error
    return [list(device.cdi_device_ids) for device in entry.devices]


def apply(spec, device_id, environment=()):
    """The environment of a process in a container to which a runtime applies that CDI device. Mounts need a container; here their paths must
    be the host's, so that the process finds the same files without one."""
    kind, _, name = device_id.partition("=")
    assert spec["kind"] == kind
    edits = [device["containerEdits"] for device in spec["devices"] if device["name"] == name] + [spec["containerEdits"]]
    for mount in (mount for edit in edits for mount in edit.get("mounts", [])):
        assert mount["hostPath"] == mount["containerPath"]
    result = dict(environment)
    for edit in edits:
        result.update(variable.split("=", 1) for variable in edit.get("env", []))
    return result


INHERITED = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "GPUSHARE_LIBRARY", "LD_PRELOAD", "ASAN_OPTIONS") if name in os.environ}


def run(code, environment):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env={**INHERITED, **environment}, capture_output=True, text=True,
                          timeout=120)


def start(code, environment):
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env={**INHERITED, **environment}, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)


def test_the_slice(dra, api):
    golden = json.loads((pathlib.Path(__file__).parent / "golden" / "resourceslice.json").read_text())
    stored = dict(api.slices[f"node-1-{DRIVER}"])
    stored["metadata"] = {key: value for key, value in stored["metadata"].items() if key != "resourceVersion"}
    assert stored == golden


def test_capacity_is_given_by_step_default_and_sum(dra, scheduler):
    first = scheduler.allocate("a", DRIVER, ("gpu", {"memory": "100Mi", "share": "23"}))
    given = first["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"]
    assert given == {"memory": str(112 * MIB), "share": "25"}
    second = scheduler.allocate("b", DRIVER, ("gpu", {"memory": "1"}))
    assert second["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"] == {"memory": str(16 * MIB), "share": "10"}
    with pytest.raises(NoRoom):
        scheduler.allocate("c", DRIVER, ("gpu", {"share": "10"}))  # memory's default is the whole device
    with pytest.raises(NoRoom):
        scheduler.allocate("c", DRIVER, ("gpu", {"memory": "16Mi", "share": "70"}))
    scheduler.allocate("c", DRIVER, ("gpu", {"memory": "128Mi", "share": "65"}))
    assert scheduler.consumed("node-1", "host") == {"memory": CAPACITY, "share": 100}


def test_a_claim_through_its_life(dra, kubelet, scheduler):
    claim = scheduler.allocate("train", DRIVER, ("gpu", {"memory": "64Mi", "share": "25"}))
    share_id = claim["status"]["allocation"]["devices"]["results"][0]["shareID"]
    entry = kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]]
    assert ids(entry) == [[f"{DRIVER}/share={share_id}"]]
    device = entry.devices[0]
    assert (list(device.request_names), device.pool_name, device.device_name) == (["gpu"], "node-1", "host")
    spec = cdi(dra, claim)
    assert (spec["cdiVersion"], spec["kind"]) == ("0.6.0", f"{DRIVER}/share")
    assert spec["devices"][0]["containerEdits"]["env"] == [
        "GPUSHARE_DEVICE=shared:host", f"GPUSHARE_SOCKET={dra.socket}", f"GPUSHARE_MEMORY={64 * MIB}B", "GPUSHARE_WEIGHT=0.25",
        "GPUSHARE_GROUP=" + hashlib.sha256(share_id.encode()).hexdigest()[:16]]
    assert spec["containerEdits"]["mounts"][0]["hostPath"] == str(dra.socket.parent)
    before = dra.files()
    assert ids(kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]]) == [[f"{DRIVER}/share={share_id}"]]  # again: the same
    assert dra.files() == before
    assert kubelet.unprepare(DRIVER, claim)[claim["metadata"]["uid"]].error == ""
    assert dra.files() == []
    assert kubelet.unprepare(DRIVER, claim)[claim["metadata"]["uid"]].error == ""  # again: no error


def test_a_request_with_alternatives_is_prepared_under_the_name_that_pods_use(dra, kubelet, scheduler):
    # `firstAvailable`: the scheduler names the alternative that it chose, and a kubelet looks the device up by the request's own name.
    claim = scheduler.allocate("train", DRIVER, ("gpu/small", {"memory": "16Mi", "share": "5"}), ("second", {"memory": "16Mi", "share": "5"}))
    entry = kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]]
    shares = [result["shareID"] for result in claim["status"]["allocation"]["devices"]["results"]]
    assert ids(entry) == [[f"{DRIVER}/share={share}"] for share in shares]
    assert [list(device.request_names) for device in entry.devices] == [["gpu"], ["second"]]


def test_a_process_with_the_cdi_file_runs_under_its_limits(dra, kubelet, scheduler):
    claim = scheduler.allocate("train", DRIVER, ("gpu", {"memory": "64Mi", "share": "25"}))
    entry = kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]]
    result = run("""
        import gpushare, json, subprocess, os
        with gpushare.Runtime() as runtime:      # GPUSHARE_DEVICE names the shared device
            with runtime.open_session("train", persistent_bytes="32M", ephemeral_bytes="8M") as session:
                session.array((1 << 20,))[:] = 1                         # 4 MiB
                top = json.loads(subprocess.run([%r, "top", "--json", "-"], capture_output=True).stdout)
                weights = [entry["weight"] for entry in top["sessions"]]
                try:
                    session.alloc("61M")
                    held = False
                except gpushare.QuotaExceeded as error:
                    held = "64.00 MiB" in str(error)
                with session.iteration() as iteration:
                    iteration.array((1024,))[:] = 1
            try:
                runtime.open_session("more", memory="65M")
                refused = False
            except gpushare.QuotaExceeded:
                refused = True
        print(json.dumps([weights, held, refused]))
    """ % (os.environ["GPUSHARE_TOOL_FOLDER"] + "/gpushare"), apply(cdi(dra, claim), entry.devices[0].cdi_device_ids[0]))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [[0.25], True, True]


def test_the_daemon_shows_the_requests_of_a_container_s_queue(dra, kubelet, scheduler):
    claim = scheduler.allocate("serve", DRIVER, ("gpu", {"memory": "64Mi", "share": "25"}))
    entry = kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]]
    result = run("""
        import gpushare, json, subprocess
        with gpushare.Runtime() as runtime, runtime.open_session("served", persistent_bytes="1M", ephemeral_bytes="1M") as session:
            queue = gpushare.RequestQueue(runtime)
            queue.add_model(session, lambda iteration, batch: None)
            for future in [queue.submit(deadline=None) for _ in range(20)]:
                future.result()
            while True:  # the queue writes its counts ten times a second
                shown = json.loads(subprocess.run([%r, "top", "--json", "-"], capture_output=True).stdout)["sessions"][0]
                if shown["requests_in_time"] == 20:
                    break
            print(shown["requests_offered"], shown["requests_pending"], sum(shown["iteration_times"]) == sum(shown["iteration_slowdowns"]) > 0)
            queue.close()
    """ % (os.environ["GPUSHARE_TOOL_FOLDER"] + "/gpushare"), apply(cdi(dra, claim), entry.devices[0].cdi_device_ids[0]))
    assert result.stdout == "20 0 True\n", result.stderr


def test_processes_of_one_claim_have_its_limits_together(dra, kubelet, scheduler):
    claims = [scheduler.allocate(name, DRIVER, ("gpu", {"memory": "64Mi", "share": "25"})) for name in ("a", "b")]
    prepared = [kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]] for claim in claims]
    first, other = [apply(cdi(dra, claim), entry.devices[0].cdi_device_ids[0]) for claim, entry in zip(claims, prepared)]
    holds = """
        import gpushare, os, sys
        runtime = gpushare.Runtime()
        session = runtime.open_session("holds", persistent_bytes="40M", ephemeral_bytes="8M")
        print("ready", flush=True)
        while True:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            with session.iteration():
                pass
            print("done", flush=True)
    """
    asks = """
        import gpushare, json, subprocess
        def opened(bytes):
            try:
                with runtime.open_session("asks", persistent_bytes=bytes, ephemeral_bytes="2M") as session:
                    with session.iteration():
                        pass
                    return {entry["name"]: entry["weight"] for entry in
                            json.loads(subprocess.run([%r, "top", "--json", "-"], capture_output=True).stdout)["sessions"]}
            except gpushare.QuotaExceeded as error:
                return "its group may need" in str(error)
        with gpushare.Runtime() as runtime:
            print(json.dumps([opened("32M"), opened("8M")]))
    """ % TOOL
    process = start(holds, first)
    try:
        assert process.stdout.readline() == "ready\n"

        def use():
            process.stdin.write("iteration\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
        use()
        # Each process has less than 64 MiB, both together would have more.
        result = run(asks, first)
        assert result.returncode == 0, result.stderr
        refused, weights = json.loads(result.stdout)
        assert refused is True
        assert weights["asks"] <= 0.25
        result = run(asks, other)
        assert result.returncode == 0, result.stderr
        assert [entry["asks"] for entry in json.loads(result.stdout)] == [0.25, 0.25]  # another claim
    finally:
        process.kill()
        process.communicate()
    # Nothing is left of a process that was killed.
    result = eventually(lambda: (done := run(asks, first)).returncode == 0 and isinstance(json.loads(done.stdout)[0], dict) and done,
                        "its memory is free")
    assert [entry["asks"] for entry in json.loads(result.stdout)] == [0.25, 0.25]


@pytest.mark.parametrize("order", [" ".join(order) for order in itertools.permutations(("agent", "kubelet", "daemon"))] + ["killed kubelet killed"])
def test_restarts_lose_no_claim_and_prepare_none_twice(dra, kubelet, scheduler, order):
    claim = scheduler.allocate("train", DRIVER, ("gpu", {"memory": "64Mi", "share": "25"}))
    uid = claim["metadata"]["uid"]
    share = ids(kubelet.prepare(DRIVER, claim)[uid])
    content = cdi(dra, claim)

    def restart_agent(number):
        dra.agents[-1].stop(number)
        assert cdi(dra, claim) == content  # containers that start meanwhile find it
        dra.agent()

    def restart_kubelet():
        for socket in (dra.kubelet_dir / "plugins_registry").glob("*.sock"):
            socket.unlink()  # what a kubelet that is set up anew may do; one that only starts finds it

    def restart_daemon():
        dra.daemon.stop()
        eventually(lambda: dra.offered() == [], "a slice without devices")
        other = copy_of(scheduler, claim)
        assert "daemon" in kubelet.prepare(DRIVER, other)[other["metadata"]["uid"]].error
        scheduler.free(other)
        dra.start_daemon()
        eventually(dra.offered, "the devices")

    restart = {"agent": lambda: restart_agent(signal.SIGTERM), "killed": lambda: restart_agent(signal.SIGKILL), "kubelet": restart_kubelet,
               "daemon": restart_daemon}
    for who in order.split():
        restart[who]()
        eventually(lambda: _registers(kubelet), "the agent's answer")
        assert ids(kubelet.prepare(DRIVER, claim)[uid]) == share
        assert cdi(dra, claim) == content
        assert len(dra.files()) == 1
    assert kubelet.unprepare(DRIVER, claim)[uid].error == ""
    assert dra.files() == []


def copy_of(scheduler, like):
    """Allocated before the daemon went."""
    claim = json.loads(json.dumps(like))
    claim["metadata"].update(name="other", uid=str(uuid.uuid4()))
    claim["status"]["allocation"]["devices"]["results"][0]["shareID"] = str(uuid.uuid4())
    scheduler._api.claims["default", "other"] = claim
    return claim


def _registers(kubelet):
    try:
        return kubelet.find(DRIVER)
    except grpc.RpcError:
        return None


def test_claims_deleted_while_the_agent_was_away_are_forgotten(dra, kubelet, scheduler):
    stays = scheduler.allocate("stays", DRIVER, ("gpu", {"memory": "16Mi", "share": "5"}))
    goes = scheduler.allocate("goes", DRIVER, ("gpu", {"memory": "16Mi", "share": "5"}))
    kubelet.prepare(DRIVER, stays, goes)
    dra.agents[-1].stop(signal.SIGKILL)
    scheduler.free(goes)
    (dra.cdi / f"{DRIVER}-claim-broken.json").write_text("{")  # not ours to judge: left
    dra.agent()
    eventually(lambda: len(dra.files()) == 2, "the forgotten claim")
    assert cdi(dra, stays)


def test_while_the_api_server_is_away_prepared_claims_stay_prepared(dra, kubelet, scheduler, api):
    claim = scheduler.allocate("a", DRIVER, ("gpu", {"memory": "16Mi", "share": "5"}))
    share = ids(kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]])
    other = scheduler.allocate("b", DRIVER, ("gpu", {"memory": "16Mi", "share": "5"}))
    api.stop()
    assert ids(kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]]) == share
    assert "resourceclaims/b" in kubelet.prepare(DRIVER, other)[other["metadata"]["uid"]].error


def test_an_agent_that_starts_while_the_api_server_is_away_serves_prepared_claims(node, kubelet, scheduler, api):
    before = node.agent()
    eventually(node.offered, "the ResourceSlice")
    claim = scheduler.allocate("a", DRIVER, ("gpu", {"memory": "16Mi", "share": "5"}))
    share = ids(kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]])
    before.stop()
    api.stop()
    socket = node.kubelet_dir / "plugins_registry" / f"{DRIVER}-reg.sock"
    assert not socket.exists()
    again = node.agent()
    eventually(socket.exists, "the agent's socket")
    assert ids(kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]]) == share
    assert "serving the claims that are prepared" in node.log()
    assert kubelet.unprepare(DRIVER, claim)[claim["metadata"]["uid"]].error == ""
    assert again.stop() == 0
    assert node.agent().process.wait(60) == 1  # nothing is prepared any more


def test_claims_that_cannot_be_prepared_say_why(dra, kubelet, scheduler, api):
    def refused(change):
        claim = scheduler.allocate("bad", DRIVER, ("gpu", {"memory": "16Mi", "share": "5"}))
        result = claim["status"]["allocation"]["devices"]["results"]
        change(claim, result)
        entry = kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]]
        scheduler.free(claim)
        assert dra.files() == []
        return entry.error

    assert "without shareID" in refused(lambda claim, results: results[0].pop("shareID"))
    assert "without shareID or consumedCapacity" in refused(lambda claim, results: results[0].pop("consumedCapacity"))
    assert "not allocated" in refused(lambda claim, results: claim.update(status={}))
    assert "no device of driver" in refused(lambda claim, results: results[0].update(driver="other"))
    assert "this node's is node-1" in refused(lambda claim, results: results[0].update(pool="node-2"))
    assert "it has host" in refused(lambda claim, results: results[0].update(device="gpu-7"))
    assert "several devices" in refused(lambda claim, results: results.append(dict(results[0], shareID=str(uuid.uuid4()))))
    assert "no room" in refused(lambda claim, results: results[0]["consumedCapacity"].update(memory="1Gi"))
    assert "share 101" in refused(lambda claim, results: results[0]["consumedCapacity"].update(share="101"))
    assert "not a quantity" in refused(lambda claim, results: results[0]["consumedCapacity"].update(memory="much"))
    missing = {"metadata": {"namespace": "default", "name": "gone", "uid": str(uuid.uuid4())}}
    assert "there is no claim default/gone" in kubelet.prepare(DRIVER, missing)[missing["metadata"]["uid"]].error
    hostile = {"metadata": {"namespace": "default", "name": "x", "uid": "../../etc/passwd"}}
    assert "uid" in kubelet.prepare(DRIVER, hostile)["../../etc/passwd"].error
    assert "uid" in kubelet.unprepare(DRIVER, hostile)["../../etc/passwd"].error


def test_one_bad_claim_does_not_keep_another_back_and_a_node_is_not_promised_twice(dra, kubelet, scheduler):
    good = scheduler.allocate("good", DRIVER, ("a", {"memory": "64Mi", "share": "50"}), ("b", {"memory": "64Mi", "share": "25"}))
    over = copy_of(scheduler, good)
    over["status"]["allocation"]["devices"]["results"][1]["shareID"] = str(uuid.uuid4())
    answers = kubelet.prepare(DRIVER, good, over)
    assert len(ids(answers[good["metadata"]["uid"]])) == 2
    assert "no room" in answers[over["metadata"]["uid"]].error
    kubelet.unprepare(DRIVER, good)
    assert len(ids(kubelet.prepare(DRIVER, over)[over["metadata"]["uid"]])) == 2


def test_the_device_s_own_cdi_device_is_added(node, kubelet, scheduler):
    node.agent("--cdi-device", "nvidia.com/gpu={index}")
    eventually(node.offered, "the ResourceSlice")
    claim = scheduler.allocate("a", DRIVER, ("gpu", {"memory": "16Mi", "share": "5"}))
    assert ids(kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]])[0][1] == "nvidia.com/gpu=0"


CONTAINER = """
import os, pathlib, subprocess, sys
# Stands for a container runtime: applies mounts in a mount namespace of its own, then becomes the program.
mounts = sys.argv[1:sys.argv.index("--")]
for host, inside in zip(mounts[::2], mounts[1::2]):
    if not os.path.exists(inside):
        above = next(str(path) for path in pathlib.Path(inside).parents if path.exists())
        subprocess.run(["mount", "-t", "tmpfs", "none", above], check=True)
        os.makedirs(inside)
    subprocess.run(["mount", "--bind", host, inside], check=True)
program = sys.argv[sys.argv.index("--") + 1:]
os.execve(program[0], program, dict(variable.split("=", 1) for variable in os.environ["EDITS"].split("\\n")))
"""
BUILD = pathlib.Path(os.environ["GPUSHARE_TOOL_FOLDER"]).parent
DRIVER_DOUBLE = BUILD / "lib" / "doubles" / "libcuda_recorder.so"
STANDIN = BUILD / "lib" / "libcuda_standin.so"  # for the driver under gpushare's own backend
PROBE, LOAD = (str(BUILD / "bin" / name) for name in ("shim_probe", "shim_load"))
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def can_contain():
    built = [BUILD / "lib" / "libgpushare_preload.so", PROBE, LOAD, DRIVER_DOUBLE]
    return all(pathlib.Path(path).exists() for path in built) and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


class Container:
    """A program of tests/shim, which knows nothing of gpushare, over the recording driver: in namespaces of its own (mounts, process numbers), with
    the edits of a CDI device."""

    def __init__(self, folder, spec, device_id, *program):
        driver = folder / "libcuda.so.1"  # where the vendor's CDI device would put it
        if not driver.exists():
            driver.symlink_to(DRIVER_DOUBLE)
        edits = [device["containerEdits"] for device in spec["devices"] if device["name"] == device_id.partition("=")[2]]
        edits.append(spec["containerEdits"])
        variables = ["PATH=/usr/bin:/bin", f"GPUSHARE_CUDA_DRIVER={DRIVER_DOUBLE}", f"LD_LIBRARY_PATH={folder}"]
        variables += [variable for edit in edits for variable in edit.get("env", [])]
        variables += [f"{name}={INHERITED[name]}" for name in ("PYTHONPATH", "GPUSHARE_LIBRARY") if name in INHERITED]
        paths = [path for edit in edits for mount in edit.get("mounts", []) for path in (mount["hostPath"], mount["containerPath"])]
        self.process = subprocess.Popen([*UNSHARE, sys.executable, "-c", CONTAINER, *paths, "--", *program],
                                        env={**os.environ, "EDITS": "\n".join(variables)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)

    def word(self):
        return self.process.stdout.readline().strip()

    def say(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def words(self):
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, err
        return out.split()

    def kill(self):
        self.process.kill()  # and with it, by --kill-child, all of the container
        self.process.communicate()


def sessions(node):
    return json.loads(subprocess.run([TOOL, "top", "--socket", str(node.socket), "--json", "-"], capture_output=True).stdout)


BORROWS = """
import sys, gpushare
with gpushare.Runtime() as runtime:
    try:
        runtime.open_session("large", persistent_bytes="46M", ephemeral_bytes="2M")
    except gpushare.QuotaExceeded as error:
        print(error, flush=True)
    with runtime.open_session("fits", persistent_bytes="30M", ephemeral_bytes="2M") as session:
        with session.iteration():
            pass
        print("holds", flush=True)
        sys.stdin.readline()
print("gone", flush=True)
"""


def test_an_unchanged_program_with_the_cdi_file_runs_under_its_limits(node, kubelet, scheduler):
    node.agent("--library-dir", str(BUILD / "lib"), "--share-dir", str(node.folder / "shares"))
    eventually(node.offered, "the ResourceSlice")
    claim = scheduler.allocate("a", DRIVER, ("gpu", {"memory": "64Mi", "share": "25"}))
    uid = claim["metadata"]["uid"]
    device = ids(kubelet.prepare(DRIVER, claim)[uid])[0][0]
    spec = cdi(node, claim)
    share_id = device.partition("=")[2]
    assert "LD_PRELOAD=/usr/local/lib/gpushare/libgpushare_preload.so" in spec["devices"][0]["containerEdits"]["env"]
    assert spec["containerEdits"]["mounts"][1] == {"hostPath": str(BUILD / "lib"), "containerPath": "/usr/local/lib/gpushare",
                                                   "options": ["ro", "rbind"]}
    page = node.folder / "shares" / share_id
    assert spec["devices"][0]["containerEdits"]["mounts"] == [{"hostPath": str(page), "containerPath": str(page), "options": ["rw", "rbind"]}]
    assert page.stat().st_mode & 0o777 == 0o666
    if can_contain():
        probe = lambda *actions: Container(node.folder, spec, device, PROBE, "soname", *actions)
        # MiB told and free; 40 are given, another 40 are not.
        assert probe("info", "40", "40", "info").words() == ["64", "64", "0", "2", "64", "24"]
        # Two containers of one claim have the limit together.
        first = probe("40", "hold")
        try:
            assert first.word() == "0"
            assert probe("40", "20").words() == ["2", "0"]
        finally:
            first.kill()
        assert probe("40").words() == ["0"]  # nothing is left of a container that was killed
        # On the daemon they have one claim and one weight.
        loads = [Container(node.folder, spec, device, LOAD, "spin_200us", "0", "10") for _ in range(2)]
        try:
            assert [load.word() for load in loads] == ["ready", "ready"]
            top = eventually(lambda: len(sessions(node)["sessions"]) == 2 and sessions(node), "two sessions")
            assert {session["weight"] for session in top["sessions"]} == {0.25}
            assert len({session["group"] for session in top["sessions"]} - {0}) == 1
            assert top["devices"][0]["promised_bytes"] == 64 * MIB
        finally:
            for load in loads:
                load.kill()
        # A program that uses gpushare gets of the claim what they do not hold, and they no more than the rest.
        hold, load = probe("20", "hold"), Container(node.folder, spec, device, LOAD, "spin_200us", "0", "60")
        try:
            assert hold.word() == "0"
            assert load.word() == "ready"
            borrows = Container(node.folder, spec, device, sys.executable, "-c", BORROWS)
            assert "its preloaded programs hold 20.00 MiB" in borrows.word()
            assert borrows.word() == "holds"
            assert sessions(node)["devices"][0]["promised_bytes"] == 66 * MIB  # the claim's, rounded up to granules for the session
            assert probe("info", "20", "10").words() == ["34", "14", "2", "0"]
            borrows.say()
            assert borrows.word() == "gone"
            assert eventually(lambda: probe("info").words() == ["64", "44"], "the return of what was lent")
        finally:
            hold.kill()
            load.kill()
        # Another claim is another group.
        other = scheduler.allocate("b", DRIVER, ("gpu", {"memory": "32Mi", "share": "25"}))
        other_device = ids(kubelet.prepare(DRIVER, other)[other["metadata"]["uid"]])[0][0]
        assert Container(node.folder, cdi(node, other), other_device, PROBE, "soname", "info").words() == ["32", "32"]
        eventually(lambda: "claim default/a is held" in node.log(), "the agent's line")
    kubelet.unprepare(DRIVER, claim)
    assert not page.exists()


def test_claims_are_refused_while_the_node_has_no_preload_library(node, kubelet, scheduler):
    folder = node.folder / "library"
    folder.mkdir()
    node.agent("--library-dir", str(folder), "--share-dir", str(node.folder / "shares"))
    eventually(node.offered, "the ResourceSlice")
    claim = scheduler.allocate("a", DRIVER, ("gpu", {"memory": "64Mi", "share": "25"}))
    uid = claim["metadata"]["uid"]
    assert "libgpushare_preload.so cannot be read" in kubelet.prepare(DRIVER, claim)[uid].error
    assert node.files() == []
    (folder / "libgpushare_preload.so").write_bytes(b"\x7fELF")
    ids(kubelet.prepare(DRIVER, claim)[uid])
    # No program has reported, so nothing says that the claim is held.
    kubelet.unprepare(DRIVER, claim)
    eventually(lambda: "claim default/a was not held" in node.log(), "the line")
    assert "is held" not in node.log()


@pytest.mark.skipif(not (BUILD / "lib" / "libgpushare_preload.so").exists() or not STANDIN.exists(), reason="no shim in this build")
def test_the_preload_library_leaves_programs_that_use_gpushare_to_their_sessions(node, kubelet, scheduler):
    node.daemon.stop()
    node.daemon.command[node.daemon.command.index("--device") + 1] = f"cuda?driver={STANDIN}&total_bytes={CAPACITY}"
    node.start_daemon()
    node.agent("--library-dir", str(BUILD / "lib"), "--share-dir", str(node.folder / "shares"))
    eventually(node.offered, "the ResourceSlice")
    claim = scheduler.allocate("a", DRIVER, ("gpu", {"memory": "64Mi", "share": "25"}))
    kubelet.prepare(DRIVER, claim)
    edits = cdi(node, claim)["devices"][0]["containerEdits"]
    environment = {**dict(variable.split("=", 1) for variable in edits["env"]), "LD_PRELOAD": str(BUILD / "lib" / "libgpushare_preload.so"),
                   "GPUSHARE_CUDA_DRIVER": str(STANDIN)}
    result = run("""
        import gpushare, json, subprocess
        with gpushare.Runtime() as runtime, runtime.open_session("train", persistent_bytes="32M", ephemeral_bytes="8M") as session:
            for _ in range(3):
                with session.iteration() as iteration:
                    iteration.alloc("1M")
            try:
                session.alloc("61M")
            except gpushare.QuotaExceeded:
                print("held")
            print(subprocess.run([%r, "top", "--json", "-"], capture_output=True, text=True).stdout.replace("\\n", ""))
    """ % TOOL, environment)
    assert result.returncode == 0, result.stderr
    held, top = result.stdout.splitlines()
    assert held == "held"
    assert [(session["name"], session["weight"]) for session in json.loads(top)["sessions"]] == [("train", 0.25)]
    # Something else in the process has a context first: the library holds the process, so its sessions would wait for its own turns.
    result = run("""
        import ctypes, gpushare, os
        cuda = ctypes.CDLL(os.environ["GPUSHARE_CUDA_DRIVER"])
        context = ctypes.c_void_p()
        assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        try:
            gpushare.Runtime()
        except gpushare.InvalidState as error:
            print(error)
        cuda.cuDevicePrimaryCtxRelease_v2(0)
    """, environment)
    assert result.returncode == 0, result.stderr
    assert "before anything else" in result.stdout


def test_a_kubelet_that_refuses_is_told_of(dra, kubelet):
    kubelet.find(DRIVER, accept=False)
    eventually(lambda: "does not take gpushare.dev: no" in dra.log(), "the log line")


def test_the_slice_follows_the_server(dra, api):
    api.slices.clear()  # as a kubelet does for a driver that it lost
    eventually(dra.offered, "the slice")
    generation = api.slices[f"node-1-{DRIVER}"]["spec"]["pool"]["generation"]
    api.slices[f"node-1-{DRIVER}"]["spec"]["devices"][0]["capacity"]["share"]["value"] = "50"
    eventually(lambda: api.slices[f"node-1-{DRIVER}"]["spec"]["pool"]["generation"] > generation, "a new generation")
    assert dra.offered()[0]["capacity"]["share"]["value"] == "100"
    calls = len([call for call in api.calls if call[0] in ("PUT", "POST")])
    api.slices[f"node-1-{DRIVER}"]["spec"]["devices"][0]["capacity"]["memory"]["value"] = "256Mi"  # the same, written differently
    looks = len(api.calls)
    eventually(lambda: len(api.calls) > looks + 6, "two more looks")
    assert len([call for call in api.calls if call[0] in ("PUT", "POST")]) == calls


def test_a_cluster_without_consumable_capacity(node, api):
    api.consumable = False
    agent = node.agent("--api", "dra")
    assert agent.process.wait(60) == 1
    assert "1.36" in node.log() and "DRAConsumableCapacity" in node.log()
    assert api.slices == {}  # it would hand out whole devices


def test_bad_usage(capsys):
    def refused(*options):
        with pytest.raises(SystemExit) as end:
            sys.exit(agent.main(["--node", "n", "--server", "http://127.0.0.1:1", *options]))
        assert end.value.code == 2
        return capsys.readouterr().err

    assert "not a quantity" in refused("--memory-step", "x")
    assert "above 0" in refused("--memory-step", "0")
    assert "divide 100" in refused("--share-step", "7")
    assert "multiple" in refused("--default-share", "3")
    assert "from 1" in refused("--units", "0")
    assert "NODE_NAME" in refused("--node", "")
    assert "--server" in refused("--server", "")
    assert agent.main(["--node", "n", "--server", "http://127.0.0.1:1"]) == 1
    assert "http" not in capsys.readouterr().out
