"""Continuous batching."""
import asyncio
import concurrent.futures
import pathlib
import runpy
import threading

import pytest

import gpushare

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples" / "python"


def count_up(iteration, step):
    """Generates 0, 1, 2, ... up to the payload."""
    for member in step.members:
        if member.generates:
            member.emit(len(member.values), done=len(member.values) + 1 == member.payload)


def test_values_come_step_by_step(session):
    with gpushare.StepQueue(session, count_up, max_prefill_tokens=4) as queue:
        streams = [queue.submit(number, prompt_tokens=3 * number, first_deadline=60, token_time=60) for number in range(1, 9)]
        assert list(streams[4]) == list(range(5))
        assert [stream.result(timeout=600) for stream in streams] == [list(range(number)) for number in range(1, 9)]
        assert not any(stream.late for stream in streams)
        queue.drain(timeout=600)
        info = queue.info()
        assert (info["in_time"], info["tokens"], info["prefill_tokens"]) == (8, 36, 108)
        with pytest.raises(gpushare.InvalidState):
            queue.submit(1, prompt_tokens=1)


def test_answers_can_be_awaited(session):
    with gpushare.StepQueue(session, count_up, "fifo") as queue:

        async def ask():
            return await asyncio.wrap_future(queue.submit(3, prompt_tokens=1).future)

        assert asyncio.run(ask()) == [0, 1, 2]


def test_failures_are_those_of_their_requests(session):
    def step(iteration, step):
        for member in step.members:
            if member.payload == "step":
                raise RuntimeError("the whole step")
            if member.payload == "one":
                member.fail(ValueError("this one"))
        count_up(iteration, step)

    with gpushare.StepQueue(session, step, max_members=1) as queue:
        whole = queue.submit("step", prompt_tokens=1)
        with pytest.raises(gpushare.CallbackFailed, match="the whole step"):
            whole.result(timeout=600)
        one = queue.submit("one", prompt_tokens=1)
        with pytest.raises(gpushare.CallbackFailed, match="this one"):
            list(one)
        assert queue.submit(2, prompt_tokens=1).result(timeout=600) == [0, 1]


def test_a_function_that_a_step_launches_fails_its_requests_alone(session):
    def step(iteration, step):
        for member in step.members:
            iteration.launch(lambda payload=member.payload: 1 / payload)
            if member.generates:
                member.emit(7, done=True)

    with gpushare.StepQueue(session, step) as queue:
        with pytest.raises(gpushare.CallbackFailed, match="division by zero"):
            queue.submit(0, prompt_tokens=1).result(timeout=600)
        assert queue.submit(2, prompt_tokens=1).result(timeout=600) == [7]
    with session.iteration():
        pass


def test_a_member_that_is_cancelled_leaves(session):
    begun, left = threading.Event(), []

    def step(iteration, step):
        left.extend(step.left)
        for member in step.members:
            member.state = f"of {member.payload}"
            if member.generates:
                member.emit("more")
        begun.set()

    queue = gpushare.StepQueue(session, step)
    stream = queue.submit("endless", prompt_tokens=5)
    assert begun.wait(60)
    assert next(iter(stream)) == "more"
    assert stream.cancel()
    with pytest.raises(gpushare.Cancelled):
        stream.result(timeout=600)
    assert left == ["of endless"] and not stream.cancel()
    second = queue.submit("endless", prompt_tokens=5)
    assert next(iter(second)) == "more"
    queue.close()
    with pytest.raises(gpushare.Cancelled):
        second.result(timeout=600)
    assert left == ["of endless"] * 2


def test_members_share_the_memory(session):
    """Members are returned when the limit falls, and start again with what they had generated."""
    starts = []

    def step(iteration, step):
        for member in step.members:
            if member.prefill and member.before == 0:
                starts.append((member.payload, member.total))
            member.holds(10 + len(member.values))
        count_up(iteration, step)

    with gpushare.StepQueue(session, step, memory=10000) as queue:
        stream = queue.submit(2000, prompt_tokens=3, start_bytes=10, step_bytes=1)
        values = iter(stream)
        assert [next(values) for _ in range(5)] == list(range(5))
        queue.set_memory(0)
        queue.set_memory(10000)
        with pytest.raises(gpushare.ExceedsCapacity):
            queue.submit(1, prompt_tokens=1, start_bytes="1M")
        with pytest.raises(gpushare.InvalidArgument):
            queue.set_memory("1M")
        assert stream.result(timeout=600) == list(range(2000))
        info = queue.info()
        assert len(starts) == 1 + info["returned"] and info["bytes"] == 0
        too_long = queue.submit(20000, prompt_tokens=1, start_bytes=10, step_bytes=1)
        with pytest.raises(gpushare.DeviceOutOfMemory):
            too_long.result(timeout=600)


def test_the_example_generates_what_a_model_alone_does(capsys):
    runpy.run_path(str(EXAMPLES / "generate.py"))["main"](6)
    assert "6 answers" in capsys.readouterr().out


def test_a_cancelled_future_cancels_its_request_and_ends_its_iteration(session):
    def step(iteration, step):
        for member in step.members:
            if member.generates:
                member.emit("more")

    with gpushare.StepQueue(session, step) as queue:
        stream = queue.submit(prompt_tokens=1)
        seen = []
        reader = threading.Thread(target=lambda: seen.extend(stream), daemon=True)

        async def give_up():
            waiting = asyncio.ensure_future(asyncio.wrap_future(stream.future))
            while not stream._ready:
                await asyncio.sleep(0)
            reader.start()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "excepthook", lambda of: seen.append(of.exc_type))
            asyncio.run(give_up())
            queue.drain(timeout=600)
            reader.join(60)
        assert not reader.is_alive() and seen[-1] is concurrent.futures.CancelledError
        assert queue.info()["cancelled"] == 1


def test_functions_that_wait_for_a_future_run_without_the_streams_lock(session):
    with gpushare.StepQueue(session, count_up) as queue:
        read = []

        def when_done(future):
            reader = threading.Thread(target=lambda: read.extend(stream), daemon=True)
            reader.start()
            reader.join(60)

        hold = threading.Event()
        queue.submit(1, prompt_tokens=1).future.add_done_callback(lambda _: hold.wait(60))
        stream = queue.submit(3, prompt_tokens=1)
        stream.future.add_done_callback(when_done)
        hold.set()
        stream.result(timeout=600)
        queue.drain(timeout=600)
        assert read == [0, 1, 2]


def test_a_member_is_the_functions_only_while_it_runs(session):
    kept = []

    def step(iteration, step):
        kept.extend(step.members)
        count_up(iteration, step)

    with gpushare.StepQueue(session, step) as queue:
        assert queue.submit(1, prompt_tokens=1).result(timeout=600) == [0]
        for late in (lambda: kept[0].emit(1), lambda: kept[0].fail(ValueError("late")), lambda: kept[0].holds(1)):
            with pytest.raises(gpushare.InvalidState, match="is over"):
                late()


def test_cancel_is_true_though_the_answer_comes_first(session):
    from test_serving import answered_before_cancel_returns

    with gpushare.StepQueue(session, count_up) as queue:
        stream = queue.submit(10**9, prompt_tokens=1)
        answered_before_cancel_returns(queue, stream.future)
        assert stream.future.cancel() and stream.future.cancelled()
