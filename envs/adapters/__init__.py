"""Adapters: one environment package each, as a ``TextEnv``. ``catalog`` names their classes by string."""
