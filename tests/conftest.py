"""Shared fixtures. Without a GPU, Triton kernels run in its CPU interpreter (which must be chosen before Triton is imported)."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kernreg import registry
from kernreg.device import Device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors of a test live."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def here() -> Device:
    """The device that kernels are asked about: this GPU, or Triton's interpreter."""
    from kernreg.device import current

    return current() if torch.cuda.is_available() else Device.interpreter()


@pytest.fixture(scope="session")
def kernels() -> registry.Registry:
    return registry.default()
