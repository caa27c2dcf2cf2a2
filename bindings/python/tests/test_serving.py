"""The request queue and its parts."""
import asyncio
import threading

import pytest

import gpushare


def test_requests_are_answered_with_their_results(runtime, session):
    with gpushare.RequestQueue(runtime) as queue:
        queue.add_model(session, lambda iteration, batch: [payload * 2 for payload in batch.payloads], c0_ns=1_000_000)
        queue.observe(0, 0, 0.001)
        futures = [queue.submit(number, deadline=60) for number in range(40)]
        outcomes = [future.result(timeout=600) for future in futures]
        assert [outcome.result for outcome in outcomes] == [2 * number for number in range(40)]
        assert all(outcome.in_time and outcome.batch_count >= 1 and outcome.drop is None for outcome in outcomes)
        queue.drain(timeout=600)
        assert queue.info()["in_time"] == 40
        assert queue.profile(0, 0)["samples"] > 0
        with pytest.raises(gpushare.InvalidState):
            queue.submit(1, deadline=1)


def test_requests_can_be_awaited(runtime, session):
    with gpushare.RequestQueue(runtime, "edf") as queue:
        queue.add_model(session, lambda iteration, batch: batch.payloads)

        async def ask():
            return await asyncio.gather(*(queue.ask(number, deadline=60) for number in range(5)))

        assert asyncio.run(ask()) == list(range(5))


def test_a_task_that_gives_up_takes_its_request_out(runtime, session):
    """With one batch under way, the next request waits; who awaits it is cancelled."""
    begun, go_on = threading.Event(), threading.Event()

    def run(iteration, batch):
        begun.set()
        assert go_on.wait(60)

    async def give_up(queue):
        first = asyncio.ensure_future(queue.ask(1, deadline=60))
        assert await asyncio.get_running_loop().run_in_executor(None, begun.wait, 60)
        second = asyncio.ensure_future(queue.ask(2, deadline=60))
        await asyncio.sleep(0)  # it has submitted
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go_on.set()
        await first

    with gpushare.RequestQueue(runtime, "fifo") as queue:
        queue.add_model(session, run, batch_sizes=[1])
        asyncio.run(give_up(queue))
        queue.drain(timeout=600)
        info = queue.info()
        assert (info["accepted"], info["cancelled"], info["batches"]) == (2, 1, 1)


def test_a_batch_function_that_raises_fails_its_requests_alone(runtime, session):
    def run(iteration, batch):
        if "bad" in batch.payloads:
            raise ValueError("bad request")
        return batch.payloads

    with gpushare.RequestQueue(runtime, "fifo") as queue:
        queue.add_model(session, run, batch_sizes=[1])
        bad, good = queue.submit("bad", deadline=60), queue.submit("good", deadline=60)
        with pytest.raises(gpushare.CallbackFailed, match="bad request") as caught:
            bad.result(timeout=600)
        assert isinstance(caught.value.__cause__, ValueError)
        assert good.result(timeout=600).result == "good"


def test_a_function_that_a_batch_launches_fails_its_requests_alone(runtime, session):
    def run(iteration, batch):
        for payload in batch.payloads:
            iteration.launch(lambda payload=payload: 1 / payload)
        return batch.payloads

    with gpushare.RequestQueue(runtime, "fifo") as queue:
        queue.add_model(session, run, batch_sizes=[1])
        assert queue.submit(2, deadline=60).result(timeout=600).result == 2
        with pytest.raises(gpushare.CallbackFailed, match="division by zero") as caught:
            queue.submit(0, deadline=60).result(timeout=600)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert queue.submit(3, deadline=60).result(timeout=600).result == 3
    with session.iteration():  # nothing of it is told here
        pass


def test_results_must_match_the_batch(runtime, session):
    with gpushare.RequestQueue(runtime, "fifo") as queue:
        queue.add_model(session, lambda iteration, batch: [1, 2, 3], batch_sizes=[1])
        with pytest.raises(gpushare.CallbackFailed):
            queue.submit(0, deadline=60).result(timeout=600)


