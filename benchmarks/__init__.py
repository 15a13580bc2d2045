"""What the engine does in how much time: each module prints one JSON line a measurement."""
