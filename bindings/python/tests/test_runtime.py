"""Runtime, session, iteration, stream, block, ticket on the host device."""
import asyncio
import concurrent.futures
import contextlib
import gc
import json
import re
import sys
import threading
import time
import types
import weakref

import numpy as np
import pytest

import gpushare


def test_an_iteration_computes_in_ephemeral_and_persistent_arrays(session):
    weights = session.array((64, 64))
    weights[:] = 2
    for iteration in session.iterations(3):
        scratch = iteration.array((64, 64))
        np.multiply(weights, 3, out=scratch)
        assert scratch.sum() == 64 * 64 * 6
        assert session.info()["ephemeral_bytes"] == scratch.nbytes
    info = session.info()
    assert info["ephemeral_bytes"] == 0
    assert info["persistent_bytes"] == weights.nbytes
    assert info["state"] == "resident"


def test_elastic_ranges_trade_memory(runtime):
    capacity = runtime.info()["capacity_bytes"]
    given = []
    giving = threading.Lock()  # what waits for the memory goes on within decommit(), before give_back has returned
    with runtime.open_session("one", ephemeral_bytes="1M") as one, runtime.open_session("two", ephemeral_bytes="1M") as two:

        def give_back(nbytes, seconds):
            assert seconds <= 60
            with giving:
                info = first.info()
                part = min(nbytes, info["committed_bytes"])
                first.decommit(info["committed_bytes"] - part, part)
                given.append(part)
            return part

        with one.range(capacity, give_back, name="kv", answer=60.0) as first, two.range(capacity) as second:
            granule = first.info()["granule_bytes"]
            most = capacity // granule * 3 // 4 * granule
            first.commit(0, most)
            with pytest.raises(gpushare.DeviceOutOfMemory, match="can be promised"):
                second.commit(0, most)
            second.commit(0, most, timeout=600.0)
            with giving:
                assert sum(given) > 0
                assert first.info()["committed_bytes"] == most - sum(given)
            second.decommit(0, most)


def test_leaving_a_loop_over_iterations_ends_the_iteration(session):
    for iteration in session.iterations():
        iteration.alloc("1K")
        break
    gc.collect()
    with session.iteration(timeout=10):
        pass


def test_an_exception_abandons_its_iteration_alone(session):
    weights = session.array((8,))
    weights[:] = 3
    with pytest.raises(ZeroDivisionError):
        with session.iteration() as iteration:
            iteration.array((1 << 18,))
            1 / 0
    info = session.info()
    assert (info["state"], info["ephemeral_bytes"]) == ("resident", 0)
    with session.iteration():
        assert (weights == 3).all()
    assert session.submit(lambda iteration: 7).result(timeout=600) == 7


def test_an_exception_ends_the_session_of_an_owner_who_says_so(runtime):
    other = runtime.open_session("other", ephemeral_bytes="1M")
    failing = runtime.open_session("failing", ephemeral_bytes="1M", fail_on_error=True)
    with pytest.raises(ZeroDivisionError):
        with failing.iteration():
            1 / 0
    assert failing.info()["state"] == "failed"
    with pytest.raises(gpushare.InvalidState, match="division by zero"):
        failing.iteration()
    submitting = runtime.open_session("submitting", ephemeral_bytes="1M", fail_on_error=True)
    with pytest.raises(gpushare.CallbackFailed, match="ZeroDivisionError"):
        submitting.submit(lambda iteration: 1 / 0).result(timeout=600)
    assert submitting.info()["state"] == "failed"
    with other.iteration() as iteration:
        iteration.fail(ValueError("by hand"))
    assert other.info()["state"] == "failed"


def test_submitted_iterations_run_in_order_and_return_their_results(session):
    seen = []
    tickets = [session.submit(lambda iteration, number=number: seen.append(number) or number) for number in range(20)]
    assert [ticket.result(timeout=600) for ticket in tickets] == list(range(20)) == seen
    assert all(ticket.done() for ticket in tickets)


def test_a_submitted_function_that_raises_tells_why(session):
    ticket = session.submit(lambda iteration: {}["absent"])
    with pytest.raises(gpushare.CallbackFailed, match="absent") as caught:
        ticket.result(timeout=600)
    assert isinstance(caught.value.__cause__, KeyError)
    assert session.info()["state"] == "resident"  # the next one runs
    assert session.submit(lambda iteration: 8).result(timeout=600) == 8


def test_a_timeout_in_a_submitted_function_is_no_timeout_of_the_ticket(runtime, session):
    """A wait without a timeout in the main thread would otherwise never end."""
    def times_out(iteration):
        raise gpushare.TimedOut("no room in time", gpushare.lib.GPUSHARE_TIMED_OUT)

    ticket = session.submit(times_out)
    runtime.drain()
    assert ticket.done()
    with pytest.raises(gpushare.CallbackFailed, match="no room in time") as caught:
        ticket.result()
    assert isinstance(caught.value.__cause__, gpushare.TimedOut)


