"""Documents to token shards, and shards to training examples."""
