"""The Model users hold, and the engine behind it."""
