"""One built library per instruction set, kept in the user's cache between test runs like any other."""

import pytest

from kvant.native import build

ISAS = [isa for isa in build.ISAS if isa != "avxvnni"]  # AVX2 but for one instruction; test_linear.py compares the two


@pytest.fixture(scope="session", params=ISAS)
def library(request):
    return _load(request.param)


@pytest.fixture(scope="session")
def native():
    return _load("native")


@pytest.fixture(scope="session")
def avx2():
    return _load("avx2")


@pytest.fixture(scope="session")
def avxvnni():
    return _load("avxvnni")


@pytest.fixture(scope="session")
def portable():
    return _load("portable")


def _load(isa):
    if not build.runs_here(isa):
        pytest.skip(f"this machine cannot run {isa} code")
    notices = []
    loaded = build.load(notices.append, isa=isa)
    if loaded is None:
        pytest.skip(notices[0])
    return loaded
