"""What Ray assigned becomes a session with weight and memory; more is refused; weights change without a restart."""
import asyncio
import gc
import inspect
import pathlib
import re
import time
import types

import gpushare
import pytest

import gpushare_ray
from gpushare_ray import board
from gpushare_ray.session import device_of


@pytest.fixture
def node(daemon, ray):
    daemon.ensure_daemon("host", 2, "64M")
    ray.resources, ray.ids = {"GPU": 0.25}, ["1"]
    return daemon


def sessions(daemon):
    return {session["name"]: session for session in daemon.status()["sessions"]}


def until(condition, timeout_s=60):
    """Waits for something that happens soon. The time is a limit against hanging, no expectation."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_quarter_of_a_gpu(node):
    @gpushare_ray.with_session(name="quarter", persistent_bytes="1M", ephemeral_bytes="1M")
    def train(session, steps, scale=1):
        for step in session.iterations(steps):
            step.array((16,))[:] = scale
        with pytest.raises(gpushare.QuotaExceeded):
            session.alloc("17M")
        assert (session.fraction, session.gpu, session.memory_limit) == (0.25, "1", 16 << 20)
        assert sessions(node)["quarter"]["weight"] == 0.25
        with pytest.raises(gpushare.QuotaExceeded):
            session.runtime.open_session("second", memory="1M")  # the first has all that this worker may have
        return steps

    assert train(3, scale=2) == 3
    assert list(inspect.signature(train).parameters) == ["steps", "scale"]
    until(lambda: not sessions(node))


def test_less_by_argument_and_more_is_refused(node):
    with gpushare_ray.open_session("less", memory="8M", weight=0.1) as session:
        assert session.memory_limit == 8 << 20
        until(lambda: sessions(node)["less"]["weight"] == 0.1)
    with pytest.raises(gpushare.QuotaExceeded, match="Ray assigned: 0.25 of GPU 1"):
        gpushare_ray.open_session(memory="17M")
    with pytest.raises(gpushare.QuotaExceeded, match="weight=0.5"):
        gpushare_ray.open_session(weight=0.5)
    assert sessions(node) == {}


def test_all_that_can_be_decorated(node):
    decorator = gpushare_ray.with_session(name="decorated")

    class Trainer:
        @decorator
        def method(self, session, x):
            return self, session.fraction, x

        @decorator
        async def coroutine(self, session, x):
            return session.fraction + x

    @decorator
    def generator(session, count):
        for number in range(count):
            assert sessions(node)
            yield number
        return "end"

    @decorator
    async def async_generator(session, count):
        for number in range(count):
            assert sessions(node)
            yield number

    @decorator
    async def fails(session):
        raise KeyError("mine")

    async def collected():
        return [each async for each in async_generator(3)]

    trainer = Trainer()
    assert trainer.method(7) == (trainer, 0.25, 7) and list(inspect.signature(Trainer.method).parameters) == ["self", "x"]
    assert inspect.iscoroutinefunction(Trainer.coroutine) and asyncio.run(trainer.coroutine(1)) == 1.25
    assert inspect.isgeneratorfunction(generator) and list(generator(3)) == [0, 1, 2]
    left = generator(3)
    next(left)
    left.close()
    assert inspect.isasyncgenfunction(async_generator) and asyncio.run(collected()) == [0, 1, 2]
    with pytest.raises(KeyError):
        asyncio.run(fails())
    until(lambda: not sessions(node))


def test_actor_classes(node):
    @gpushare_ray.with_session(name="actor")
    class Actor:
        """Of the user's."""

        def __init__(self, session, size, fails=False):
            self.session = session
            self.weights = session.alloc(size)
            if fails:
                raise KeyError("mine")

        def step(self):
            with self.session.iteration() as iteration:
                iteration.alloc("1K")
            return self.session.info()["persistent_bytes"]

    assert Actor.__name__ == "Actor" and Actor.__doc__ == "Of the user's."
    assert list(inspect.signature(Actor.__init__).parameters) == ["self", "size", "fails"]
    actor = Actor(4096)
    assert actor.step() == actor.step() == 4096 and sessions(node)
    with pytest.raises(gpushare.InvalidState):
        session = actor.session
        del actor
        gc.collect()
        session.info()
    with pytest.raises(KeyError):
        Actor("1M", fails=True)
    until(lambda: not sessions(node))


def test_an_exception_ends_the_session(node):
    @gpushare_ray.with_session(name="fails")
    def train(session):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    until(lambda: not sessions(node))