def test_tickets_are_awaitable(session):
    async def both():
        return await asyncio.gather(*(_await(session.submit(lambda iteration: 7)) for _ in range(2)))

    async def _await(ticket):
        return await ticket

    assert asyncio.run(both()) == [7, 7]


def test_tickets_that_wait_for_their_turn_take_no_thread_of_asyncio():
    """More of them than asyncio has threads, in a session that waits for memory: another task still gets the answer that makes room."""
    async def everything(runtime):
        holder = runtime.open_session("holder", persistent_bytes="12M", ephemeral_bytes="64K")
        holder.alloc("12M")
        queued = runtime.open_session("queued", persistent_bytes="12M", ephemeral_bytes="64K")
        waiting = [asyncio.ensure_future(_await(queued.submit(lambda iteration: 7))) for _ in range(100)]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(queued.submit(lambda iteration: 8)), 0.05)
        assert await holder.submit(lambda iteration: 9) == 9
        holder.close()
        assert await asyncio.gather(*waiting) == [7] * 100
        last = queued.submit(lambda iteration: 10)
        assert await last == 10 and await last == 10

    async def _await(ticket):
        return await ticket

    with gpushare.Runtime("host", capacity_bytes="16M", max_lanes=1) as runtime:
        asyncio.run(everything(runtime))


def test_tickets_that_never_run_end_those_who_await_them():
    async def cancelled(runtime):
        holder = runtime.open_session("holder", persistent_bytes="12M", ephemeral_bytes="64K")
        holder.alloc("12M")
        queued = runtime.open_session("queued", persistent_bytes="12M", ephemeral_bytes="64K")
        ticket = queued.submit(lambda iteration: 7)
        asyncio.get_running_loop().call_later(0.01, queued.cancel)
        with pytest.raises(gpushare.Cancelled):
            await ticket

    with gpushare.Runtime("host", capacity_bytes="16M", max_lanes=1) as runtime:
        asyncio.run(cancelled(runtime))


def test_copies_fills_and_launched_functions_run_in_stream_order(session):
    source = np.arange(1024, dtype=np.float32)
    back = np.zeros_like(source)
    block = session.alloc(source.nbytes)
    with session.iteration() as iteration:
        scratch = iteration.alloc(source.nbytes)
        stream = iteration.stream
        stream.copy_from_host(block, source)
        stream.copy(scratch, block)
        iteration.launch(lambda array: np.add(array, 1, out=array), scratch.array((1024,)))
        stream.copy_to_host(back, scratch)
        stream.fill(block, 0)
        stream.synchronize()
    assert (back == source + 1).all()
    assert not block.array((1024,)).any()


def test_a_launched_function_that_raises_fails_its_iteration_alone(session):
    weights = session.array((8,))
    weights[:] = 3
    with session.iteration() as iteration:
        iteration.launch(lambda: [][1])
        iteration.stream.synchronize()
    with pytest.raises(gpushare.CallbackFailed, match="list index") as caught:  # told once
        session.iteration()
    assert isinstance(caught.value.__cause__, IndexError)
    with session.iteration():
        assert (weights == 3).all()
    ticket = session.submit(lambda iteration: iteration.launch(lambda: {}["absent"]))
    with pytest.raises(gpushare.CallbackFailed, match="absent") as caught:  # by its own ticket
        ticket.result(timeout=600)
    assert isinstance(caught.value.__cause__, KeyError)
    with session.iteration():
        pass
    assert session.info()["state"] == "resident"


def test_a_launched_function_that_raises_ends_the_session_of_an_owner_who_says_so(runtime):
    session = runtime.open_session("strict", ephemeral_bytes="1M", fail_on_error=True)
    with session.iteration() as iteration:
        iteration.launch(lambda: [][1])
        iteration.stream.synchronize()
    for _ in range(2):
        with pytest.raises(gpushare.CallbackFailed, match="list index") as caught:
            session.iteration()
        assert isinstance(caught.value.__cause__, IndexError)


def test_side_streams(runtime, session):
    block = session.alloc("4K")
    with runtime.create_stream() as stream:
        stream.fill(block, 7)
        block.record_use(stream)
        stream.synchronize()
        assert stream.native != 0
        assert (block.array() == 7).all()
        block.free()
    with pytest.raises(gpushare.NotFound):
        block.free()
    with pytest.raises(gpushare.InvalidState, match="closed"):
        stream.synchronize()


