"""The estimators once more, as plain loops straight from the formulas: slow, obvious, without code of the package.

``naive.<method>(rows, **params)`` takes a list of dicts, one per step, with group, trajectory, step, reward, penalty
and whatever else the method reads (anchor, action, score, value, ..., hashable or None), and returns the advantages in
that order. Parameters and defaults are those of the estimator of that name.
"""

import importlib
import pkgutil
from types import FunctionType

for _module in pkgutil.iter_modules(__path__):
    _path = f"naive.{_module.name}"
    _twins = vars(importlib.import_module(_path)).items() if _module.name != "common" else ()
    globals().update({name: f for name, f in _twins if isinstance(f, FunctionType) and f.__module__ == _path})
