"""What type checkers and programs read of the package: names, enumerations, options, kinds of errors."""
# SPDX-License-Identifier: Apache-2.0
import ast
import concurrent.futures
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import textwrap
import types

import pytest

import gpushare
from gpushare import _enums, cluster

SOURCES = pathlib.Path(gpushare.__file__).resolve().parent


def test_all_is_literal_and_whole():
    """Type checkers read __all__ without running the module."""
    tree = ast.parse((SOURCES / "__init__.py").read_text(encoding="utf-8"))
    lists = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    public = {name for name, value in vars(gpushare).items() if not name.startswith("_") and not isinstance(value, types.ModuleType)} | {"lib"}
    assert len(lists) == 1 and sorted(lists[0]) == lists[0] and set(lists[0]) == public


def test_info_has_enumerations_and_no_reserved_fields(runtime, session):
    with gpushare.Loader(runtime) as loader, gpushare.Switcher(loader) as switcher:
        member = switcher.add(loader.create("m", {"w": b"1234"}), ephemeral_bytes="1M")
        infos = [runtime.info(), session.info(), session.alloc(64).info(), switcher.info(), switcher.member(member), loader.info(),
                 *gpushare.devices()]
    assert not [name for info in infos for name in info if re.fullmatch(r"reserved(_\d+)?|struct_size", name)]
    with session.range("4M") as elastic:
        assert elastic.info()["reserved_bytes"] >= 4 << 20  # a figure
    assert infos[0]["layout"] is gpushare.Layout.VIRTUAL and gpushare.DeviceCapability.HOST_ADDRESSABLE in infos[0]["capabilities"]
    state = infos[1]["state"]
    assert state is gpushare.SessionState.RESIDENT and state == "resident" and {"resident": 1}[state] == 1 and f"{state}" == "resident"
    assert infos[1]["session_class"] is gpushare.SessionClass.GUARANTEED and infos[1]["status"] is gpushare.Status.OK
    assert infos[2]["kind"] is gpushare.Kind.MODEL and infos[4]["state"] is gpushare.MemberState.STANDBY
    runtime.open_session("x", session_class=gpushare.SessionClass.OPPORTUNISTIC).close()


def test_enumerations_are_those_of_the_c_abi():
    lib = gpushare.lib
    for names, prefix in ((gpushare.SessionState, "SESSION"), (gpushare.SessionClass, "CLASS"), (gpushare.Layout, "LAYOUT"), (gpushare.Kind, "KIND"),
                          (gpushare.MemberState, "MEMBER")):
        for number, member in enumerate(names):
            assert getattr(lib, f"GPUSHARE_{prefix}_{member.name}") == number
    for member in gpushare.Status:
        assert gpushare._native.text(lib.gpushare_status_name(member)) == member.name
    for member in gpushare.DeviceCapability:
        assert getattr(lib, f"GPUSHARE_DEVICE_CAP_{member.name}") == member
    # A newer library's members are numbers.
    assert _enums.member_of("gpushare_session_info", "state", 99) == 99 == _enums.member_of("gpushare_session_info", "status", 99)


def test_errors_of_memory_are_memory_errors(runtime):
    with pytest.raises(MemoryError) as caught:
        runtime.open_session("big", persistent_bytes="1G")
    assert isinstance(caught.value, gpushare.ExceedsCapacity)
    for error in (gpushare.QuotaExceeded, gpushare.DeviceOutOfMemory, gpushare.HostOutOfMemory):
        assert issubclass(error, MemoryError)
    assert issubclass(gpushare.Ticket, concurrent.futures.Future)


def test_options_are_those_that_are_taken(runtime):
    defaults = {"session_class": "guaranteed", "remaining": None, "queue": True, "spill": False, "plan_iterations": False, "may_upgrade": False,
                "fail_on_error": False, "weight": 1.0}
    runtime.open_session("all", **{name: defaults.get(name, 0) for name in gpushare.SessionOptions.__annotations__}).close()
    fields = {name for name, _ in gpushare.ffi.typeof("gpushare_batcher_params").fields}
    assert set(gpushare.BatcherOptions.__annotations__) == fields - {"struct_size", "reserved", "policy"}


GOOD = """
    import asyncio
    import concurrent.futures
    import gpushare
    from gpushare import Runtime, SessionOptions, cluster

    def train(session: gpushare.Session) -> float:
        weights = session.array((256, 256))
        for step in session.iterations(10):
            scratch = step.array((256, 256))
            scratch[:] = weights
        return float(session.info()["service_ns"])

    class Mine(gpushare.Policy):
        def before(self, a: object, b: object) -> bool:
            return False

    async def ask(ticket: gpushare.Ticket) -> object:
        return await ticket

    options: SessionOptions = {"memory": "256M", "weight": 2}
    with Runtime("host", policy=Mine()) as runtime, runtime.open_session("a", **options) as session:
        reveal_type(runtime)
        reveal_type(session)
        with session.iteration() as iteration:
            block: gpushare.Block = iteration.alloc("1M")
            iteration.stream.fill(block, 0)
        future: concurrent.futures.Future[object] = session.submit(lambda iteration: 7)
        state = session.info()["state"]
        if state is gpushare.SessionState.RESIDENT:
            print(train(session))
        with gpushare.RequestQueue(runtime, max_pending=10) as queue:
            queue.drain()
    with cluster.ReservationTable() as table:
        reveal_type(table)
    try:
        pass
    except (gpushare.OutOfMemory, MemoryError):
        pass
"""
BAD = """
    import gpushare
    runtime = gpushare.Runtime("host")
    runtime.open_session("a", wieght=2)
    gpushare.RequestQueue(runtime, max_pendings=1)
    gpushare.nothing
    runtime.open_session("a").iteration(timeout="1s")
"""


def mypy_finds_misspelt_options():
    """Since 1.7 mypy reads the TypedDict of keyword arguments."""
    try:
        return tuple(int(part) for part in importlib.metadata.version("mypy").split(".")[:2]) >= (1, 7)
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not mypy_finds_misspelt_options(), reason="no mypy, or one older than 1.7")
def test_mypy_accepts_what_users_write(tmp_path):
    def mypy(source):
        (tmp_path / "script.py").write_text(textwrap.dedent(source), encoding="utf-8")
        (tmp_path / "gpushare").exists() or (tmp_path / "gpushare").symlink_to(pathlib.Path(gpushare.__file__).parent)
        done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-incremental", "script.py"], cwd=tmp_path,
                              capture_output=True, text=True, timeout=300)
        return done.stdout

    said = mypy(GOOD)
    assert "Success" in said, said
    for kind in ("gpushare._runtime.Runtime", "gpushare._session.Session", "gpushare.cluster.ReservationTable"):
        assert f'Revealed type is "{kind}"' in said, said
    said = mypy(BAD)
    assert said.count(" error: ") == 4 and "wieght" in said and "max_pendings" in said and "nothing" in said, said
