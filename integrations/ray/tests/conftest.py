"""Ray is not needed: what these tests use of it is faked below. scripts/test-ray runs the real one."""
import asyncio
import os
import pathlib
import sys
import tempfile
import threading
import types

import pytest

FOLDER = pathlib.Path(os.environ["GPUSHARE_TOOL_FOLDER"])
os.environ["GPUSHARE_TOOL"] = str(FOLDER / "gpushare")


class TrialScheduler:
    CONTINUE, PAUSE, STOP, NOOP = "CONTINUE", "PAUSE", "STOP", "NOOP"
    metric = None
    supports_buffered_results = True

    def set_search_properties(self, metric, mode, **spec):
        return True

    def on_trial_add(self, controller, trial):
        pass

    on_trial_error = on_trial_remove = on_trial_add

    def on_trial_result(self, controller, trial, result):
        return self.CONTINUE

    def on_trial_complete(self, controller, trial, result):
        pass

    def choose_trial_to_run(self, controller):
        return next((trial for trial in controller.get_trials() if trial.status == "PENDING"), None)

    def debug_string(self):
        return ""


class PlacementGroupFactory:
    def __init__(self, bundles):
        self.required_resources = dict(bundles[0])


class Ray(types.ModuleType):
    """One worker, and actors that run in this process when they are called."""

    def __init__(self):
        super().__init__("ray")
        self.resources, self.ids, self.trial, self.actors, self.dead, self.slow = {}, [], None, {}, False, False

    def get_runtime_context(self):
        return types.SimpleNamespace(get_assigned_resources=lambda: self.resources, get_accelerator_ids=lambda: {"GPU": self.ids},
                                     get_node_id=lambda: "node-1")

    def nodes(self):
        return [{"NodeID": "node-0", "Resources": {"CPU": 4}}, {"NodeID": "node-1", "Resources": {"GPU": 2.0}}]

    def cluster_resources(self):
        return {"GPU": 2.0}

    def get(self, value, timeout=None):
        return value

    def wait(self, values, timeout=None):
        return ([], values) if self.slow else (values, [])

    def get_actor(self, name, namespace=None):
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def remote(self, **_):
        def make(cls):
            def options(name, namespace, get_if_exists, lifetime=None):
                def create():
                    if self.dead:
                        raise RuntimeError("the cluster is away")
                    return self.actors.setdefault(name, Actor(cls))
                return types.SimpleNamespace(remote=create)
            return types.SimpleNamespace(options=options)
        return make


class Actor:
    """Its methods run on an event loop of its own, as an asynchronous actor's do."""

    def __init__(self, cls):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

        async def make():
            return cls()

        self.made = asyncio.run_coroutine_threadsafe(make(), self._loop).result(60)

    def __getattr__(self, name):
        return types.SimpleNamespace(
            remote=lambda *arguments: asyncio.run_coroutine_threadsafe(getattr(self.made, name)(*arguments), self._loop).result(60))


TrialScheduler.__module__ = "ray.tune.schedulers.trial_scheduler"  # where it is found by its pickles
fake = Ray()
tune = types.ModuleType("ray.tune")
tune.PlacementGroupFactory = PlacementGroupFactory
tune.get_context = lambda: types.SimpleNamespace(get_trial_id=lambda: fake.trial)
schedulers = types.ModuleType("ray.tune.schedulers")
trial_scheduler = types.ModuleType("ray.tune.schedulers.trial_scheduler")
trial_scheduler.TrialScheduler = trial_scheduler.FIFOScheduler = TrialScheduler
fake.tune = tune
strategies = types.ModuleType("ray.util.scheduling_strategies")
strategies.NodeAffinitySchedulingStrategy = lambda node_id, soft: ("on", node_id, soft)
sys.modules.update({"ray.util": types.ModuleType("ray.util"), "ray.util.scheduling_strategies": strategies})
sys.modules.update({"ray": fake, "ray.tune": tune, "ray.tune.schedulers": schedulers, "ray.tune.schedulers.trial_scheduler": trial_scheduler})


@pytest.fixture
def ray():
    fake.__init__()
    fake.tune = tune
    fake.actors = {}
    return fake


@pytest.fixture
def daemon(monkeypatch):
    """A node without a daemon yet; one that is started is stopped."""
    from gpushare_ray import daemon as module

    with tempfile.TemporaryDirectory(prefix="gs-") as folder:
        monkeypatch.setenv("GPUSHARE_SOCKET", f"{folder}/run/daemon.sock")
        yield module
        module.stop_daemon()
