"""Arrays over real device memory that other libraries use: on a GPU (the driver's stand-in, whose memory is the CPU's), and models."""
# SPDX-License-Identifier: Apache-2.0
import gc
import os

import numpy as np
import pytest

import gpushare

needs_standin = pytest.mark.skipif("GPUSHARE_CUDA_STANDIN" not in os.environ, reason="no stand-in for the CUDA driver")


class Library:
    """What cupy.asarray(array) does: reads the interface and keeps the array."""

    def __init__(self, array):
        self.array = array
        interface = array.__cuda_array_interface__
        self.address, self.shape = interface["data"][0], interface["shape"]


@pytest.fixture
def gpu():
    runtime = gpushare.Runtime("cuda?driver=" + os.environ["GPUSHARE_CUDA_STANDIN"], policy="fair", capacity_bytes="64M", max_lanes=1)
    yield runtime
    runtime.close()


def live(runtime, view):
    """The library still knows a block there."""
    info = gpushare.ffi.new("gpushare_block_info*")
    info.struct_size = gpushare.ffi.sizeof("gpushare_block_info")
    return gpushare.lib.gpushare_memory_get_info(runtime, view.address, info) == 0


@needs_standin
@pytest.mark.parametrize("take", [Library, lambda array: array.__dlpack__()], ids=["interface", "dlpack"])
def test_memory_waits_for_libraries_that_use_it(gpu, take):
    native = gpu.handle
    session = gpu.open_session("a", persistent_bytes="8M", ephemeral_bytes="8M")
    block = session.alloc(4096)
    array = block.array((1024,))
    view, used = Library(array), take(array)
    block.free()
    with pytest.raises(gpushare.InvalidState, match="gone"):
        block.array()
    with pytest.raises(gpushare.NotFound):
        block.free()
    assert live(native, view) and session.info()["persistent_bytes"] == 4096
    address = view.address
    del view, used, array
    gc.collect()
    assert session.info()["persistent_bytes"] == 0
    with session.iteration() as iteration:
        seen, unseen = iteration.array((1024,)), iteration.array((1024,))
        view, used = Library(seen), take(seen)
    assert session.info()["persistent_bytes"] == 4096 and live(native, view)
    for use in (lambda: unseen.__cuda_array_interface__, unseen.__dlpack__, lambda: unseen.address):
        with pytest.raises(gpushare.InvalidState, match="gone"):
            use()
    with session.iteration() as iteration:
        assert all(other.address != view.address for other in (iteration.array((1024,)) for _ in range(4)))
    session.cancel()
    with pytest.raises(gpushare.Cancelled):
        session.iteration()
    assert live(native, view)
    session.close()
    assert session.closed and live(native, view) and gpu.info()["sessions_resident"] == 1
    del view, used, seen
    gc.collect()
    assert gpu.info()["sessions_resident"] == 0 and address


@needs_standin
def test_a_runtime_that_is_closed_waits_for_them_too():
    runtime = gpushare.Runtime("cuda?driver=" + os.environ["GPUSHARE_CUDA_STANDIN"], capacity_bytes="64M")
    session, other = (runtime.open_session(name, persistent_bytes="8M", ephemeral_bytes="8M") for name in "ab")
    view, native = Library(session.array((1024,))), runtime.handle
    runtime.close()
    runtime.close()
    assert runtime.closed and session.closed and other.closed
    with pytest.raises(gpushare.InvalidState, match="closed"):
        runtime.info()
    assert live(native, view)
    del view
    gc.collect()
    info = gpushare.ffi.new("gpushare_runtime_info*")
    info.struct_size = gpushare.ffi.sizeof("gpushare_runtime_info")
    assert gpushare.lib.gpushare_runtime_get_info(native, info) == gpushare.lib.GPUSHARE_INVALID_HANDLE


@needs_standin
def test_an_iteration_whose_memory_finds_no_place_lasts_as_long_as_it_is_used():
    with gpushare.Runtime("cuda?driver=" + os.environ["GPUSHARE_CUDA_STANDIN"], capacity_bytes="64M", max_lanes=1) as runtime:
        session = runtime.open_session("a", persistent_bytes="28M", ephemeral_bytes="32M")
        weights = session.alloc("28M")
        with pytest.raises(gpushare.DeviceOutOfMemory):
            with session.iteration() as iteration:
                view = Library(iteration.array((6 << 20,)))
        assert live(runtime.handle, view)  # and nobody else has a turn
        with pytest.raises(gpushare.InvalidState):
            session.iteration(timeout=0)
        del view
        gc.collect()
        with session.iteration(timeout=600) as iteration:
            iteration.alloc("30M")
        del weights


