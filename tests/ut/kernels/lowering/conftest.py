"""The tier `ascend`: skipped with its reason where the compiler is missing, failing there if it was asked for."""

from __future__ import annotations

import pytest

from vllm_ascend_ext.kernels.lowering import toolchain


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr == "ascend":
        return
    try:
        toolchain.find()
    except toolchain.ToolchainError as error:
        skip = pytest.mark.skip(reason=str(error))
        for item in items:
            if item.get_closest_marker("ascend") is not None:
                item.add_marker(skip)
