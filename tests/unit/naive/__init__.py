"""The estimators once more, as plain loops straight from the formulas: slow, obvious, without code of the package.

``naive.<method>(rows, **params)`` takes a list of dicts, one per step, with group, trajectory, step, reward, penalty
and whatever else the method reads (anchor, action, score, value, ..., hashable or None), and returns the advantages in
that order. Parameters and defaults are those of the estimator of that name. One file per method, found by its name.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if _module.name != "common":
        globals()[_module.name] = getattr(importlib.import_module(f"naive.{_module.name}"), _module.name)