def test_blocks_know_their_owner_and_can_be_kept(session):
    with session.iteration() as iteration:
        several = iteration.alloc_many(["4K", 100, "1M"])
        assert [each.nbytes for each in several] == [4096, 100, 1 << 20]
        iteration.session.runtime.free_many(several)
        with pytest.raises(gpushare.Error):
            iteration.session.runtime.free_many(several[:1])
        block = iteration.keep(iteration.alloc("64K"))
        array = block.array((16384,))
        array[:] = 5
    assert (array == 5).all()
    assert block.info()["promoted"] == 1
    assert session.info()["promoted_bytes"] == 65536
    block.free()


def test_memory_is_found_by_stream_and_by_thread(runtime, session):
    with session.iteration() as iteration:
        stream = iteration.stream
        by_stream = []
        helper = threading.Thread(target=lambda: by_stream.append(runtime.alloc("1K", stream=stream)))
        helper.start()
        helper.join()
        by_thread = runtime.alloc("1K", kind="framework")
        assert by_stream[0].info()["session_id"] == by_thread.info()["session_id"] == session.info()["session_id"]
        by_thread.free()
    with pytest.raises(gpushare.NotFound):
        runtime.alloc("1K")


def test_views_do_not_leave_their_block(session):
    block = session.alloc(100)
    assert block.array().shape == (100,)
    assert block.array((25,), "<i4").nbytes == 100
    for shape, dtype, offset in (((26,), "<i4", 0), ((25,), "<i4", 4), ((1,), "|u1", -1), ((-1,), "|u1", 0)):
        with pytest.raises(gpushare.InvalidArgument, match="does not fit|from 0"):
            block.array(shape, dtype, offset)
    with pytest.raises(gpushare.InvalidArgument, match="100 bytes"):
        with session.iteration() as iteration:
            iteration.stream.fill(block, 0, 101)


# All ways to keep an array's bytes: the array, parts of parts, buffers, DLPack, other libraries' views.
KEPT = {
    "array": lambda array: array,
    "slice of a slice": lambda array: array[2:200][::3],
    "transposed": lambda array: array.reshape(16, 16).T[3],
    "memoryview": lambda array: memoryview(array)[4:],
    "frombuffer": lambda array: np.frombuffer(memoryview(array)[8:], np.float32),
    "dlpack": lambda array: np.from_dlpack(array),
    "interface": lambda array: np.asarray(types.SimpleNamespace(__array_interface__=array.__array_interface__, array=array)),
    "iterator": lambda array: array.flat,
}
ENDS = ("free", "free_many", "iteration", "raised", "session", "failed", "cancelled", "thread", "runtime", "collected")


def end_memory(how, runtime, owner, block, iteration):
    """Takes the memory of a block away in one of the ways that there are."""
    if how == "free":
        block.free()
    elif how == "free_many":
        runtime.free_many([block])
    elif how == "session":
        owner.close()
    elif how == "cancelled":
        owner.cancel()
    elif how == "runtime":
        runtime.close()
    elif how == "failed":
        iteration.fail(ValueError("over"))


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "ephemeral"])
@pytest.mark.parametrize("how", ENDS)
def test_arrays_keep_their_bytes_however_their_memory_ends(how, persistent):
    runtime = gpushare.Runtime("host", policy="fair", capacity_bytes="16M", max_lanes=1)
    owner = runtime.open_session("owner", persistent_bytes="1M", ephemeral_bytes="1M")
    kept = []

    def run():
        iteration = owner.iteration()
        block = owner.alloc(1024) if persistent else iteration.alloc(1024)
        array = block.array((256,))
        array[:] = 7
        kept.append({name: keep(array) for name, keep in KEPT.items()})
        kept.append((owner if persistent else iteration).array((256,)))
        kept[-1][:] = 7
        if how in ("free", "free_many"):
            end_memory(how, runtime, owner, block, iteration)
        if how == "raised":
            with contextlib.suppress(ZeroDivisionError), iteration:
                1 / 0
        elif how not in ("failed", "thread"):
            iteration.end()
        if how != "thread":  # the thread ends with its iteration open
            end_memory(how, runtime, owner, block, iteration)

    def again():
        with contextlib.suppress(gpushare.NotFound):
            run()

    thread = threading.Thread(target=again)
    thread.start()
    thread.join()
    if how == "collected":
        del owner
        gc.collect()
    # Others write wherever the memory went, and the session itself where it has freed.
    if how in ("free", "free_many"):
        for array in [owner.array((256,)) for _ in range(8)]:
            array[:] = 9
    if not runtime.closed:
        with runtime.open_session("other", persistent_bytes="4M", ephemeral_bytes="2M") as other, other.iteration(timeout=600) as iteration:
            for array in [other.array((1 << 16,)) for _ in range(8)] + [iteration.array((1 << 18,))]:
                array[:] = 9
    read = {name: np.asarray(list(view) if name == "iterator" else view) for name, view in kept[0].items()}
    assert all((values == 7).all() for values in read.values()) and (kept[1] == 7).all()
    # A write to a kept array reaches nobody.
    theirs = None if runtime.closed else runtime.open_session("theirs", persistent_bytes="1M", ephemeral_bytes="1M").array((4096,))
    if theirs is not None:
        theirs[:] = 5
    kept[0]["array"][:] = 1
    kept[1][:] = 1
    assert theirs is None or (theirs == 5).all()
    runtime.close()


