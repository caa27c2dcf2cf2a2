"""The agent as a device plugin: units, registration with kubelets that come and go, and limits."""
import os
import signal

import grpc
import pytest

from cluster import PluginKubelet
from conftest import CAPACITY, eventually
from gpushare_kubernetes import messages
from gpushare_kubernetes.device_plugin import DevicePlugin
from gpushare_kubernetes.inventory import Device
from gpushare_kubernetes.shares import Site
from test_dra import run

plugin = messages.plugin


@pytest.fixture
def kubelet(node):
    made = PluginKubelet(node.kubelet_dir / "device-plugins")
    made.start()
    yield made
    made.stop()


def units(kubelet, channel):
    return kubelet.call(channel, "ListAndWatch", plugin.Empty(), plugin.ListAndWatchResponse, stream=True)


def allocate(kubelet, channel, *containers):
    return kubelet.call(channel, "Allocate", plugin.AllocateRequest(container_requests=[
        plugin.ContainerAllocateRequest(devices_ids=list(ids)) for ids in containers]), plugin.AllocateResponse).container_responses


def test_a_container_gets_its_units(node, api, kubelet):
    api.resource_v1 = False
    node.agent()
    eventually(lambda: kubelet.registered, "the registration")
    assert (kubelet.registered[0].resource_name, kubelet.registered[0].options.get_preferred_allocation_available) == ("gpushare.dev/share", True)
    with kubelet.channel() as channel:
        watch = units(kubelet, channel)
        assert [(unit.ID, unit.health) for unit in next(watch).devices] == [(f"host.{number}", "Healthy") for number in range(10)]
        entry = allocate(kubelet, channel, ["host.1", "host.4", "host.9"])[0]
        envs = dict(entry.envs)
        assert len(envs["GPUSHARE_GROUP"]) == 16
        assert envs == {"GPUSHARE_GROUP": envs["GPUSHARE_GROUP"], "GPUSHARE_DEVICE": "shared:host", "GPUSHARE_SOCKET": str(node.socket), "GPUSHARE_MEMORY": f"{76 << 20}B",
                        "GPUSHARE_WEIGHT": "0.3"}
        assert [(mount.host_path, mount.container_path, mount.read_only) for mount in entry.mounts] == [
            (str(node.socket.parent), str(node.socket.parent), False)]
        result = run("""
            import gpushare, json, subprocess
            with gpushare.Runtime() as runtime, runtime.open_session("train", persistent_bytes="1M", ephemeral_bytes="1M") as session:
                session.wait_admitted()
                top = json.loads(subprocess.run([%r, "top", "--json", "-"], capture_output=True).stdout)
                try:
                    session.alloc("77M")
                except gpushare.QuotaExceeded as error:
                    print(top["sessions"][0]["weight"], "76.00 MiB" in str(error))
        """ % (os.environ["GPUSHARE_TOOL_FOLDER"] + "/gpushare"), envs)
        assert result.stdout == "0.3 True\n", result.stderr
        node.daemon.stop()
        assert {unit.health for unit in next(watch).devices} == {"Unhealthy"}
        node.start_daemon()
        assert {unit.health for unit in next(watch).devices} == {"Healthy"}
        watch.cancel()


@pytest.mark.parametrize("order", ["kubelet", "agent", "agent killed", "both"])
def test_restarts_register_once_each(node, kubelet, order):
    agent = node.agent("--api", "device-plugin")
    eventually(lambda: kubelet.registered, "the registration")
    if order in ("kubelet", "both"):
        kubelet.stop()
        if order == "both":
            agent.stop()
        kubelet.start()
    if order in ("agent", "agent killed"):
        agent.stop(signal.SIGKILL if "killed" in order else signal.SIGTERM)
        kubelet.registered.clear()
    if order != "kubelet":
        node.agent("--api", "device-plugin")
    eventually(lambda: kubelet.registered, "the new registration")
    with kubelet.channel() as channel:
        watch = units(kubelet, channel)
        assert len(next(watch).devices) == 10
        assert dict(allocate(kubelet, channel, ["host.0"])[0].envs)["GPUSHARE_WEIGHT"] == "0.1"  # the kubelet's books are all there is
        watch.cancel()
    assert len(kubelet.registered) == 1


def test_an_agent_before_its_kubelet(node):
    late = PluginKubelet(node.kubelet_dir / "device-plugins")
    node.agent("--api", "device-plugin")
    eventually((node.kubelet_dir / "device-plugins" / "gpushare.dev-share.sock").exists, "the plugin's socket")
    late.start()
    eventually(lambda: late.registered, "the registration")
    late.stop()


def test_a_cluster_that_drops_consumable_capacity_falls_back(node, api, kubelet):
    api.consumable = False
    node.agent()
    eventually(lambda: kubelet.registered, "the registration")
    assert api.slices == {}
    assert "serving the device plugin API" in node.log()


