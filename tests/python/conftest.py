from __future__ import annotations

import os
import signal

# The models are tiny: a second OpenMP thread only waits for the first.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

import megatrain


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-family", action="store_true", help="run the families that are left out by default too")
    parser.addoption("--models-page", metavar="FILE", help="write what the families' tests have found there")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--models-page")
    if path is not None and not hasattr(config, "workerinput"):  # where the tests run on several cores, once
        from models_page import PageWriter

        config.pluginmanager.register(PageWriter(path))


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> object:
    """An adversarial host backend (delays before every copy, NaN in released slots), and a GPU."""
    if request.param == "host":
        return megatrain.HostBackend(max_delay_us=200, seed=7, poison=True)
    if megatrain._native.cuda_device_count() == 0:
        pytest.skip(f"no GPU: {megatrain._native.cuda_unavailable_reason()}")
    return "cuda"


@pytest.fixture
def torch_device(device: object) -> str:
    return "cuda" if device == "cuda" else "cpu"


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """A shell without job control starts what it puts into the background with Ctrl-C ignored, and so are children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models stream unless a test plans: else every small one would be resident on a GPU."""

    def refuse(backend: object) -> None:
        raise MemoryError("tests do not measure")

    monkeypatch.setattr("megatrain.auto_placement.measured_hardware", refuse)