def test_arrays_keep_their_bytes_while_their_session_is_paged_out():
    with gpushare.Runtime("host?total_bytes=33554432", policy="priority", layout="virtual", max_lanes=1) as runtime:
        low = runtime.open_session("low", persistent_bytes="16M", ephemeral_bytes="1M", priority=0)
        with low.iteration():
            weights = low.array((3 << 20,))
            weights[:] = 7
        high = runtime.open_session("high", persistent_bytes="16M", ephemeral_bytes="1M", priority=5)
        with high.iteration(timeout=600):
            high.alloc("12M")
        assert low.info()["state"] == "paged_out"
        assert (weights == 7).all()
        high.close()
        with low.iteration(timeout=600):
            assert (weights == 7).all()


def test_large_buffers_are_used_again_and_bounded(session):
    from gpushare import _arrays

    addresses, kept = set(), None
    for iteration in session.iterations(20):
        kept = iteration.array((1 << 19,))
        addresses.add(kept.ctypes.data)
    assert len(addresses) == 2  # that of the round before is alive in each round
    for size in range(200):
        with session.iteration() as iteration:
            iteration.array(((1 << 20) + size,))
    assert sum(size * len(buffers) for size, buffers in _arrays.spare.items()) <= _arrays.MOST_SPARE


def test_a_block_that_is_gone_says_so(runtime, session):
    with session.iteration() as iteration:
        ephemeral = iteration.alloc(64)
        freed = session.alloc(64)
        freed.free()
    other = session.alloc(64)
    for block in (ephemeral, freed):
        assert block.gone and "gone" in repr(block)
        for use in (block.array, lambda: block.address, lambda: gpushare.DeviceArray(block, 16)):
            with pytest.raises(gpushare.InvalidState, match="gone"):
                use()
        with pytest.raises(gpushare.NotFound, match="gone"):
            block.free()
        with pytest.raises(gpushare.NotFound, match="gone"):
            runtime.free_many([block])
        with runtime.create_stream() as stream:
            for use in (lambda: stream.fill(block, 1), lambda: stream.copy(block, other), lambda: stream.copy_from_host(block, b"1"),
                        lambda: stream.copy_to_host(bytearray(1), block), lambda: block.record_use(stream)):
                with pytest.raises(gpushare.InvalidState, match="gone"):
                    use()
    assert not other.gone
    other.free()


def test_work_on_arrays_goes_on_after_their_iteration_has_ended(session):
    """A function that was launched keeps what it was given, also when the iteration ends before it runs."""
    holds, results = threading.Event(), []
    for number in range(2):
        with session.iteration() as iteration:
            if number == 0:
                iteration.launch(holds.wait, 60)
            scratch = iteration.alloc(4096)
            iteration.stream.fill(scratch, number + 1)
            iteration.launch(lambda array: results.append(set(array.tolist())), scratch.array())
    holds.set()
    session.runtime.synchronize()
    assert results == [{1}, {2}]


def test_arrays_are_shared_without_a_copy(session):
    block = session.alloc(4096)
    shared = gpushare.DeviceArray(block, (32, 32), np.float32)
    first, second = np.asarray(shared), np.from_dlpack(shared)
    first[3, 4] = 9
    assert second[3, 4] == 9
    assert shared.__dlpack_device__() == (1, 0)
    assert not hasattr(shared, "__cuda_array_interface__")
    with pytest.raises(BufferError):
        shared.__dlpack__(copy=True)
    collected = weakref.ref(shared)
    del shared, second
    gc.collect()
    assert collected() is not None  # `first` still reads it
    del first
    gc.collect()
    assert collected() is None


