"""Hosts run environments beside an agent-loop worker: in threads, or in processes that can die without it."""
