"""One file a task: records, features, head, loss, prediction."""
