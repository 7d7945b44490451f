"""Methods as configuration: Hydra files under ``config/``, no logic."""