def test_errors_name_what_is_wrong(runtime):
    with pytest.raises(gpushare.NotFound, match="round-robin"):
        gpushare.Runtime("host", policy="round-robin")
    with pytest.raises(gpushare.ExceedsCapacity, match="'big'") as caught:
        runtime.open_session("big", persistent_bytes="1G")
    assert caught.value.status_name == "EXCEEDS_CAPACITY"
    with pytest.raises(gpushare.InvalidArgument, match="guaranteed, opportunistic"):
        runtime.open_session("x", session_class="best")
    with pytest.raises(gpushare.InvalidArgument, match="'8 apples'"):
        runtime.open_session("x", memory="8 apples")
    with pytest.raises(MemoryError):
        runtime.open_session("small", persistent_bytes="1M", ephemeral_bytes="1M", memory="2M").alloc("4M")
    with pytest.raises(TypeError):
        runtime.open_session("x", no_such_option=1)


def test_sizes_are_bytes_or_texts_with_a_unit(runtime):
    """As the tool takes them: tests/unit/base/base_test.cpp."""
    from gpushare._values import size_in_bytes

    for size, expected in ((5, 5), ("0", 0), ("5B", 5), ("2K", 2048), ("1.5M", 1536 * 1024), ("8G", 8 * 2**30), ("8GiB", 8 * 2**30), ("1 G", 2**30),
                           ("16GB", 16 * 10**9), ("2kB", 2000), ("2KB", 2000), ("3T", 3 * 2**40), ("8EiB", 2**63), ("9007199254740993B", 2**53 + 1)):
        assert size_in_bytes(size) == expected, size
    for size in ("8", "8.", "1.5", "16384", "8g", "8 apples", "", "G", "-1G", "1e3M", "1..5G", "8GiBs", "9EiB", "nan", "inf", " 8G", "8G\n", "\u0668G", -1, 2**65):
        with pytest.raises(gpushare.InvalidArgument, match="size"):
            size_in_bytes(size)
    with pytest.raises(gpushare.InvalidArgument, match="'8' has no unit: '8GiB' or '8B'"):
        runtime.open_session("x", memory="8")


def test_closing(runtime):
    session = runtime.open_session("a", ephemeral_bytes="1M")
    session.close()
    session.close()
    assert session.closed
    with pytest.raises(gpushare.InvalidState, match="this Session is closed"):
        session.info()
    left = runtime.open_session("left", ephemeral_bytes="1M")
    runtime.close()
    with pytest.raises(gpushare.InvalidState):
        left.iteration()
    left.close()


def test_closing_inside_its_own_iteration_is_refused_and_loses_nothing(session):
    with session.iteration() as iteration:
        with pytest.raises(gpushare.InvalidState):
            session.close()
        iteration.alloc(64)
    with session.iteration():
        pass


def test_timeouts(runtime):
    holder = runtime.open_session("holder", persistent_bytes="60M", ephemeral_bytes="1M")
    queued = runtime.open_session("queued", persistent_bytes="60M", ephemeral_bytes="1M")
    holder.alloc("60M")
    with pytest.raises(TimeoutError):
        queued.wait_admitted(timeout=0.05)
    assert queued.info()["state"] == "queued"
    assert "waits for admission" in queued.explain_wait()
    with pytest.raises(gpushare.InvalidArgument):
        queued.wait_admitted(timeout=-1)
    holder.close()
    queued.wait_admitted(timeout=600)


