"""Turn-level credit for LLM agents on stock verl."""
