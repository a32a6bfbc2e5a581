"""The `Model` that users hold, and what is done with it: vectors, files of predictions, exports."""
