"""``turnkey env-check``: plays an environment and checks the properties that training relies on."""
