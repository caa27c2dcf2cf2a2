"""Parts that need no process: quantities, messages, the inventory, CDI files."""
import json
import pathlib
import re
import stat
import struct

import pytest

from gpushare_kubernetes import dra, inventory, messages
from gpushare_kubernetes.quantity import parse_quantity
from gpushare_kubernetes.shares import NoLibrary, PreparedClaim, Share, ShareStore, Site


@pytest.mark.parametrize("text, value", [("0", 0), ("512Mi", 512 << 20), ("1.5Gi", 3 << 29), ("2e3", 2000), ("1E", 10**18), ("1E3", 1000),
                                         ("100m", 1), ("1500m", 2), ("10G", 10**10), ("1n", 1), (".5k", 500), ("8Ei", 8 << 60), (7, 7)])
def test_quantities(text, value):
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1Gb", "1KiB", "--1", "1e", "1e9999", "Mi", "nan", "1.2.3"])
def test_what_is_no_quantity(text):
    with pytest.raises(ValueError, match="quantity"):
        parse_quantity(text)


def test_messages_have_the_bytes_of_the_kubelet_s():
    """Bytes put together by hand from the field numbers of the kubelet's files."""
    claim = b"\n\x02ns\x12\x01u\x1a\x01n"
    assert messages.dra.NodePrepareResourcesRequest.FromString(b"\n" + bytes([len(claim)]) + claim).claims[0].uid == "u"
    response = messages.dra.NodePrepareResourcesResponse()
    response.claims["u"].devices.add(request_names=["r"], pool_name="p", device_name="d", cdi_device_ids=["c"])
    device = b"\n\x01r\x12\x01p\x1a\x01d\x22\x01c"
    value = b"\n" + bytes([len(device)]) + device
    entry = b"\n\x01u\x12" + bytes([len(value)]) + value
    assert response.SerializeToString() == b"\n" + bytes([len(entry)]) + entry
    assert messages.registration.RegistrationStatus.FromString(b"\x08\x01\x12\x01e").plugin_registered
    allocation = messages.plugin.ContainerAllocateResponse(envs={"A": "b"})
    allocation.mounts.add(container_path="c", host_path="h", read_only=True)
    assert allocation.SerializeToString() == b"\n\x06\n\x01A\x12\x01b\x12\x08\n\x01c\x12\x01h\x18\x01"
    unknown = messages.plugin.Device.FromString(b"\n\x01i\x12\x01h\x1a\x04\n\x02\x08\x01")  # with a topology, which we do not describe
    assert (unknown.ID, unknown.health) == ("i", "h")


def tool(folder, script):
    path = folder / "gpushare"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_devices_get_names_that_kubernetes_takes(tmp_path):
    devices = [{"device": name, "capacity_bytes": 1} for name in ("cuda:0", "host?total_bytes=1", "cuda:0", "x" * 90, "??")]
    (tmp_path / "top.json").write_text(json.dumps({"devices": devices}))
    found = inventory.devices(tool(tmp_path, f"cat {tmp_path}/top.json"), tmp_path / "socket")
    assert [device.name for device in found] == ["cuda-0", "host-total-bytes-1", "cuda-0-2", "x" * 58, "device"]
    assert [device.index for device in found] == ["0", "0", "0", "0", "0"]
    assert inventory.Device("cuda-3", "cuda:3", 1).index == "3"


MIG = {"device": "cuda:0", "capacity_bytes": 9 << 30, "total_bytes": 10 << 30, "parent_uuid": "GPU-aa000000-1", "mig_profile": "1g.10gb",
       "product": "NVIDIA A100-SXM4-80GB", "driver_version": "535.104.05"}


def test_instances_of_mig_are_devices_at_their_daemons(tmp_path):
    socket = tmp_path / "daemon.sock"
    uuids = {"daemon": "MIG-5C89852C-0", "daemon-mig-7a000000": "MIG-7a000000-0", "daemon-mig-7b000000": "MIG-7b000000-0"}
    for stem, uuid in uuids.items():
        (tmp_path / f"{stem}.sock").touch()
        (tmp_path / f"{stem}.json").write_text(json.dumps({"devices": [{**MIG, "uuid": uuid}]}))
    (tmp_path / "daemon-mig-7b000000.json").unlink()  # its daemon does not answer: the others are offered
    script = tool(tmp_path, 'while [ "$1" != --socket ]; do shift; done; exec cat "${2%.sock}.json"')
    found = inventory.devices(script, socket)
    assert [(device.name, device.spec, device.socket.name) for device in found] == [
        ("mig-5c89852c", "cuda:0", "daemon.sock"), ("mig-7a000000", "cuda:0", "daemon-mig-7a000000.sock")]
    assert found[1].cdi_id("nvidia.com/gpu={uuid}") == "nvidia.com/gpu=MIG-7a000000-0"
    store = ShareStore(tmp_path / "cdi", "gpushare.dev", Site(socket))
    store.write(PreparedClaim("u-1", "ns", "n", (Share("s-1", "gpu", "node", "mig-7a000000", "cuda:0", 1 << 30, 0.5, str(found[1].socket)),)))
    environment = json.loads(store.path("u-1").read_text())["devices"][0]["containerEdits"]["env"]
    assert f"GPUSHARE_SOCKET={found[1].socket}" in environment  # the instance's daemon


