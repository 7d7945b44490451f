"""The trajectory log: its tables, and what writes them inside a run."""
