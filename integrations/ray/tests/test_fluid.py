"""FluidScheduler: groups, results and completions to widths and weights; growth is taken back for a neighbour."""
import pickle
import types

import pytest

from gpushare_ray import FluidScheduler, board
from gpushare_ray.widths import by_remaining, weights, widths


class Controller:
    def __init__(self):
        self.trials = []

    def get_trials(self):
        return self.trials


class Trial:
    def __init__(self, name, seconds):
        self.trial_id, self.seconds, self.status = name, seconds, "PENDING"
        self.stopping_criterion = {"training_iteration": 10}
        self.placement_group_factory = types.SimpleNamespace(required_resources={"CPU": 1, "GPU": 0.25})


@pytest.fixture
def run(ray):
    """A controller with four trials of Fluid's example, on two devices."""
    made = types.SimpleNamespace(controller=Controller(), ray=ray)

    def scheduler(**options):
        options.setdefault("remaining", lambda trial, result, told: trial.seconds - (result or {}).get("done_s", 0))
        made.fluid = FluidScheduler(interval_s=0, **options)
        for name, seconds in (("a", 4), ("b", 4), ("c", 12), ("d", 30)):
            made.controller.trials.append(Trial(name, seconds))
            made.fluid.on_trial_add(made.controller, made.controller.trials[-1])
        return made.fluid

    def start(trial, device, fraction=0.25):
        trial.status = "RUNNING"
        made.board().next_weight.remote(trial.trial_id, 0, {"device": device, "fraction": fraction, "service_s": 0.0, "iterations": 0}, 0.001)

    made.board = lambda: ray.actors[board.NAME]
    made.scheduler, made.start = scheduler, start
    made.weights = lambda: dict(made.board().made._weights)
    return made


def test_widths_are_the_library_s():
    static = widths({"a": 4, "b": 4, "c": 12, "d": 30}, 5, 3, 5, "static-fluid")
    assert static["d"] == 3 and static["c"] == 1  # Fluid's example
    assert widths({}, 5, 3, 5, "gpushare") == {}
    assert widths({"a": 0, "b": 1}, 1, 4, 1, "dynamic-fluid")["b"] > 0


def test_weights_keep_what_ray_assigned_and_divide_the_rest():
    places = {"a": ("x", 0.25), "b": ("x", 0.25), "c": ("y", 0.25)}
    assert weights({"a": 1.0, "b": 0.25, "c": 1.0}, places) == {"a": 0.75, "b": 0.25, "c": 1.0}
    assert weights({"a": 1.0, "b": 1.0, "c": 0.5}, places) == {"a": 0.5, "b": 0.5, "c": 0.5}
    assert weights({}, places) == {"a": 0.25, "b": 0.25, "c": 0.25}
    assert weights({"a": 9.0}, {"a": ("x", 0.25), **{name: ("x", 0.25) for name in "bcd"}}) == dict.fromkeys("abcd", 0.25)


def test_trials_of_a_gpu_get_what_lets_them_end_together(run):
    places = {"a": ("x", 0.1), "b": ("x", 0.1), "c": ("y", 0.1)}
    assert by_remaining({"a": 30, "b": 10, "c": 5}, places) == {"a": 0.75, "b": 0.25, "c": 1.0}
    assert by_remaining({}, places) == {"a": 0.0, "b": 0.0, "c": 0.0}
    fluid = run.scheduler(max_packed=16)
    fluid.choose_trial_to_run(run.controller)
    for trial in run.controller.trials:
        run.start(trial, "node/0", 1 / 16)
    fluid.on_trial_result(run.controller, run.controller.trials[3], {"done_s": 0})
    now = run.weights()  # 4, 4, 12 and 30 s are left
    assert now["d"] == pytest.approx(0.6, abs=0.01) and now["c"] == pytest.approx(0.24, abs=0.01)


def test_a_group_arrives_and_the_longest_goes_first(run):
    fluid = run.scheduler()
    chosen = []
    while (trial := fluid.choose_trial_to_run(run.controller)) is not None:
        chosen.append(trial.trial_id)
        trial.status = "RUNNING"
    assert chosen[:2] == ["d", "c"] and sorted(chosen) == ["a", "b", "c", "d"]
    assert fluid.decisions == 1  # one group, one decision


