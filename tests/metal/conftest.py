"""The host machine, built once for all tests of this folder."""
import pytest

from metal_host import MISSING, Machine


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    if MISSING:
        pytest.skip(f"not on this machine: {', '.join(MISSING)}")
    return Machine(tmp_path_factory.mktemp("metal"))


@pytest.fixture(scope="session")
def own_libraries(machine):
    """Libraries of the project's kernels."""
    return [machine.library(text, f"kvq-{name}") for name, text in machine.own_kernels().items()]
