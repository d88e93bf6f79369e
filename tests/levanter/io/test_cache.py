"""Where things are kept between runs."""

from pathlib import Path

import pytest

from levanter.io.cache import cache_folder

pytestmark = pytest.mark.quick


def test_where_it_is(monkeypatch):
    monkeypatch.setenv("LEVANTER_CACHE", "/here")
    assert cache_folder() == Path("/here")
    monkeypatch.delenv("LEVANTER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/levanter")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/levanter")
