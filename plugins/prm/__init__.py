"""The process reward model in the trainer's processes: its engine, its worker, and where its numbers are of a row."""
