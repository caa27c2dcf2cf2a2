"""A cluster for the tests: an API server, a scheduler that gives out consumable capacity, and a kubelet, each as far as the agent sees it.

They are our own reading of the published rules (Kubernetes' resource/v1 types, kubelet/pkg/apis), not Kubernetes' code: what the agent does
beside a real scheduler and kubelet stays unproven here.
"""
# SPDX-License-Identifier: Apache-2.0
import copy
import http.server
import json
import pathlib
import re
import threading
import urllib.parse
import uuid

import grpc

from gpushare_kubernetes import messages
from gpushare_kubernetes.quantity import parse_quantity
from gpushare_kubernetes.kubelet import SocketServer, method


class ApiServer:
    """resource.k8s.io/v1 and pods in memory. `consumable` False: a server that drops the fields of consumable capacity, as one without the gate."""

    def __init__(self, resource_v1=True, consumable=True):
        self.slices, self.claims, self.pods, self.calls = {}, {}, {}, []
        self.resource_v1, self.consumable, self.away = resource_v1, consumable, False
        self._mutex = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def answer(self):
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
                code, content = outer.handle(self.command, self.path, body)
                data = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self):
        self._server.shutdown()
        self._server.server_close()

    def handle(self, verb, path, body):
        self.calls.append((verb, path))
        with self._mutex:
            if self.away:
                return 503, {"message": "the server is away"}
            if path.startswith("/api/v1/nodes/"):
                return 200, {"metadata": {"name": path.rpartition("/")[2], "uid": "11111111-2222-3333-4444-555555555555"}}
            if path.startswith("/api/v1/pods?labelSelector="):
                label = urllib.parse.unquote(path.partition("=")[2])
                return 200, {"items": [pod for pod in self.pods.values() if label in pod["metadata"].get("labels", {})]}
            found = re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)", path)
            if found and verb == "PATCH":
                return self.patch_pod(found.groups(), body)
            if not path.startswith("/apis/resource.k8s.io/v1") or not self.resource_v1:
                return 404, {"message": "not found"}
            rest = path[len("/apis/resource.k8s.io/v1"):]
            if rest == "":
                return 200, {"kind": "APIResourceList"}
            if rest == "/resourceslices" and verb == "GET":
                return 200, {"items": list(self.slices.values())}
            if rest == "/resourceclaims" and verb == "GET":
                return 200, {"items": list(self.claims.values())}
            if rest.startswith("/resourceslices"):
                return self.slice(verb, rest[len("/resourceslices/"):], body)
            found = re.fullmatch(r"/namespaces/([^/]+)/resourceclaims/([^/]+)", rest)
            claim = self.claims.get(found.groups()) if found else None
            return (200, claim) if claim else (404, {"message": f"resourceclaims {rest} not found"})

    def patch_pod(self, key, body):
        """A merge patch by the rules for a gated pod: gates are only taken away, the node selector is only added to."""
        pod = self.pods.get(key)
        if pod is None:
            return 404, {"message": "not found"}
        if body["metadata"].get("uid", pod["metadata"]["uid"]) != pod["metadata"]["uid"]:
            return 409, {"message": "the uid is another one"}
        spec, change = pod["spec"], body.get("spec", {})
        if "nodeSelector" in change and not spec.get("schedulingGates"):
            return 422, {"message": "the pod has no scheduling gate"}
        if not all(gate in spec.get("schedulingGates", []) for gate in change.get("schedulingGates", [])):
            return 422, {"message": "gates cannot be added"}
        pod["metadata"].setdefault("annotations", {}).update(body["metadata"].get("annotations", {}))
        spec.setdefault("nodeSelector", {}).update(change.get("nodeSelector", {}))
        if "schedulingGates" in change:
            spec["schedulingGates"] = change["schedulingGates"]
        return 200, pod

    def slice(self, verb, name, body):
        if verb == "GET":
            return (200, self.slices[name]) if name in self.slices else (404, {"message": "not found"})
        if verb == "DELETE":
            return (200, self.slices.pop(name)) if name in self.slices else (404, {"message": "not found"})
        problem = check_slice(body)
        if problem:
            return 422, {"message": problem}
        name = body["metadata"]["name"]
        present = self.slices.get(name)
        if verb == "POST" and present:
            return 409, {"message": "already exists"}
        if verb == "PUT":
            if not present:
                return 404, {"message": "not found"}
            if body["metadata"].get("resourceVersion") != present["metadata"]["resourceVersion"]:
                return 409, {"message": "the object has been modified"}
        stored = copy.deepcopy(body)
        stored["metadata"]["resourceVersion"] = str(len(self.calls))
        if not self.consumable:
            for device in stored["spec"].get("devices", []):
                device.pop("allowMultipleAllocations", None)
                for capacity in device.get("capacity", {}).values():
                    capacity.pop("requestPolicy", None)
        self.slices[name] = stored
        return 201 if verb == "POST" else 200, stored


