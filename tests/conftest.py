"""Settings every test shares."""

import os

import pytest
from hypothesis import settings

# No example is timed: machines that run the tests are shared, and a slow moment is not a wrong answer.
settings.register_profile("perfmodel", deadline=None)
settings.load_profile("perfmodel")


@pytest.fixture(autouse=True, scope="session")
def _own_graph_cache(tmp_path_factory):
    """Tests share a graph cache of their own and leave the user's alone."""
    os.environ["PERFMODEL_CACHE"] = str(tmp_path_factory.mktemp("graph_cache"))
