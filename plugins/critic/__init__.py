"""A critic with several heads on one model, in the trainer's processes."""
