"""resource.k8s.io/v1 and pods over REST: the few calls that the agent and the gangs' controller make, with the service account's token."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import pathlib
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Optional

GROUP = "/apis/resource.k8s.io/v1"
_ACCOUNT = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ApiError(Exception):
    """The API server refused a call (`code` is HTTP's), or could not be reached (`code` is 0)."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Api:
    """Calls to the API server at `server`. The token's file is read anew at each call, since the kubelet renews it."""

    def __init__(self, server: str, token_file: Optional[pathlib.Path] = None, ca_file: Optional[pathlib.Path] = None,
                 timeout_s: float = 10) -> None:
        self._server = server.rstrip("/")
        self._token_file = token_file
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context(cafile=str(ca_file) if ca_file else None) if server.startswith("https:") else None

    @classmethod
    def in_cluster(cls) -> "Api":
        """For a pod, from what its service account mounts. Raises KeyError outside of one."""
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", _ACCOUNT / "token", _ACCOUNT / "ca.crt")

    def _call(self, verb: str, path: str, body: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        request = urllib.request.Request(self._server + path, method=verb, data=None if body is None else json.dumps(body).encode())
        request.add_header("Accept", "application/json")
        if body is not None:
            request.add_header("Content-Type", "application/merge-patch+json" if verb == "PATCH" else "application/json")
        if self._token_file is not None:
            request.add_header("Authorization", "Bearer " + self._token_file.read_text().strip())
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s, context=self._tls) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            try:
                why = json.load(error).get("message", "")
            except (ValueError, AttributeError):
                why = ""
            raise ApiError(f"{verb} {path}: {error.code} {why or error.reason}", error.code) from error
        except (OSError, ValueError) as error:  # unreachable, cut off, or not JSON
            raise ApiError(f"{verb} {path}: {error}", 0) from error

    def has_resource_v1(self) -> bool:
        """True if the server knows resource.k8s.io/v1 (Kubernetes 1.34 and newer)."""
        try:
            self._call("GET", GROUP)
            return True
        except ApiError as error:
            if error.code in (403, 404):
                return False
            raise

    def node_uid(self, node: str) -> str:
        return str(self._call("GET", "/api/v1/nodes/" + _quoted(node))["metadata"]["uid"])

    def claim(self, namespace: str, name: str) -> Optional[dict[str, Any]]:
        """The ResourceClaim, or None if there is none."""
        return self._or_none("GET", f"{GROUP}/namespaces/{_quoted(namespace)}/resourceclaims/{_quoted(name)}")

    def slice(self, name: str) -> Optional[dict[str, Any]]:
        """The ResourceSlice, or None if there is none."""
        return self._or_none("GET", f"{GROUP}/resourceslices/{_quoted(name)}")

    def create_slice(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", f"{GROUP}/resourceslices", body)

    def replace_slice(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("PUT", f"{GROUP}/resourceslices/{_quoted(body['metadata']['name'])}", body)

    def delete_slice(self, name: str) -> None:
        self._or_none("DELETE", f"{GROUP}/resourceslices/{_quoted(name)}")

    def slices(self) -> list[dict[str, Any]]:
        return self._list(f"{GROUP}/resourceslices")

    def claims(self) -> list[dict[str, Any]]:
        return self._list(f"{GROUP}/resourceclaims")

    def pods(self, label: str) -> list[dict[str, Any]]:
        """The pods of all namespaces that have the label."""
        return self._list("/api/v1/pods?labelSelector=" + _quoted(label))

    def patch_pod(self, namespace: str, name: str, body: dict[str, Any]) -> None:
        """A merge patch. Nothing happens if the pod is gone, or another one has its name by now (`body` has the uid)."""
        try:
            self._call("PATCH", f"/api/v1/namespaces/{_quoted(namespace)}/pods/{_quoted(name)}", body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def _list(self, path: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self._call("GET", path).get("items") or []
        return items

    def _or_none(self, verb: str, path: str) -> Optional[dict[str, Any]]:
        try:
            return self._call(verb, path)
        except ApiError as error:
            if error.code == 404:
                return None
            raise


def _quoted(part: str) -> str:
    return urllib.parse.quote(part, safe="")