def test_growth_is_weight_and_goes_back_for_a_neighbour(run):
    fluid = run.scheduler()
    fluid.choose_trial_to_run(run.controller)
    a, b, c, d = run.controller.trials
    run.start(d, "node/0")
    fluid.on_trial_result(run.controller, d, {"done_s": 1})
    assert run.weights()["d"] == 1.0  # alone on its GPU
    run.start(c, "node/0")
    fluid.on_trial_result(run.controller, d, {"done_s": 2})
    both = run.weights()
    assert both["c"] >= 0.25 and both["d"] < 1.0 and both["d"] + both.get("c", 0.25) <= 1.0 + 1e-6
    for trial in (a, b):
        run.start(trial, "node/0")
    fluid.on_trial_result(run.controller, d, {"done_s": 3})
    assert run.weights()["d"] == 0.25  # the GPU is full: all that it holds is what Ray assigned
    for trial in (a, b, c):
        run.board().left.remote(trial.trial_id)
        fluid.on_trial_complete(run.controller, trial, {})
    assert run.weights()["d"] == 1.0
    assert fluid.resizes >= 4 and "without a restart" in fluid.debug_string()


def test_a_paused_trial_holds_nothing(run):
    fluid = run.scheduler()
    fluid.choose_trial_to_run(run.controller)
    _, _, c, d = run.controller.trials
    for trial in (c, d):
        run.start(trial, "node/0")
    c.status = "PAUSED"  # its actor was killed: it never told the board that it left
    fluid.on_trial_result(run.controller, d, {"done_s": 1})
    assert run.weights()["d"] == 1.0


@pytest.mark.parametrize("scheduler", ["dynamic-fluid", "gpushare"])
def test_every_way_to_end_gives_its_part_to_others(run, scheduler):
    fluid = run.scheduler(scheduler=scheduler)
    fluid.choose_trial_to_run(run.controller)
    for trial in run.controller.trials:
        run.start(trial, "node/0")
    a, b, c, d = run.controller.trials
    for trial, end in ((a, lambda: fluid.on_trial_error(run.controller, a)), (b, lambda: fluid.on_trial_remove(run.controller, b)),
                       (c, lambda: fluid.on_trial_complete(run.controller, c, {}))):
        run.board().left.remote(trial.trial_id)
        end()
    assert run.weights()["d"] == 1.0
    assert list(fluid._trials) == ["d"]


def test_the_base_decides_who_stops(run, ray):
    from ray.tune.schedulers.trial_scheduler import FIFOScheduler

    class Stops(FIFOScheduler):
        def on_trial_result(self, controller, trial, result):
            return self.STOP if trial.trial_id == "a" else self.CONTINUE

    fluid = run.scheduler(base=Stops())
    assert fluid.choose_trial_to_run(run.controller).trial_id == "a"  # the base's choice
    a, b, _, _ = run.controller.trials
    assert fluid.on_trial_result(run.controller, a, {}) == "STOP"
    assert "a" not in fluid._trials
    assert fluid.on_trial_result(run.controller, b, {}) == "CONTINUE"


def test_what_is_left_is_measured(run):
    fluid = FluidScheduler(devices=1)
    trial = Trial("t", 0)
    fluid.on_trial_add(run.controller, trial)
    assert fluid._left(trial) == 10  # 10 iterations, a second each until something is known
    fluid._results["t"] = {"training_iteration": 4}
    fluid._hear({"t": {"iterations": 40, "service_s": 2.0}})
    assert fluid._left(trial) == pytest.approx(6 * 0.5)


def test_a_restart_does_not_make_a_trial_look_short(run):
    """Its session is another one, whose device time begins at 0, while Tune's iterations go on."""
    fluid = FluidScheduler(devices=1)
    trial = Trial("t", 0)
    fluid.on_trial_add(run.controller, trial)
    fluid._results["t"] = {"training_iteration": 4}
    fluid._hear({"t": {"iterations": 4, "service_s": 2.0}})
    fluid._hear({})  # between the two sessions
    assert fluid._left(trial) == pytest.approx(6 * 0.5)
    for service_s in (0.0, 0.25, 0.5):
        fluid._hear({"t": {"iterations": 1, "service_s": service_s}})
    fluid._results["t"] = {"training_iteration": 5}
    assert fluid._told["t"]["service_s"] == 2.5
    assert fluid._left(trial) == pytest.approx(5 * 0.5)
    fluid.on_trial_complete(run.controller, trial, {})
    assert fluid._used == {}