def test_attributes_of_gpus():
    gpu = inventory.Device("cuda-0", "cuda:0", 79 << 30, None, "GPU-aa000000-1", "", "", "NVIDIA H100 80GB HBM3", "550.54.15", 80 << 30)
    mig = inventory.Device("mig-7a000000", "cuda:0", 9 << 30, None, "MIG-7a000000-0", "GPU-aa000000-1", "1g.10gb", "NVIDIA A100-SXM4-80GB",
                           "535.104.05", 10 << 30)
    golden = json.loads((pathlib.Path(__file__).parent / "golden" / "attributes.json").read_text())
    assert {device.name: dra.attributes_of(device) for device in (gpu, mig)} == golden
    assert dra.attributes_of(inventory.Device("host", "host", 1 << 30)) == {"device": {"string": "host"}, "type": {"string": "host"}}


def test_a_daemon_that_does_not_answer(tmp_path):
    with pytest.raises(inventory.DaemonUnavailable, match="no daemon"):
        inventory.devices(tool(tmp_path, "echo no daemon >&2; exit 3"), tmp_path / "socket")
    with pytest.raises(inventory.DaemonUnavailable, match="cannot ask"):
        inventory.devices(tool(tmp_path, "exec sleep 60"), tmp_path / "socket", timeout_s=0.05)
    with pytest.raises(inventory.DaemonUnavailable, match="cannot ask"):
        inventory.devices(str(tmp_path / "none"), tmp_path / "socket")


def test_the_record_of_claims(tmp_path):
    store = ShareStore(tmp_path / "cdi", "gpushare.dev", Site(tmp_path / "daemon.sock"))
    share = Share("s-1", "gpu", "node", "cuda-0", "cuda:0", 1 << 30, 0.25)
    claim = PreparedClaim("u-1", "ns", "name", (share,))
    assert store.read("u-1") is None
    store.write(claim)
    store.write(claim)
    assert store.read("u-1") == claim
    assert list(store.claims()) == [claim]
    store.path("u-2").write_text('{"kind": "cut off')
    store.path("u-3").write_text('{"devices": []}')
    assert store.read("u-2") is None and store.read("u-3") is None
    assert list(store.claims()) == [claim]
    store.remove("u-1")
    store.remove("u-1")
    assert list(store.claims()) == []


def test_a_node_without_the_library_holds_nothing(tmp_path):
    site = Site(tmp_path / "socket", tmp_path / "library", tmp_path / "pages")
    with pytest.raises(NoLibrary, match="cannot be read"):
        site.check_library()
    (tmp_path / "library").mkdir()
    library = tmp_path / "library" / "libgpushare_preload.so"
    library.write_text("no library")
    with pytest.raises(NoLibrary, match="is no library"):
        site.check_library()
    library.write_bytes(b"\x7fELF and more")
    site.check_library()
    Site(tmp_path / "socket").check_library()  # programs that are linked to gpushare need none


def test_programs_that_have_reported_are_counted_where_the_page_has_them(tmp_path):
    header = (pathlib.Path(__file__).parents[3] / "src/shim/group.hpp").read_text()
    fields = re.search(r"struct GroupPage \{(.*?)uint32_t reports;", header, re.S)[1]
    devices = int(re.search(r"kDevices = (\d+);", header)[1])
    sizes = {"uint32_t": 4, "Limits": 24, f"uint64_t[{devices}]": 8 * devices}
    names = re.findall(r"^  (\w+) \w+(?:\[(\w+)\])?;", fields, re.M)
    offset = sum(sizes[f"{kind}[{devices}]" if count else kind] for kind, count in names)
    site = Site(tmp_path / "socket", tmp_path, tmp_path)
    assert site.reports("a") == 0
    (tmp_path / "a").touch()
    assert site.reports("a") == 0
    (tmp_path / "a").write_bytes(bytes(offset) + struct.pack("=I", 3) + bytes(100))
    assert site.reports("a") == 3