def test_refusals(runtime, session):
    go_on = threading.Event()
    with gpushare.RequestQueue(runtime) as queue:
        queue.add_model(session, lambda iteration, batch: go_on.wait(60) and None)
        queue.observe(0, 7, 1000.0)
        with pytest.raises(gpushare.TimedOut):  # one runs to see whether the estimate holds, one waits for that
            for _ in range(3):
                queue.submit(0, deadline=30, application=7)
        go_on.set()
        with pytest.raises(gpushare.InvalidArgument):
            queue.submit(0, deadline=1, model=3)
        with pytest.raises(gpushare.InvalidArgument):
            queue.submit(0, deadline=1, cost=-1)
        with pytest.raises(gpushare.NotFound):
            queue.cancel(12345)
    with pytest.raises(gpushare.NotFound, match="best-guess"):
        gpushare.RequestQueue(runtime, "best-guess")


def test_a_batch_function_returns_one_result_a_request(runtime, session):
    with gpushare.RequestQueue(runtime, "fifo") as queue:
        queue.add_model(session, lambda iteration, batch: ["one", "too many"], batch_sizes=[1])
        with pytest.raises(gpushare.CallbackFailed, match="2 results for 1 requests"):
            queue.submit(0, deadline=60).result(timeout=600)


def test_the_batcher_alone():
    with gpushare.Batcher("edf") as batcher:
        batcher.add_model(batch_sizes=[1, 2, 4], c0_ns=1_000)
        batcher.observe(0, 0, 1_000)
        for number in range(3):
            batcher.arrive(number, now_ns=0, deadline_ns=10**9)
        assert batcher.pending == 3
        batch, _ = batcher.next(0)
        assert batch is not None and set(batch["ids"]) <= {0, 1, 2}
        batcher.started(batch["id"], 0)
        batcher.finished(batch["id"], 2_000, 2_000)
        batcher.observe_run(0, [0, 0], 2_000)
        left = batcher.pending
        for number in range(3):
            if number not in batch["ids"]:
                batcher.cancel(number, 3_000)
        assert len(batcher.take_drops()) == left and batcher.pending == 0
        assert batcher.next(4_000)[0] is None
        assert batcher.profile(0, 0)["samples"] >= 1


def test_features_tell_the_short_from_the_long():
    with gpushare.Batcher() as batcher:
        batcher.add_model()
        for number in range(256):
            tokens = 1 + number * 37 % 100
            batcher.observe(0, 0, tokens * 1_000_000, features=[tokens])
        assert batcher.next(0)[0] is None
        batcher.arrive(1, now_ns=0, deadline_ns=30_000_000, features=[100])  # runs to see whether it is hopeless
        with pytest.raises(gpushare.TimedOut):
            batcher.arrive(4, now_ns=0, deadline_ns=30_000_000, features=[100])
        probe, _ = batcher.next(0)
        assert probe is not None and probe["ids"] == [1]
        batcher.finished(probe["id"], 1, 0)
        batcher.arrive(2, now_ns=0, deadline_ns=30_000_000, features=[10])
        with pytest.raises(gpushare.InvalidArgument, match="application 0 of model 0 has 1"):
            batcher.arrive(3, now_ns=0, deadline_ns=30_000_000, features=[10, 10])
        batch, _ = batcher.next(0)
        assert batch is not None
        batcher.started(batch["id"], 0)
        batcher.finished_run(batch["id"], 10_000_000, 10_000_000, [10_000_000])
        assert batcher.profile(0, 0)["samples"] == 257


def test_histograms_and_the_score_queue():
    with gpushare.Histogram() as histogram:
        for number in range(1_000):
            histogram.record(1_000 + number * 617 % 1_000)  # shuffled: a rising series would be taken for a shift
        assert abs(histogram.quantile(0.5) - 1_500) < 50
        assert histogram.quantile(0.5, k=16) > histogram.quantile(0.5)
        again = gpushare.Histogram.parse(histogram.serialize())
        assert again.info()["count"] == 1_000
        again.merge(histogram)
        assert again.info()["count"] == 2_000
        again.reset()
        with pytest.raises(gpushare.NotReady):
            again.quantile(0.5)
        with pytest.raises(gpushare.MalformedInput):
            gpushare.Histogram.parse("no histogram")
        with gpushare.ScoreQueue() as queue:
            index = queue.add_class(histogram)
            queue.set_class(index, histogram, k=2)
            entry = queue.insert(index, 10**6, 1)
            queue.insert(index, 10**7, 2)
            assert len(queue) == 2 and queue.best(0)[0] in (1, 2)
            queue.erase(entry)
            assert queue.pop(0, 5) == [2]
            with pytest.raises(gpushare.NotReady):
                queue.best(0)