def test_without_a_gpu_or_a_device(node, ray):
    with pytest.raises(gpushare.InvalidArgument, match="index is 1"):
        gpushare_ray.open_session(index=1)
    ray.ids = ["5"]
    with pytest.raises(gpushare.NotFound, match="GPU 5"):
        gpushare_ray.open_session()
    ray.resources, ray.ids = {}, []
    with pytest.raises(gpushare.Unavailable, match="num_gpus"):
        gpushare_ray.open_session()


def test_the_first_session_starts_the_daemon_for_all_gpus_of_its_node(daemon, ray, monkeypatch):
    monkeypatch.setattr(daemon.gpushare, "devices", lambda: [])  # a node without a GPU that works: host devices
    ray.resources, ray.ids = {"GPU": 0.5}, ["1"]
    with gpushare_ray.open_session("first") as session:
        assert len(daemon.status()["devices"]) == 2
        assert session.memory_limit == 512 << 20


def test_devices_are_found_by_name_before_position():
    devices = [{"device": "cuda:2"}, {"device": "cuda:0"}]
    assert device_of("0", devices)["device"] == "cuda:0"
    assert device_of("1", devices)["device"] == "cuda:0"
    assert device_of("2", devices)["device"] == "cuda:2"
    with pytest.raises(gpushare.NotFound):
        device_of("GPU-abc", devices)


def test_device_ids_of_all_forms():
    cuda, host = ([{"device": f"{kind}{number}"} for number in range(2)] for kind in ("cuda:", "host?total_bytes="))
    whole, mig = "GPU-8f1c2ab9-4a6d-1111-2222-333344445555", "MIG-0d3f9a77-aaaa-bbbb-cccc-ddddeeeeffff"
    for ids in (["5", "3"], ["1", "0"], [whole, mig], ["GPU-8f1c", "MIG-0d3f"], [whole, "7"]):
        for number, given in enumerate(ids):
            assert device_of(given, cuda, visible=ids) is cuda[number]  # the daemon's first is the first that CUDA shows it
            assert device_of(given, host, node=ids) is host[number]
    assert device_of(whole, cuda, visible=["GPU-8f1c", "GPU-9"]) is cuda[0]  # Ray has the name in full, or cut
    assert device_of("GPU-8f1c", cuda, visible=["GPU-9", whole]) is cuda[1]
    for given, visible in (("2", ["5", "3"]), ("GPU-77", [whole, mig]), ("GPU-", [whole, mig]), ("GPU-8f1c", ["GPU-8f1c2", "GPU-8f1c3"]), (whole, None)):
        with pytest.raises(gpushare.NotFound, match="CUDA_VISIBLE_DEVICES of `ray start`"):
            device_of(given, cuda, visible=visible)
    with pytest.raises(gpushare.NotFound):
        device_of("GPU-77", host, node=[whole, mig])


