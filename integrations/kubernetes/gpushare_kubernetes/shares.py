"""Shares: parts of a device that containers were given, and the CDI files through which a container runtime applies them.

The file of a claim is written before the kubelet is told that the claim is prepared, and it is the only record of that: an agent that
starts again reads what its predecessor wrote, so it neither loses a claim nor prepares one twice.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import struct
from typing import Any, Iterable, Optional

CDI_VERSION = "0.6.0"  # the first with annotations
PRELOAD = "libgpushare_preload.so"
_IN_CONTAINER = pathlib.PurePosixPath("/usr/local/lib/gpushare")
_REPORTS = 164  # where a page has the number of programs that have reported: GroupPage::reports of src/shim/group.hpp


class NoLibrary(Exception):
    """The node has not got the preload library, so nothing would hold the programs of a container."""


@dataclasses.dataclass(frozen=True)
class Site:
    """What containers of this node get besides their limits: paths on the host."""

    socket: pathlib.Path  # the daemon's
    library_dir: Optional[pathlib.Path] = None  # has the preload library; None: programs are linked to gpushare, or use its Python package
    share_dir: pathlib.Path = pathlib.Path("/run/gpushare-shares")  # with a preload library: a file for each part that is given out

    def page(self, name: str) -> pathlib.Path:
        """The file in which the processes of a part count together what they hold of the device."""
        return self.share_dir / _checked(name, ".-")

    def check_library(self) -> None:
        """Raises NoLibrary: the loader of a container would pass over the library without a word, and its programs would run without limits."""
        if self.library_dir is None:
            return
        path = self.library_dir / PRELOAD
        try:
            with open(path, "rb") as file:
                good = file.read(4) == b"\x7fELF"
        except OSError as error:
            raise NoLibrary(f"{path} cannot be read ({error.strerror}), so programs would run without limits: copy the library there "
                            "(docs/kubernetes.md)") from error
        if not good:
            raise NoLibrary(f"{path} is no library, so programs would run without limits: copy {PRELOAD} there (docs/kubernetes.md)")

    def reports(self, name: str) -> int:
        """How many programs of the part have said that the preload library is in them. 0: none has, so nothing is known to be held."""
        try:
            with open(self.page(name), "rb") as file:
                file.seek(_REPORTS)
                word = file.read(4)
        except OSError:
            return 0
        return struct.unpack("=I", word)[0] if len(word) == 4 else 0


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of a device for one claim. `share_id` is unique among all shares of the node."""

    share_id: str
    request: str  # of the claim
    pool: str
    device: str  # its name in Kubernetes
    spec: str  # the daemon's name for it
    memory_bytes: int
    weight: float
    socket: str = ""  # of the device's daemon; empty: the node's one
    cdi_device: str = ""  # of the device itself, such as nvidia.com/gpu=0; empty: none is added


@dataclasses.dataclass(frozen=True)
class PreparedClaim:
    uid: str
    namespace: str
    name: str
    shares: tuple[Share, ...]


def environment(site: Site, spec: str, memory_bytes: int, weight: float, page: str, part: str, socket: str = "") -> dict[str, str]:
    """The variables that put a program's sessions on the shared device `spec` and limit them (docs/operators.md).

    All processes that name the same `part` have the limits together at the daemon; those that are preloaded also count on the same `page`.
    """
    result = {"GPUSHARE_DEVICE": f"shared:{spec}", "GPUSHARE_SOCKET": socket or str(site.socket), "GPUSHARE_MEMORY": f"{memory_bytes}B",
              "GPUSHARE_WEIGHT": f"{weight:g}",
              "GPUSHARE_GROUP": hashlib.sha256(part.encode()).hexdigest()[:16]}  # the part's number at the daemon
    if site.library_dir is not None:
        result["LD_PRELOAD"] = str(_IN_CONTAINER / PRELOAD)
        result["GPUSHARE_SHIM_GROUP"] = str(site.page(page))
    return result


def page_mounts(site: Site, page: str) -> list[tuple[str, str, bool]]:
    """The mount of a part's own page, as `mounts`."""
    return [] if site.library_dir is None else [(str(site.page(page)), str(site.page(page)), False)]


def make_page(site: Site, page: str, anew: bool = False) -> None:
    """Makes an empty file, which the first program of the part fills in. An existing file stays, unless the part is given out anew."""
    if site.library_dir is None:
        return
    path = site.page(page)
    site.share_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
    if anew:
        path.unlink(missing_ok=True)  # a container that still ends keeps the old one
    path.touch()
    path.chmod(0o666)  # the programs of a part may be of any user