def check_slice(body):
    """What an API server would refuse in a ResourceSlice of ours, or None."""
    spec = body["spec"]
    if body["apiVersion"] != "resource.k8s.io/v1" or body["kind"] != "ResourceSlice":
        return "apiVersion or kind"
    if set(spec) - {"driver", "nodeName", "pool", "devices"} or set(spec["pool"]) != {"name", "generation", "resourceSliceCount"}:
        return f"unknown fields in {sorted(spec)}"
    if len(spec["devices"]) > 128 or len({device["name"] for device in spec["devices"]}) != len(spec["devices"]):
        return "devices: more than 128, or a name twice"
    for device in spec["devices"]:
        if set(device) - {"name", "attributes", "capacity", "allowMultipleAllocations"}:
            return f"unknown fields in {sorted(device)}"
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", device["name"]):
            return f"device name {device['name']} is not a DNS label"
        for name, capacity in device["capacity"].items():
            policy = capacity.get("requestPolicy")
            if policy is None:
                continue
            if not device.get("allowMultipleAllocations"):
                return "requestPolicy needs allowMultipleAllocations"
            value, default = parse_quantity(capacity["value"]), parse_quantity(policy["default"])
            least, most, step = (parse_quantity(policy["validRange"][part]) for part in ("min", "max", "step"))
            if not (0 <= least <= default <= most <= value and most % step == 0 and default % step == 0 and least + step <= value + least):
                return f"capacity {name}: min {least}, default {default}, max {most}, step {step}, value {value}"
    return None


class NoRoom(Exception):
    pass


