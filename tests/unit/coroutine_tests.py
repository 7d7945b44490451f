"""Tests that are coroutines. A conftest imports the hook, which pytest calls for each test.

They run on the event loop of their file, where a fixture ``run`` has one, else on one of their own.
"""

import asyncio
import inspect

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    pyfuncitem.funcargs.get("run", asyncio.run)(test)
    return True
