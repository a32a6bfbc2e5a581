"""A small world in words, made by rules: text to pre-train on and a task to fine-tune on, for the quickstart."""
