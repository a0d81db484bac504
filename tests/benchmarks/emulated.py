"""A mark for tests on emulated hosts: whether there can be any is tried once."""

import pytest

from benchmarks import hosts

_REASON = hosts.reason_against()
NEEDS_HOSTS = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