def test_threads_take_turns(runtime):
    done = {}

    def work(name):
        with runtime.open_session(name, persistent_bytes="1M", ephemeral_bytes="4M") as session:
            weights = session.array((256,))
            weights[:] = 0
            for iteration in session.iterations(50):
                scratch = iteration.array((1024,))
                scratch[:] = 1
                weights += scratch[:256]
            done[name] = weights.sum()

    threads = [threading.Thread(target=work, args=(f"job {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == {f"job {number}": 50 * 256 for number in range(6)}


def test_other_threads_run_while_one_waits_for_its_turn():
    with gpushare.Runtime("host", policy="fair", capacity_bytes="16M", max_lanes=1) as runtime:
        holder = runtime.open_session("holder", ephemeral_bytes="1M")
        waiting = runtime.open_session("waiting", ephemeral_bytes="1M")
        begun, granted = threading.Event(), threading.Event()

        def begin():
            begun.set()
            with waiting.iteration():
                granted.set()

        with holder.iteration():
            thread = threading.Thread(target=begin)
            thread.start()
            assert begun.wait(timeout=600)
            assert not granted.wait(timeout=0.05)  # this thread runs, the other one waits
        assert granted.wait(timeout=600)
        thread.join()


def test_progress_out_of_memory_and_log_functions():
    finished, asked = [], []
    with gpushare.Runtime("host", capacity_bytes="16M", on_progress=finished.append) as runtime:
        session = runtime.open_session("a", persistent_bytes="1M", ephemeral_bytes="1M")
        for _ in session.iterations(4):
            pass
        session.submit(lambda iteration: None)
        runtime.drain()
        deadline = time.monotonic() + 600  # the call comes after the iteration has ended, on another thread
        while len(finished) < 5 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(finished) == 5
        runtime.synchronize()

        def free_something(session_id, nbytes):
            asked.append(nbytes)
            return False

        runtime.set_out_of_memory_function(free_something)
        with pytest.raises(gpushare.DeviceOutOfMemory):
            session.alloc("12M")
            session.alloc("12M")
        runtime.set_out_of_memory_function(None)
    assert {call.session_name for call in finished} == {"a"}
    assert max(call.iterations_done for call in finished) == 5
    assert asked == [12 * 2**20]


class Youngest(gpushare.Policy):
    name = "youngest"

    def __init__(self):
        self.asked = 0

    def before(self, a, b):
        return a.session_id > b.session_id

    def may_run(self, session, now_ns):
        self.asked += 1
        return True

    def share(self, session):
        return self.WHOLE


def test_policies_in_python():
    policy = Youngest()
    gone = weakref.ref(policy)
    with gpushare.Runtime("host", policy=policy, capacity_bytes="16M") as runtime:
        assert runtime.info()["policy"] == "youngest"
        sessions = [runtime.open_session(f"s{number}", ephemeral_bytes="1M") for number in range(3)]
        tickets = [session.submit(lambda iteration: None) for session in sessions]
        for ticket in tickets:
            ticket.result(timeout=600)
        assert policy.asked >= 3
        runtime.set_policy("fifo")
        assert runtime.info()["policy"] == "fifo"
    del policy
    gc.collect()
    assert gone() is None


def test_capacity_and_quota_change_at_run_time():
    with gpushare.Runtime("host", capacity_bytes="64M") as runtime:
        session = runtime.open_session("a", persistent_bytes="16M", ephemeral_bytes="8M")
        runtime.set_capacity("32M")
        info = runtime.info()
        assert info["capacity_bytes"] == info["effective_capacity_bytes"] == 32 << 20
        with pytest.raises(gpushare.ExceedsCapacity):
            runtime.set_capacity("65M")
        session.set_quota("8M")
        with pytest.raises(gpushare.QuotaExceeded):
            session.alloc("12M")
        assert session.info()["quota_bytes"] == session.info()["effective_quota_bytes"] == 8 << 20
        runtime.set_capacity(0)
        assert runtime.info()["capacity_bytes"] == 64 << 20


def test_what_was_measured_is_kept_in_a_file(tmp_path):
    path = tmp_path / "table"
    for _ in range(2):
        with gpushare.Runtime("sim", capacity_bytes="64M", policy="pack", lane_finder="balanced", interference_file=path) as runtime:
            session = runtime.open_session("a", persistent_bytes="1M", ephemeral_bytes="1M")
            for _ in session.iterations(4):
                pass
            runtime.synchronize()
            assert all(entry["name"] == "a" for entry in runtime.interference())
    assert path.read_text().startswith("gpushare interference 1\n")
    with pytest.raises(gpushare.NotFound):
        gpushare.Runtime("sim", lane_finder="first")


def test_what_spilled_comes_home_within_the_budget():
    with gpushare.Runtime("host?total_bytes=134217728", layout="virtual", spill_limit="24M", spill_move_bytes="4M",
                          spill_move=1.0) as runtime:
        session = runtime.open_session("a", persistent_bytes="2M", ephemeral_bytes="2M", memory="8M", spill=True)
        with session.iteration():
            pass
        block = session.alloc("20M")
        with pytest.raises(gpushare.QuotaExceeded):
            session.alloc("12M")
        assert session.info()["spilled_bytes"] == 20 << 20
        session.set_quota(0)
        for _ in session.iterations(40):
            pass
        info = session.info()
        assert info["spilled_bytes"] == 0 and info["home_bytes"] == 20 << 20
        block.free()
        assert runtime.info()["link_bytes_per_s"] == 0


def test_a_gate_is_closed_beside_a_guaranteed_iteration():
    with gpushare.Runtime("host", capacity_bytes="64M", policy="pack") as runtime:
        sure = runtime.open_session("sure", persistent_bytes="1M", ephemeral_bytes="1M")
        spare = runtime.open_session("spare", session_class="opportunistic", persistent_bytes="1M", ephemeral_bytes="1M")
        runtime.set_target_slowdown(0.05)
        sure.set_target_slowdown(0.02)
        with pytest.raises(gpushare.InvalidArgument):
            spare.set_target_slowdown(0.02)
        gate = spare.gate()
        gate.enter(0.001)
        assert gate.info()["open"] == 1 and gate.info()["entries"] == 0
        with sure.iteration():
            with pytest.raises(gpushare.TimedOut):
                gate.enter(0.001, timeout=0)
            assert gate.info()["learning"] == 1 and gate.info()["target_slowdown"] == 0.02
        with spare.iteration() as iteration:
            gate.enter(0.001, stream=iteration.stream)
        gate.done(0.001)
        gate.close()
        with pytest.raises(gpushare.InvalidState):
            gate.enter(0.001)


def test_a_policy_that_raises_ends_the_waits_of_its_runtime(caplog):
    class Broken(gpushare.Policy):
        def may_run(self, session, now_ns):
            raise RuntimeError("no idea")

    with gpushare.Runtime("host", policy=Broken(), capacity_bytes="16M") as runtime:
        session = runtime.open_session("a", ephemeral_bytes="1M")
        ticket = session.submit(lambda iteration: 7)
        seen = []

        def wait_in_a_thread():
            try:
                runtime.open_session("b", ephemeral_bytes="1M").iteration()
            except gpushare.Error as error:
                seen.append(error)

        thread = threading.Thread(target=wait_in_a_thread)
        thread.start()
        for waits in (session.iteration, ticket.result, ticket.exception, runtime.drain):  # without a timeout
            with pytest.raises(gpushare.CallbackFailed, match="may_run raised RuntimeError.*set another policy") as caught:
                waits()
            assert str(caught.value.__cause__) == "no idea"
        thread.join()
        assert isinstance(seen[0], gpushare.CallbackFailed)
        runtime.set_policy("fair")
        with session.iteration(timeout=600):
            pass
        assert ticket.result(timeout=600) == 7
    assert caplog.text.count("may_run raised") == 1


def test_tickets_are_futures(runtime, session):
    opened, told = threading.Event(), []
    first = session.submit(lambda iteration: opened.wait(60))
    last = session.submit(lambda iteration: 1 / 0)
    dropped = session.submit(told.append)
    assert isinstance(first, concurrent.futures.Future)
    first.add_done_callback(lambda future: told.append(future.result()))
    assert dropped.cancel() and dropped.cancelled()  # before it has begun
    with pytest.raises(TimeoutError):
        first.result(timeout=0.01)
    opened.set()
    done, left = concurrent.futures.wait([first, last, dropped], timeout=600)
    assert not left and first.result() is True and told == [True]
    assert isinstance(last.exception().__cause__, ZeroDivisionError)
    runtime.drain()
    assert told == [True] and not first.cancel()
    numbers = [session.submit(lambda iteration, number=number: number) for number in range(5)]
    assert sorted(ticket.result() for ticket in concurrent.futures.as_completed(numbers, timeout=600)) == list(range(5))


def test_a_ticket_is_done_when_the_device_is(session):
    opened, begun = threading.Event(), threading.Event()

    def slow():
        begun.set()
        opened.wait(60)

    ticket = session.submit(lambda iteration: iteration.launch(slow))
    told = threading.Event()
    ticket.add_done_callback(lambda future: told.set())
    assert begun.wait(60)
    assert not ticket.done() and not told.is_set()
    opened.set()
    assert told.wait(60) and ticket.done()


def test_tickets_of_a_session_that_ends_are_resolved(runtime):
    for end in ("close", "cancel"):
        session = runtime.open_session("a", ephemeral_bytes="1M")
        opened = threading.Event()
        running, queued = session.submit(lambda iteration: opened.wait(60)), session.submit(lambda iteration: 7)
        ended = threading.Thread(target=getattr(session, end))
        ended.start()
        with pytest.raises(gpushare.Cancelled):
            queued.result(timeout=600)
        opened.set()
        ended.join()
        assert running.result(timeout=600) is True
        given_back = runtime.open_session("b", ephemeral_bytes="1M").submit(lambda iteration: 9)
        given_back.close()
        assert given_back.result(timeout=600) == 9


def test_exports(tmp_path):
    with gpushare.Runtime("host", capacity_bytes="16M", record_timeline=True, record_allocations=True) as runtime:
        session = runtime.open_session("a", persistent_bytes="1M", ephemeral_bytes="1M")
        session.alloc("64K")
        for iteration in session.iterations(2):
            iteration.alloc("4K")
        runtime.synchronize()
        runtime.write_timeline(tmp_path / "timeline.json")
        runtime.write_snapshot(tmp_path / "snapshot.json", json=True)
        runtime.write_snapshot(tmp_path / "snapshot.pickle")
        runtime.write_allocation_log(tmp_path / "log.csv")
        assert re.search(r'^gpushare_session_iterations_total\{device="host",name="a",.*\} 2$', runtime.metrics(), re.MULTILINE)
        with pytest.raises(OSError, match="absent"):
            runtime.write_timeline(tmp_path / "absent" / "timeline.json")
    assert json.loads((tmp_path / "timeline.json").read_text())
    assert json.loads((tmp_path / "snapshot.json").read_text())["segments"]
    assert (tmp_path / "log.csv").read_text().startswith("Thread,Time,Action")


def test_the_simulated_device_runs_on_virtual_time():
    with gpushare.Runtime("sim?total_gib=1", policy="fifo") as runtime:
        session = runtime.open_session("a", ephemeral_bytes="1M")
        for iteration in session.iterations(3):
            iteration.stream.work(duration=10)
        runtime.synchronize()
        assert session.info()["service_ns"] == 30_000_000_000


def test_devices_and_policies():
    assert {"host", "sim"} <= {device["spec"] for device in gpushare.devices()}
    assert "fair" in gpushare.policies()
    with pytest.raises(gpushare.InvalidArgument):
        gpushare.load_backend("relative.so")


def test_arrays_of_text_take_what_numpy_counts_and_python_objects_are_refused(session):
    with session.range("1M") as elastic:
        granule = elastic.info()["granule_bytes"]
        elastic.commit(0, granule)
        text = elastic.array(granule // 16, "<U4")
        assert text.nbytes == granule
        with pytest.raises((gpushare.InvalidState, gpushare.InvalidArgument)):
            elastic.array(granule // 16 + 1, "<U4")
        for wrong in ("|O8", object, "<U0", "<f-8", "<M8[ns]"):
            with pytest.raises((gpushare.InvalidArgument, TypeError)):
                elastic.array(1, wrong)
        del text
    with session.iteration() as iteration:
        assert iteration.array(3, "<U5").nbytes == 60


def events_of(function):
    """How often Python calls a function, its own or C's, in function()."""
    counted = []

    def count(frame, event, argument):
        if event in ("call", "c_call"):
            counted.append(argument or frame.f_code.co_name)

    function()  # what is done once
    gc.collect()
    gc.disable()  # what others left is not ended within the count
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(counted)


def test_the_package_adds_few_calls_to_the_librarys(session, monkeypatch):
    """Speed as a count, which no load changes: benchmarks/python/binding_bench.py has the times."""
    from gpushare import _session

    monkeypatch.setattr(_session, "FIRST_WAIT_NS", 10**18)  # a turn that is late on a busy machine would cost a second wait

    def iteration():
        with session.iteration():
            pass

    with session.iteration() as step:
        arrays = events_of(lambda: step.array((4, 4)))
    assert events_of(iteration) <= 12 and arrays <= 15, (events_of(iteration), arrays)


def test_what_an_array_may_look_like(runtime, session):
    with session.iteration() as step:
        for shape in (3, np.int64(3), (3,), [3], np.array([3])):
            assert step.array(shape).shape == session.array(shape).shape == (3,)
        assert step.array(()).shape == () and step.array((0, 5)).shape == (0, 5)
        for dtype in ("<f4", "f4", float, np.float16, np.dtype("i2"), "bool", "<U3", [("a", "<i4"), ("b", "<f8")]):
            made = step.array((2, 3), dtype)
            assert made.nbytes == 6 * np.dtype(dtype).itemsize and made.ctypes.data % 256 == 0 and made.flags.writeable, dtype
        before = session.info()["ephemeral_bytes"]
        for bad in ((-1,), (2, -3)):
            with pytest.raises(gpushare.InvalidArgument, match="from 0"):
                step.array(bad)
        for make in (step.array, session.array):
            with pytest.raises(gpushare.InvalidArgument, match="8 EiB"):
                make((2**40, 2**40))
        for bad in (1.5, (2, 1.5), "3"):
            with pytest.raises(TypeError):
                step.array(bad)
        with pytest.raises(gpushare.InvalidArgument, match="Python objects"):
            step.array(3, object)
        assert session.info()["ephemeral_bytes"] == before
    with pytest.raises(gpushare.Error):
        step.array(3)
    with pytest.raises(gpushare.OutOfMemory), session.iteration() as step:
        step.array((1 << 30,))


def test_a_second_wait_for_a_turn_goes_on_after_the_first(runtime, session):
    """The first wait is short: beyond it the turn comes all the same, and a timeout counts."""
    other = runtime.open_session("other", ephemeral_bytes="56M")  # no room beside the session: one of them at a time
    order = []

    def wait_long():
        with session.iteration():
            order.append("session")

    def wait_short():
        try:
            session.iteration(timeout=0.01)
        except gpushare.TimedOut:
            order.append("timed out")

    with other.iteration() as held:
        hurried = threading.Thread(target=wait_short)
        hurried.start()
        hurried.join()
        waiting = threading.Thread(target=wait_long)
        waiting.start()
        waiting.join(0.25)  # beyond the first wait, on most machines
        order.append("other")
        held.array((4,))
    waiting.join()
    assert order == ["timed out", "other", "session"]
