"""What a step costs at least: bytes and operations of a model, and the time they take at a machine's ceilings. No torch."""