def test_cancel_is_true_only_for_a_request_that_does_not_run(runtime, session):
    begun, go_on, ran = threading.Event(), threading.Event(), []

    def run(iteration, batch):
        begun.set()
        assert go_on.wait(60)
        ran.extend(batch.payloads)

    with gpushare.RequestQueue(runtime, "fifo") as queue:
        queue.add_model(session, run, batch_sizes=[1])
        first = queue.submit(1, deadline=60)
        assert begun.wait(60)
        # The next one or two may have been handed to the device already.
        waiting = [queue.submit(n, deadline=60) for n in range(2, 8)]
        last = waiting.pop()
        assert not first.cancel()  # it runs
        assert last.cancel()
        assert last.cancel() and last.cancelled()
        go_on.set()
        assert first.result(60).in_time and all(each.result(60).in_time for each in waiting)
        assert not first.cancel() and not waiting[0].cancel()  # answered
        queue.drain(timeout=600)
        assert ran == [1, 2, 3, 4, 5, 6]
        assert queue.info()["cancelled"] == 1
    assert not waiting[0].cancel()  # the queue is closed


def test_no_deadline_is_none_or_infinity(runtime, session):
    for policy in ("gpushare", "edf", "nexus", "nexus-earliest", "clockwork", "orloj", "clipper", "greedy"):
        with gpushare.RequestQueue(runtime, policy) as queue:
            queue.add_model(session, lambda iteration, batch: batch.payloads)
            for deadline in (None, float("inf"), 60):
                assert queue.submit(deadline, deadline=deadline).result(60).in_time


def test_each_request_of_a_batch_can_have_its_own_outcome(runtime, session):
    begun, go_on = threading.Event(), threading.Event()

    def run(iteration, batch):
        begun.set()
        assert go_on.wait(60)
        return [ValueError("odd") if payload % 2 else payload for payload in batch.payloads]

    with gpushare.RequestQueue(runtime, "fifo") as queue:
        queue.add_model(session, run)
        futures = [queue.submit(0, deadline=60)]
        assert begun.wait(60)
        futures += [queue.submit(number, deadline=60) for number in range(1, 8)]
        go_on.set()
        for number, future in enumerate(futures):
            if number % 2:
                with pytest.raises(gpushare.CallbackFailed, match="odd"):
                    future.result(60)
            else:
                assert future.result(60).result == number
        queue.drain(timeout=600)
        info = queue.info()
        assert (info["failed"], info["in_time"], info["batches"]) == (4, 4, 2)


def test_a_batch_is_the_functions_only_while_it_runs(runtime, session):
    kept = []
    with gpushare.RequestQueue(runtime) as queue:
        queue.add_model(session, lambda iteration, batch: kept.append(batch))
        queue.submit(deadline=60).result(timeout=600)
        with pytest.raises(gpushare.InvalidState, match="is over"):
            kept[0].set_execution(0, 1.0)


def answered_before_cancel_returns(queue, future):
    """Has queue.cancel return when the library's answer to it, on another thread, has reached the future."""
    cancel, answered = queue.cancel, threading.Event()
    future.add_done_callback(lambda _: answered.set())

    def slow(request_id):
        cancel(request_id)
        assert answered.wait(60)

    queue.cancel = slow


def test_cancel_is_true_though_the_answer_comes_first(runtime, session):
    begun, go_on = threading.Event(), threading.Event()

    def run(iteration, batch):
        begun.set()
        assert go_on.wait(60)

    with gpushare.RequestQueue(runtime, "fifo") as queue:
        queue.add_model(session, run, batch_sizes=[1])
        queue.submit(1, deadline=60)
        assert begun.wait(60)
        last = [queue.submit(n, deadline=60) for n in range(2, 8)][-1]
        answered_before_cancel_returns(queue, last)
        try:
            assert last.cancel() and last.cancelled() and last.cancel()
        finally:
            go_on.set()
