"""A pytest plugin that takes the marks to skip off, for ``test_gpu_tests``."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]
