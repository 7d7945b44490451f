"""``python -m verl_turnkey``: the command ``turnkey``."""

from verl_turnkey.plugins.cli.main import main

if __name__ == "__main__":
    main()