def test_models_stay_loaded_while_arrays_show_them(runtime):
    layers = {"a": np.full(1024, 7, np.float32), "b": np.full(1024, 8, np.float32)}
    with gpushare.Loader(runtime) as loader:
        session = runtime.open_session("a", persistent_bytes="1M", ephemeral_bytes="1M")
        with loader.load(session, loader.create("model", layers)) as model:
            model.wait()
            part, unused = model.array(0, (1024,))[5:], model.array(1, (1024,))
        with pytest.raises(gpushare.InvalidState):
            model.array(0, (1024,))
        del unused
        session.close()
        with runtime.open_session("b", persistent_bytes="8M", ephemeral_bytes="8M") as other, other.iteration(timeout=600) as iteration:
            for block in [other.alloc("1M") for _ in range(8)] + [iteration.alloc("8M")]:
                gpushare.lib.gpushare_stream_fill(iteration.stream.handle, block._token, 9, block.nbytes)
            iteration.stream.synchronize()
        assert (part == 7).all() and runtime.info()["sessions_resident"] == 1
        del part
        gc.collect()
        assert runtime.info()["sessions_resident"] == 0


def test_arrays_of_a_switchers_model_are_copies(runtime):
    with gpushare.Loader(runtime) as loader, gpushare.Switcher(loader, keep_bytes=0) as switcher:
        members = [switcher.add(loader.create(name, {"w": np.full(1024, value, np.float32)}), name, ephemeral_bytes="1M")
                   for name, value in (("a", 3), ("b", 4))]
        kept = []
        for member in members:
            with switcher.iteration(member, timeout=600) as iteration:
                kept.append(iteration.model.array(0, (32, 32)))
        assert (kept[0] == 3).all() and (kept[1] == 4).all() and not kept[0].flags.writeable


def granule_of(session):
    with session.range("1M") as probe:
        return probe.info()["granule_bytes"]


def test_ranges_as_arrays_on_the_host():
    with gpushare.Runtime("host") as runtime:
        session = runtime.open_session("kv", memory="64M")
        granule = granule_of(session)
        kv = session.range(1 << 36)  # more than the machine has: addresses alone
        with pytest.raises(gpushare.InvalidState, match="not all committed"):
            kv.array((4,))
        kv.commit(granule, 2 * granule)
        pages = kv.array((2, granule // 4), np.float32, offset=granule)
        pages[:] = [[1], [2]]
        for offset, count in ((0, 1), (granule - 4, 2), (3 * granule - 4, 2), (-4, 1), (1 << 36, 1)):
            with pytest.raises(gpushare.InvalidState):
                kv.array((count,), np.float32, offset=offset)
        assert kv.array((1,), offset=2 * granule)[0] == 2 and np.from_dlpack(gpushare._arrays.DeviceArray(kv._memory, (1,), offset=granule))[0] == 1
        kv.decommit(granule, granule)
        assert kv.info()["committed_bytes"] == granule
        assert (pages[0] == 1).all() and (pages[1] == 2).all()  # an array keeps its bytes
        del pages
        gc.collect()
        kv.decommit(2 * granule, granule)
        kv.commit(granule, granule)
        last = kv.array((granule,), np.uint8, offset=granule)
        last[:] = 3
        kv.close()
        with pytest.raises(gpushare.InvalidState):
            kv.array((1,), offset=granule)
    assert (last == 3).all()


@needs_standin
def test_ranges_as_arrays_on_a_gpu(gpu):
    session = gpu.open_session("kv", memory="64M")
    granule = granule_of(session)
    kv = session.range(8 * granule)
    kv.commit(0, 2 * granule)
    library = Library(kv.array((16,), offset=granule))
    assert library.address == kv.info()["address"] + granule and kv.array((1,)).__dlpack_device__() == (2, 0)
    kv.decommit(0, granule)
    with pytest.raises(gpushare.InvalidState, match="another library uses"):
        kv.decommit(granule, granule)
    kv.close()
    assert session.info()["promised_persistent_bytes"] == granule  # closed with its last array
    del library
    gc.collect()
    assert session.info()["promised_persistent_bytes"] == 0
