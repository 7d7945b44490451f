"""Tests of hosts are coroutines."""

from coroutine_tests import pytest_pyfunc_call as pytest_pyfunc_call
