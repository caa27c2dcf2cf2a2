import pytest

import gpushare
from gpushare import cluster


def trials(*budgets):
    return {"version": 1, "kind": "trials", "devices": 5, "max_packed": 3, "max_workers": 5,
            "groups": [{"arrival_s": 0, "trials": [{"name": f"t{n}", "budget_s": budget} for n, budget in enumerate(budgets)]}]}


def test_a_plan_of_trials():
    fifo, fluid, ours = cluster.plan(trials(4, 4, 12, 30), "fifo,static-fluid,gpushare")["results"]
    assert (fifo["makespan_s"], fluid["makespan_s"], ours["makespan_s"]) == (30, 12, 10)  # Fluid's own example
    assert fluid["shares"]["t3"] == 3


def test_bad_documents_say_what_is_wrong():
    with pytest.raises(gpushare.MalformedInput, match="budget_s"):
        cluster.plan(trials(-1))
    with pytest.raises(gpushare.InvalidArgument, match="nonsense"):
        cluster.plan(trials(1), "nonsense")


def test_the_schema():
    assert "trials" in str(cluster.schema())
