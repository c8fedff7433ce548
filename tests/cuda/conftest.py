"""Marker of the tests that need a CUDA GPU: pytest -m cuda."""


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA GPU and the program that -DPYKVQ_BUILD_TESTS=ON builds")
