"""Measurements: workloads through the engine's public doors, each with the floor of its bytes and operations."""