def test_whole_gpus_go_through_ray(run):
    fluid = run.scheduler(max_workers=5, devices=5)
    fluid.trial_group(run.controller.trials)
    a, _, _, d = run.controller.trials
    allocate = fluid.whole_gpus()
    allocate.metric = "loss"  # as ResourceChangingScheduler does
    assert allocate(None, d, {}, None).required_resources == {"CPU": 1.0, "GPU": 3}
    assert allocate(None, a, {}, None) is None
    d.placement_group_factory.required_resources = {"CPU": 1, "GPU": 3}
    assert allocate(None, d, {}, None) is None
    fluid._widths["d"] = 0.5
    assert allocate(None, d, {}, None).required_resources == {"CPU": 1.0, "GPU": 0.25}


def test_no_whole_gpu_that_another_trial_has_or_waits_for(run):
    fluid = run.scheduler(max_workers=2, devices=2)
    trials = run.controller.trials
    allocate = fluid.whole_gpus()
    first, *others = trials
    fluid._widths = {trial.trial_id: 2.0 for trial in trials}
    for status in ("PENDING", "RUNNING"):  # others that wait to begin count as well
        for trial in others:
            trial.status = status
        assert allocate(None, first, {}, None) is None
    for trial in others[1:]:
        fluid.on_trial_complete(run.controller, trial, {})
    fluid._widths = {trial.trial_id: 2.0 for trial in trials}
    assert allocate(None, first, {}, None) is None
    (other, *_) = others
    other.status = "PAUSED"  # by the base scheduler: it holds no GPU
    assert allocate(None, first, {}, None).required_resources["GPU"] == 2
    first.status = "PAUSED"  # by Ray, until both GPUs are free: the other, which runs again, does not get them too
    other.status = "RUNNING"
    assert allocate(None, other, {}, None) is None
    first.placement_group_factory.required_resources = {"CPU": 1, "GPU": 2}
    first.status = "RUNNING"
    assert allocate(None, first, {}, None).required_resources["GPU"] == 0.25  # makes room
    fluid.on_trial_complete(run.controller, first, {})
    assert fluid._granted == {}
    fluid._widths = {other.trial_id: 2.0}
    assert allocate(None, other, {}, None).required_resources["GPU"] == 2


def test_without_a_board_trials_go_on(run, ray):
    ray.dead = True
    fluid = run.scheduler()
    trial = fluid.choose_trial_to_run(run.controller)
    assert fluid.on_trial_result(run.controller, trial, {}) == "CONTINUE"
    assert fluid.resizes == 0


def test_a_board_that_is_slow_does_not_hold_tune_up(run, ray):
    fluid = run.scheduler()
    ray.slow = True  # its actor starts
    trial = fluid.choose_trial_to_run(run.controller)
    run.start(trial, "n/0")
    assert fluid.on_trial_result(run.controller, trial, {}) == "CONTINUE"
    assert fluid.resizes == 0
    ray.slow = False  # the answer to the first question comes, and then that to the next
    for _ in range(2):
        fluid.on_trial_result(run.controller, trial, {})
    assert fluid.resizes == 1


def test_state_is_kept(run, tmp_path):
    fluid = run.scheduler(remaining=_seconds)
    fluid.choose_trial_to_run(run.controller)
    fluid.save(tmp_path / "state")
    other = FluidScheduler(remaining=_seconds)
    other.restore(tmp_path / "state")
    assert other._widths == fluid._widths and other._board is None
    assert pickle.loads(pickle.dumps(fluid)).decisions == fluid.decisions


def _seconds(trial, result, told):
    return trial.seconds


def test_bad_arguments():
    with pytest.raises(ValueError, match="static-fluid"):
        FluidScheduler(scheduler="nonsense")
    with pytest.raises(ValueError, match="max_packed is 0"):
        FluidScheduler(max_packed=0)