class Scheduler:
    """Gives claims parts of devices: absent entries take the default, others are rounded up to the range and step, sums stay below the value."""

    def __init__(self, api):
        self._api = api

    def allocate(self, name, driver, *requests, namespace="default"):
        """A claim with a request for each of `requests` (name, {capacity: quantity}), placed on the first device that has room."""
        results = []
        for request, capacity in requests:
            results.append(self._place(request, capacity, driver, results))
        claim = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
                 "metadata": {"namespace": namespace, "name": name, "uid": str(uuid.uuid4())},
                 "spec": {"devices": {"requests": [{"name": request, "exactly": {
                     "deviceClassName": driver, "capacity": {"requests": capacity}}} for request, capacity in requests]}},
                 "status": {"allocation": {"devices": {"results": results}}}}
        self._api.claims[namespace, name] = claim
        return claim

    def free(self, claim):
        self._api.claims.pop((claim["metadata"]["namespace"], claim["metadata"]["name"]))

    def consumed(self, pool, device, more=()):
        sums = {}
        results = [result for claim in self._api.claims.values() for result in claim["status"]["allocation"]["devices"]["results"]]
        for result in (*results, *more):
            if (result["pool"], result["device"]) == (pool, device):
                for name, amount in result["consumedCapacity"].items():
                    sums[name] = sums.get(name, 0) + parse_quantity(amount)
        return sums

    @staticmethod
    def rounded(asked, capacity):
        policy = capacity["requestPolicy"]
        if asked is None:
            return parse_quantity(policy["default"])
        least, most, step = (parse_quantity(policy["validRange"][part]) for part in ("min", "max", "step"))
        amount = max(parse_quantity(asked), least)
        amount = least + -(-(amount - least) // step) * step
        if amount > most:
            raise NoRoom(f"{asked} is above {most}")
        return amount

    def _place(self, request, asked, driver, placed):
        why = "no device"
        for entry in self._api.slices.values():
            if entry["spec"]["driver"] != driver:
                continue
            for device in entry["spec"]["devices"]:
                try:
                    pool = entry["spec"]["pool"]["name"]
                    unknown = set(asked) - set(device["capacity"])
                    if unknown:
                        raise NoRoom(f"no capacity {unknown}")
                    amounts = {name: self.rounded(asked.get(name), capacity) for name, capacity in device["capacity"].items()}
                    taken = self.consumed(pool, device["name"], placed)
                    for name, amount in amounts.items():
                        if taken.get(name, 0) + amount > parse_quantity(device["capacity"][name]["value"]):
                            raise NoRoom(f"{name}: {taken.get(name, 0)} + {amount}")
                    return {"request": request, "driver": driver, "pool": pool, "device": device["name"], "shareID": str(uuid.uuid4()),
                            "consumedCapacity": {name: str(amount) for name, amount in amounts.items()}}
                except NoRoom as error:
                    why = str(error)
        raise NoRoom(why)


class DraKubelet:
    """Finds plugins by their registration socket, and has claims prepared."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def find(self, driver, accept=True):
        """Registers the plugin, as a kubelet does at its start and when a socket appears; the plugin's endpoint."""
        registration = messages.registration
        with grpc.insecure_channel(f"unix:{self.folder}/plugins_registry/{driver}-reg.sock") as channel:
            info = self._call(channel, messages.REGISTRATION_SERVICE, "GetInfo", registration.InfoRequest(), registration.PluginInfo)
            assert (info.type, info.name, list(info.supported_versions)) == ("DRAPlugin", driver, ["v1.DRAPlugin"])
            status = registration.RegistrationStatus(plugin_registered=accept, error="" if accept else "no")
            self._call(channel, messages.REGISTRATION_SERVICE, "NotifyRegistrationStatus", status, registration.RegistrationStatusResponse)
        return info.endpoint

    def prepare(self, driver, *claims):
        request = messages.dra.NodePrepareResourcesRequest(claims=[self._claim(claim) for claim in claims])
        return self._plugin(driver, "NodePrepareResources", request, messages.dra.NodePrepareResourcesResponse)

    def unprepare(self, driver, *claims):
        request = messages.dra.NodeUnprepareResourcesRequest(claims=[self._claim(claim) for claim in claims])
        return self._plugin(driver, "NodeUnprepareResources", request, messages.dra.NodeUnprepareResourcesResponse)

    def _plugin(self, driver, name, request, response):
        with grpc.insecure_channel(f"unix:{self.find(driver)}") as channel:
            answer = self._call(channel, messages.DRA_SERVICE, name, request, response)
        assert set(answer.claims) == {claim.uid for claim in request.claims}
        return answer.claims

    @staticmethod
    def _claim(claim):
        return messages.dra.Claim(**{key: claim["metadata"][key] for key in ("namespace", "uid", "name")})

    @staticmethod
    def _call(channel, service, name, request, response):
        return channel.unary_unary(f"/{service}/{name}", type(request).SerializeToString, response.FromString)(request, timeout=30)


class PluginKubelet:
    """The kubelet's device manager: plugins register with it, it watches their devices and has parts of them allocated."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.registered = []
        self.server = None

    def start(self):
        """As a kubelet starts: sockets of plugins are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for socket in self.folder.glob("*.sock"):
            socket.unlink()
        self.registered.clear()
        plugin = messages.plugin
        self.server = SocketServer(self.folder / "kubelet.sock", {messages.PLUGIN_REGISTRATION_SERVICE: {
            "Register": method(self._register, plugin.RegisterRequest, plugin.Empty)}})

    def stop(self):
        if self.server:
            self.server.stop()
            self.server = None

    def _register(self, request, context):
        if request.version != "v1beta1":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "version")
        self.registered.append(request)
        return messages.plugin.Empty()

    def channel(self):
        return grpc.insecure_channel(f"unix:{self.folder / self.registered[-1].endpoint}")

    def call(self, channel, name, request, response, stream=False):
        make = channel.unary_stream if stream else channel.unary_unary
        return make(f"/{messages.PLUGIN_SERVICE}/{name}", type(request).SerializeToString, response.FromString)(request, timeout=60)
