"""FluidScheduler: how much of the GPUs each of Tune's trials has, beside a scheduler that decides which trials go on.

The algorithms are Fluid's StaticFluid and DynamicFluid, and ours, all in libgpushare_cluster (docs/design/cluster.md, trials). Ray gives each trial
1/max_packed of a GPU throughout; what a trial gets beyond that is its session's weight on that GPU, which changes without a restart. Only
whole GPUs, for trials that can use several, go through Ray's ResourceChangingScheduler, which restarts the trial's actor.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import pickle
import time
from typing import Any, Callable, Iterable, Optional

from ray.tune.schedulers.trial_scheduler import FIFOScheduler, TrialScheduler

from . import board
from .widths import SCHEDULERS, by_remaining, weights, widths

_log = logging.getLogger("gpushare.ray")


class FluidScheduler(TrialScheduler):
    """A TrialScheduler around `base` (ASHA, Hyperband, ...; None: all trials run to their end, the longest first).

    max_packed: trials on one GPU at most; give each trial {"gpu": 1 / max_packed}. max_workers: whole GPUs that a trial can use (see
    `whole_gpus`). remaining: function (trial, last result or None, what its session told or None) -> seconds of a whole GPU that the trial
    still needs; None: iterations left x seconds of the device an iteration, as measured. total_iterations: of a trial, where its stopping
    criterion does not say. scheduler: decides at results and completions, 'dynamic-fluid' or 'gpushare', whose weights let the trials on a GPU
    end together; StaticFluid decides when a group arrives. devices: the cluster's GPUs; None: asks Ray. interval_s: least time between two decisions at results.
    """

    def __init__(self, base: Optional[TrialScheduler] = None, *, max_packed: int = 4, max_workers: int = 1,
                 remaining: Optional[Callable[[Any, Optional[dict], Optional[dict]], float]] = None, total_iterations: int = 0,
                 scheduler: str = "gpushare", devices: Optional[int] = None, interval_s: float = 1.0) -> None:
        if scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler is {scheduler!r}, allowed are {', '.join(SCHEDULERS)}")
        if max_packed < 1 or max_workers < 1:
            raise ValueError(f"max_packed is {max_packed} and max_workers {max_workers}; both must be at least 1")
        super().__init__()
        self._base = base or FIFOScheduler()
        self._in_order = base is None
        self._max_packed, self._max_workers = max_packed, max_workers
        self._remaining = remaining or self._iterations_left
        self._total_iterations = total_iterations
        self._scheduler = scheduler
        self._devices = devices
        self._interval_s = interval_s
        self._new: list[Any] = []
        self._trials: dict[str, Any] = {}  # not ended
        self._results: dict[str, dict] = {}
        self._widths: dict[str, float] = {}
        self._told: dict[str, dict] = {}
        self._used: dict[str, tuple[float, float]] = {}  # device time of a trial's sessions that have ended, and of the last one
        self._weights: dict[str, float] = {}
        self._granted: dict[str, float] = {}  # GPUs of trials that whole_gpus() gave other resources
        self._decided_at = 0.0
        self._board: Any = None
        self._answer: Any = None  # of the board, not here yet
        self.decisions = 0  # how often widths were decided
        self.resizes = 0  # weights changed of trials that ran

    # ---- the group call ----

    def trial_group(self, trials: Iterable[Any]) -> dict[str, float]:
        """A group of trials arrives together: StaticFluid decides their widths, {trial_id: devices' worth}.

        Called by itself for the trials that Tune has added when it next looks for one to run; a search algorithm that knows its groups (a
        bracket, a generation) may call it first.
        """
        group = [trial for trial in trials if trial.trial_id in self._trials]
        self._new = [trial for trial in self._new if trial not in group]
        chosen = widths({trial.trial_id: self._left(trial) for trial in group}, self._device_count(), self._max_packed, self._max_workers,
                        "static-fluid")
        self._widths.update(chosen)
        self.decisions += 1
        self._apply()
        return chosen

    def whole_gpus(self) -> Callable[..., Any]:
        """The resources_allocation_function for ResourceChangingScheduler(base_scheduler=this): a trial whose width is 2 or more gets so many
        whole GPUs, and 1/max_packed again when it is less. Each such change restarts the trial's actor from its checkpoint. A trial gets no GPU
        that another one has or waits for: it would be stopped, and wait for that one to end."""
        from ray.tune import PlacementGroupFactory

        def gpus_of(trial: Any) -> float:
            return float(trial.placement_group_factory.required_resources.get("GPU", 0))

        def needed_by_others(trial: Any) -> float:
            # Ray has stopped a trial that gets other resources. A trial stopped by the base scheduler holds none.
            return sum(self._granted.get(other.trial_id) or (gpus_of(other) if other.status != "PAUSED" else 0)
                       for other in self._trials.values() if other is not trial)

        def allocate(_controller: Any, trial: Any, _result: dict, _scheduler: Any) -> Any:
            has = gpus_of(trial)
            cpus = float(trial.placement_group_factory.required_resources.get("CPU", 1))
            wants = int(min(self._widths.get(trial.trial_id, 0), self._device_count() - needed_by_others(trial)))
            if wants < 2 and has < 2:
                return None
            gpus = wants if wants >= 2 else 1 / self._max_packed
            if gpus == has:
                return None
            self._granted[trial.trial_id] = gpus
            return PlacementGroupFactory([{"CPU": cpus, "GPU": gpus}])

        return allocate

    # ---- TrialScheduler ----

    @property
    def metric(self) -> Optional[str]:
        return self._base.metric

    @property
    def supports_buffered_results(self) -> bool:
        return self._base.supports_buffered_results

    def set_search_properties(self, metric: Optional[str], mode: Optional[str], **spec: Any) -> bool:
        return self._base.set_search_properties(metric, mode, **spec)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        self._trials[trial.trial_id] = trial
        self._new.append(trial)
        self._base.on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        self._results[trial.trial_id] = result
        decision = self._base.on_trial_result(tune_controller, trial, result)
        if decision == TrialScheduler.STOP:
            self._forget(trial)
            self._decide()
        elif time.monotonic() >= self._decided_at + self._interval_s:
            self._decide()
        return decision

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        self._base.on_trial_error(tune_controller, trial)
        self._forget(trial)
        self._decide()

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict) -> None:
        self._base.on_trial_complete(tune_controller, trial, result)
        self._forget(trial)
        self._decide()

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self._base.on_trial_remove(tune_controller, trial)
        self._forget(trial)
        self._decide()

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        if self._new:
            self.trial_group(list(self._new))
        if not self._in_order:
            return self._base.choose_trial_to_run(tune_controller)
        ready = [trial for trial in tune_controller.get_trials() if trial.status in ("PENDING", "PAUSED")]
        # A trial that waits is not looked at again before it runs, so the order holds.
        return max(ready, key=lambda trial: (trial.status == "PENDING", self._left(trial)), default=None)

    def debug_string(self) -> str:
        return (f"FluidScheduler ({self._scheduler}): {self.decisions} decisions, {self.resizes} resizes without a restart. "
                f"{self._base.debug_string() if not self._in_order else ''}")

    def save(self, checkpoint_path: str) -> None:
        with open(checkpoint_path, "wb") as file:
            pickle.dump(self.__getstate__(), file)

    def restore(self, checkpoint_path: str) -> None:
        with open(checkpoint_path, "rb") as file:
            self.__dict__.update(pickle.load(file))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_board": None, "_answer": None}  # found again by its name

    # ---- how ----

    def _iterations_left(self, trial: Any, result: Optional[dict], told: Optional[dict]) -> float:
        total = self._total_iterations or (getattr(trial, "stopping_criterion", None) or {}).get("training_iteration", 1)
        done = (result or {}).get("training_iteration", 0)
        # The session's iterations need not be Tune's: its device time over Tune's iterations is what counts.
        used = sum(self._used.get(trial.trial_id, ()))
        each = used / max(1, done) if used > 0 else 1.0
        return max(0.0, total - done) * each

    def _left(self, trial: Any) -> float:
        return float(self._remaining(trial, self._results.get(trial.trial_id), self._told.get(trial.trial_id)))

    def _forget(self, trial: Any) -> None:
        for table in (self._trials, self._results, self._widths, self._told, self._used, self._weights, self._granted):
            table.pop(trial.trial_id, None)
        self._new = [other for other in self._new if other is not trial]

    def _device_count(self) -> int:
        if self._devices is None:
            import ray

            self._devices = max(1, int(ray.cluster_resources().get("GPU", 1)))
        return self._devices

    def _decide(self) -> None:
        """Widths anew for all trials that have not ended, and with them the weights of those that run."""
        self._decided_at = time.monotonic()
        self._ask_board()
        paused = {trial_id for trial_id, trial in self._trials.items() if trial.status == "PAUSED"}
        left = {trial_id: self._left(trial) for trial_id, trial in self._trials.items() if trial_id not in paused}
        self._widths.update(widths(left, self._device_count(), self._max_packed, self._max_workers, self._scheduler))
        self.decisions += 1
        self._apply(asked=True)

    def _apply(self, asked: bool = False) -> None:
        if not asked:
            self._ask_board()
        # A trial whose actor was killed or paused may still be on the board.
        places = {trial_id: (told["device"], told["fraction"]) for trial_id, told in self._told.items()
                  if trial_id in self._trials and self._trials[trial_id].status == "RUNNING"}
        wanted = self._widths
        if self._scheduler == "gpushare":
            wanted = by_remaining({trial_id: self._left(self._trials[trial_id]) for trial_id in places}, places)
        chosen = weights(wanted, places)
        # The remaining work changes with each result. A trial is sent a message only if its weight changes by more than a tenth.
        before = {trial_id: self._weights.get(trial_id, places[trial_id][1]) for trial_id in places}
        changed = {trial_id: weight for trial_id, weight in chosen.items()
                   if abs(weight - before[trial_id]) > max(0.01, 0.1 * before[trial_id])}
        if changed and self._board is not None:
            self._board.set_weights.remote(changed)
            self._weights.update(changed)
            self.resizes += len(changed)

    def _ask_board(self) -> None:
        """Where trials are and what they have used. Tune waits for this call, and the board may take seconds to start: an answer that does not
        come at once counts at a later decision, and until then what was known stays."""
        import ray

        try:
            if self._board is None:
                actor = ray.remote(num_cpus=0, max_concurrency=1000)(board.Board)
                self._board = actor.options(name=board.NAME, namespace=board.NAMESPACE, get_if_exists=True).remote()
                self._answer = None
            if self._answer is None:
                self._answer = self._board.trials.remote()
            ready, _ = ray.wait([self._answer], timeout=0.02)
            if ready:
                self._answer = None
                self._hear(ray.get(ready[0]))
        except Exception as error:
            _log.warning("the board does not answer: %s; weights stay as they are", error)
            self._board = None

    def _hear(self, told: dict[str, dict]) -> None:
        """What the board tells of the trials that have a session. `service_s` becomes that of all sessions which a trial has had: a restart, as
        for whole GPUs, is another session, while Tune's iterations go on."""
        self._told = {}
        for trial_id, entry in told.items():
            if trial_id not in self._trials:
                continue
            ended, latest = self._used.get(trial_id, (0.0, 0.0))
            if entry["service_s"] < latest:
                ended += latest
            self._used[trial_id] = (ended, entry["service_s"])
            self._told[trial_id] = {**entry, "service_s": ended + entry["service_s"]}
