"""``turnkey env-check``: plays an environment and holds what it does against what training relies on."""