def mounts(site: Site) -> list[tuple[str, str, bool]]:
    """(path on the host, path in the container, read only). A socket is found by its folder, so that a daemon may start again."""
    result = [(str(site.socket.parent), str(site.socket.parent), False)]
    if site.library_dir is not None:
        result.append((str(site.library_dir), str(_IN_CONTAINER), True))
    return result


class ShareStore:
    """The prepared claims of this node, in the folder where the container runtime looks for CDI files. One thread at a time."""

    def __init__(self, folder: pathlib.Path, driver: str, site: Site) -> None:
        self._folder = folder
        self._driver = driver
        self._site = site
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def kind(self) -> str:
        return f"{self._driver}/share"

    def device_id(self, share: Share) -> str:
        """The CDI device of a share, as the kubelet hands it to the container runtime."""
        return f"{self.kind}={share.share_id}"

    def path(self, uid: str) -> pathlib.Path:
        return self._folder / f"{self._driver}-claim-{_checked(uid)}.json"

    def write(self, claim: PreparedClaim) -> None:
        """Writes the claim's file. It is whole or not there, also after a crash of the machine."""
        content = {
            "cdiVersion": CDI_VERSION,
            "kind": self.kind,
            "annotations": {f"{self._driver}/claim": json.dumps({"uid": claim.uid, "namespace": claim.namespace, "name": claim.name})},
            "devices": [{
                "name": share.share_id,
                "annotations": {f"{self._driver}/share": json.dumps(dataclasses.asdict(share))},
                "containerEdits": {"env": [f"{name}={value}" for name, value in environment(
                                       self._site, share.spec, share.memory_bytes, share.weight, share.share_id, share.share_id, share.socket).items()],
                                   **_cdi_mounts(page_mounts(self._site, share.share_id))},
            } for share in claim.shares],
            "containerEdits": _cdi_mounts(mounts(self._site)),
        }
        path = self.path(claim.uid)
        draft = path.with_suffix(".draft")  # runtimes read files that end in .json or .yaml
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def check_library(self) -> None:
        """See Site."""
        self._site.check_library()

    def reported(self, claim: PreparedClaim) -> Optional[bool]:
        """Whether a program in each part of the claim has reported. None: containers of this node get no preload library."""
        return None if self._site.library_dir is None else all(self._site.reports(share.share_id) for share in claim.shares)

    def make_pages(self, claim: PreparedClaim) -> None:
        for share in claim.shares:
            make_page(self._site, share.share_id)

    def read(self, uid: str) -> Optional[PreparedClaim]:
        """The claim as it was prepared, or None. A file that cannot be read counts as none: it is written anew."""
        try:
            content = json.loads(self.path(uid).read_text(encoding="utf-8"))
            claim = json.loads(content["annotations"][f"{self._driver}/claim"])
            shares = tuple(Share(**json.loads(device["annotations"][f"{self._driver}/share"])) for device in content["devices"])
            return PreparedClaim(claim["uid"], claim["namespace"], claim["name"], shares)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return None

    def remove(self, uid: str) -> None:
        """Forgets the claim. Removing one that is not there is no error."""
        claim = self.read(uid)
        self.path(uid).unlink(missing_ok=True)
        for share in claim.shares if claim else ():
            self._site.page(share.share_id).unlink(missing_ok=True)

    def claims(self) -> Iterable[PreparedClaim]:
        prefix, suffix = f"{self._driver}-claim-", ".json"
        for path in sorted(self._folder.glob(prefix + "*" + suffix)):
            claim = self.read(path.name[len(prefix):-len(suffix)])
            if claim is not None:
                yield claim


def _cdi_mounts(entries: list[tuple[str, str, bool]]) -> dict[str, Any]:
    return {"mounts": [{"hostPath": host, "containerPath": inside, "options": ["ro" if read_only else "rw", "rbind"]}
                       for host, inside, read_only in entries]} if entries else {}


def _checked(uid: str, marks: str = "-") -> str:
    """A claim's uid, a share's id or a device's unit becomes a file's name."""
    if not uid or uid.startswith(".") or not all(c.isascii() and (c.isalnum() or c in marks) for c in uid):
        raise ValueError(f"a claim's uid has letters, digits and '-' only: {uid!r}")
    return uid