def test_the_daemon_sees_what_ray_sees(daemon, ray, monkeypatch):
    """Ray was started with CUDA_VISIBLE_DEVICES, and the first session starts the daemon."""
    monkeypatch.setattr(daemon.gpushare, "devices", lambda: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb")  # as Ray has it in a worker that it assigned one GPU
    ids = ["GPU-aaaa", "GPU-bbbb"]
    worker = types.SimpleNamespace(original_visible_accelerator_ids={"GPU": ids})
    monkeypatch.setattr(ray, "_private", types.SimpleNamespace(worker=types.SimpleNamespace(global_worker=worker)), raising=False)
    ray.resources, ray.ids = {"GPU": 0.5}, ["GPU-bbbb"]
    with gpushare_ray.open_session("first") as session:
        status = daemon.status()
        assert daemon.visible_gpus(status["pid"]) == ids and len(status["devices"]) == 2
        assert [entry["device"] for entry in daemon.status()["sessions"]] == [status["devices"][1]["device"]] and session.gpu == "GPU-bbbb"
    assert daemon.visible_gpus(2**22 + 1) is None and daemon.gpu_list(" 0, GPU-a ,") == ["0", "GPU-a"] and daemon.gpu_list("") is None


def test_each_mig_instance_has_a_daemon(daemon, ray, monkeypatch):
    """CUDA shows a process only the first of several MIG instances: one daemon for all would not start, or miss the others."""
    one, other = "MIG-0d3f9a77-aaaa-bbbb-cccc-ddddeeeeffff", "MIG-GPU-8f1c2ab9-4a6d/7/0"
    assert daemon.own_instance(one) is None and daemon.own_instance("GPU-1") is None  # GPUSHARE_SOCKET names a daemon
    folder = daemon.socket_path().parent.parent
    monkeypatch.delenv("GPUSHARE_SOCKET")
    monkeypatch.setattr(daemon.tempfile, "gettempdir", lambda: str(folder))
    assert daemon.own_instance(one) is None  # no CUDA: host devices stand for the instances, in one daemon
    monkeypatch.setattr(daemon, "own_instance", lambda gpu: gpu)
    try:
        for gpu in (one, other):
            ray.resources, ray.ids = {"GPU": 1.0}, [gpu]
            with gpushare_ray.open_session("whole") as session:
                status = daemon.status(mig=gpu)
                assert daemon.visible_gpus(status["pid"]) == [gpu] and len(status["devices"]) == 1
                assert session.memory_limit == status["devices"][0]["capacity_bytes"] and len(status["sessions"]) == 1
        ray.resources = {"GPU": 0.5}
        with gpushare_ray.open_session("half") as session:
            assert session.memory_limit == 512 << 20
        assert daemon.status() is None and len({daemon.status(mig=gpu)["pid"] for gpu in (one, other)}) == 2
    finally:
        assert daemon.stop_daemon()
    assert daemon.status(mig=one) is daemon.status(mig=other) is None and not daemon.stop_daemon()


def test_a_trial_follows_its_weight(node, ray):
    ray.trial = "trial-1"
    actor = ray.remote()(board.Board).options(board.NAME, board.NAMESPACE, True).remote()
    with gpushare_ray.open_session(persistent_bytes="1M", ephemeral_bytes="1M") as session:
        for _ in session.iterations(2):
            pass
        until(lambda: actor.trials.remote().get("trial-1", {}).get("iterations") == 2)
        assert actor.trials.remote()["trial-1"]["device"] == "node-1/1"
        actor.set_weights.remote({"trial-1": 0.75})
        until(lambda: sessions(node)["trial-1"]["weight"] == 0.75)
        assert session.info()["iterations_done"] == 2  # the same session
    until(lambda: "trial-1" not in actor.trials.remote())


def test_the_board_wakes_who_waits():
    async def play():
        made = board.Board()
        waiting = asyncio.create_task(made.next_weight("a", 0, {"device": "d"}, timeout_s=60))
        await asyncio.sleep(0)
        await made.set_weights({"b": 1.0})
        assert not waiting.done()
        await made.set_weights({"a": 0.5})
        assert await waiting == (1, 0.5)
        assert await made.next_weight("a", 1, {}, timeout_s=0.01) == (1, 0.5)  # nothing new
        await made.set_weights({"a": 0.5})
        assert (await made.next_weight("a", 1, {}, timeout_s=0.01))[0] == 1  # the same weight is no change

    asyncio.run(play())


def test_the_pages_sessions_run_as_they_are_printed(daemon, ray, monkeypatch):
    """The first snippet of docs/ray.md; scripts/test-ray runs both with Ray itself."""
    daemon.ensure_daemon("host", 1, "3G")

    def remote(num_gpus):
        def call(thing, arguments):
            ray.resources, ray.ids = {"GPU": num_gpus}, ["0"]
            return thing(*arguments)

        return lambda thing: types.SimpleNamespace(remote=lambda *arguments: call(thing, arguments))

    monkeypatch.setattr(ray, "remote", remote, raising=False)
    monkeypatch.setattr(ray, "init", lambda num_gpus: None, raising=False)
    page = (pathlib.Path(__file__).resolve().parents[3] / "docs/ray.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    server = names["Server"].remote()
    assert server.session.memory_limit == 2 << 30 and server.session.weight == 0.75
    server.session.close()


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 16])
def test_all_parts_of_a_device_can_be_used_in_full(node, ray, parts):
    ray.resources = {"GPU": int(10000 / parts) / 10000}  # Ray counts in ten-thousandths
    opened = [gpushare_ray.open_session(f"part-{number}") for number in range(parts)]
    try:
        blocks = [session.alloc(session.memory_limit) for session in opened]
        for session in opened:
            with pytest.raises(gpushare.OutOfMemory):
                session.alloc(1)
        assert sum(block.nbytes for block in blocks) > (64 << 20) - parts * (2 << 20)  # nothing is lost but parts of granules
    finally:
        for session in opened:
            session.close()
