"""The frameworks' allocator in Python, and its adaptors over stand-ins for the frameworks."""
# SPDX-License-Identifier: Apache-2.0
import gc
import os
import sys
import types

import pytest

import gpushare

needs_standin = pytest.mark.skipif("GPUSHARE_CUDA_STANDIN" not in os.environ, reason="no stand-in for the CUDA driver")


@pytest.fixture
def allocator(runtime):
    with gpushare.Allocator(runtime) as made:
        yield made


def test_what_outlives_an_iteration_is_kept(runtime, session, allocator):
    with pytest.raises(gpushare.NotFound, match="no session"):
        allocator.allocate(64)
    with allocator.use(session):
        weights = allocator.allocate("1M")
        assert session.info()["persistent_bytes"] == 1 << 20 and allocator.allocate(0) == 0
        for error in (None, ValueError):
            try:
                with allocator.iteration(session, timeout=600) as iteration:
                    scratch, kept = allocator.allocate(4096), allocator.allocate(8192)
                    assert iteration.stream.native and session.info()["ephemeral_bytes"] == 12288
                    allocator.free(scratch)
                    if error:
                        raise error
            except ValueError:
                assert error
            assert (session.info()["persistent_bytes"], session.info()["ephemeral_bytes"]) == ((1 << 20) + 8192, 0)
            allocator.free(kept)
        with pytest.raises(gpushare.NotFound):
            allocator.free(kept)
        told = []
        allocator.add_observer(lambda session_id, nbytes, message: told.append(nbytes))
        with pytest.raises(gpushare.OutOfMemory):
            allocator.allocate("1G")
        assert told == [1 << 30]
    with pytest.raises(gpushare.NotFound):
        allocator.allocate(64)
    allocator.set_default_session(session)
    allocator.free(allocator.allocate(64))
    allocator.set_default_session(None)
    info = allocator.info(session)
    assert info["current_bytes"] == 1 << 20 and info["failures"] == 1 and allocator.info()["allocations"] == info["allocations"]
    allocator.reset_peaks(session)
    allocator.free(weights)
    assert allocator.trim() >= 0


def test_streams_lead_to_their_session(runtime, session, allocator):
    with runtime.create_stream() as side:
        allocator.adopt_stream(session, side.native)
        block = allocator.allocate(4096, stream=side.native)
        assert session.info()["persistent_bytes"] == 4096
        with runtime.create_stream() as other:
            allocator.record_use(block, other.native)
            allocator.free(block, side.native)
            allocator.forget_stream(other.native)
        allocator.forget_stream(side.native)
        with pytest.raises(gpushare.NotFound):
            allocator.allocate(4096, stream=side.native)


@needs_standin
def test_cupy(monkeypatch):
    """A module that stands in for CuPy: its allocator's function, pointers and errors as CuPy 13 has them."""
    chosen = []
    current = types.SimpleNamespace(ptr=None)

    class Unowned:
        def __init__(self, pointer, size, owner, device_id):
            self.ptr, self.size, self.owner, self.device_id = pointer, size, owner, device_id

    class Out(MemoryError):
        def __init__(self, size, total):
            super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes)")

    fake = types.ModuleType("cupy")
    fake.cuda = types.SimpleNamespace(get_current_stream=lambda: current, set_allocator=chosen.append, UnownedMemory=Unowned,
                                      MemoryPointer=lambda memory, offset: types.SimpleNamespace(mem=memory, ptr=memory.ptr + offset),
                                      memory=types.SimpleNamespace(OutOfMemoryError=Out))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    import gpushare.cupy

    runtime = gpushare.Runtime("cuda?driver=" + os.environ["GPUSHARE_CUDA_STANDIN"], capacity_bytes="64M")
    with runtime, gpushare.Allocator(runtime) as allocator, runtime.open_session("cupy", memory="32M", ephemeral_bytes="16M") as session:
        gpushare.cupy.install(allocator)
        with allocator.use(session):
            with allocator.iteration(session) as iteration:
                current.ptr = iteration.stream.native
                kept, scratch = chosen[0](1 << 20), chosen[0](1 << 20)
                del scratch
            assert session.info()["persistent_bytes"] == 1 << 20 and kept.mem.device_id == 0
            current.ptr = 0  # CuPy's null stream
            with pytest.raises(MemoryError, match="Out of memory allocating"):
                chosen[0](1 << 30)
        del kept
        gc.collect()
        assert session.info()["persistent_bytes"] == 0
    sys.modules.pop("gpushare.cupy")


@needs_standin
def test_rmm(monkeypatch):
    """A module that stands in for RMM: its callback resource, with the stream objects of several versions."""
    chosen = {}
    fake = types.ModuleType("rmm")
    fake.mr = types.SimpleNamespace(CallbackMemoryResource=lambda allocate, free: types.SimpleNamespace(allocate=allocate, free=free),
                                    set_per_device_resource=chosen.__setitem__)
    monkeypatch.setitem(sys.modules, "rmm", fake)
    import gpushare.rmm

    runtime = gpushare.Runtime("cuda?driver=" + os.environ["GPUSHARE_CUDA_STANDIN"], capacity_bytes="64M")
    with runtime, gpushare.Allocator(runtime) as allocator, runtime.open_session("rmm", memory="32M", ephemeral_bytes="16M") as session:
        resource = gpushare.rmm.install(allocator)
        assert chosen == {0: resource}
        with allocator.use(session), allocator.iteration(session) as iteration:
            native = iteration.stream.native
            streams = (types.SimpleNamespace(__cuda_stream__=lambda: (0, native)), types.SimpleNamespace(value=lambda: native), None)
            kept = [(resource.allocate(1 << 20, stream), stream) for stream in streams]
            resource.free(resource.allocate(1 << 20, streams[0]), 1 << 20, streams[0])
            with pytest.raises(MemoryError):
                resource.allocate(1 << 30, None)
        assert session.info()["persistent_bytes"] == 3 << 20
        for address, stream in kept:
            resource.free(address, 1 << 20, None)
        assert session.info()["persistent_bytes"] == 0
    sys.modules.pop("gpushare.rmm")
