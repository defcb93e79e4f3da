"""Fixtures of recipes."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _fast(without_plots):
    """Runs draw no plots, unless a module overrides `without_plots`."""