@pytest.fixture
def two_devices(tmp_path):
    made = DevicePlugin("gpushare.dev/share", 4, lambda: [Device("cuda-0", "cuda:0", 8 << 30), Device("cuda-1", "cuda:1", 8 << 30)],
                        Site(tmp_path / "s" / "daemon.sock"), tmp_path / "p", "nvidia.com/gpu={index}")
    kubelet = PluginKubelet(tmp_path / "p")
    kubelet.start()
    made.ensure()
    with kubelet.channel() as channel:
        yield kubelet, channel
    made.stop()
    kubelet.stop()


def test_each_of_a_devices_units_can_be_used_whole_at_the_same_time(node, api, kubelet):
    api.resource_v1 = False
    node.agent()
    eventually(lambda: kubelet.registered, "the registration")
    with kubelet.channel() as channel:
        next(units(kubelet, channel))
        environments = [dict(entry.envs) for entry in allocate(kubelet, channel, *([f"host.{number}"] for number in range(10)))]
        result = run("""
            import gpushare, os
            held = []
            for environment in %r:
                os.environ.update(environment)
                runtime = gpushare.Runtime()
                session = runtime.open_session("train")
                held.append((runtime, session, session.alloc(int(environment["GPUSHARE_MEMORY"][:-1]))))
            print(len(held))
        """ % environments, environments[0])
        assert result.stdout.split() == ["10"], result.stderr


def prefer(kubelet, channel, available, must, size):
    request = plugin.PreferredAllocationRequest(container_requests=[plugin.ContainerPreferredAllocationRequest(
        available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size)])
    return list(kubelet.call(channel, "GetPreferredAllocation", request, plugin.PreferredAllocationResponse).container_responses[0].deviceIDs)


def test_units_of_a_container_are_on_one_device(two_devices):
    kubelet, channel = two_devices
    available = ["cuda-0.0", "cuda-0.1", "cuda-0.2", "cuda-1.0", "cuda-1.1", "cuda-1.2", "cuda-1.3"]
    assert prefer(kubelet, channel, available, [], 2) == ["cuda-0.0", "cuda-0.1"]  # the fuller device
    assert prefer(kubelet, channel, available, [], 4) == ["cuda-1.0", "cuda-1.1", "cuda-1.2", "cuda-1.3"]
    assert prefer(kubelet, channel, available, ["cuda-1.2"], 2) == ["cuda-1.2", "cuda-1.0"]
    assert prefer(kubelet, channel, available, [], 5) == []
    entry = allocate(kubelet, channel, ["cuda-1.0", "cuda-1.1"])[0]
    assert (entry.envs["GPUSHARE_DEVICE"], entry.envs["GPUSHARE_MEMORY"], entry.cdi_devices[0].name) == ("shared:cuda:1", f"{4 << 30}B",
                                                                                                        "nvidia.com/gpu=1")
    for ids, words in [(["cuda-0.2", "cuda-1.0"], "different devices"), (["cuda-7.0"], "no device"), (["x"], "no device")]:
        with pytest.raises(grpc.RpcError) as error:
            allocate(kubelet, channel, ids)
        assert words in error.value.details()
    assert not kubelet.call(channel, "GetDevicePluginOptions", plugin.Empty(), plugin.DevicePluginOptions).pre_start_required
    kubelet.call(channel, "PreStartContainer", plugin.PreStartContainerRequest(devices_ids=["cuda-0.0"]), plugin.PreStartContainerResponse)


def test_the_preloaded_programs_of_a_container_have_their_limits_together(tmp_path):
    site = Site(tmp_path / "s" / "daemon.sock", tmp_path / "lib", tmp_path / "shares")
    made = DevicePlugin("gpushare.dev/share", 4, lambda: [Device("cuda-0", "cuda:0", 8 << 30)], site, tmp_path / "p")
    kubelet = PluginKubelet(tmp_path / "p")
    kubelet.start()
    made.ensure()
    try:
        with kubelet.channel() as channel:
            with pytest.raises(grpc.RpcError) as error:
                allocate(kubelet, channel, ["cuda-0.3"])
            assert "libgpushare_preload.so cannot be read" in error.value.details()
            (tmp_path / "lib").mkdir()
            (tmp_path / "lib" / "libgpushare_preload.so").write_bytes(b"\x7fELF")
            first, beside = allocate(kubelet, channel, ["cuda-0.0", "cuda-0.1"])[0], allocate(kubelet, channel, ["cuda-0.2"])[0]
            page = tmp_path / "shares" / "cuda-0.0"
            assert first.envs["GPUSHARE_SHIM_GROUP"] == str(page) != beside.envs["GPUSHARE_SHIM_GROUP"]
            assert [(mount.host_path, mount.container_path, mount.read_only) for mount in first.mounts][2:] == [(str(page), str(page), False)]
            page.write_text("what the container's programs hold")
            again = allocate(kubelet, channel, ["cuda-0.1", "cuda-0.0"])[0]  # the next container on these units
            assert page.read_text() == ""
            assert len({entry.envs["GPUSHARE_GROUP"] for entry in (first, beside, again)}) == 3
    finally:
        made.stop()
        kubelet.stop()


def test_watchers_that_leave_end(two_devices):
    kubelet, channel = two_devices
    for _ in range(40):  # more than the server has threads
        watch = units(kubelet, channel)
        assert len(next(watch).devices) == 8
        watch.cancel()
