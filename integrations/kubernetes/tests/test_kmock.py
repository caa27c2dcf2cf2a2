"""The agent with an API server that is not ours, PyPI's kmock, which PyPI's `kubernetes` client fills and reads. scripts/check-manifests has both."""
import asyncio
import pathlib
import tempfile
import threading
import types

import pytest

from cluster import DraKubelet
from conftest import CAPACITY, DRIVER, Node, eventually

MIB = 1 << 20


@pytest.fixture
def server():
    """kmock, in a thread. `url` is where it serves."""
    kmock = pytest.importorskip("kmock")
    found, ready, loop = types.SimpleNamespace(), threading.Event(), asyncio.new_event_loop()

    async def serve():
        found.stop = asyncio.Event()
        async with kmock.KubernetesEmulator() as cluster, kmock.Server(cluster) as place:
            for name in ("v1/nodes", "resource.k8s.io/v1/resourceslices", "resource.k8s.io/v1/resourceclaims"):
                cluster.resources[name] = {"namespaced": name.endswith("claims")}
            found.url = str(place.url).rstrip("/")
            ready.set()
            await found.stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    yield found
    loop.call_soon_threadsafe(found.stop.set)
    thread.join(60)
    loop.close()


@pytest.fixture
def kubernetes(server):
    """The client's module; its calls go to `server`."""
    module = pytest.importorskip("kubernetes").client
    configuration = module.Configuration()
    configuration.host = server.url
    module.Configuration.set_default(configuration)
    yield module
    module.Configuration.set_default(None)


def make_claim(kubernetes, memory, share):
    """A claim as a scheduler leaves it."""
    given = kubernetes.V1DeviceRequestAllocationResult(request="gpu", driver=DRIVER, pool="node-1", device="host",
                                                       share_id="a671734a-e8e5-11e4-8fde-42010af09327",
                                                       consumed_capacity={"memory": str(memory), "share": str(share)})
    claim = kubernetes.ResourceV1ResourceClaim(
        api_version="resource.k8s.io/v1", kind="ResourceClaim",
        metadata=kubernetes.V1ObjectMeta(name="train", namespace="default", uid="11111111-2222-3333-4444-555555555555"),
        spec=kubernetes.V1ResourceClaimSpec(),
        status=kubernetes.V1ResourceClaimStatus(allocation=kubernetes.V1AllocationResult(devices=kubernetes.V1DeviceAllocationResult(results=[given]))))
    kubernetes.ResourceV1Api().create_namespaced_resource_claim("default", claim)
    return {"metadata": {"name": "train", "namespace": "default", "uid": claim.metadata.uid}}


def test_a_server_and_a_client_that_are_not_ours(server, kubernetes):
    kubernetes.CoreV1Api().create_node(kubernetes.V1Node(api_version="v1", kind="Node", metadata=kubernetes.V1ObjectMeta(name="node-1", uid="node-uid")))
    slices = kubernetes.ResourceV1Api()
    with tempfile.TemporaryDirectory(prefix="gs-") as folder:
        node = Node(pathlib.Path(folder), server)
        try:
            node.start_daemon()
            agent = node.agent()
            offered = eventually(lambda: slices.list_resource_slice().items, "the ResourceSlice", 60)[0]
            device = offered.spec.devices[0]
            assert (offered.metadata.name, offered.metadata.owner_references[0].uid) == (f"node-1-{DRIVER}", "node-uid")
            assert (offered.spec.driver, offered.spec.node_name, device.allow_multiple_allocations) == (DRIVER, "node-1", True)
            assert (device.capacity["memory"].value, device.capacity["share"].request_policy.valid_range.step) == (str(CAPACITY), "5")

            slices.delete_resource_slice(f"node-1-{DRIVER}")  # somebody else does: the agent makes it again
            eventually(lambda: slices.list_resource_slice().items, "the ResourceSlice once more")

            claim, kubelet = make_claim(kubernetes, 64 * MIB, 25), DraKubelet(node.kubelet_dir)
            entry = kubelet.prepare(DRIVER, claim)[claim["metadata"]["uid"]]
            assert entry.error == "" and len(node.files()) == 1
            agent.stop()
            slices.delete_namespaced_resource_claim("train", "default")
            node.agent()  # the claim was deleted while the agent was away
            eventually(lambda: node.files() == [], "the removal of the claim's file")
        finally:
            node.stop()
