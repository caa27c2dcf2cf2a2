import pytest

import gpushare


@pytest.fixture
def runtime():
    with gpushare.Runtime("host", policy="fair", capacity_bytes="64M") as opened:
        yield opened


@pytest.fixture
def session(runtime):
    with runtime.open_session("job", persistent_bytes="8M", ephemeral_bytes="8M") as opened:
        yield opened
